"""Your working copies of the lessons: made once, never overwritten, put aside when you ask for a fresh one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.command import runnable
from distlab.grading.progress import MARKER, copy_in, load_progress

VERSIONS = ".versions.json"
START = "START.ipynb"
NOTEBOOK = "lesson.ipynb"  # its name in the repository, next to its source
_LINK = re.compile(r"\(\.\./(\d\d_\w+)/\w+\.ipynb\)")
PAGES = ("GLOSSARY.md", "CHEATSHEET.md")  # the lessons and START link to them


class Copy(NamedTuple):
    """One working copy after `make_copies`.

    Attributes:
        name: such as "03_data_parallel/03_data_parallel.ipynb", below the work folder.
        state: "made", "kept", "refreshed", "newer" (the lesson has changed since), "damaged" or "blocked".
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
    versions = _read_versions(work)
    for page in PAGES:
        _bring_page(lessons / page, work / page, versions)
    copies = [_copy(name, original, work, versions) for name, original in originals(lessons, work).items()]
    _write_versions(work, versions)
    return copies


def draw_map(lessons: Path, work: Path) -> None:
    """Put the map of the course, as it is now, below its cell in the copy of START: seen before anything is run."""
    from distlab.notebook.learner.course import CourseMap, rows, this_machine_can

    path = work / START
    if damage(path):
        return
    notebook = _read(path)
    drawn = CourseMap(rows(lessons, load_progress(work)), this_machine_can())
    data = {"text/html": drawn._repr_html_(), "text/plain": str(drawn)}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "course_map()" in "".join(cell["source"]):
            cell["outputs"] = [{"output_type": "display_data", "data": data, "metadata": {}}]
    _put(path, notebook, replace=True)


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
    aside = _free_name(copy)
    copy.rename(aside)
    fresh = _read(known[name])
    _put(copy, _to_work_in(fresh, work))
    versions = _read_versions(work)
    versions[name] = fingerprint(fresh)
    _write_versions(work, versions)
    return aside, copy


def fingerprint(notebook: dict[str, Any]) -> str:
    """Hash what a person writes in a notebook: its cells, without what they showed and without the names of copies."""
    cells = [
        (cell.get("cell_type"), _LINK.sub(r"(../\1)", "".join(cell.get("source", "")))) for cell in notebook["cells"]
    ]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def damage(path: Path) -> str | None:
    """Return why a file cannot be opened as a notebook, exactly, or None when it can."""
    try:
        text = path.read_bytes().decode("utf-8")
        if not text.strip():
            return "is empty"
        notebook = json.loads(text)
    except IsADirectoryError:
        return "is a folder, not a file"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
    except json.JSONDecodeError as error:
        return f"is not whole JSON (line {error.lineno}, column {error.colno}: {error.msg})"
    except RecursionError:
        return "is JSON nested too deep to be a notebook"
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and "source" in cell for cell in cells):
        return "is JSON, but no notebook: it has no list of cells"
    if notebook.get("nbformat") != 4:
        return f"is a notebook of format {notebook.get('nbformat')!r}; JupyterLab wants format 4"
    return None


def _copy(name: str, original: Path, work: Path, versions: dict[str, str]) -> Copy:
    """Make one copy, or look at the one that is there."""
    copy, lesson = work / name, _read(original)
    version = fingerprint(lesson)
    reset_it = runnable(f"distlab lesson reset {name.partition('_')[0].removesuffix('.ipynb')}")
    if not os.path.lexists(copy):
        try:
            copy.parent.mkdir(exist_ok=True)
            _put(copy, _to_work_in(lesson, work))
        except OSError as error:
            return Copy(name, "blocked", f"{copy} cannot be made: {error.strerror}")
        versions[name] = version
        return Copy(name, "made")
    if wrong := damage(copy):
        message = f"{copy} {wrong}. It is kept as it is; `{reset_it}` puts it aside and brings a fresh one"
        return Copy(name, "damaged", message)
    came_from = versions.get(name)
    if came_from == version:
        return Copy(name, "kept")
    if name == START and fingerprint(_read(copy)) == came_from:  # the learner wrote nothing in it
        with contextlib.suppress(OSError):
            _put(copy, _to_work_in(lesson, work), replace=True)
            versions[name] = version
            return Copy(name, "refreshed")
    if fingerprint(_read(copy)) == version:  # brought by hand
        versions[name] = version
        return Copy(name, "kept")
    since = "there is a newer version of it" if came_from else "it is not known which version it came from"
    return Copy(name, "newer", f"{copy}: {since}. Yours is kept; `{reset_it}` puts it aside and brings the new one")


def _bring_page(original: Path, copy: Path, versions: dict[str, str]) -> None:
    """Copy a page, also over an older one in which the learner wrote nothing."""
    if original.is_file() and (not copy.exists() or versions.get(copy.name) == _hash(copy)):
        shutil.copyfile(original, copy)
        versions[copy.name] = _hash(copy)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
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
    return {**notebook, "cells": cells}


def _put(path: Path, notebook: dict[str, Any], *, replace: bool = False) -> None:
    """Write a whole notebook at once; without `replace`, only where nothing is."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if replace or not os.path.lexists(path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _free_name(copy: Path) -> Path:
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    paths = (copy.with_name(f"{copy.stem}.{stamp}{ending}{copy.suffix}") for ending in endings)
    return next(path for path in paths if not os.path.lexists(path))


def _read_versions(work: Path) -> dict[str, str]:
    """Return which version each copy came from; a damaged file knows nothing."""
    try:
        known = json.loads((work / VERSIONS).read_text(encoding="utf-8"))
        return {str(name): str(version) for name, version in known.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_versions(work: Path, versions: dict[str, str]) -> None:
    part = work / f"{VERSIONS}.{os.getpid()}"
    part.write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
    part.replace(work / VERSIONS)
