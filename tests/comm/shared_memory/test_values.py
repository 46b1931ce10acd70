"""Where things stand in the arena; every collective's values: those that gloo has, with equal bits on all ranks."""

import ctypes

import pytest
import torch
import torch.distributed as dist
from collective_programs import bits, moved_wrongly, reduced_differently
from odd_tensors import refused_before, seen_by_modes

from distlab.comm import Ranks
from distlab.comm.shared_memory.arena import MIN_PIECE_BYTES, PAGE, ArenaLayout
from distlab.comm.shared_memory.messages import HEADER_BYTES, PIECES_PER_RING, MessageHeader

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 3, 16, 17, 64])
def test_nothing_overlaps_and_it_is_as_small_as_the_package_says(size):
    layout, ranks = ArenaLayout(size), range(size)
    slot, ring = PAGE + layout.slot_bytes, PAGE + layout.ring_bytes
    spans = [(layout.header(rank), PAGE) for rank in ranks]
    spans += [(layout.slot(rank, parity), slot) for rank in ranks for parity in (0, 1)]
    spans += [(layout.ring(source, destination), ring) for source in ranks for destination in ranks]
    spans.sort()
    for (start, length), (following, _) in zip(spans, spans[1:], strict=False):
        assert start + length <= following
    assert sum(spans[-1]) == layout.num_bytes
    assert layout.slot_bytes <= 4 * MIB
    assert layout.ring_bytes <= 2 * MIB
    assert 2 * size * layout.slot_bytes <= 128 * MIB
    assert layout.num_bytes <= size * (8 * MIB + 3 * PAGE) + size**2 * (2 * MIB + PAGE)
    piece_bytes = max(MIN_PIECE_BYTES, layout.ring_bytes // PIECES_PER_RING)
    assert layout.ring_bytes % piece_bytes == piece_bytes % HEADER_BYTES == 0, "no piece and no header is cut"


def test_a_header_has_the_size_that_is_kept_free_for_it():
    assert ctypes.sizeof(MessageHeader) == HEADER_BYTES


WORLD_SIZES = (1, 2, 3, 4)
BEYOND_A_SLOT = 1_100_001  # of int64, in three pieces: a slot holds 524,288


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_reduction_of_every_type_is_gloos(shared_ranks, world_size):
    assert shared_ranks(world_size).run(reduced_differently) == [[]] * world_size


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_data_goes_where_it_should(shared_ranks, world_size):
    sizes = (0, 1, 13, 5000, *([BEYOND_A_SLOT] if world_size in (2, 3) else []))  # the last goes in pieces
    found = shared_ranks(world_size).run(lambda: [wrong for numel in sizes for wrong in moved_wrongly(numel)])
    assert found == [[]] * world_size


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
    with Ranks(2, timeout_s=200, backend="shared", record=False) as ranks:
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
