"""Labs that fail: the cause first, a hang ended with words, and nothing left."""

import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import processes_with, wait_for

from distlab.cli import main

SMALL = ["--sizes", "8,1024", "--rounds", "1", "--repeats", "1", "--laps", "1"]
MARK = "DISTLAB_TEST_OF_LABS"
LAB = """
import sys
from distlab.cli import main
from distlab.comm.launch import fork_client
fork_client.PRELOAD = fork_client.PRELOAD[1:]  # without optimizers, whose loading takes long
sys.exit(main())
"""
HEAD = "import os, signal, sys, time\nimport torch\nimport torch.distributed as dist\n\n"
RECEIVE_FIRST = """
def shift(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    dist.recv(received, (rank - 1) % n)
    dist.send(tensor, (rank + 1) % n)
    return received
"""
STUBBORN = """
def shift(tensor):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(1000)
    while True:
        time.sleep(0.01)
"""


def command(tmp_path, text, num_ranks=2, *more):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + text)
    return [sys.executable, "-c", LAB, "lab", "01", "--ranks", str(num_ranks), *SMALL, "--impl", str(path), *more]


@pytest.fixture
def failed(tmp_path, capsys):
    """Make `failed(text)` run a lab that fails and return what it said."""

    def told(text, num_ranks=2, *more, status=1):
        arguments = command(tmp_path, text, num_ranks, *more)[3:]  # in this process, which has torch loaded
        ended, said = main(arguments), capsys.readouterr()
        assert ended == status, said.out + said.err
        return said.err

    return told


def test_a_deadlock_is_told_with_who_waits_for_whom(failed):
    told = failed(RECEIVE_FIRST, 3)
    assert told.startswith("distlab lab: lab 01 cannot go on: deadlock")
    for rank in range(3):
        assert f"rank {rank} waits in recv from {(rank - 1) % 3} #1" in told
    assert "dist.recv(received, (rank - 1) % n)" in told  # the learner's own line


def test_what_exits_is_told(failed, tmp_path):
    told = failed("\ndef shift(tensor):\n    sys.exit(0)\n")
    assert "left by exit(0); a function returns instead" in told.splitlines()[0]
    told = failed("sys.exit(3)\n", status=2)  # a module
    assert told.count("\n") == 1
    assert f"{tmp_path / 'mine.py'} cannot be loaded" in told


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), *(pytest.param(s, -s, marks=pytest.mark.soak) for s in (signal.SIGTERM, signal.SIGKILL))],
)
def test_nothing_is_left_when_it_is_ended_from_outside(tmp_path, number, code):
    process = subprocess.Popen(
        command(tmp_path, STUBBORN),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env=os.environ | {MARK: str(tmp_path)},
    )
    mark = f"{MARK}={tmp_path}"
    wait_for(lambda: len(processes_with(mark)) >= 6 or process.poll())  # command, fork server, two ranks, two children
    time.sleep(0.5)
    assert len(processes_with(mark)) >= 6
    os.kill(process.pid, number)
    told = process.communicate(timeout=250)[1]
    assert process.returncode == code
    assert "Traceback" not in told
    wait_for(lambda: not processes_with(mark))
