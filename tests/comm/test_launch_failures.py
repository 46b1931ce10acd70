"""How failures are told: the root cause first, soon, and nothing is left."""

import ctypes
import os
import signal
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks, RankTimeout, run
from distlab.comm.launch.pool import Pool
from distlab.comm.launch.worker import stack_path


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
    ("how", "message"),
    [
        ("raise", "rank 2 of 4 raised ValueError: three is odd"),
        ("exit", r"rank 2 of 4 exited with status 3 \(sys.exit\)"),
        ("os._exit", "rank 2 of 4 exited with status 4"),
        ("segfault", r"rank 2 of 4 was killed by SIGSEGV"),
        ("kill", r"rank 2 of 4 was killed by SIGKILL \(out of memory\?"),
    ],
)
def test_the_rank_that_failed_is_blamed_first(how, message):
    with pytest.raises(RankError, match=message) as caught:
        run(fail_on, 4, args=(2, how), timeout_s=30)
    assert caught.value.rank == 2
    assert caught.value.failures[0].rank == 2
    text = str(caught.value)
    if how in ("raise", "segfault"):
        where = "raise ValueError" if how == "raise" else "ctypes.string_at(0)"
        assert where in text, "the source line is shown"
        assert "comm/worker.py" not in text, "the launcher's own frames are not"


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
            run(fail, 4, args=(path,), timeout_s=60)
        record_property("seconds", time.monotonic() - float(path.read_text()))
        assert caught.value.failures[0].rank == 2, str(caught.value)
    record_property("tried", 20)


def test_a_failure_is_reported_while_others_run():
    def fail() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise RuntimeError("one is enough")
        time.sleep(1000)

    with pytest.raises(RankError) as caught:
        run(fail, 2)
    assert not isinstance(caught.value, RankTimeout)
    assert "rank 0 was still running in fail (" in str(caught.value)


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

    with pytest.raises(RankError, match="killed by SIGKILL") as caught:
        run(fill_a_line, 1, echo=False, timeout_s=60)
    assert 500 <= str(caught.value).count("x") <= 20 * 500


def test_a_noisy_failure_is_still_told_when_there_is_no_other():
    def fail() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RankError, match="rank 1 of 2") as caught:
        run(fail, 2, record=False)
    assert "rank 0 had already returned" in str(caught.value)


@contextmanager
def warm(record=True):
    """Two ranks that are up before their time begins to count: 3 s for a call."""
    with Ranks(2, timeout_s=60, record=record) as pool:
        pool.run(int)
        pool.timeout_s = 3.0
        yield pool


@pytest.mark.parametrize("record", [True, False])
def test_a_timeout_says_where_every_rank_stands(record):
    def hang() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # waits in C
        while True:
            pass

    with warm(record) as pool, pytest.raises(RankTimeout, match=r"ranks 0, 1 of 2 did not finish in 3 s") as caught:
        pool.run(hang)
    text = str(caught.value)
    assert "dist.all_reduce(torch.ones(1))" in text
    assert "threading.py" not in text, "the launcher's own threads are not shown"
    assert "distlab/comm" not in text, "nor its frames"
    assert "while True" in text or "pass" in text
    if record:
        assert "rank 0 waits in all_reduce" in text, text


def test_a_stopped_rank_is_named():
    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with warm() as pool, pytest.raises(RankTimeout) as caught:
        pool.run(stop)
    assert "it is stopped by a signal (SIGSTOP" in str(caught.value)


def test_processes_and_grandchildren_are_gone_after_a_failure_while_other_ranks_live_on(ranks):
    others = ranks(2).run(os.getpid)

    def fail() -> None:
        import subprocess

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
    deadline = time.monotonic() + 60
    left = [child, escaped] if sys.platform == "linux" else [child]
    while any(map(psutil.pid_exists, left)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, left))
    assert ranks(2).run(os.getpid) == others


def test_an_interrupt_kills_the_ranks_and_is_raised():
    def sleep() -> None:
        os.kill(os.getppid(), 0)
        time.sleep(1000)

    pool = Ranks(2, timeout_s=900)
    pids = pool.run(os.getpid)
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(sleep)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert pool.pids == ()


STACK = """Thread 0x00007f0 (most recent call first):
  File "/home/me/threads.py", line 3 in wait

Current thread 0x00007f1 (most recent call first):
  File "/home/me/train.py", line 9 in step
  File "<string>", line 1 in <module>
"""


@pytest.mark.parametrize("lines", range(len(STACK.splitlines()) + 1))
def test_a_stack_is_complete_when_its_last_line_is_there(tmp_path, lines):
    written = "".join(STACK.splitlines(keepends=True)[:lines])
    stack_path(tmp_path, 0).parent.mkdir(parents=True, exist_ok=True)
    stack_path(tmp_path, 0).write_text(written)
    pool = SimpleNamespace(folder=tmp_path, ranks=[SimpleNamespace(is_stopped=lambda: False)])
    assert Pool._has_answered(pool, 0) == (written == STACK)
