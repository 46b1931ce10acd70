"""The throttled link: nothing is over before its bytes are through, calls queue, computing meanwhile is free."""

import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import recorded, throttled
from distlab.comm.nodes import wire
from distlab.comm.record import throttle
from distlab.comm.record.throttle import link_s

RATE, LATENCY = 1e6, 1e-3
NUM_BYTES = 40_000


def test_a_calls_time_is_that_of_the_ring():
    assert link_s("all_reduce", 8_000, 4, bytes_per_s=1e6) == pytest.approx(6 / 4 * 8e-3)
    assert link_s("all_reduce", 0, 4, bytes_per_s=1e6, latency_s=1e-3) == pytest.approx(6e-3)
    assert link_s("all_gather", 8_000, 4, bytes_per_s=1e6, latency_s=1e-3) == pytest.approx(3 * 9e-3)
    assert link_s("broadcast", 8_000, 4, bytes_per_s=1e6, latency_s=1e-3) == pytest.approx(2e-3 + 8e-3)
    assert link_s("all_reduce", 8_000, 1, bytes_per_s=1e6, latency_s=1.0) == 0.0


def seconds_of(call):
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_call_is_over_before_its_bytes_are_through(ranks, world_size):
    def body():
        tensor = torch.zeros(NUM_BYTES // 4)
        out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        found = {}
        with throttled(RATE, LATENCY):
            found["all_reduce"] = seconds_of(lambda: dist.all_reduce(tensor))
            found["all_gather"] = seconds_of(lambda: dist.all_gather(out, tensor))
            works = []
            found["queue"] = seconds_of(
                lambda: (
                    works.extend(dist.all_reduce(tensor, async_op=True) for _ in range(3)),
                    [work.wait() for work in works],
                )
            )
        return found

    how = {"bytes_per_s": RATE, "latency_s": LATENCY}
    one = {op: link_s(op, NUM_BYTES, world_size, **how) for op in ("all_reduce", "all_gather")}
    for found in ranks(world_size).run(body):
        assert found["all_reduce"] >= one["all_reduce"]
        assert found["all_gather"] >= one["all_gather"]
        assert found["queue"] >= 3 * one["all_reduce"]


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now_s, self.sleeps = 1000.0, []

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now_s += seconds


def test_time_that_passes_meanwhile_is_not_paid_twice(ranks):
    def body():
        clock = Clock()
        with pytest.MonkeyPatch.context() as patch:
            for module in (throttle, wire):
                patch.setattr(module, "time", clock)
            tensor = torch.zeros(NUM_BYTES // 4)
            with throttled(RATE):
                first, second = (dist.all_reduce(tensor, async_op=True) for _ in range(2))
                over = [first.is_completed()]
                clock.now_s += 0.03  # what a rank computes meanwhile
                first.wait()
                over += [first.is_completed(), second.is_completed()]
                clock.now_s += 0.06
                second.wait()
            return over, clock.sleeps

    for over, sleeps in ranks(2).run(body):
        assert over == [False, True, False]
        assert sleeps == pytest.approx([0.01])


def test_a_recorder_sees_the_paced_times_and_all_is_put_back(ranks):
    def body():
        before = dist.Work.is_completed, dist.Work.wait
        tensor = torch.zeros(NUM_BYTES // 4)
        with recorded() as seen, throttled(RATE):
            work = dist.all_reduce(tensor, async_op=True)
            dist.all_reduce(tensor)
            work.wait()
        calls = seen.records.calls(dist.get_rank())
        spans = [(call.end_ns - calls[0].start_ns) / 1e9 for call in calls]
        return spans, before == (dist.Work.is_completed, dist.Work.wait)

    for spans, same in ranks(2).run(body):
        one = link_s("all_reduce", NUM_BYTES, 2, bytes_per_s=RATE)
        assert spans[0] >= one
        assert spans[1] >= 2 * one
        assert same


@pytest.mark.on_ranks(2)
def test_sends_and_links_that_cannot_be_are_refused_and_the_link_is_taken_away():
    before = dist.Work.is_completed
    with pytest.raises(ValueError, match="slows down collectives only"), throttled(RATE):
        dist.send(torch.zeros(1), 1 - dist.get_rank())
    assert dist.Work.is_completed is before
    for numbers, text in (((0.0,), "bytes_per_s is 0"), ((1e6, -1.0), "latency_s is -1")):
        with pytest.raises(ValueError, match=text), throttled(*numbers):
            pass
    dist.all_reduce(torch.zeros(1))
