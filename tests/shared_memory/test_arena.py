"""Where things stand in the arena: nothing overlaps, and it is as small as it says."""

import ctypes

import pytest

from distlab.shared_memory.arena import (
    LANE_HEAD_BYTES,
    NUM_PIECES,
    ArenaLayout,
)
from distlab.shared_memory.messages.lanes import LETTER_BYTES, LETTERS, NUM_LETTERS, Letter

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16, 64])
def test_nothing_overlaps(size):
    layout, ranks = ArenaLayout(size), range(size)
    spans = [(layout.header(rank), 4096) for rank in ranks] + [(layout.roll, 64)]
    spans += [(layout.marks(parity), 8 * size) for parity in (0, 1)]
    spans += [
        (layout.slot(rank, parity), layout.data(rank, parity) + layout.slot_bytes - layout.slot(rank, parity))
        for rank in ranks
        for parity in (0, 1)
    ]
    lane = LANE_HEAD_BYTES + NUM_PIECES * layout.piece_bytes
    spans += [(layout.lane(source, destination), lane) for source in ranks for destination in ranks]
    spans.sort()
    for (start, length), (following, _) in zip(spans, spans[1:], strict=False):
        assert start + length <= following
    assert sum(spans[-1]) == layout.num_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16, 64])
def test_it_is_as_small_as_the_package_says(size):
    layout = ArenaLayout(size)
    assert NUM_PIECES * layout.piece_bytes <= 2 * MIB
    assert layout.slot_bytes <= 4 * MIB
    assert 2 * size * layout.slot_bytes <= 128 * MIB
    assert layout.num_bytes <= size * (8 * MIB + 3 * 4096) + 4096 + size**2 * (2 * MIB + LANE_HEAD_BYTES)


def test_letters_stand_before_the_pieces():
    assert LETTERS + NUM_LETTERS * LETTER_BYTES <= LANE_HEAD_BYTES
    assert ctypes.sizeof(Letter) == LETTER_BYTES
