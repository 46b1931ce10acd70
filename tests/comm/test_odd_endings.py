"""Endings that nobody plans: full disks, limits, memory, signals, errors that cannot be read."""

import re
import threading

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


def test_who_left_the_group_is_named():
    says = r"(?s)rank 0 of 2 destroyed a group that the other ranks still used \(group .*rank 1"
    with pytest.raises(RankError, match=says) as caught:
        run(leave_the_group, 2, timeout_s=60)
    assert caught.value.rank == 0, str(caught.value)
