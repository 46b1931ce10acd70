"""Messages between two ranks and small exchanges: order, ranks, refusals, costs as docstrings say, and clocks."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from equal import heard

from distlab.comm import clock_offsets_ns
from distlab.comm.clocks import measure_offset_ns
from distlab.comm.p2p import Receive, Send, exchange, require_same, send_receive, start
from distlab.measure import on_first_rank


def measure():
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(5)
    _, ring = heard(lambda: send_receive(torch.full((5,), float(rank)), (rank + 1) % n, received, (rank - 1) % n))
    _, same = heard(lambda: require_same(torch.zeros(3, 4)))
    _, once = heard(lambda: on_first_rank(lambda: "made"))
    return received[0].item(), ring, same, once


def test_messages_comparisons_and_results_of_one_rank(ranks):
    for rank, (received, ring, same, once) in enumerate(ranks(3).run(measure)):
        assert received == (rank - 1) % 3
        assert ring == [("send", 20)]
        assert same == [("all_gather", 40)]
        assert [op for op, _ in once] == ["broadcast", "broadcast"]
        assert once[0] == ("broadcast", 8)  # the length of what follows


def offset_and_trips(late_ns):
    """What rank 1's clock, made late on purpose, is off by, and the round trips that measured it."""
    from distlab.comm import clocks

    trips, real, clock = [], clocks.exchange, time.monotonic_ns

    def noting(*messages, **options):
        begin = time.monotonic_ns()
        real(*messages, **options)
        trips.append(time.monotonic_ns() - begin)

    clocks.exchange = noting
    clocks.monotonic_ns = (lambda: clock() - late_ns) if dist.get_rank() == 1 else clock
    try:
        return measure_offset_ns(1), trips, clocks.ROUNDS
    finally:
        clocks.exchange, clocks.monotonic_ns = real, clock


def test_a_late_clock_is_measured_to_a_round_trip(ranks):
    assert ranks(3).run(clock_offsets_ns) == [(0, 0, 0)] * 3, "those of one machine are one"
    late_ns = 3600_000_000_000
    (offset, trips, rounds), (other, *_) = ranks(2).run(offset_and_trips, late_ns)
    assert (rounds, offset) == (20, other)
    there, back = trips[: 2 * rounds : 2], trips[1 : 2 * rounds : 2]
    assert abs(offset - late_ns) <= max(map(sum, zip(there, back, strict=True)))


@pytest.mark.on_ranks(3)
def test_messages_of_every_dtype_arrive_in_the_order_of_their_starts():
    rank, n = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % n, (rank + 1) % n
    for dtype in (torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64):
        for shape in ((), (0,), (3, 5), (70_000,)):
            received = torch.zeros(shape, dtype=dtype)
            send_receive(torch.full(shape, rank + 1).to(dtype), after, received, before)
            assert torch.equal(received, torch.full(shape, before + 1).to(dtype))
    first, second = torch.zeros(2), torch.zeros(2)
    pending = start(Receive(first, before), Receive(second, before), Send(torch.ones(2), after))
    rest = start(Send(torch.full((2,), 2.0), after))
    pending.wait_received()
    rest.wait()
    pending.wait()
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])
    start().wait()


@pytest.mark.on_ranks(3)
def test_ranks_are_those_of_the_group_and_who_has_a_different_shape_is_named():
    group, rank, received = dist.new_group([1, 2]), dist.get_rank(), torch.zeros(1)
    if rank:
        peer = 1 - dist.get_rank(group)
        send_receive(torch.tensor([float(rank)]), peer, received, peer, group)
        assert received.item() == 3 - rank
    require_same(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"gradient.*ranks 0, 1 .*; rank 2 .*\[2, 4\]"):
        require_same(torch.zeros(2, 3 + (dist.get_rank() == 2)), what="gradient")


@pytest.mark.on_ranks(2)
def test_bad_messages_are_refused_before_they_leave():
    rank, n = dist.get_rank(), dist.get_world_size()
    peer = 1 - rank
    leaf = torch.nn.Parameter(torch.zeros(3))
    same = torch.zeros(3)
    calls = {
        "itself": lambda: exchange(Send(torch.zeros(3), rank)),
        "ranks 0 to 1": lambda: exchange(Receive(torch.zeros(3), n)),
        "send to rank -1": lambda: exchange(Send(torch.zeros(3), -1)),
        "call .contiguous()": lambda: exchange(Send(torch.zeros(4, 4)[:, 1], peer)),
        "sparse": lambda: exchange(Send(torch.eye(3).to_sparse(), peer)),
        "requires grad": lambda: exchange(Receive(leaf, peer)),
        "same memory": lambda: send_receive(same, peer, same, peer),
        "receives on meta": lambda: send_receive(same, peer, torch.zeros(3, device="meta"), peer),
        "expected a tensor, got float": lambda: exchange(Send(1.0, peer)),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=f"^rank {rank}: .*{re.escape(words)}"):
            call()
