"""Tables of grades: CSV for a spreadsheet, JSON for Gradescope, HTML for the eye, one page per student."""

from __future__ import annotations

import csv
import html
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

from distlab.classroom.marks import Grade, Mark

COLOURS = {
    "passed": "#1b7837",
    "wrong": "#a50026",
    "not attempted": "#555555",
    "blocked": "#8a5a00",
    "stopped": "#a50026",
}
STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em;max-width:75em;background:white;color:black}"
    "table{border-collapse:collapse}th,td{padding:.3em .7em;text-align:left;border-bottom:1px solid #8888;"
    "vertical-align:top}pre{white-space:pre-wrap;margin:.3em 0}"
)


def to_csv(grades: Sequence[Grade]) -> str:
    """Return a line per student: points, what was possible and blocked, then each exercise's verdict and fault."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [head for mark in grades[0].marks for head in (mark.exercise, f"{mark.exercise} fault")] if grades else []
    writer.writerow(["student", "points", "possible", "blocked", "stopped", *heads])
    for grade in grades:
        cells = [cell for mark in grade.marks for cell in (mark.verdict, mark.fault or "")]
        name = f"'{grade.student}" if grade.student[:1] in "=+-@" else grade.student  # no formula in a spreadsheet
        writer.writerow([name, grade.points, grade.possible, grade.blocked, grade.stopped, *cells])
    return out.getvalue()


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
    exercises = [mark.exercise for mark in grades[0].marks] if grades else []
    rows = [[_text(each.student), f"{each.points} of {each.possible}", *map(_verdict, each.marks)] for each in grades]
    table = _table(["student", "points", *exercises], rows)
    counted = Counter((mark.exercise, mark.fault) for each in grades for mark in each.marks if mark.verdict == "wrong")
    often = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    faults = _table(["exercise", "fault", "answers"], [[name, _text(fault), str(n)] for (name, fault), n in often])
    return _page(title, table + (f"<h2>What went wrong, and how often</h2>{faults}" if often else ""))


def student_page(title: str, grade: Grade) -> str:
    """Return a page for one student: what each exercise earned, and what its check said."""
    notes = [*grade.notes, *([f"Ended early: {grade.stopped}"] if grade.stopped else [])]
    more = f"; {grade.blocked} more need a machine that has what they use" if grade.blocked else ""
    total = f"<p><strong>{grade.points} of {grade.possible} points</strong>{more}</p>"
    rows = [
        [mark.exercise, f"{mark.points} of {mark.worth}", _verdict(mark), f"<pre>{_text(mark.message)}</pre>"]
        for mark in grade.marks
    ]
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
