"""The lessons as a learner has them: working copies, the map of the course with your progress, and a page to print.

A copy is made once and never overwritten; it is put aside when you ask for a fresh one.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.command import runnable
from distlab.course.grading.lesson import lessons_folder
from distlab.course.grading.progress import MARKER, OUTSIDE, Entry, copy_in, now, record_of, work_folder
from distlab.course.notebook.stuck import Note
from distlab.course.page import page as html_page
from distlab.measure import gpu_names, num_cores
from simulator.units import counted

START = "START.ipynb"
GUIDES = "GUIDES.ipynb"
CAME_FROM = "distlab"  # in a copy's metadata: the fingerprint of the lesson that it was made from
PAGES = ("GLOSSARY.md", "CHEATSHEET.md")  # the lessons and START link to them
BROUGHT_S = 946_684_800  # a page's time of change (2000-01-01) until you write in it
_LINK = re.compile(r"\(\.\./(\d\d_\w+)/\w+\.ipynb\)")
PAGE = "progress.html"
TITLE = "Distributed training: my progress"
COLUMNS = ("exercise", "passed on", "checks", "help", "what your answer used")


class Copy(NamedTuple):
    """One working copy after `make_copies`.

    Attributes:
        name: such as "03_data_parallel/03_data_parallel.ipynb", below the work folder.
        state: "made", "kept", "newer" (the lesson has changed since) or "damaged".
        message: what to tell about it, or "".
    """

    name: str
    state: str
    message: str = ""


def originals(lessons: Path, work: Path) -> dict[str, Path]:
    """Return the notebooks to work in, by the name of their copy below `work`: START, then lessons, then GUIDES."""
    found = {START: lessons / START}
    for original in sorted(lessons.glob("[0-9][0-9]_*/lesson.ipynb")):
        found[f"{original.parent.name}/{copy_in(work, original.parent.name).name}"] = original
    found[GUIDES] = lessons / GUIDES
    return {name: original for name, original in found.items() if original.is_file()}


def make_copies(lessons: Path, work: Path) -> list[Copy]:
    """Bring every missing copy into the work folder, and look at those that are there.

    Raises:
        ValueError: the work folder cannot be one: it is a file, or below the lessons.
        OSError: it cannot be made or written.
    """
    if work.exists() and not work.is_dir():
        raise ValueError(f"{work} is a file; pass --work with a folder for your copies of the lessons")
    if work.resolve() == lessons.resolve() or lessons.resolve() in work.resolve().parents:
        raise ValueError(f"{work} is inside the lessons themselves; pass --work with a folder of your own")
    work.mkdir(parents=True, exist_ok=True)
    (work / MARKER).touch()
    for page in PAGES:
        copy = work / page
        if (lessons / page).is_file() and (not copy.exists() or copy.stat().st_mtime == BROUGHT_S):
            shutil.copyfile(lessons / page, copy)
            os.utime(copy, (BROUGHT_S, BROUGHT_S))
    return [_copy(name, original, work) for name, original in originals(lessons, work).items()]


def reset(number: str, lessons: Path, work: Path) -> tuple[Path, Path]:
    """Put the copy of a lesson aside and bring a fresh one; return aside and fresh; a ValueError: there is no copy."""
    known = originals(lessons, work)
    wanted = f"{int(number):02}" if number.isdecimal() else number
    names = [name for name in known if wanted in (name[:2], name.partition("/")[0], name.removesuffix(".ipynb"))]
    if not names:
        numbers = ", ".join(name.removesuffix(".ipynb") if name in (START, GUIDES) else name[:2] for name in known)
        raise ValueError(f"there is no lesson {number!r}; pass one of {numbers or '(no lesson has been built)'}")
    name, copy = names[0], work / names[0]
    if not os.path.lexists(copy):
        raise ValueError(f"nothing to reset: {copy} is not there; {runnable('distlab lesson start')} makes it")
    aside = copy.with_name(f"{copy.stem}.{datetime.now():%Y-%m-%d_%H-%M-%S.%f}{copy.suffix}")
    copy.rename(aside)
    _put(copy, _read(known[name]), work)
    return aside, copy


def fingerprint(notebook: dict[str, Any]) -> str:
    """Hash what a person writes in a notebook: its cells, without what they showed and without the names of copies."""
    cells = [(one.get("cell_type"), _LINK.sub(r"(../\1)", "".join(one.get("source", "")))) for one in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def _copy(name: str, original: Path, work: Path) -> Copy:
    copy, lesson = work / name, _read(original)
    number = name.partition("_")[0].removesuffix(".ipynb")
    reset_it = f"`{runnable(f'distlab lesson reset {number}')}` puts it aside and brings"
    try:
        if not os.path.lexists(copy):
            copy.parent.mkdir(exist_ok=True)
            _put(copy, lesson, work)
            return Copy(name, "made")
        mine = _read(copy)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return Copy(name, "damaged", f"{copy} cannot be used: {why}. It is left alone; {reset_it} a fresh one")
    if fingerprint(lesson) in (mine["metadata"].get(CAME_FROM), fingerprint(mine)):
        return Copy(name, "kept")
    return Copy(name, "newer", f"{copy}: there is a newer version of it. Yours is kept; {reset_it} the new one")


def _read(path: Path) -> dict[str, Any]:
    """Read a notebook; a ValueError says that it is none."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise ValueError("it is JSON, but no notebook of format 4")
    return notebook


