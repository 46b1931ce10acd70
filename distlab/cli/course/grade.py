"""Grade what a class handed in for a lesson: points per exercise, as tables and as a page for each student.

A submission is a notebook or a .py file. Pass files, a folder of them, or a folder with one folder per student. Each
is checked in a process group of its own, under limits; with --contained also in a container, which keeps it from other
files and from the network. The same command again goes on where the last one ended. Exits
with status 0 when every submission was graded, 1 when one was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from pathlib import Path

from distlab.cli.arguments import whole_number


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab grade`."""
    command.add_argument("lesson", metavar="NN", help="the lesson's number, such as 03")
    command.add_argument("submissions", nargs="+", type=Path, metavar="FILE|FOLDER", help="what was handed in")
    command.add_argument("--out", type=Path, default=Path("grades"), metavar="DIR", help="of results; default: grades/")
    command.add_argument("--jobs", type=whole_number(most=64), default=1, metavar="N", help="submissions at a time: 1")
    command.add_argument("--minutes", type=float, default=10.0, metavar="M", help="limit of one submission: 10")
    command.add_argument("--seed", type=int, metavar="N", help="of the drawn arguments; default: kept in DIR")
    command.add_argument("--contained", action="store_true", help="each in a container; needs bubblewrap (bwrap)")
    command.add_argument("--json", action="store_true", help="print the grades as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Grade, write the tables, and return 0 when no submission was stopped, else 1.

    Raises:
        ValueError: there is nothing to grade, a limit is not a time, or no container can be made.
    """
    from distlab.course.classroom import find_submissions, grade_all, refuse_unless_contained, write_tables
    from distlab.course.grading import load_lesson

    if not 0 < arguments.minutes < 24 * 60:
        raise ValueError(f"--minutes is {arguments.minutes:g}; pass minutes above 0, at most a day")
    if arguments.contained:
        refuse_unless_contained()
    lesson = load_lesson(arguments.lesson)
    submissions = find_submissions(arguments.submissions, lesson.folder.name)
    out = arguments.out / lesson.folder.name
    out.mkdir(parents=True, exist_ok=True)
    seed = _seed(out / "seed", arguments.seed)
    how = {"jobs": arguments.jobs, "minutes": arguments.minutes, "is_contained": arguments.contained}
    grades = []
    try:
        for grade, is_new in grade_all(submissions, lesson, out / "results", seed=seed, **how):
            grades.append(grade)
            if not arguments.json:
                words = ("" if is_new else " (kept)") + (f"; stopped: {grade.stopped}" if grade.stopped else "")
                print(f"{grade.student:24} {grade.points:3} of {grade.possible}{words}", flush=True)
    except KeyboardInterrupt:
        print("\nInterrupted. What is graded is kept; the same command goes on.", flush=True)
        return 130
    grades.sort()
    write_tables(out, f"Lesson {lesson.number}, {lesson.title}", grades)
    if arguments.json:
        told = {"lesson": lesson.number, "seed": seed, "grades": [grade.as_dict() for grade in grades]}
        print(json.dumps(told, indent=2))
    else:
        pages = "in students/ a page for each and Gradescope's results.json"
        print(f"\n{len(grades)} graded: {out / 'grades.html'}, grades.csv, grades.json; {pages}")
    return 1 if any(grade.stopped for grade in grades) else 0


def _seed(kept: Path, asked: int | None) -> int:
    """Return the seed of the class: the one asked for, or the one of the last run, or a new one; keep it."""
    if asked is None:
        with contextlib.suppress(OSError, ValueError):
            return int(kept.read_text(encoding="utf-8"))
    seed = random.SystemRandom().randrange(10**6) if asked is None else asked
    kept.write_text(f"{seed}\n", encoding="utf-8")
    return seed
