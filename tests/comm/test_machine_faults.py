"""What a machine does to a job: programs that are stopped, memory that is not there."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, run

STOPPED = """
import os, sys, time
from pathlib import Path
from distlab.comm import run

def late(folder):
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(1)
    return 7

print(run(late, 2, args=(sys.argv[1],), timeout_s=20), flush=True)
"""


def in_state(pid, state):
    return psutil.Process(pid).status() == state


def test_a_launcher_that_was_stopped_beyond_its_limit_takes_what_came_meanwhile(tmp_path):
    """Ctrl-Z and fg: the ranks went on, and their results lie in the pipes."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not (tmp_path / "0").exists() or not (tmp_path / "1").exists():  # both have begun
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(22)
        assert in_state(process.pid, psutil.STATUS_STOPPED)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate(timeout=30)
    assert said == "[7, 7]\n"
    assert process.returncode == 0


def no_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    dist.barrier()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        torch.ones(256 << 20)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_a_rank_without_memory_is_the_cause(backend):
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 3 raised RuntimeError: .*(alloc|memory)") as caught:
        run(no_memory, 3, timeout_s=60, backend=backend)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 30
