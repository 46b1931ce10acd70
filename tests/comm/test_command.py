"""A command is written so that it runs where its reader stands."""

import os
import subprocess
import sys

import pytest

from distlab.comm import command
from distlab.comm.command import put_on_path, runnable


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The program `distlab` in a folder .venv/bin below the working directory."""
    path = tmp_path / ".venv" / "bin" / "distlab"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho ran $1\n")
    path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_FOLDER", path.parent)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return path


def test_a_program_beside_this_python_is_named_by_its_path(program, tmp_path, monkeypatch):
    assert runnable("distlab check 03") == ".venv/bin/distlab check 03"
    assert subprocess.check_output(runnable("distlab check"), shell=True, text=True) == "ran check\n"
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    assert runnable("distlab check 03") == f"{program} check 03"


def test_a_program_on_the_path_stays_as_it_is(program, monkeypatch):
    put_on_path()
    put_on_path()
    assert os.environ["PATH"] == f"{program.parent}:/usr/bin:/bin"
    assert runnable("distlab check 03") == "distlab check 03"


def test_another_program_of_that_name_is_not_meant(program, tmp_path, monkeypatch):
    other = tmp_path / "other" / "distlab"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    assert runnable("distlab check 03") == ".venv/bin/distlab check 03"


def test_without_a_program_this_python_runs_the_module(program, monkeypatch):
    program.unlink()
    assert runnable("distlab check 03") == f"{sys.executable} -m distlab check 03"
    assert runnable("lab 03 --help") == "lab 03 --help"
