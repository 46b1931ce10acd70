"""The watchdog against jobs written row by row, so that every order of events can be had without processes."""

import time
from pathlib import Path

import numpy as np
import pytest

from distlab.comm import read_records
from distlab.comm.record.file import ASIDE, DONE, WAITING, Known, RecordWriter
from distlab.comm.record.matching import channel_of, fingerprint_of, ledger_of
from distlab.comm.watch import watchdog as module
from distlab.comm.watch.watchdog import Watchdog, describe, find_deadlock


class Job:
    """Ranks whose calls the test makes."""

    def __init__(self, folder: Path, world_size: int, slots: int = 64) -> None:
        self.folder, self.world_size = folder, world_size
        self.writers = [RecordWriter(folder, rank, slots) for rank in range(world_size)]

    def issue(self, rank, op, shape=(4,), *, peer=-1, tag=0, group=None, dtype="torch.float32", line=1, aside=False):
        writer = self.writers[rank]
        members = list(range(self.world_size)) if group is None else list(group)
        text, pair = f"g{members} {members}", op in ("send", "recv")
        texts = (writer.text(f"train{rank}.py:{line}"), 0, writer.text(f"{dtype.removeprefix('torch.')}{list(shape)}"))
        meets = channel_of(text, op, rank, peer, tag), fingerprint_of(op, peer, [(shape, dtype)])
        num_bytes, parties = (4 * int(np.prod(shape)), 0), (2 if peer >= 0 else 0) if pair else len(members)
        return writer.begin(Known.of(op, *meets, num_bytes, (*texts, writer.text(text)), peer, parties), aside)

    def wait(self, rank, op, *args, **named):
        number = self.issue(rank, op, *args, **named)
        self.writers[rank].wait(number, WAITING)
        return number

    def done(self, rank, number):
        self.writers[rank].end(number, DONE)

    def whole(self, rank, op, *args, **named):
        self.done(rank, self.wait(rank, op, *args, **named))

    @property
    def records(self):
        return read_records(self.folder)


@pytest.fixture
def job(tmp_path):
    return lambda world_size=2, **named: Job(tmp_path, world_size, **named)


@pytest.fixture
def quick(monkeypatch):
    """A watchdog that takes some hundredths of a second of stillness for a deadlock."""
    monkeypatch.setattr(module, "STABLE_S", 0.04)
    monkeypatch.setattr(module, "MISMATCH_GRACE_S", 0.02)


def verdict(job, finished=(), looks=4):
    """Look several times, as a launcher does."""
    watchdog = Watchdog(job.folder, job.world_size, since_ns=0)
    for _ in range(looks):
        message = watchdog.check(finished)
        if message:
            return message
        time.sleep(0.025)
    return None


def mismatch(job):
    """Look once, without patience."""
    return Watchdog(job.folder, job.world_size, since_ns=0).mismatch()


def deadlock(job, finished=()):
    """Judge what is recorded so far."""
    return find_deadlock(job.records.by_rank, ledger_of(job.records), finished)


def test_describe_says_who_waits_for_whom(job):
    job = job(3)
    for _ in range(6):
        for rank in (0, 1):
            job.whole(rank, "all_reduce", (256,), group=(0, 1))
    job.wait(1, "all_reduce", (256,), group=(0, 1), line=31)
    job.wait(0, "recv", (256,), peer=1, group=(0, 1), line=29)
    first, second, third = describe(job.records, 3)
    assert first.startswith("rank 0 waits in recv from 1 #1 (float32[256], group [0, 1]) at train0.py:29 for 0.")
    assert "rank 1 has not called the send: it is in all_reduce #7" in first
    assert second.startswith("rank 1 waits in all_reduce #7 (float32[256], group [0, 1]) at train1.py:31 for 0.")
    assert "rank 0 has not called it: it is in recv from 1 #1 (float32[256], group [0, 1]) at train0.py:29" in second
    assert third == "rank 2 has made no call to torch.distributed"


def test_describe_of_ranks_that_wait_in_no_call(job):
    job = job()
    job.whole(0, "barrier", ())
    job.issue(1, "all_reduce")
    first, second = describe(job.records, 2)
    assert "rank 0 waits in no call; its last was barrier #1" in first
    assert "rank 1 has called all_reduce #1" in second
    assert "not known to be over" in second


