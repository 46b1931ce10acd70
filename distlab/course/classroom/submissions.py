"""What students hand in: one notebook or module each, found in files and folders, with the student's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

KINDS = (".ipynb", ".py")


class Submission(NamedTuple):
    """One student's notebook or module, or None where there is none; or the problem why it cannot be graded, in a line.

    `student` names the student and the files of results: it is the submission's file name, or its folder's.
    """

    student: str
    path: Path | None = None
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
    found: dict[str, list[Path]] = {}
    for path in paths:
        if not path.exists() or (path.is_file() and path.suffix not in KINDS):
            raise ValueError(f"{path} is neither a notebook (.ipynb) nor a module (.py) nor a folder of them")
        for child in sorted(path.iterdir()) if path.is_dir() else [path]:
            if child.name.startswith((".", "__")) or not (child.is_dir() or child.suffix in KINDS):
                continue
            names = (child.stem, *(above.name for above in child.absolute().parents))
            owner = next(name for name in names if name not in (lesson, "lesson", "answers", "work"))
            student = re.sub(r"[^\w.@+-]+", "_", owner) or "student"
            files = [child] if child.is_file() else [one for one in sorted(child.rglob("*")) if one.is_file()]
            hidden = re.compile(r"/(\.|__)").search  # what editors and systems leave beside an answer
            shown = [one for one in files if one.suffix in KINDS and not hidden(str(one)[len(str(child)) :])]
            found.setdefault(student, []).extend(shown)
    if not found:
        listed = ", ".join(map(str, paths))
        raise ValueError(f"{listed}: no submission of lesson {lesson[:2]}; expected notebooks or .py files")
    return [_chosen(student, found[student], lesson) for student in sorted(found)]


def _chosen(student: str, files: list[Path], lesson: str) -> Submission:
    """Return a student's one file for the lesson: the one of its name, or the only one that is of no lesson."""
    if len(files) > 1:
        plain = [path for path in files if not re.match(r"\d\d_|START$", path.stem)]
        files = [path for path in files if path.stem == lesson] or plain
    if len(files) > 1:
        listed = ", ".join(path.name for path in files[:4])
        return Submission(student, None, f"several files to grade ({listed}); name the right one {lesson}.ipynb")
    return Submission(student, files[0] if files else None)
