"""Endings that nobody plans: full disks, limits, memory, signals, errors that cannot be read."""

import os
import re
import resource
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks, run
from distlab.comm.launch.fork_client import fork_server
from distlab.comm.launch.worker import failure_of


def test_ranks_without_room_for_their_records_are_refused():
    server = psutil.Process(fork_server().pid)  # what it forks has its limits
    before = server.rlimit(psutil.RLIMIT_FSIZE)
    server.rlimit(psutil.RLIMIT_FSIZE, (1 << 20, before[1]))
    says = (
        r"could not join the group in /.* \(make room there, or set TMPDIR to a different folder\): OSError: .* large"
    )
    try:
        with pytest.raises(RankError, match=says):
            run(int, 2)
    finally:
        server.rlimit(psutil.RLIMIT_FSIZE, before)


class Bomb:
    def __reduce__(self):
        return eval, ("1 / 0",)


def on_rank_1(make):
    return make() if dist.get_rank() == 1 else None


def test_a_result_that_cannot_be_sent_or_read_names_its_rank():
    with Ranks(2) as pool:
        with pytest.raises(RankError, match=r"rank 1 of 2 returned what cannot be read: ZeroDivision.*; return plain"):
            pool.run(on_rank_1, Bomb)
        assert pool.run(dist.get_rank) == [0, 1], "the ranks go on"
        with pytest.raises(RankError, match=r"rank 1 of 2 returned a lock that cannot be sent back") as caught:
            pool.run(on_rank_1, threading.Lock)
        assert caught.value.rank == 1


def test_a_limit_of_open_files_is_named():
    fork_server()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(120 - psutil.Process().num_fds())]
    used = psutil.Process().num_fds()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        with pytest.raises(RuntimeError, match=r"rank \d+ of 16 cannot be started \(Too many open files\): each"):
            run(int, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in kept:
            os.close(file)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SystemExit(3), "exited with status 3 (sys.exit) before it returned"),
        (KeyboardInterrupt(), "was interrupted (SIGINT)"),
        (ValueError("half \ud800"), "raised ValueError: half \\ud800"),
    ],
)
def test_an_error_is_told_in_one_line_that_can_be_printed(error, says):
    told = failure_of(error, 0)
    assert told.summary == says
    assert not told.is_noise
    (told.summary + told.traceback).encode()  # it can be printed


def test_what_a_different_rank_saw_of_a_failure_is_noise_also_as_its_cause():
    error = ValueError("my own words")
    error.__cause__ = RuntimeError("Connection reset by peer")
    assert failure_of(error, 0).is_noise
    assert not failure_of(OSError("Connection reset by peer"), 0).is_noise


def test_of_a_huge_error_a_page_is_told():
    told = failure_of(ValueError("line\n" * 300_000 + "x" * 1_500_000), 0)
    for text in (told.summary, told.traceback):
        assert re.search(r"\[\.\.\. 2,99\d,\d\d\d characters \.\.\.\]|\[\.\.\. 2,98\d,\d\d\d characters", text)
        assert len(text) < 21_000
        assert max(map(len, text.splitlines())) < 600


def leave_the_group():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        return
    dist.all_reduce(torch.ones(4))


def write_too_much():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return bytes(1_000_000 if dist.get_rank() == 0 else 1)


def no_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    dist.barrier()
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
        torch.ones(256 << 20)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (leave_the_group, r"rank 0 of 2 destroyed a group that the other ranks still used \(group .*rank 1"),
        (write_too_much, r"could not write its result \(1000\d\d\d bytes\); make room there, .*File too large"),
        (no_memory, r"rank 0 of 2 raised RuntimeError: .*(alloc|memory)"),
    ],
)
def test_the_cause_is_named(fn, says):
    with pytest.raises(RankError, match=f"(?s){says}") as caught:
        run(fn, 2, timeout_s=60)
    assert caught.value.rank == 0, str(caught.value)
