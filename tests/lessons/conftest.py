"""The builder of the lessons, which is a program and no package."""

import importlib
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def build():
    """The module tools/build_lessons.py."""
    return importlib.import_module("build_lessons")


@pytest.fixture
def tiny(tmp_path):
    """A folder of lessons that holds a copy of the tiny one, not built."""
    unbuilt = shutil.ignore_patterns("*.ipynb")
    return shutil.copytree(Path(__file__).parent / "fixture" / "lessons", tmp_path / "lessons", ignore=unbuilt)