def _put(copy: Path, notebook: dict[str, Any], work: Path) -> None:
    """Write a working copy: its links lead to other copies, and it shows nothing before you run it.

    A result that is seen beforehand cannot be predicted.
    """

    def link(match: re.Match[str]) -> str:
        return f"(../{match[1]}/{copy_in(work, match[1]).name})"

    cells = [
        {**cell, "outputs": [], "execution_count": None}
        if cell["cell_type"] == "code"
        else {**cell, "source": _LINK.sub(link, "".join(cell["source"]))}
        for cell in notebook["cells"]
    ]
    whole = {**notebook, "cells": cells, "metadata": {**notebook["metadata"], CAME_FROM: fingerprint(notebook)}}
    copy.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class CourseRow:
    """One lesson of the map.

    Attributes:
        number: two digits.
        folder: name of its folder.
        title: a few words.
        can: what you can do afterwards.
        ready: whether it is written.
        minutes: how long it takes, or None.
        needs: numbers of the lessons before it.
        exercises: names of its exercises.
        passed: how many of them were right.
        solutions_seen: names of those whose solution was shown before they were right.
        notebook: name of the file to open, in the lesson's folder.
    """

    number: str
    folder: str
    title: str
    can: str
    ready: bool
    minutes: int | None = None
    needs: tuple[str, ...] = ()
    exercises: tuple[str, ...] = ()
    passed: int = 0
    solutions_seen: tuple[str, ...] = ()
    notebook: str = "lesson.ipynb"

    @property
    def progress(self) -> str:
        """How far you are, in words."""
        if not self.ready:
            return "to come"
        if not self.exercises:
            return "no exercises"
        seen = f"; solution seen: {', '.join(self.solutions_seen)}" if self.solutions_seen else ""
        return f"{self.passed} of {len(self.exercises)}{seen}"


def rows(lessons: Path, progress: Mapping[str, Entry]) -> list[CourseRow]:
    """Return one row per lesson: those of COURSE.toml, filled in from the notebooks that are built."""
    plan = tomllib.loads((lessons / "COURSE.toml").read_text(encoding="utf-8"))["lesson"]
    return [_row(lessons, entry["folder"], entry["can"], progress) for entry in plan]


def _row(lessons: Path, folder: str, can: str, progress: Mapping[str, Entry]) -> CourseRow:
    """Return a lesson's row, from what the builder wrote into its notebook; without one it is to come."""
    number, _, words = folder.partition("_")
    title = words.replace("_", " ").capitalize()
    try:
        facts = json.loads((lessons / folder / "lesson.ipynb").read_text(encoding="utf-8"))["metadata"]["distlab"]
    except (OSError, ValueError, KeyError):
        return CourseRow(number, folder, title, can, ready=False)
    names, work = tuple(facts.get("exercises", ())), work_folder()
    copy = None if work is None else copy_in(work, folder)
    return CourseRow(
        number,
        folder,
        facts.get("title", title),
        can,
        ready=True,
        minutes=facts.get("minutes"),
        needs=tuple(map(str, facts.get("needs", ()))),
        exercises=names,
        passed=sum(name in progress and progress[name].passed for name in names),
        solutions_seen=tuple(name for name in names if name in progress and progress[name].solution_seen),
        notebook=copy.name if copy and copy.is_file() else "lesson.ipynb",
    )


def course_map(lessons: Path | None = None, work: Path | None = None) -> CourseMap:
    """Return the map of the course, with your progress; a notebook shows it as a table with links."""
    return CourseMap(rows(lessons or lessons_folder(), record_of(work).exercises), this_machine_can())


