"""Ring attention over a causal mask: which rank computes how many pairs at which hop, and a picture of it.

A sequence is cut into two chunks per rank, in zig-zag order: one from the front and the one as far from the back. The
mask is drawn in blocks of chunks: a block's colour is the rank that computes it, its number the hop at which the keys
arrive there. Next to it stand the pairs that each rank computes at each hop: a ring goes on when its busiest rank is
done.

Symbols: n ranks, 2n chunks, 1,024 n positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.units import percent
from simulator.viz.drawing.pen import Pen, Picture, sheet
from simulator.viz.drawing.plot import width_in
from simulator.viz.drawing.theme import FAINT, IDLE, INK, RANK_COLOURS, SMALL_PT, TEXT_PT, WIDTH_IN, text_colour

MAX_RANKS = 8
Ints = NDArray[np.int64]


class RingWork(NamedTuple):
    """What a causal ring attention computes over `length` positions.

    `owner` [2n] is the rank that holds each chunk, `hop` [2n, 2n] the one at which the rank of a query chunk has the
    keys of a key chunk: 0 is its own. `pairs` [2n, 2n] are visible in each block of query and key chunk, and `work` [n,
    n] is what each rank computes at each hop.
    """

    length: int
    owner: Ints
    hop: Ints
    pairs: Ints
    work: Ints


def ring_work(num_ranks: int) -> RingWork:
    """Count the pairs of query and key that each rank computes at each hop, under a causal mask.

    Keys go to the next rank at each hop: at hop h rank r has those that began h ranks before it.

    Raises:
        ValueError: there are not 1 to 8 ranks.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"{num_ranks} ranks; pass 1 to {MAX_RANKS}: more cannot be told apart in a picture")
    chunks = 2 * num_ranks
    length = 1024 * num_ranks
    place = np.arange(chunks)
    owner = np.minimum(place, chunks - 1 - place)
    hop = (owner[:, None] - owner[None, :]) % num_ranks
    size = length // chunks
    half = np.eye(chunks, dtype=np.int64) * (size * (size + 1) // 2)
    pairs = np.tril(np.full((chunks, chunks), size * size), -1) + half
    work = np.zeros((num_ranks, num_ranks), np.int64)
    np.add.at(work, (np.broadcast_to(owner[:, None], hop.shape), hop), pairs)
    return RingWork(length, owner, hop, pairs, work)


TOP_IN, STRIP_IN, MASK_IN, FOOT_IN, LEFT_IN = 1.05, 0.85, 4.2, 0.75, 0.85
TABLE_IN = LEFT_IN + MASK_IN + 1.35


def draw_context(num_ranks: int) -> Picture:
    """Draw who holds which positions, the blocks of the causal mask, and the work of every rank at every hop.

    Raises:
        ValueError: there are not 1 to 8 ranks.
    """
    ring = ring_work(num_ranks)
    height = TOP_IN + STRIP_IN + MASK_IN + FOOT_IN
    _, pen = sheet(height)
    wide, top = MASK_IN / len(ring.owner), height - TOP_IN
    pen.words((LEFT_IN - 0.1, top - 0.24), "held by", colour=FAINT, side="right")
    for chunk, rank in enumerate(ring.owner.tolist()):
        corner = (LEFT_IN + chunk * wide, top - 0.42)
        pen.block(corner, wide, 0.36, RANK_COLOURS[rank], f"r{rank}", size=min(TEXT_PT, 36 * wide))
    pen.words((LEFT_IN + MASK_IN / 2, top - 0.6), "keys, from the first position to the last", colour=FAINT)
    _draw_mask(pen, ring)
    _draw_work(pen, ring)
    _draw_merged(pen, ring)
    title = "Zig-zag order: every rank computes the same at every hop, and none waits"
    if num_ranks == 1:
        title = "Zig-zag order, one rank: it holds and computes everything"
    note = f"{ring.length:,} positions in {len(ring.owner)} chunks, 2 for each of {len(ring.work)} ranks. A block's "
    note += "colour: the rank that computes it; its number: the hop at which the keys arrive."
    lines, size = [], ring.length // len(ring.owner)
    for rank in range(num_ranks):
        mine = np.flatnonzero(ring.owner == rank).tolist()
        held = " and ".join(f"{chunk * size}-{(chunk + 1) * size - 1}" for chunk in mine)
        work = ", ".join(percent(pairs / int(ring.pairs.sum()), 1) for pairs in ring.work[rank].tolist())
        lines.append(f"Rank {rank} holds positions {held}; of all pairs it computes, hop by hop: {work}.")
    return pen.finish(title, note, *lines)


def _draw_mask(pen: Pen, ring: RingWork) -> None:
    """Draw the blocks of the mask; of those on the diagonal only the lower half is visible."""
    count = len(ring.owner)
    cell = MASK_IN / count
    top = FOOT_IN + MASK_IN
    for query in range(count):
        y = top - (query + 1) * cell
        rank = int(ring.owner[query])
        pen.words((LEFT_IN - 0.1, y + cell / 2), f"r{rank}", size=min(TEXT_PT, 36 * cell), side="right")
        for key in range(count):
            corner = (LEFT_IN + key * cell, y)
            at = int(ring.hop[query, key])
            if not ring.pairs[query, key]:
                pen.box(corner, cell, cell, IDLE)
                continue
            fill = RANK_COLOURS[rank]
            pen.block(corner, cell, cell, fill, str(at) if query != key else "", size=min(TEXT_PT, 36 * cell))
            if query == key:
                pen.box((corner[0] + cell / 2, corner[1] + cell / 2), cell / 2, cell / 2, IDLE, line=0)
                spot = (corner[0] + 0.3 * cell, corner[1] + 0.3 * cell)
                pen.words(spot, str(at), size=min(TEXT_PT, 28 * cell), colour=text_colour(fill))
    words = "queries down, keys across; grey is masked, the diagonal by half"
    pen.words((LEFT_IN + MASK_IN / 2, FOOT_IN - 0.22), words, colour=FAINT)


def _draw_work(pen: Pen, ring: RingWork) -> None:
    """Draw a table of ranks and hops: a bar in each cell is the pairs computed there."""
    count = len(ring.work)
    top = FOOT_IN + MASK_IN + STRIP_IN - 0.1
    room = WIDTH_IN - TABLE_IN - 0.95
    wide, tall = room / count, min(0.44, 2.7 / (count + 1))
    pen.heading((TABLE_IN - 0.75, top), "work of each rank at each hop (part of all pairs)")
    total, most, digits = int(ring.pairs.sum()), int(ring.work.max()), 1 if count <= 5 else 0
    for at in range(count):
        x = TABLE_IN + (at + 0.5) * wide
        pen.words((x, top - 0.32), f"hop {at}" if count <= 6 else str(at), colour=FAINT)
    pen.words((TABLE_IN + room + 0.42, top - 0.32), "all", colour=FAINT)
    for rank in range(count):
        y = top - 0.5 - (rank + 1) * tall
        pen.words((TABLE_IN - 0.08, y + tall / 2), f"rank {rank}", side="right")
        for at in range(count):
            pairs, x = int(ring.work[rank, at]), TABLE_IN + at * wide
            size, bar = min(SMALL_PT, 16 * wide), (wide - 0.06) * pairs / most
            text, fill = percent(pairs / total, digits), RANK_COLOURS[rank]
            pen.box((x + 0.03, y + 0.04), wide - 0.06, tall - 0.08, IDLE)
            pen.box((x + 0.03, y + 0.04), bar, tall - 0.08, fill)
            inside = bar > width_in(text, size) + 0.06
            spot, ink = (x + 0.09 + (0 if inside else bar), y + tall / 2), text_colour(fill) if inside else INK
            pen.words(spot, text, size=size, colour=ink, side="left")
        pen.words((TABLE_IN + room + 0.42, y + tall / 2), percent(ring.work[rank].sum() / total, 1))
    y = top - 0.5 - count * tall - 0.17
    pen.words((TABLE_IN - 0.08, y), "busiest", colour=FAINT, side="right")
    for at, pairs in enumerate(ring.work.max(axis=0).tolist()):
        spot = (TABLE_IN + at * wide + 0.09, y)
        pen.words(spot, percent(pairs / total, digits), size=min(SMALL_PT, 16 * wide), side="left", bold=True)
    pen.words((TABLE_IN + room + 0.42, y), percent(ring.work.max(axis=0).sum() / total, 1), bold=True)


def _draw_merged(pen: Pen, ring: RingWork) -> None:
    """Draw that every rank has merged the keys of all after the last hop, and the rule by which they merge."""
    count = len(ring.work)
    top = FOOT_IN + 1.35
    pen.heading((TABLE_IN - 0.75, top), f"keys in each rank's output after hop {count - 1}")
    wide = min(1.28, (WIDTH_IN - TABLE_IN + 0.6) / count)
    for rank in range(count):
        x = TABLE_IN - 0.75 + rank * wide
        pen.words((x + wide / 2, top - 0.3), f"rank {rank}" if wide > 0.7 else f"r{rank}")
        cell = (wide - 0.12) / count
        for other, fill in enumerate(RANK_COLOURS[:count]):
            pen.box((x + 0.06 + other * cell, top - 0.72), cell, 0.28, fill)
            if cell > 0.14:
                spot = (x + 0.06 + (other + 0.5) * cell, top - 0.58)
                pen.words(spot, str(other), size=min(SMALL_PT, 46 * cell), colour=text_colour(fill))
    rule = "merge, exact: L = log(exp L1 + exp L2),  out = exp(L1 - L) out1 + exp(L2 - L) out2"
    pen.words((TABLE_IN - 0.75, top - 1.02), rule, side="left")
    meaning = "L: log of the sum of exp(scores) over the keys so far, one number per query"
    pen.words((TABLE_IN - 0.75, top - 1.26), meaning, colour=FAINT, side="left")
