"""Your working copies of the lessons: made once, never overwritten, put aside when you ask for a fresh one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.command import runnable
from distlab.course.grading.progress import MARKER, copy_in, load_progress

START = "START.ipynb"
NOTEBOOK = "lesson.ipynb"  # its name in the repository, next to its source
CAME_FROM = "distlab"  # in a copy's metadata: the fingerprint of the lesson that it was made from
_LINK = re.compile(r"\(\.\./(\d\d_\w+)/\w+\.ipynb\)")
PAGES = ("GLOSSARY.md", "CHEATSHEET.md")  # the lessons and START link to them
BROUGHT_S = 946_684_800  # a page's time of change (2000-01-01) until you write in it


class Copy(NamedTuple):
    """One working copy after `make_copies`.

    Attributes:
        name: such as "03_data_parallel/03_data_parallel.ipynb", below the work folder.
        state: "made", "kept", "refreshed", "newer" (the lesson has changed since) or "damaged".
        message: what to tell about it, or "".
    """

    name: str
    state: str
    message: str = ""


def originals(lessons: Path, work: Path) -> dict[str, Path]:
    """Return the notebooks to work in, by the name of their copy below `work`: START first, then lessons in order."""
    found = {START: lessons / START} if (lessons / START).is_file() else {}
    folders = sorted(path for path in lessons.glob("[0-9][0-9]_*") if (path / NOTEBOOK).is_file())
    return found | {f"{folder.name}/{copy_in(work, folder.name).name}": folder / NOTEBOOK for folder in folders}


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


def draw_map(lessons: Path, work: Path) -> None:
    """Put the map of the course, as it is now, below its cell in the copy of START: seen before anything is run."""
    from distlab.course.notebook.learner.course import CourseMap, rows, this_machine_can

    path = work / START
    try:
        notebook = _read(path)
    except (OSError, ValueError):
        return
    drawn = CourseMap(rows(lessons, load_progress(work)), this_machine_can())
    data = {"text/html": drawn._repr_html_(), "text/plain": str(drawn)}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "course_map()" in "".join(cell["source"]):
            cell["outputs"] = [{"output_type": "display_data", "data": data, "metadata": {}}]
    _put(path, notebook)


def reset(number: str, lessons: Path, work: Path) -> tuple[Path, Path]:
    """Put the copy of one lesson aside, whatever state it is in, and bring a fresh one; return aside and fresh.

    Raises:
        ValueError: there is no such lesson, or no copy of it.
    """
    known = originals(lessons, work)
    wanted = f"{int(number):02}" if number.isdecimal() else number
    names = [name for name in known if wanted in (name[:2], name.partition("/")[0], name.removesuffix(".ipynb"))]
    if not names:
        numbers = ", ".join(name.removesuffix(".ipynb") if name == START else name[:2] for name in known)
        raise ValueError(f"there is no lesson {number!r}; pass one of {numbers or '(no lesson has been built)'}")
    name, copy = names[0], work / names[0]
    if not os.path.lexists(copy):
        raise ValueError(f"nothing to reset: {copy} is not there; {runnable('distlab lesson start')} makes it")
    aside = copy.with_name(f"{copy.stem}.{datetime.now():%Y-%m-%d_%H-%M-%S.%f}{copy.suffix}")
    copy.rename(aside)
    _put(copy, _to_work_in(_read(known[name]), work))
    return aside, copy


def fingerprint(notebook: dict[str, Any]) -> str:
    """Hash what a person writes in a notebook: its cells, without what they showed and without the names of copies."""
    cells = [
        (cell.get("cell_type"), _LINK.sub(r"(../\1)", "".join(cell.get("source", "")))) for cell in notebook["cells"]
    ]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def _copy(name: str, original: Path, work: Path) -> Copy:
    """Make one copy, or look at the one that is there."""
    copy, lesson = work / name, _read(original)
    number = name.partition("_")[0].removesuffix(".ipynb")
    reset_it = f"`{runnable(f'distlab lesson reset {number}')}` puts it aside"
    try:
        if not os.path.lexists(copy):
            copy.parent.mkdir(exist_ok=True)
            _put(copy, _to_work_in(lesson, work))
            return Copy(name, "made")
        mine = _read(copy)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        text = f"{copy} cannot be used: {why}. It is left alone; {reset_it} and brings a fresh one"
        return Copy(name, "damaged", text)
    came_from = mine["metadata"].get(CAME_FROM)
    if fingerprint(lesson) in (came_from, fingerprint(mine)):
        return Copy(name, "kept")
    if name == START and fingerprint(mine) == came_from:  # the learner wrote nothing in it
        _put(copy, _to_work_in(lesson, work))
        return Copy(name, "refreshed")
    text = f"{copy}: there is a newer version of it. Yours is kept; {reset_it} and brings the new one"
    return Copy(name, "newer", text)


def _read(path: Path) -> dict[str, Any]:
    """Read a notebook.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise ValueError("it is JSON, but no notebook of format 4")
    return notebook


def _to_work_in(notebook: dict[str, Any], work: Path) -> dict[str, Any]:
    """Return a notebook as a working copy: its links lead to other copies, and it shows nothing before you run it.

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
    return {**notebook, "cells": cells, "metadata": {**notebook["metadata"], CAME_FROM: fingerprint(notebook)}}


def _put(path: Path, notebook: dict[str, Any]) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
