"""Tables of grades: CSV for a spreadsheet, HTML for the eye, one page per student."""

from __future__ import annotations

import csv
import html
import io
from collections import Counter
from collections.abc import Sequence

from distlab.classroom.marks import Grade, Mark

COLOURS = {
    "passed": "#1b7837",
    "wrong": "#a50026",
    "not attempted": "#555555",
    "blocked": "#8a5a00",
    "stopped": "#a50026",
}
SIGNS = {"passed": "right", "wrong": "wrong", "not attempted": "none", "blocked": "blocked", "stopped": "stopped"}
STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em;max-width:75em;background:white;color:black}"
    "table{border-collapse:collapse}th,td{padding:.3em .7em;text-align:left;border-bottom:1px solid #8888;"
    "vertical-align:top}td.n{text-align:right}pre{white-space:pre-wrap;margin:.3em 0}"
)


def to_csv(grades: Sequence[Grade]) -> str:
    """Return a line per student: points, what was possible and blocked, then each exercise's verdict and fault."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    exercises = [mark.exercise for mark in grades[0].marks] if grades else []
    heads = [head for name in exercises for head in (name, f"{name} fault")]
    writer.writerow(["student", "points", "possible", "blocked", "stopped", *heads])
    for grade in grades:
        cells = [cell for mark in grade.marks for cell in (mark.verdict, mark.fault or "")]
        name = f"'{grade.student}" if grade.student[:1] in "=+-@" else grade.student  # no formula in a spreadsheet
        writer.writerow([name, grade.points, grade.possible, grade.blocked, grade.stopped, *cells])
    return out.getvalue()


def class_page(title: str, grades: Sequence[Grade]) -> str:
    """Return a page of the whole class: who has what, and which faults were made how often."""
    exercises = [mark.exercise for mark in grades[0].marks] if grades else []
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in exercises)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(grade.student)}</th>'
        f'<td class="n">{grade.points} of {grade.possible}</td>{"".join(map(_cell, grade.marks))}</tr>'
        for grade in grades
    )
    table = f'<table><tr><th scope="col">student</th><th scope="col">points</th>{heads}</tr>{rows}</table>'
    counted = Counter(
        (mark.exercise, mark.fault) for grade in grades for mark in grade.marks if mark.verdict == "wrong"
    )
    faults = "".join(
        f'<tr><td>{html.escape(name)}</td><td>{html.escape(str(fault))}</td><td class="n">{count}</td></tr>'
        for (name, fault), count in sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    )
    heads = '<tr><th scope="col">exercise</th><th scope="col">fault</th><th scope="col">answers</th></tr>'
    often = f"<h2>What went wrong, and how often</h2><table>{heads}{faults}</table>" if faults else ""
    return _page(title, table + often)


def student_page(title: str, grade: Grade) -> str:
    """Return a page for one student: what each exercise earned, and what its check said."""
    notes = [*grade.notes, *([f"Ended early: {grade.stopped}"] if grade.stopped else [])]
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(mark.exercise)}</th><td class="n">{_points(mark)}</td>{_cell(mark)}'
        f"<td><pre>{html.escape(mark.message)}</pre></td></tr>"
        for mark in grade.marks
    )
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("exercise", "points", "verdict", "what the check said"))
    total = f"<p><strong>{grade.points} of {grade.possible} points</strong>{_blocked(grade)}</p>"
    return _page(f"{title}: {grade.student}", f"{total}{said}<table><tr>{heads}</tr>{rows}</table>")


def _points(mark: Mark) -> str:
    return "-" if mark.verdict == "blocked" else f"{mark.points} of {mark.worth}"


def _blocked(grade: Grade) -> str:
    return f"; {grade.blocked} more need a machine that has what they use" if grade.blocked else ""


def _cell(mark: Mark) -> str:
    colour, words = COLOURS[mark.verdict], html.escape(mark.message, quote=True)
    return f'<td style="color:{colour}" title="{words}">{SIGNS[mark.verdict]}</td>'


def _page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{html.escape(title)}</h1>{body}</body></html>\n'
    )
