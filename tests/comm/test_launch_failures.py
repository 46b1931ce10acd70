"""How failures are told: the root cause first, soon, and nothing is left; also endings that nobody plans."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch
import torch.distributed as dist
from waiting import are_gone, wait_for

from distlab.comm import RankError, Ranks, RankTimeout, run
from distlab.comm.launch.fork_client import fork_server
from distlab.comm.launch.worker import failure_of


def fail_on(rank: int, how: str) -> None:
    """Fail on one rank while the others wait for it in a collective."""
    dist.barrier()
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(4))
        return
    if how == "raise":
        raise ValueError("three is odd")
    if how == "exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "message", "line"),
    [
        ("raise", "rank 2 of 4 raised ValueError: three is odd", "raise ValueError"),
        ("segfault", r"rank 2 of 4 was killed by SIGSEGV", "ctypes.string_at(0)"),
    ],
)
def test_the_rank_that_failed_is_blamed_first(how, message, line):
    with pytest.raises(RankError, match=message) as caught:
        run(fail_on, 4, args=(2, how), timeout_s=200)
    assert caught.value.rank == caught.value.failures[0].rank == 2
    assert line in str(caught.value), "the source line is shown"
    assert "comm/worker.py" not in str(caught.value), "the launcher's own frames are not"


@pytest.mark.soak
@pytest.mark.parametrize("how", ["raise", "exit", "os._exit", "segfault", "kill"])
def test_the_first_failure_is_told_first_and_soon(how, tmp_path, record_property):
    def fail(path) -> None:
        if dist.get_rank() == 2:
            path.write_text(str(time.monotonic()))
        fail_on(2, how)

    for number in range(20):
        path = tmp_path / str(number)
        with pytest.raises(RankError) as caught:
            run(fail, 4, args=(path,), timeout_s=200)
        record_property("seconds", time.monotonic() - float(path.read_text()))
        assert caught.value.failures[0].rank == 2, str(caught.value)
    record_property("tried", 20)


def test_a_failure_is_reported_while_others_run_and_a_noisy_one_when_there_is_no_other():
    def fail(error: Exception, seconds: int) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise error
        time.sleep(seconds)

    for error, seconds, words in (
        (RuntimeError("one is enough"), 1000, "rank 0 was still running in fail ("),
        (RuntimeError("Connection reset by peer"), 0, "rank 0 had already returned"),
    ):
        with pytest.raises(RankError, match="rank 1 of 2") as caught:
            run(fail, 2, args=(error, seconds), record=False)
        assert not isinstance(caught.value, RankTimeout)
        assert words in str(caught.value)


def test_peers_that_saw_the_connection_close_are_not_blamed():
    def leave_late() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            dist.destroy_process_group()  # the others see the connection close, before the cause is known
            time.sleep(0.3)
            raise OSError("disk full")
        dist.all_reduce(torch.ones(4))

    with pytest.raises(RankError, match="rank 0 of 3 raised OSError: disk full") as caught:
        run(leave_late, 3)
    assert caught.value.rank == 0
    assert "(a consequence)" in str(caught.value)


def test_of_an_endless_last_line_an_error_repeats_a_little():
    def fill_a_line():
        sys.stdout.write("x" * 300_000)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match=r"killed by SIGKILL \(out of memory\?") as caught:
        run(fill_a_line, 1, echo=False, timeout_s=200)
    assert 500 <= str(caught.value).count("x") <= 20 * 500


def test_an_error_in_a_lambda_has_its_line():
    with pytest.raises(RankError) as failed:
        run(lambda: [[].pop() for _ in range(1)], 1)
    assert f'File "{__file__}", line {failed.traceback[0].lineno + 1}, in <lambda>' in str(failed.value)


@contextmanager
def warm(seconds):
    """Two ranks that are up before their time for a call begins to count."""
    with Ranks(2, timeout_s=200) as pool:
        pool.run(int)
        pool.timeout_s = seconds
        yield pool


def test_a_timeout_says_where_every_rank_stands():
    def hang() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # waits in C
        while True:
            pass

    with warm(3.0) as pool, pytest.raises(RankTimeout, match=r"ranks 0, 1 of 2 did not finish in 3 s") as caught:
        pool.run(hang)
    text = str(caught.value)
    assert "dist.all_reduce(torch.ones(1))" in text
    assert "threading.py" not in text, "the launcher's own threads are not shown"
    assert "distlab/comm" not in text, "nor its frames"
    assert "while True" in text or "pass" in text
    assert "rank 0 waits in all_reduce" in text, text


def test_processes_and_grandchildren_are_gone_after_a_failure_while_other_ranks_live_on(ranks):
    others = ranks(2).run(os.getpid)

    def fail() -> None:
        child = subprocess.Popen(["sleep", "100"])
        escaped = subprocess.Popen(["sleep", "100"], start_new_session=True)
        if dist.get_rank() == 0:
            raise RuntimeError(f"{os.getpid()} {child.pid} {escaped.pid}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)

    with pytest.raises(RankError) as caught:
        run(fail, 2)
    rank, child, escaped = (int(word) for word in caught.value.failures[0].summary.split()[-3:])
    assert not psutil.pid_exists(rank)
    wait_for(lambda: are_gone([child, escaped] if sys.platform == "linux" else [child]))
    assert ranks(2).run(os.getpid) == others


def test_ranks_without_room_for_their_records_are_refused():
    server = psutil.Process(fork_server().pid)  # what it forks has its limits
    before = server.rlimit(psutil.RLIMIT_FSIZE)
    server.rlimit(psutil.RLIMIT_FSIZE, (1 << 20, before[1]))
    says = r"could not join the group in /.* \(make room there, or set TMPDIR to a different folder\): "
    says += "OSError: .* large"
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


def test_an_error_is_told_in_lines_that_can_be_printed_and_noise_is_known_also_as_its_cause():
    mine, closed = ValueError("my own words"), "Connection reset by peer"
    mine.__cause__ = RuntimeError(closed)
    for error, says, is_noise in (
        (SystemExit(3), "exited with status 3 (sys.exit) before it returned", False),
        (KeyboardInterrupt(), "was interrupted (SIGINT)", False),
        (ValueError("half \ud800"), "raised ValueError: half \\ud800", False),
        (OSError(closed), f"raised OSError: {closed}", False),
        (mine, "raised ValueError: my own words", True),
    ):
        told = failure_of(error, 0)
        assert (told.summary, told.is_noise) == (says, is_noise)
        (told.summary + told.traceback).encode()  # it can be printed
    told = failure_of(ValueError("line\n" * 300_000 + "x" * 1_500_000), 0)
    for text in (told.summary, told.traceback):  # a page
        assert re.search(r"\[\.\.\. 2,9[89]\d,\d\d\d characters", text)
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
        run(leave_the_group, 2, timeout_s=200)
    assert caught.value.rank == 0, str(caught.value)
