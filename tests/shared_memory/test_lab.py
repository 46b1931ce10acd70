"""A lab on this backend."""

import functools
import subprocess
import sys

import pytest
from lab_on_ranks import on_forked_ranks

from distlab.cli import main
from distlab.comm.launch import torchrun

LAB = ["lab", "02", "--ranks", "2", "--backend", "shared", "--limit-s", "100"]


def require_words(said):
    assert "--backend shared" in said, "the plain command says it too"
    assert "on 2 ranks, cpu, shared; functions: reference" in said


def test_a_lab_runs_on_this_backend(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torchrun, "run_script", functools.partial(on_forked_ranks, tmp_path))
    status, said = main([*LAB, "--blocks", "1"]), capsys.readouterr()
    assert status == 0, said
    require_words(said.out)


@pytest.mark.soak
def test_a_lab_runs_under_torchrun():
    done = subprocess.run([sys.executable, "-m", "distlab", *LAB], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    require_words(done.stdout)
