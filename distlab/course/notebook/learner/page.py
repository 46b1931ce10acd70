"""One HTML page with all that you have passed, to print or to hand in: `work/progress.html`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from distlab.course.grading.progress import OUTSIDE, Entry, load_progress, now, work_folder
from distlab.course.notebook.learner.course import CourseMap, CourseRow, rows
from distlab.course.notebook.learner.stuck import Note

PAGE = "progress.html"
TITLE = "Distributed training: my progress"
STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;background:white;color:black}"
    "table{border-collapse:collapse;width:100%}th,td{padding:.25em .7em;text-align:left;border-bottom:1px solid #8888;"
    "vertical-align:top}thead th{font-weight:normal}td:nth-child(n+2):nth-child(-n+4){white-space:nowrap}"
    "section{break-inside:avoid}h2{font-size:1.1em;margin:1.6em 0 .3em}"
    "@media print{body{margin:0;max-width:none;font-size:9pt}@page{margin:15mm}}"
)
COLUMNS = ("exercise", "passed on", "checks", "help", "what your answer used")


def progress_page() -> Note:
    """Write the page into the folder of your working copies, anew at each call; return a link to it."""
    from distlab.course.grading.lesson import lessons_folder

    work = work_folder()
    if work is None:
        return Note(OUTSIDE)
    write_page(lessons_folder(), work)
    link = f'<a href="{PAGE}" target="_blank">{PAGE}</a>'
    text = f"Your progress is in {PAGE}, beside START.ipynb. Open it, and print it."
    return Note(text, page=f"<p>Your progress is in {link}. Open it, and print it from there.</p>")


def write_page(lessons: Path, work: Path) -> Path:
    """Write the page into a folder of working copies; return its path.

    Raises:
        ValueError: the folder is not one that `distlab lesson start` made.
        OSError: it cannot be written.
    """
    if work_folder(work) is None:
        raise ValueError(f"{work} has no working copies: `distlab lesson start` makes them, --work names their folder")
    progress = load_progress(work)
    text = page(rows(lessons, progress), progress, day=now()[:10])
    (work / PAGE).write_text(text, encoding="utf-8")
    return work / PAGE


def page(lessons: Sequence[CourseRow], progress: Mapping[str, Entry], *, day: str) -> str:
    """Return the page: how far you are in all, a table for each lesson that you began, and the lessons ahead."""
    begun = [row for row in lessons if any(name in progress for name in row.exercises)]
    whole = sum(row.passed == len(row.exercises) for row in begun)
    ahead = ", ".join(f"{row.number} {row.title}" for row in lessons if row not in begun)
    summary = f"{CourseMap(list(lessons), '').summary} Lessons with all exercises passed: {whole} of {len(lessons)}."
    parts = [f"<h1>{TITLE}</h1>", f"<p>Name: ______________________________ &nbsp; {day}</p>"]
    parts.append(f"<p>{html.escape(summary)}</p>")
    heads = "".join(f'<th scope="col">{head}</th>' for head in COLUMNS)
    for row in begun:
        name = html.escape(f"{row.number} {row.title}: {row.passed} of {len(row.exercises)}")
        body = "".join(_exercise(one, progress.get(one, Entry())) for one in row.exercises)
        parts.append(
            f"<section><h2>{name}</h2><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></section>"
        )
    parts += [f"<h2>Not begun</h2><p>{html.escape(ahead)}</p>"] if ahead else []
    head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _exercise(name: str, entry: Entry) -> str:
    """Return the row of an exercise: when it was passed, after how many checks, with what help, and what it used."""
    passed = entry.first_passed[:10] or "not yet"
    checks = f"{entry.attempts}, {entry.failed} wrong" if entry.failed else str(entry.attempts or "")
    hints = [f"{entry.hints} hint{'s' if entry.hints > 1 else ''}"] if entry.hints else []
    helped = ", ".join([*hints, *(["solution seen"] if entry.solution_seen else [])])
    cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in (passed, checks, helped, "; ".join(entry.budget)))
    return f'<tr><th scope="row">{html.escape(name)}</th>{cells}</tr>'
