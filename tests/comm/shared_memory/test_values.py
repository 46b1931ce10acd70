"""Every collective: the values that gloo has, in all types, shapes, sizes and places; equal bits on all ranks."""

import pytest
import torch
import torch.distributed as dist
from collective_programs import bits, moved_wrongly, reduced_differently
from odd_tensors import refused_before, seen_by_modes

from distlab.comm import Ranks

WORLD_SIZES = (1, 2, 3, 4)
BEYOND_A_SLOT = 1_100_001  # of int64, in three pieces: a slot holds 524,288


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_reduction_of_every_type_is_gloos(shared_ranks, world_size):
    assert shared_ranks(world_size).run(reduced_differently) == [[]] * world_size


def all_moved_wrongly(sizes):
    return [wrong for numel in sizes for wrong in moved_wrongly(numel)]


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_data_goes_where_it_should(shared_ranks, world_size):
    sizes = (0, 1, 13, 5000, *([BEYOND_A_SLOT] if world_size in (2, 3) else []))  # the last goes in pieces
    assert shared_ranks(world_size).run(all_moved_wrongly, sizes) == [[]] * world_size


def write_at_once():
    """Write what a call was given and what it returned as soon as it is over, while the others may still read."""
    me, n, wrong = dist.get_rank(), dist.get_world_size(), 0
    for turn in range(40):
        numel = (3, 5_000, 300_000)[turn % 3]
        x, parts = torch.full((numel,), float(me + turn)), [torch.empty(numel) for _ in range(n)]
        dist.all_gather(parts, x)
        x.fill_(-1.0)
        wrong += sum(not bool((part == rank + turn).all()) for rank, part in enumerate(parts))
        for part in parts:
            part.fill_(-2.0)
        y = torch.full((numel,), float(me + turn))
        dist.all_reduce(y)
        wrong += not bool((y == sum(rank + turn for rank in range(n))).all())
        y.fill_(-3.0)
        z = torch.full((numel,), float(turn if me == 0 else -4))
        dist.broadcast(z, 0)
        wrong += not bool((z == turn).all())
        z.fill_(-5.0)
    return wrong


def test_refusals_modes_and_memory_that_is_written_at_once():
    with Ranks(2, timeout_s=60, backend="shared", record=False) as ranks:
        assert ranks.run(write_at_once) == [0, 0]
        assert ranks.run(refused_before) == [([], [2.0, 2.0])] * 2
        for (*calls, message), sums in ranks.run(seen_by_modes):  # what they would see on gloo
            assert calls == ["c10d.allreduce_.default"] * 2
            assert message in ("c10d.send.default", "c10d.recv_.default")
            assert sums == [40_000.0, 12.0]


def test_bits_repeat_and_are_equal_on_all_ranks(shared_ranks):
    of_ranks = shared_ranks(4).run(bits, 3)
    for first, again in zip(of_ranks[0][::2], of_ranks[0][1::2], strict=True):
        assert torch.equal(first, again)
    for other in of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_ranks[0], other, strict=True))
