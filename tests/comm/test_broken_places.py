"""What is broken around a job is named: folders that are gone or full, signals, closed files, errors without a text."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks, run


def leave_the_group():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        return
    dist.all_reduce(torch.ones(4))


def interrupt_itself():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


class NoText(ValueError):
    def __str__(self):
        raise KeyError("no text")

    def __eq__(self, other):
        raise KeyError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def raise_without_text():
    raise NoText


def raise_half_a_letter():
    raise ValueError("half \ud800")


def write_too_much():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return bytes(1_000_000)


def exit_with_an_object():
    sys.exit(NoText())


CASES = [
    (leave_the_group, r"rank 0 of 2 left the process group \(dist.destroy_process_group\).*rank 1"),
    (interrupt_itself, r"was interrupted \(SIGINT\)"),
    (raise_without_text, r"raised NoText: \(no text: its __str__ raised KeyError\)"),
    (exit_with_an_object, r"exited with status \(no text: its __str__ raised KeyError\)"),
    (raise_half_a_letter, r"raised ValueError: half \\ud800"),
    (
        write_too_much,
        r"could not write its result \(1000\d\d\d bytes\); make room there, .*File too large",
    ),
]


@pytest.mark.parametrize(("fn", "says"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_cause_is_named(fn, says):
    with pytest.raises(RankError, match=f"(?s){says}") as caught:
        run(fn, 2 if fn is leave_the_group else 1, timeout_s=60)
    assert caught.value.rank == 0, str(caught.value)
    str(caught.value).encode()  # it can be printed


def test_an_interrupt_between_jobs_is_an_interrupt():
    with Ranks(1, timeout_s=60) as ranks:
        ranks.run(os.getpid)
        os.kill(ranks.pids[0], signal.SIGINT)
        with pytest.raises(RankError, match=r"rank 0 of 1 was killed by SIGINT \(interrupt"):
            ranks.run(time.sleep, 1)


def test_a_folder_for_ranks_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(RuntimeError, match=r"cannot make a folder for the ranks in /.* \(No such file.*; create"):
        run(int, 1)


KILLED = """
import os, signal
from distlab.comm.launch.fork_client import fork_server
print(fork_server().make_folder(), fork_server().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_folder_stays_when_the_launcher_dies_while_torch_loads():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    folder = done.stdout.split()[0]
    deadline = time.monotonic() + 60
    while os.path.exists(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(folder)
