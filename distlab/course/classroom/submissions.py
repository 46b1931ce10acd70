"""What students hand in: one notebook or module each, found in files and folders, with the student's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

KINDS = (".ipynb", ".py")
HIDDEN = (".", "__")


class Submission(NamedTuple):
    """One student's answers to a lesson.

    Attributes:
        student: names the student and the files of results: the submission's file name, or its folder's.
        path: the notebook or module, or None where the student's folder has none.
        data: the file's bytes as they were found: a different submission that runs first cannot change them.
        problem: why it cannot be graded, in one line, or "".
    """

    student: str
    path: Path | None = None
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
        ValueError: a path is not there or has a different ending, or there is no submission at all. What is wrong with
            one student's files stands in `problem`, and does not keep the others from being graded.
    """
    found: dict[str, Submission] = {}
    for path in paths:
        if not path.exists() or (path.is_file() and path.suffix not in KINDS):
            raise ValueError(f"{path} is neither a notebook (.ipynb) nor a module (.py) nor a folder of them")
        for child in sorted(path.iterdir()) if path.is_dir() else [path]:
            if child.name.startswith(HIDDEN) or not (child.is_dir() or child.suffix in KINDS):
                continue
            name = child.name if child.is_dir() else _owner(child, lesson)
            student = re.sub(r"[^\w.@+-]+", "_", name).strip(".") or "student"
            one = _read(student, child, lesson)
            if student in found:
                both = f"{found[student].path} and {one.path}"
                text = f"two submissions are {student}'s: {both}; leave one out, or rename a folder"
                one = Submission(student, one.path, problem=text)
            found[student] = one
    if not found:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"{listed}: no submission of lesson {lesson[:2]}; expected notebooks or .py files")
    return [found[student] for student in sorted(found)]


def _owner(path: Path, lesson: str) -> str:
    """Return the file's name, or that of the first folder above it that is not named like the lesson."""
    names = (path.stem, *(parent.name for parent in path.absolute().parents))
    return next((name for name in names if name not in (lesson, "lesson", "answers", "work", "")), path.stem)


def _read(student: str, place: Path, lesson: str) -> Submission:
    """Read a student's one file for the lesson: the one of its name, or the only one that is of no lesson."""
    files = [one for one in sorted(place.rglob("*")) if _is_answer(one, place)] if place.is_dir() else [place]
    if len(files) > 1:
        plain = [path for path in files if not re.match(r"\d\d_|START$", path.stem)]  # named like no lesson
        beside = [path for path in plain if path.parent.name == lesson]
        files = [path for path in files if path.stem == lesson] or beside or plain
    if len(files) > 1:
        listed = ", ".join(path.name for path in files[:4])
        return Submission(student, problem=f"several files to grade ({listed}); name the right one {lesson}.ipynb")
    if not files or not files[0].is_file():  # a pipe, or a link to nothing
        return Submission(student)
    try:
        return Submission(student, files[0], files[0].read_bytes())
    except OSError as error:
        return Submission(student, files[0], problem=f"{files[0]} cannot be read: {error.strerror}")


def _is_answer(path: Path, place: Path) -> bool:
    inside = path.relative_to(place).parts
    return path.suffix in KINDS and path.is_file() and not any(part.startswith(HIDDEN) for part in inside)
