"""A command is written so that it runs where its reader stands."""

import os
import subprocess
import sys

from distlab.comm import command
from distlab.comm.command import put_on_path, runnable


def test_a_program_is_named_so_that_it_runs_here(tmp_path, monkeypatch):
    program, other = tmp_path / ".venv" / "bin" / "distlab", tmp_path / "other" / "distlab"
    for path in (program, other):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\necho ran $1\n")
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_FOLDER", program.parent)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert runnable("distlab check 03") == ".venv/bin/distlab check 03", "beside this Python, and not on the path"
    assert subprocess.check_output(runnable("distlab check"), shell=True, text=True) == "ran check\n"
    monkeypatch.chdir(other.parent)
    assert runnable("distlab check 03") == f"{program} check 03"
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    assert runnable("distlab check 03") == f"{program} check 03", "the path leads to a different one of that name"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    put_on_path()
    put_on_path()
    assert os.environ["PATH"] == f"{program.parent}:/usr/bin:/bin"
    assert runnable("distlab check 03") == "distlab check 03", "it stays as it is"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    program.unlink()
    assert runnable("distlab check 03") == f"{sys.executable} -m distlab check 03"
    assert runnable("lab 03 --help") == "lab 03 --help"
