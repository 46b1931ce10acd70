"""The builder of the lessons, which is a program and no package."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="session")
def build():
    """The module tools/build_lessons.py."""
    sys.path.insert(0, str(TOOLS))
    try:
        yield importlib.import_module("build_lessons")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def tiny(tmp_path):
    """A folder of lessons that holds a copy of the tiny one, not built."""
    import shutil

    shutil.copytree(Path(__file__).parent / "fixture" / "lessons", tmp_path / "lessons")
    for path in (tmp_path / "lessons").rglob("*.ipynb"):
        path.unlink()
    return tmp_path / "lessons"
