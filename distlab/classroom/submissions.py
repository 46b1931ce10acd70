"""What students hand in: one notebook or module each, found in files and folders, with the student's name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

KINDS = (".ipynb", ".py")
_SAFE = re.compile(r"[^\w.@+-]+")


class Submission(NamedTuple):
    """One student's answers to a lesson.

    Attributes:
        student: names the student and the files of results: the submission's file name, or its folder's.
        path: the notebook or module, or None where the student's folder has none.
        digest: of the file's bytes, "" where there is none.
        data: the file's bytes as they were found: another submission that runs first cannot change them.
        problem: why it cannot be graded, in one line, or "".
    """

    student: str
    path: Path | None
    digest: str
    data: bytes = b""
    problem: str = ""


def find_submissions(paths: Sequence[Path], lesson: str) -> list[Submission]:
    """Return the submissions in files and folders, by student.

    A file is a submission. A folder holds one file per student, or one folder per student; a student's folder holds
    the notebook of the lesson at any depth, as `work/03_data_parallel/03_data_parallel.ipynb` does.

    Args:
        paths: files and folders.
        lesson: name of the lesson's folder, such as 03_data_parallel.

    Raises:
        ValueError: a path is not there or has another ending, or there is no submission at all. What is wrong with one
            student's files stands in `problem`, and does not keep the others from being graded.
    """
    found: dict[str, Submission] = {}
    for student, path in _pairs(paths, lesson):
        name = _SAFE.sub("_", student).strip(".") or "student"
        one = _read(name, path)
        if name in found:
            text = f"two submissions are {name}'s: {found[name].path} and {one.path}; leave one out, or rename a folder"
            one = Submission(name, one.path, one.digest, problem=text)
        found[name] = one
    if not found:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"{listed}: no submission of lesson {lesson[:2]}; expected notebooks or .py files")
    return [found[name] for name in sorted(found)]


def _read(student: str, path: Path | None | ValueError) -> Submission:
    if path is None or isinstance(path, ValueError):
        return Submission(student, None, "", problem=str(path or ""))
    try:
        data = path.read_bytes()
    except OSError as error:
        return Submission(student, path, "", problem=f"{path} cannot be read: {error.strerror}")
    return Submission(student, path, hashlib.sha256(data).hexdigest(), data)


def _pairs(paths: Sequence[Path], lesson: str) -> Iterator[tuple[str, Path | None | ValueError]]:
    for path in paths:
        if path.is_file():
            if path.suffix not in KINDS:
                raise ValueError(f"{path} is neither a notebook (.ipynb) nor a module (.py); pass one, or a folder")
            yield _owner(path, lesson), path
        elif path.is_dir():
            yield from _in_folder(path, lesson)
        else:
            raise ValueError(f"{path} is not there; pass notebooks, .py files or folders of them")


def _in_folder(folder: Path, lesson: str) -> Iterator[tuple[str, Path | None | ValueError]]:
    for child in sorted(folder.iterdir()):
        if child.name.startswith((".", "__")):
            continue
        if child.is_dir():
            yield child.name, _one_or_why_not(child, lesson)
        elif child.suffix in KINDS:
            yield _owner(child, lesson), child if child.is_file() else None  # a pipe, or a link to nothing


def _owner(path: Path, lesson: str) -> str:
    """Return the file's name, or that of the first folder above it that is not named like the lesson."""
    generic = (lesson, "lesson", "answers", "work", "")
    names = (path.stem, *(parent.name for parent in path.absolute().parents))
    return next((name for name in names if name not in generic), path.stem)


def _one_or_why_not(folder: Path, lesson: str) -> Path | None | ValueError:
    try:
        return _only(folder, lesson)
    except ValueError as error:
        return error
    except OSError as error:
        return ValueError(f"{error.filename} cannot be read: {error.strerror}")


def _only(folder: Path, lesson: str) -> Path | None:
    """Return the student's one file for the lesson, or None.

    Raises:
        ValueError: there are several, and none is named like the lesson.
    """
    files = sorted(_files(folder))
    if len(files) <= 1:
        return files[0] if files else None
    named = [path for path in files if path.stem == lesson or (path.stem == "lesson" and path.parent.name == lesson)]
    if len(named) == 1:
        return named[0]
    others = [path for path in files if not re.match(r"\d\d_", path.stem) and path.stem != "START"]
    if not named and len(others) <= 1:
        return others[0] if others else None
    listed = ", ".join(str(path.relative_to(folder)) for path in (named or others)[:4])
    raise ValueError(f"{folder} has several files to grade ({listed}); name the right one {lesson}.ipynb")


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if path.suffix in KINDS and path.is_file() and not hidden:
            yield path
