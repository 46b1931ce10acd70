"""Endings that nobody plans: copies of ranks, results that cannot be read, limits, huge errors."""

import os
import re
import resource
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks, run
from distlab.comm.launch import fork_client
from distlab.comm.launch.fork_client import ForkServer, fork_server


class Bomb:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_a_result_that_cannot_be_read_names_its_rank():
    with Ranks(2) as pool:
        with pytest.raises(RankError, match=r"rank 1 of 2 returned what cannot be read: ZeroDivision.*; return plain"):
            pool.run(lambda: Bomb() if dist.get_rank() == 1 else None)
        assert pool.run(dist.get_rank) == [0, 1], "the ranks go on"


def copy_itself():
    """A copy of rank 1 comes out of the function as the rank does, and sooner."""
    if dist.get_rank() == 1:
        copy = os.fork()
        if not copy:
            return "copy"
        os.waitpid(copy, 0)
    return "rank"


def test_a_copy_of_a_rank_does_not_answer_for_it():
    with Ranks(2) as pool:
        for _ in range(2):
            assert pool.run(copy_itself) == ["rank", "rank"]


CLOSED = """
import sys
from distlab.comm import run
try:
    run(int, 2)
except RuntimeError as error:
    open(sys.argv[1], "w").write(str(error))
"""


def test_a_program_without_standard_files_is_refused(tmp_path):
    (tmp_path / "script.py").write_text(CLOSED)
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, tmp_path / "script.py", tmp_path / "said"]
    subprocess.run(command, timeout=100)
    assert "standard input, output or errors are closed" in (tmp_path / "said").read_text()


def test_a_rank_that_cannot_open_its_files_names_them_and_what_to_do(monkeypatch):
    """As where a disk has room, and no inodes."""
    make = ForkServer.make_folder

    def with_something_in_the_way(self):
        folder = make(self)
        (folder / "rank1.stack").mkdir()
        return folder

    monkeypatch.setattr(ForkServer, "make_folder", with_something_in_the_way)
    says = r"rank 1 of 2 could not join the group in /.* \(make room there, or set TMPDIR to another folder\): IsADir"
    with pytest.raises(RankError, match=says) as caught:
        run(dist.barrier, 2)
    assert "rank1.stack" in str(caught.value)


def test_a_limit_of_open_files_is_named():
    fork_server()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(120 - psutil.Process().num_fds())]
    used = psutil.Process().num_fds()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
        with pytest.raises(ValueError, match=r"can start at most 1 \(real processes with 3 open files each; raise"):
            run(int, 16)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        with pytest.raises(RuntimeError, match=r"rank \d+ of 16 cannot be started \(Too many open files\): each"):
            run(int, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in kept:
            os.close(file)
    assert run(dist.get_rank, 2) == [0, 1]


def test_a_limit_of_processes_is_named_by_the_server(tmp_path, monkeypatch):
    """The third rank cannot be forked; the two before it end with the job. This server starts without torch._dynamo."""
    (tmp_path / "few_forks.py").write_text(FEW_FORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = fork_client.OPTIMIZERS, "cloudpickle", "distlab.comm.launch.worker", "few_forks"
    monkeypatch.setattr(fork_client, "PRELOAD", modules)
    monkeypatch.setattr(fork_client._Current, "without", ())  # it is as it was after this test
    fork_client.start_without(fork_client.OPTIMIZERS)
    monkeypatch.setattr(fork_client._Current, "server", None)  # the other tests' ranks stay with theirs
    try:
        with pytest.raises(RankError, match=r"rank 2 of 3 could not be started \(Resource temporarily unavailable"):
            run(dist.barrier, 3)
        assert run(has_what_optimizers_load, 1) == [(False, True)]
    finally:
        fork_client.shut_down()


def has_what_optimizers_load():
    """Tell whether it is loaded before and after a first optimizer."""
    before = fork_client.OPTIMIZERS in sys.modules
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()
    return before, fork_client.OPTIMIZERS in sys.modules


FEW_FORKS = """
import errno, itertools, os

fork, turns = os.fork, itertools.count(1)

def few():
    if next(turns) % 3:
        return fork()
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = few
"""


def test_of_a_huge_error_a_page_is_told():
    text = "line\n" * 300_000 + "x" * 1_500_000

    def fail():
        raise ValueError(text)

    with pytest.raises(RankError, match="rank 0 of 1 raised ValueError: (x|line)") as caught:
        run(fail, 1, timeout_s=60)
    said = str(caught.value)
    assert re.search(r"\[\.\.\. 2,99\d,\d\d\d characters \.\.\.\]", said)
    assert "raise ValueError(text)" in said
    assert len(said) < 30_000
    assert max(map(len, said.splitlines())) < 600
