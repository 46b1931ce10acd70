"""Where things stand in the arena: nothing overlaps, and it is as small as it says."""

import ctypes

import pytest

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