def pairs(job, *ops):
    """Ranks 0 and 1 make calls that agree and are over."""
    for op in ops:
        job.whole(0, op, group=(0, 1))
        job.whole(1, op, group=(0, 1))


def differ(first, second):
    """After a call that agrees, rank 0 waits in one call and rank 1 in a different one."""

    def act(job):
        pairs(job, "all_reduce")
        for rank, call in enumerate((first, second)):
            job.wait(rank, **({"op": "all_reduce", "group": (0, 1)} | call), line=40 + rank)

    return act


SAME = "group [0, 1] do not make the same call, at their call #2"
LINES = ("train0.py:40", "train1.py:41")
ODD = {  # what the ranks do, and what is told of it at once
    "op": (differ({}, {"op": "broadcast", "peer": 0}), (SAME, *LINES)),
    "shape": (differ({}, {"shape": (5,)}), (SAME, *LINES)),
    "dtype": (differ({}, {"dtype": "torch.float64"}), (SAME, *LINES)),
    "root": (differ({"op": "broadcast", "peer": 0}, {"op": "broadcast", "peer": 1}), (SAME, *LINES)),
    "size of a message": (
        differ({"op": "send", "peer": 1}, {"op": "recv", "peer": 0, "shape": (8,)}),
        ("a send and the receive", *LINES),
    ),
    "calls that are over": (
        lambda j: [j.whole(0, "all_reduce"), j.whole(0, "broadcast", peer=0), j.whole(1, "broadcast", peer=0)],
        ("all_reduce #1", "broadcast #1"),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_calls_that_do_not_fit_are_named_with_every_line(job, quick, name):
    job, (act, words) = job(), ODD[name]
    act(job)
    for message in (mismatch(job), verdict(job)):
        assert [word for word in words if word not in message] == []


def test_the_message_waits_a_moment_for_the_other_members(job, quick):
    job = job(3)
    job.wait(0, "all_reduce", (4,))
    job.wait(1, "all_reduce", (5,))
    watchdog = Watchdog(job.folder, 3, since_ns=0)
    assert watchdog.check() is None
    assert "rank 2 has not called it yet" in watchdog.mismatch()
    job.wait(2, "all_reduce", (4,))
    message = watchdog.check()
    assert all(f"rank {rank}: all_reduce #1" in message for rank in range(3))


@pytest.mark.parametrize("call", [("all_reduce", {}), ("send", {"peer": 0})])
def test_deadlock_when_the_other_has_returned(job, quick, call):
    job = job()
    pairs(job, "all_gather")
    job.wait(1, call[0], **call[1])
    assert verdict(job, finished=()) is None  # rank 0 may yet come
    assert "rank 0 has returned without it" in verdict(job, finished=(0,))
    job.writers[0].finish()
    assert "rank 0 has returned without it" in verdict(job), "it says so itself"
    watchdog = Watchdog(job.folder, 3, since_ns=0)
    assert [watchdog.is_finished(rank) for rank in range(3)] == [True, False, False]  # of the last there is no record


def test_a_call_that_cpp_waits_for_counts_when_its_partner_has_returned(job, quick, monkeypatch):
    job = job()
    job.issue(1, "all_reduce")
    assert verdict(job, finished=(0,)) is None
    later = time.monotonic_ns() + 6_000_000_000
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: later)
    assert "rank 0 has returned without it" in deadlock(job, (0,))


HEALTHY = {
    "everyone has called": lambda j: [j.wait(r, "all_reduce", (1 << 20,)) for r in range(3)],
    "one still computes": lambda j: [j.wait(r, "all_reduce") for r in range(2)],
    "the send was buffered": lambda j: (
        [j.whole(0, "send", peer=1), j.wait(1, "recv", peer=0)],
        [j.wait(0, "barrier"), j.wait(2, "barrier")],
    ),
    "an early irecv, waited for late": lambda j: (
        [j.issue(1, "recv", peer=0), j.wait(1, "recv", peer=2), j.wait(0, "send", peer=1)],
        [j.wait(2, "send", peer=1)],
    ),
    "asynchronous calls under way": lambda j: [j.issue(r, "all_reduce") for r in (0, 1)],
    "groups with unequal numbers of calls": lambda j: (
        [j.whole(r, "all_reduce", group=(0, 1)) for r in (0, 1, 0, 1)],
        [j.whole(2, "all_reduce", group=(2,)), j.wait(0, "barrier"), j.wait(1, "barrier"), j.wait(2, "barrier")],
    ),
    "a broadcast whose root has called": lambda j: (
        [j.whole(0, "broadcast", peer=0), j.wait(0, "recv", peer=2), j.wait(2, "broadcast", peer=0)],
        [j.wait(1, "barrier", group=(0, 1))],
    ),
    "a receive from anyone that is served": lambda j: (
        [j.wait(0, "recv"), j.issue(1, "send", peer=0), j.wait(1, "barrier"), j.wait(2, "barrier")]
    ),
    "tags in a different order, and other shapes of one count": lambda j: (
        [j.issue(0, "send", (2, 3), peer=1, tag=1), j.issue(0, "send", (9,), peer=1, tag=2)],
        [j.issue(1, "recv", (9,), peer=0, tag=2), j.issue(1, "recv", (6,), peer=0, tag=1)],
        [j.issue(0, "all_to_all", (3,)), j.issue(1, "all_to_all", (7,))],
    ),
    "a receive from anyone: which send it takes is not known": lambda j: (
        [j.issue(2, "recv", (1,)), j.issue(0, "send", (1,), peer=2), j.issue(1, "send", (2,), peer=2)],
        [j.issue(2, "recv", (2,), peer=0)],
    ),
    "a wait in a different thread": lambda j: (
        [j.writers[0].wait(j.issue(0, "recv", peer=1), ASIDE), j.wait(1, "recv", peer=0), j.wait(2, "recv", peer=0)]
    ),
    "rows that were overwritten": lambda j: (
        [j.whole(0, "all_reduce"), [j.whole(0, "all_gather", group=(0,)) for _ in range(70)], j.wait(0, "barrier")],
        [j.wait(1, "all_reduce"), j.wait(2, "all_reduce")],
    ),
    "a helper thread makes calls": lambda j: (
        [j.issue(0, "barrier", group=(0,), aside=True)] + [j.wait(r, "recv", peer=(r + 1) % 3) for r in range(3)]
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_slow_but_healthy_jobs_are_left_alone(job, quick, name):
    job = job(3)
    HEALTHY[name](job)
    assert mismatch(job) is None
    assert verdict(job, looks=6) is None


def test_whatever_moves_begins_the_two_seconds_anew(job, quick):
    job = job()
    job.wait(0, "recv", peer=1)
    watchdog, number = Watchdog(job.folder, 2, since_ns=0), job.wait(1, "recv", peer=0)
    for _ in range(4):
        assert watchdog.check() is None
        time.sleep(0.025)
        job.done(1, number)
        number = job.wait(1, "recv", peer=0, tag=number, line=6)
    message = verdict(job)
    assert "deadlock" in message
    assert "train1.py:6" in message
    assert "rank 0 has not called the send" in message


def test_ranks_in_different_jobs_never_meet(job, quick):
    job = job()
    for rank in (0, 1):
        job.whole(rank, "all_reduce", (3,))
    job.writers[0].reset()
    job.wait(0, "all_reduce", (7,))
    assert ledger_of(job.records).disagreement() is None
    assert "rank 1 has not called it" in describe(job.records, 2)[0]
    job.writers[1].reset()
    job.whole(1, "all_reduce", (8,))
    assert "float32[7]" in verdict(job)


def test_since_keeps_records_of_an_earlier_job_out(job, quick):
    job = job()
    job.whole(1, "all_reduce", (3,))
    watchdog = Watchdog(job.folder, 2, since_ns=time.monotonic_ns())
    job.writers[0].reset()
    job.whole(0, "all_reduce", (4,))
    assert watchdog.mismatch() is None
    job.writers[1].reset()
    job.whole(1, "all_reduce", (5,))
    assert "float32[5]" in watchdog.mismatch()


def test_ranks_seen_before_they_took_up_the_job_are_followed_into_it(tmp_path):
    since = time.monotonic_ns()
    job = Job(tmp_path, 3)  # the ranks have joined: their records begin, and are younger than the job
    watchdog = Watchdog(job.folder, 3, since_ns=since)
    assert watchdog.check() is None
    for rank, writer in enumerate(job.writers[:2]):  # the third is late
        writer.reset()
        job.wait(rank, "broadcast", peer=rank)
    assert "do not make the same call" in (watchdog.mismatch() or "")