def this_machine_can() -> str:
    """Say in a sentence what of the course runs here; a GPU is never needed."""
    here, gpus = f"This machine has {counted(num_cores(), 'core')} and", gpu_names()
    if not gpus:
        return f"{here} no GPU: every lesson runs here; parts for GPUs use the CPU."
    use = "ranks share the GPU where a part needs several" if len(gpus) == 1 else "parts for GPUs use them"
    return f"{here} {counted(len(gpus), 'GPU')} ({gpus[0]}): every lesson runs here; {use}."


class CourseMap:
    """The map, as a table in a notebook and as text elsewhere."""

    def __init__(self, lessons: Sequence[CourseRow], machine: str) -> None:
        self.rows, self.machine = lessons, machine

    @property
    def summary(self) -> str:
        """How far you are in all, and what is next, in a sentence."""
        ready = [row for row in self.rows if row.ready]
        passed, total = sum(row.passed for row in ready), sum(len(row.exercises) for row in ready)
        following = next((row for row in ready if row.passed < len(row.exercises)), None)
        done = f"{passed} of {total} exercises passed."
        return f"{done} Next: {following.number} {following.title}." if following else done

    def __str__(self) -> str:
        lines = [self.machine, self.summary, ""]
        for row in self.rows:
            facts = [f"{row.minutes} min"] if row.minutes else []
            facts += [f"after {', '.join(row.needs)}"] if row.needs else []
            lines.append(f"{row.number}  {row.title:<30} {row.progress:<10} {', '.join(facts)}".rstrip())
            lines.append(f"    {row.can}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns = ("Lesson", "Afterwards you can", "Time", "After", "Exercises passed")
        head = "".join(f'<th scope="col" style="text-align:left">{name}</th>' for name in columns)
        return (
            f"<p>{html.escape(self.machine)}</p><p>{html.escape(self.summary)}</p>"
            f'<table aria-label="The lessons of the course"><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(map(_html_row, self.rows))}</tbody></table>"
        )


def _html_row(row: CourseRow) -> str:
    name, done = html.escape(f"{row.number} {row.title}"), html.escape(row.progress)
    if row.exercises:
        number, style = f'max="{len(row.exercises)}" value="{row.passed}"', "width:5em;display:block"
        done = f'<progress {number} style="{style}" aria-hidden="true"></progress>{done}'
    cells = (  # beside JupyterLab's folders 1024 pixels leave some 550: names and goals wrap, numbers stay whole
        (f'<a href="{row.folder}/{row.notebook}">{name}</a>' if row.ready else name, "min-width:7em"),
        (html.escape(row.can), "min-width:13em"),
        (f"{row.minutes} min" if row.minutes else "", "white-space:nowrap"),
        (html.escape(", ".join(row.needs)), "min-width:4em"),
        (done, "white-space:nowrap"),
    )
    columns = "".join(f'<td style="text-align:left;{layout}">{cell}</td>' for cell, layout in cells)
    return f"<tr>{columns}</tr>" if row.ready else f'<tr style="opacity:0.65">{columns}</tr>'


def progress_page() -> Note:
    """Write the page into the folder of your working copies, anew at each call; return a link to it."""
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
    progress = record_of(work).exercises
    (work / PAGE).write_text(page(rows(lessons, progress), progress, day=now()[:10]), encoding="utf-8")
    return work / PAGE


def page(lessons: Sequence[CourseRow], progress: Mapping[str, Entry], *, day: str) -> str:
    """Return the page: how far you are in all, a table for each lesson that you began, and the lessons ahead."""
    begun = [row for row in lessons if any(name in progress for name in row.exercises)]
    whole = sum(row.passed == len(row.exercises) for row in begun)
    ahead = ", ".join(f"{row.number} {row.title}" for row in lessons if row not in begun)
    summary = f"{CourseMap(lessons, '').summary} Lessons with all exercises passed: {whole} of {len(lessons)}."
    lines = [f"Name: ______________________________   {day}", summary, *([f"Not begun: {ahead}"] if ahead else [])]
    tables = []
    for row in begun:
        its = [COLUMNS, *(_exercise(one, progress.get(one, Entry())) for one in row.exercises)]
        tables.append((f"{row.number} {row.title}: {row.passed} of {len(row.exercises)}", its))
    return html_page(TITLE, lines, *tables)


def _exercise(name: str, entry: Entry) -> tuple[str, ...]:
    checks = f"{entry.attempts}, {entry.failed} wrong" if entry.failed else str(entry.attempts or "")
    hints = [f"{entry.hints} hint{'s' if entry.hints > 1 else ''}"] if entry.hints else []
    helped = ", ".join([*hints, *(["solution seen"] if entry.solution_seen else [])])
    return name, entry.first_passed[:10] or "not yet", checks, helped, "; ".join(entry.budget)
