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
from pathlib import Path
from typing import Any, NamedTuple

STYLE = "body{font-family:system-ui,sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}"
STYLE += "th,td{padding:.3em .7em;text-align:left;vertical-align:top;white-space:pre-wrap;border-bottom:1px solid #888}"


class Mark(NamedTuple):
    """What became of one exercise: its worth, the points that it earned, and what the student is told.

    The verdict is "passed", "wrong", "not attempted", "blocked", or "stopped" where a limit ended the submission first.
    """

    exercise: str
    worth: int
    points: int
    verdict: str
    fault: str | None = None
    message: str = ""


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
    notes: tuple[str, ...] = ()
    stopped: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the grade as JSON-ready values."""
        return self._asdict() | {"marks": [mark._asdict() for mark in self.marks]}


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
        stopped = [f"Ended early: {one.stopped}"] if one.stopped else []
        lines = [f"{one.points} of {one.possible} points{blocked}", *one.notes, *stopped]
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
