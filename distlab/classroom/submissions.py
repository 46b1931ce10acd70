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
        data: the file's bytes as they were found: a different submission that runs first cannot change them.
        problem: why it cannot be graded, in one line, or "".
    """

    student: str
    path: Path | None = None
    digest: str = ""
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
    for path in paths:
        for student, files in _by_student(path, lesson):
            name = _SAFE.sub("_", student).strip(".") or "student"
            one = _read(name, files, lesson)
            if name in found:
                both = f"{found[name].path} and {one.path}"
                text = f"two submissions are {name}'s: {both}; leave one out, or rename a folder"
                one = Submission(name, one.path, one.digest, problem=text)
            found[name] = one
    if not found:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"{listed}: no submission of lesson {lesson[:2]}; expected notebooks or .py files")
    return [found[name] for name in sorted(found)]


def _by_student(path: Path, lesson: str) -> Iterator[tuple[str, list[Path]]]:
    """Yield each student's name and files in a file or folder."""
    if path.is_file() and path.suffix not in KINDS:
        raise ValueError(f"{path} is neither a notebook (.ipynb) nor a module (.py); pass one, or a folder")
    if not path.exists():
        raise ValueError(f"{path} is not there; pass notebooks, .py files or folders of them")
    for child in sorted(path.iterdir()) if path.is_dir() else [path]:
        if child.is_dir() and not child.name.startswith((".", "__")):
            yield child.name, sorted(one for one in child.rglob("*") if _is_answer(one.relative_to(child), one))
        elif child.suffix in KINDS:
            yield _owner(child, lesson), [child] if _is_answer(Path(child.name), child) else []


def _is_answer(name: Path, path: Path) -> bool:
    """Whether a file holds answers; no pipe, no link to nothing, and nothing in a hidden folder."""
    return path.suffix in KINDS and path.is_file() and not any(part.startswith((".", "__")) for part in name.parts)


def _owner(path: Path, lesson: str) -> str:
    """Return the file's name, or that of the first folder above it that is not named like the lesson."""
    names = (path.stem, *(parent.name for parent in path.absolute().parents))
    return next((name for name in names if name not in (lesson, "lesson", "answers", "work", "")), path.stem)


def _read(student: str, files: Sequence[Path], lesson: str) -> Submission:
    """Read a student's one file for the lesson: the one of its name, or the only one that is of no lesson."""
    if len(files) > 1:
        others = [path for path in files if not re.match(r"\d\d_|START$", path.stem)]
        named = [path for path in files if lesson in (path.stem, path.parent.name) and path not in others]
        files = named or [path for path in others if lesson == path.parent.name] or others
    if len(files) > 1:
        listed = ", ".join(path.name for path in files[:4])
        return Submission(student, problem=f"several files to grade ({listed}); name the right one {lesson}.ipynb")
    if not files:
        return Submission(student)
    try:
        data = files[0].read_bytes()
    except OSError as error:
        return Submission(student, files[0], problem=f"{files[0]} cannot be read: {error.strerror}")
    return Submission(student, files[0], hashlib.sha256(data).hexdigest(), data)
