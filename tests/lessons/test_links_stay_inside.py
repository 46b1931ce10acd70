"""JupyterLab opens nothing above the folder it was started in: no link of a lesson leads out of the lessons."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlab.course.grading.lesson import lessons_folder


@pytest.mark.parametrize(
    "path", sorted(lessons_folder().glob("[0-9][0-9]_*/*.ipynb")), ids=lambda path: path.parent.name
)
def test_no_link_leaves_the_lessons(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "](../../" not in text, f"{path}: name the file in words; Jupyter's root is the folder of the copies"
