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
from distlab.course.grading.progress import MARKER, copy_in

START = "START.ipynb"
CAME_FROM = "distlab"  # in a copy's metadata: the fingerprint of the lesson that it was made from
PAGES = ("GLOSSARY.md", "CHEATSHEET.md")  # the lessons and START link to them
BROUGHT_S = 946_684_800  # a page's time of change (2000-01-01) until you write in it
_LINK = re.compile(r"\(\.\./(\d\d_\w+)/\w+\.ipynb\)")


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
    """Return the notebooks to work in, by the name of their copy below `work`: START first, then lessons in order."""
    found = {START: lessons / START}
    for original in sorted(lessons.glob("[0-9][0-9]_*/lesson.ipynb")):
        found[f"{original.parent.name}/{copy_in(work, original.parent.name).name}"] = original
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
    _put(copy, _read(known[name]), work)
    return aside, copy


def fingerprint(notebook: dict[str, Any]) -> str:
    """Hash what a person writes in a notebook: its cells, without what they showed and without the names of copies."""
    cells = [(one.get("cell_type"), _LINK.sub(r"(../\1)", "".join(one.get("source", "")))) for one in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def _copy(name: str, original: Path, work: Path) -> Copy:
    """Make one copy, or look at the one that is there."""
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
