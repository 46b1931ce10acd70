"""A lab under torchrun on this backend."""

import subprocess
import sys


def test_a_lab_runs_under_torchrun():
    flags = ["--ranks", "2", "--backend", "shared", "--limit-s", "100"]
    done = subprocess.run(
        [sys.executable, "-m", "distlab", "lab", "02", *flags], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--backend shared" in done.stdout, "the plain command says it too"
    assert "on 2 ranks, cpu, shared; functions: reference" in done.stdout
    assert "no reference output for cpu, 2 ranks, shared" in done.stdout
