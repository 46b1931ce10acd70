"""Grades: what each exercise earned, kept as one JSON file for each student, and as tables for people and programs.

An exercise is worth its difficulty, 1 to 3 points. A right answer earns them; a wrong or missing one earns none. An
exercise that this machine cannot run (it needs a GPU) is *blocked*: its points are neither earned nor lost.
"""

from __future__ import annotations

import csv
import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COLOURS = {"passed": "#1b7837", "wrong": "#a50026", "not attempted": "#555555", "blocked": "#8a5a00"}
COLOURS["stopped"] = COLOURS["wrong"]
STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em;max-width:75em;background:white;color:black}"
    "table{border-collapse:collapse}th,td{padding:.3em .7em;text-align:left;border-bottom:1px solid #8888;"
    "vertical-align:top}pre{white-space:pre-wrap;margin:.3em 0}"
)


@dataclass(frozen=True)
class Mark:
    """What became of one exercise.

    Attributes:
        exercise: its name.
        worth: its points.
        points: those that it earned.
        verdict: "passed", "wrong", "not attempted", "blocked", or "stopped" where a limit ended the submission first.
        fault: the code of the fault, or None.
        message: what the student is told.
        seconds: how long the check took.
    """

    exercise: str
    worth: int
    points: int
    verdict: str
    fault: str | None = None
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Grade:
    """What one student earned in a lesson.

    Attributes:
        student: their name.
        file: what was handed in, or "".
        key: names all that the grade depends on: the submission, the lesson, the seed, this package.
        points: that were earned.
        possible: points that could be earned on this machine.
        blocked: points of exercises that this machine cannot run.
        marks: one per exercise, in the lesson's order.
        notes: what was left out of the submission, such as cells with a syntax error.
        stopped: why it was ended early, or "".
    """

    student: str
    file: str
    key: str
    points: int
    possible: int
    blocked: int
    marks: tuple[Mark, ...]
    notes: tuple[str, ...] = ()
    stopped: str = ""


def kept_grade(folder: Path, student: str, key: str) -> Grade | None:
    """Return the kept grade, or None: there is none, it is damaged, has a different key, or was stopped early."""
    try:
        found = json.loads((folder / f"{student}.json").read_text(encoding="utf-8"))
        marks = tuple(Mark(**mark) for mark in found["marks"])
        grade = Grade(**{**found, "marks": marks, "notes": tuple(found["notes"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return grade if grade.key == key and not grade.stopped else None


def keep_grade(folder: Path, grade: Grade) -> None:
    """Write a grade into FOLDER/STUDENT.json."""
    (folder / f"{grade.student}.json").write_text(json.dumps(asdict(grade), indent=2), encoding="utf-8")


def write_tables(out: Path, title: str, grades: Sequence[Grade]) -> None:
    """Write grades.csv, grades.json and grades.html, and in students/ a page and Gradescope's results of each."""
    (out / "students").mkdir(exist_ok=True)
    heads = [head for mark in grades[0].marks for head in (mark.exercise, f"{mark.exercise} fault")]
    rows: list[list[Any]] = [["student", "points", "possible", "blocked", "stopped", *heads]]
    for one in grades:
        name = f"'{one.student}" if one.student[:1] in "=+-@" else one.student  # no formula in a spreadsheet
        cells = [cell for mark in one.marks for cell in (mark.verdict, mark.fault)]
        rows.append([name, one.points, one.possible, one.blocked, one.stopped, *cells])
        page, results = (out / "students" / f"{one.student}{ending}" for ending in (".html", ".results.json"))
        page.write_text(student_page(title, one), encoding="utf-8")
        results.write_text(json.dumps(to_gradescope(one), indent=2), encoding="utf-8")
    with (out / "grades.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    (out / "grades.json").write_text(json.dumps([asdict(one) for one in grades], indent=2), encoding="utf-8")
    (out / "grades.html").write_text(class_page(title, grades), encoding="utf-8")


def to_gradescope(grade: Grade) -> dict[str, Any]:
    """Return what Gradescope's autograder reads as results.json.

    Source: Gradescope, Autograder Specifications, "Output format" (read 2026-11).
    """
    tests = [
        {"name": mark.exercise, "score": mark.points, "max_score": mark.worth, "output": mark.message}
        for mark in grade.marks
        if mark.verdict != "blocked"
    ]
    return {"tests": tests, "output": "\n".join([*grade.notes, grade.stopped]).strip()}


def class_page(title: str, grades: Sequence[Grade]) -> str:
    """Return a page of the whole class: who has what, and which faults were made how often."""
    rows = [[_text(each.student), f"{each.points} of {each.possible}", *map(_verdict, each.marks)] for each in grades]
    body = _table(["student", "points", *(mark.exercise for mark in grades[0].marks)], rows)
    faults = Counter((mark.exercise, mark.fault) for each in grades for mark in each.marks if mark.verdict == "wrong")
    often = [[name, _text(fault), str(n)] for (name, fault), n in faults.most_common()]
    body += f"<h2>What went wrong, and how often</h2>{_table(['exercise', 'fault', 'answers'], often)}" if often else ""
    return _page(title, body)


def student_page(title: str, grade: Grade) -> str:
    """Return a page for one student: what each exercise earned, and what its check said."""
    more = f"; {grade.blocked} more need a machine that has what they use" if grade.blocked else ""
    notes = [*grade.notes, *([f"Ended early: {grade.stopped}"] if grade.stopped else [])]
    rows = [
        [mark.exercise, f"{mark.points} of {mark.worth}", _verdict(mark), f"<pre>{_text(mark.message)}</pre>"]
        for mark in grade.marks
    ]
    total = f"<p><strong>{grade.points} of {grade.possible} points</strong>{more}</p>"
    table = _table(["exercise", "points", "verdict", "what the check said"], rows)
    return _page(f"{title}: {grade.student}", f"{total}{''.join(f'<p>{_text(note)}</p>' for note in notes)}{table}")


def _text(value: object) -> str:
    return html.escape(str(value))


def _verdict(mark: Mark) -> str:
    return f'<span style="color:{COLOURS[mark.verdict]}" title="{_text(mark.message)}">{mark.verdict}</span>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out cells of HTML; the first of each row is its head."""
    lines = ["".join(f'<th scope="col">{_text(head)}</th>' for head in heads)]
    lines += [f'<th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{_text(title)}</h1>{body}</body></html>\n'
