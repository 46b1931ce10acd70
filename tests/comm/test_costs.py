"""Small exchanges cost what their docstrings say, and a clock is measured as well as its round trips allow."""

import time

import torch
import torch.distributed as dist

from distlab.comm import recorded
from distlab.comm.clocks import measure_offset_ns
from distlab.comm.p2p import require_same, send_receive
from distlab.measure import on_first_rank


def calls_of(function):
    with recorded() as seen:
        value = function()
    return value, [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]


def measure():
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(5)
    _, ring = calls_of(lambda: send_receive(torch.full((5,), float(rank)), (rank + 1) % n, received, (rank - 1) % n))
    _, same = calls_of(lambda: require_same(torch.zeros(3, 4)))
    _, once = calls_of(lambda: on_first_rank(lambda: "made"))
    return received[0].item(), ring, same, once


def test_messages_comparisons_and_results_of_one_rank(ranks):
    for rank, (received, ring, same, once) in enumerate(ranks(3).run(measure)):
        assert received == (rank - 1) % 3
        assert sorted(ring) == [("recv", 20), ("send", 20)]
        assert same == [("all_gather", 40)]
        assert [op for op, _ in once] == ["broadcast", "broadcast"]
        assert once[0] == ("broadcast", 8)  # the length of what follows


def offset_and_trips():
    """What a clock is off by on one machine, which is nothing, and the best round trip of those that measured it."""
    from distlab.comm import clocks

    trips, real = [], clocks.exchange

    def noting(*messages, **options):
        begin = time.monotonic_ns()
        real(*messages, **options)
        trips.append(time.monotonic_ns() - begin)

    clocks.exchange = noting
    try:
        return measure_offset_ns(1), trips, clocks.ROUNDS
    finally:
        clocks.exchange = real


def test_a_clock_is_off_by_no_more_than_a_round_trip(ranks):
    (offset, trips, rounds), (other, *_) = ranks(2).run(offset_and_trips)
    assert rounds == 20
    assert offset == other
    there, back = trips[: 2 * rounds : 2], trips[1 : 2 * rounds : 2]
    assert abs(offset) <= max(map(sum, zip(there, back, strict=True)))  # both share one clock: nothing is the truth
