"""What students hand in, found in files and folders; what it earned; and the tables of that, for people and programs.

An exercise is worth its difficulty, 1 to 3 points. A right answer earns them; a wrong or missing one earns none. An
exercise that this machine cannot run (it needs a GPU) is *blocked*: its points are neither earned nor lost.
"""

from __future__ import annotations

import csv
import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distlab.course.grading import Lesson

STYLE = "body{font-family:system-ui,sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}"
STYLE += "th,td{padding:.3em .7em;text-align:left;vertical-align:top;white-space:pre-wrap;border-bottom:1px solid #888}"
KINDS = (".ipynb", ".py")
NAMELESS = ("lesson", "answers", "work")  # of files and folders, beside the lesson's own name


class Submission(NamedTuple):
    """One student's notebook or module, or None where there is none; or the problem why it cannot be graded, in a line.

    `student` names the student and the files of results: it is the submission's file name, or its folder's.
    """

    student: str
    path: Path | None = None
    problem: str = ""


def find_submissions(paths: Sequence[Path], lesson: str) -> list[Submission]:
    """Return the submissions in files and folders, by student.

    A file is a submission. A folder holds one file per student, or one folder per student; a student's folder holds
    the notebook of the lesson at any depth, as `work/03_data_parallel/03_data_parallel.ipynb` does.

    Args:
        paths: files and folders.
        lesson: name of the lesson's folder, such as 03_data_parallel.

    Raises:
        ValueError: a path is not there or has a different ending, or there is no submission at all. What is wrong with
            one student's files stands in `problem`, and does not keep the others from being graded.
    """
    found: dict[str, list[Path]] = {}
    for path in paths:
        if not path.exists() or (path.is_file() and path.suffix not in KINDS):
            raise ValueError(f"{path} is neither a notebook (.ipynb) nor a module (.py) nor a folder of them")
        for child in sorted(path.iterdir()) if path.is_dir() else [path]:
            if child.name.startswith((".", "__")) or not (child.is_dir() or child.suffix in KINDS):
                continue
            names = (child.stem, *(above.name for above in child.absolute().parents))
            owner = next(name for name in names if name not in (lesson, *NAMELESS))
            files = [child] if child.is_file() else [one for one in sorted(child.rglob("*.*")) if one.is_file()]
            hidden = re.compile(r"/(\.|__)").search  # what editors and systems leave beside an answer
            shown = [one for one in files if one.suffix in KINDS and not hidden(str(one)[len(str(child)) :])]
            found.setdefault(re.sub(r"[^\w.@+-]+", "_", owner) or "student", []).extend(shown)
    if not found:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"{listed}: no submission of lesson {lesson[:2]}; expected notebooks or .py files")
    return [_chosen(student, found[student], lesson) for student in sorted(found)]


def _chosen(student: str, files: list[Path], lesson: str) -> Submission:
    """Return a student's one file for the lesson: the one of its name, or the only one that is of no lesson."""
    if len(files) > 1:
        plain = [path for path in files if not re.match(r"\d\d_|START$", path.stem)]
        files = [path for path in files if path.stem == lesson] or plain
    if len(files) > 1:
        listed = ", ".join(path.name for path in files[:4])
        return Submission(student, None, f"several files to grade ({listed}); name the right one {lesson}.ipynb")
    return Submission(student, files[0] if files else None)


class Mark(NamedTuple):
    """What became of one exercise: its worth, the points that it earned, and what the student is told.

    The verdict is "passed", "wrong", "not attempted", "blocked", or "stopped" where a limit ended the submission first.
    """

    exercise: str
    worth: int
    points: int
    verdict: str
    fault: str | None
    message: str


class Grade(NamedTuple):
    """What one student earned in a lesson, of the points that are possible and not blocked on this machine.

    `notes` say what was left out of the submission, such as cells with a syntax error; `stopped`, why it was ended
    early, or "".
    """

    student: str
    points: int
    possible: int
    blocked: int
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]
    stopped: str

    def as_dict(self) -> dict[str, Any]:
        """Return the grade as JSON-ready values."""
        return self._asdict() | {"marks": [mark._asdict() for mark in self.marks]}


