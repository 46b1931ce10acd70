"""A student copy of the lessons: notebooks, labs and sealed checks, without solutions and hidden cases.

What a student gets of a lesson:

| file | in the copy |
|---|---|
| lesson.ipynb, lab.py, exercises.py, and all other files that notebooks and labs read | as it is |
| solutions.py, checks/*.py | sealed: checks run, and name faults as ever; no answer is read by accident |
| checks/varied*.py | hidden: the drawn arguments come when the work is graded |
| solution.ipynb, lesson.py (the notebooks' source) | left out |
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from distlab.course.grading import lessons
from distlab.course.grading.lesson import lesson_number
from distlab.course.grading.sealed import seal

LEFT_OUT = ("lesson.py", "solution.ipynb", ".*", "__pycache__")
SHARED = ("COURSE.toml", "GLOSSARY.md", "CHEATSHEET.md", "CAPSTONE.md", "START.ipynb")
HIDDEN = '''"""Hidden in a student copy: more cases, with drawn arguments, which are checked when the work is graded."""

from typing import Any


def __getattr__(name: str) -> Any:
    return () if name.startswith("WRONG") else None
'''
README = """# {title}

A student copy of the lessons. It needs the package `distlab`, which your instructor names, in a virtual environment.

    cd {folder}
    distlab lesson start       # opens the lessons in JupyterLab; you work in copies, in the folder work/
    distlab check {first}          # checks your answers to lesson {first} on real ranks

The checks are those of the course; more cases are added when your work is graded. Solutions are not in this copy.
Hand in your notebook, such as `work/{lesson}/{lesson}.ipynb`.
"""


def release(folder: Path, out: Path, numbers: Sequence[str] = (), *, title: str = "distlab") -> list[Path]:
    """Write a student copy of the lessons.

    Args:
        folder: the folder of all lessons.
        out: the copy's folder, which is made.
        numbers: of the lessons, such as "03"; none means all.
        title: the first line of its README.

    Returns:
        the copied lessons' folders.

    Raises:
        ValueError: `out` holds something already or there is no such lesson.
        OSError: it cannot be written.
    """
    have = lessons(folder)
    chosen = [lesson_number(number) for number in numbers] or list(have)
    if unknown := [number for number in chosen if number not in have]:
        raise ValueError(f"there is no lesson {', '.join(unknown)}; lessons are {', '.join(have)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something already; pass a new folder for the student copy")
    copies = [out / "lessons" / path.name for path in sorted(folder.iterdir()) if path.name[:2] in chosen]
    for copy in copies:
        shutil.copytree(folder / copy.name, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for path in [copy / "solutions.py", *sorted(copy.glob("checks/*.py"))]:
            kind = "solutions" if path.parent == copy else "checks"
            is_hidden = kind == "checks" and path.stem.startswith("varied")
            text = HIDDEN if is_hidden else seal(path.read_text(encoding="utf-8"), f"{kind} of lesson {copy.name[:2]}")
            path.write_text(text, encoding="utf-8")
    for path in filter(Path.is_file, (folder / name for name in SHARED)):
        shutil.copyfile(path, out / "lessons" / path.name)
    words = README.format(title=title, folder=out.name, first=copies[0].name[:2], lesson=copies[0].name)
    (out / "README.md").write_text(words, encoding="utf-8")
    return copies
