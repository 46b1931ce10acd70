"""Check the answers to a lesson, or to one exercise, on real ranks.

Answers come from your working copy of the lesson's notebook, or from --impl: a module's name, the path of a .py file
or a notebook, or "reference". Exits with status 0 when all are right, else 1.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path

from distlab.course.grading import Report, load_lesson
from distlab.course.grading.answer.submission import isolated_submission
from distlab.course.grading.check import examine
from distlab.course.grading.progress import MINE, keep, working_copy
from distlab.course.grading.report import SCHEMA


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab check`."""
    command.add_argument("lesson", metavar="NN", help="a lesson's number, such as 03, or an exercise, such as 03.flat")
    command.add_argument("--impl", metavar="MODULE|FILE", help="where answers are (default: mine, your working copy)")
    command.add_argument("--exercise", metavar="NAME", help="check one exercise, such as flat")
    command.add_argument("--seed", type=int, metavar="N", help="draw the arguments of an earlier check again")
    command.add_argument("--json", action="store_true", help="print the reports as JSON")
    command.add_argument("--list", action="store_true", help="list the exercises with minutes and difficulty; run none")


def main(arguments: argparse.Namespace) -> int:
    """Check, print one report per exercise, and return 0 when all are right, else 1."""
    lesson = load_lesson(arguments.lesson)
    exercises, asked = lesson.exercises, arguments.exercise or ("." in arguments.lesson and arguments.lesson)
    if asked:
        number, _, topic = asked.rpartition(".")
        if number and number.zfill(2) != lesson.number:
            raise ValueError(f"exercise {asked} is not of lesson {lesson.number}")
        exercises = (lesson.exercise(f"{lesson.number}.{topic}"),)
    if arguments.list:
        print("\n".join(f"{exercise.name}  {exercise.title} ({exercise.effort})" for exercise in exercises))
        return 0
    impl = str(working_copy(lesson.folder.name)) if arguments.impl in (None, MINE) else arguments.impl
    functions, notes = isolated_submission(impl, lesson)
    path = Path(impl).expanduser()
    if not arguments.json:
        saved = ""
        if path.suffix == ".ipynb" and path.is_file():  # later changes in the browser are not checked
            at = datetime.fromtimestamp(path.stat().st_mtime)
            saved = f", saved at {at:%H:%M:%S} (save again to check what you see now)"
        whose = f"Lesson {lesson.number}, {lesson.title}: answers of {impl}{saved}"
        print("\n".join([whose, *notes]), flush=True)
    start = path.resolve().parent if path.is_file() else Path.cwd()  # its folder keeps the progress
    reports: list[Report] = []
    told: list[str] = []
    for exercise in exercises:
        report = examine(exercise, functions[exercise.name], seed=arguments.seed)
        told += [keep(report, start)] if impl != "reference" else []
        again = bool(reports) and report.fault == "not loaded" and report.message == reports[0].message
        reports.append(report)
        if not arguments.json:
            print(f"\n{exercise.name}  {'Wrong, as above.' if again else report}", flush=True)
    passed = sum(report.passed for report in reports)
    if arguments.json:
        said = {"schema": SCHEMA, "lesson": lesson.number, "title": lesson.title, "impl": impl, "notes": [*notes]}
        said |= {"passed": passed, "total": len(reports), "reports": [report.as_dict() for report in reports]}
        print(json.dumps(said, indent=2))
    else:
        print("\n".join([f"\n{passed} of {len(reports)} exercises right.", *filter(None, dict.fromkeys(told))]))
    return 0 if passed == len(reports) else 1