def grade_of(submission: Submission, lesson: Lesson, lines: Sequence[dict[str, Any]], stopped: str) -> Grade:
    """Make a grade of what the process that checked told, line by line."""
    reports = {line.get("exercise"): line for line in lines}
    about, marks = reports.get(None, {}), []
    stopped = about.get("unread", stopped)
    missing = {"verdict": "stopped", "fault": None, "message": stopped}
    if submission.path is None and not stopped:
        missing |= {"verdict": "not attempted", "message": "nothing was handed in"}
    for one in lesson.exercises:
        verdict, fault, message = (reports.get(one.name, missing)[name] for name in ("verdict", "fault", "message"))
        points = one.difficulty if verdict == "passed" else 0
        marks.append(Mark(one.name, one.difficulty, points, verdict, fault, message))
    blocked = sum(mark.worth for mark in marks if mark.verdict == "blocked")
    points, possible = sum(mark.points for mark in marks), sum(mark.worth for mark in marks) - blocked
    return Grade(submission.student, points, possible, blocked, tuple(marks), tuple(about.get("notes", ())), stopped)


def write_tables(out: Path, title: str, grades: Sequence[Grade]) -> None:
    """Write grades.csv, grades.json and grades.html, and in students/ a page and Gradescope's results of each.

    Source: Gradescope, Autograder Specifications, "Output format" of results.json (read 2026-11).
    """
    heads, rows = ["student", "points", "possible", "blocked", "stopped"], []
    heads += [head for mark in grades[0].marks for head in (mark.exercise, f"{mark.exercise} fault")]
    for one in grades:
        name = f"'{one.student}" if one.student[:1] in "=+-@" else one.student  # no formula in a spreadsheet
        cells = [cell for mark in one.marks for cell in (mark.verdict, mark.fault or "")]
        rows.append([name, one.points, one.possible, one.blocked, one.stopped, *cells])
    faults = Counter((mark.exercise, mark.fault) for each in grades for mark in each.marks if mark.verdict == "wrong")
    often = [[*fault, count] for fault, count in faults.most_common()]
    texts = {"grades.json": json.dumps([one.as_dict() for one in grades], indent=2)}
    texts["grades.html"] = _page(title, [], (heads, rows), (["what went wrong in", "fault", "answers"], often))
    for one in grades:
        tests = [
            {"name": mark.exercise, "score": mark.points, "max_score": mark.worth, "output": mark.message}
            for mark in one.marks
            if mark.verdict != "blocked"
        ]
        results = {"tests": tests, "output": "\n".join([*one.notes, one.stopped]).strip()}
        texts[f"students/{one.student}.results.json"] = json.dumps(results, indent=2)
        blocked = f"; {one.blocked} more need a machine that has what they use" if one.blocked else ""
        stopped = f"Ended early: {one.stopped}" if one.stopped else ""
        lines = [f"{one.points} of {one.possible} points{blocked}", *one.notes, stopped]
        told = [[mark.exercise, f"{mark.points} of {mark.worth}", mark.verdict, mark.message] for mark in one.marks]
        table = (["exercise", "points", "verdict", "what the check said"], told)
        texts[f"students/{one.student}.html"] = _page(f"{title}: {one.student}", lines, table)
    (out / "students").mkdir(exist_ok=True)
    for path, text in texts.items():
        (out / path).write_text(text, encoding="utf-8")
    with (out / "grades.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([heads, *rows])


def _page(title: str, lines: Sequence[str], *tables: tuple[Sequence[str], Sequence[Sequence[object]]]) -> str:
    """Write a page of HTML: lines, then tables of heads and rows."""
    name, body = html.escape(title), "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    for heads, rows in tables:
        lines_of = ["\n".join(f'<th scope="col">{head}</th>' for head in heads)]
        lines_of += ["\n".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
        body += f"<table>{''.join(f'<tr>{line}</tr>' for line in lines_of)}</table>"
    head = f'<meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{name}</h1>{body}</body></html>\n'
