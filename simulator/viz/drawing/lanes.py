"""Where each lane of each rank stands: measured above, its prediction right under it.

A row belongs to one rank, one lane and one side (measured or predicted). Spans of one row that overlap in time, such as
gradient buckets that wait their turn on the wire, stand on levels within the row. If a rank has several stages, the
actions of its second stage are a lighter shade of the same colours, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.viz.drawing.style import SHADE

MAX_LEVELS = 6
PASSES = ("F", "B", "I", "W")
PREDICTED_HEIGHT = 0.62
LANE_GAP, RANK_GAP = 0.14, 0.5
CLOSE_RANKS, CLOSE_GAP = 16, 0.18  # from this many ranks on, those with a single row move together


class Side(NamedTuple):
    """One of the two traces in a picture, with its clock at zero."""

    trace: Trace
    predicted: bool


class LaneRow(NamedTuple):
    """One lane of one rank in one trace; y grows downwards, in units of a measured lane's height."""

    rank: int
    lane: str
    predicted: bool
    top: float
    height: float
    num_levels: int


class Placement(NamedTuple):
    """The rows of a picture, and where each span of each side stands.

    Attributes:
        rows: from top to bottom.
        total_height: of all rows and gaps.
        row_of: for each side, the index of each span's row, or -1 where it is not shown.
        level_of: for each side, the level of each span within its row.
    """

    rows: tuple[LaneRow, ...]
    total_height: float
    row_of: tuple[NDArray[np.int64], ...]
    level_of: tuple[NDArray[np.int64], ...]


def lanes_of(sides: Sequence[Side]) -> tuple[str, ...]:
    """Return the lanes that occur: compute first, communication next, then the others by name."""
    present = {side.trace.words[code] for side in sides for code in np.unique(side.trace.lane)}
    first = [lane for lane in ("compute", "communication") if lane in present]
    return (*first, *sorted(present - set(first)))


def place(
    sides: Sequence[Side],
    ranks: Sequence[int],
    lanes: Sequence[str],
    *,
    seen: Sequence[NDArray[np.bool_]],
    levels: bool,
) -> Placement:
    """Give each lane of each rank a row, and each span that `seen` marks its row and level.

    With `levels` false every span is on level 0, whatever overlaps.
    """
    lane_of: list[NDArray[np.int64]] = []
    present: set[tuple[int, str, bool]] = set()
    for side in sides:
        trace = side.trace
        codes = np.array([lanes.index(word) if word in lanes else -1 for word in trace.words], dtype=np.int64)
        lane = codes[trace.lane]
        rank = np.searchsorted(np.asarray(ranks), trace.rank)
        shown = (lane >= 0) & np.isin(trace.rank, np.asarray(ranks))
        lane_of.append(np.where(shown, rank * len(lanes) + lane, -1))
        cells = np.unique(lane_of[-1][lane_of[-1] >= 0]).tolist()
        present |= {(ranks[cell // len(lanes)], lanes[cell % len(lanes)], side.predicted) for cell in cells}
    in_order = sorted(present, key=lambda key: (key[0], lanes.index(key[1]), key[2]))
    keys = {key: number for number, key in enumerate(in_order)}
    row_of: list[NDArray[np.int64]] = []
    level_of: list[NDArray[np.int64]] = []
    for side, cell, visible in zip(sides, lane_of, seen, strict=True):
        table = [keys.get((rank, lane, side.predicted), -1) for rank in ranks for lane in lanes]
        row = np.array([*table, -1], dtype=np.int64)[cell]  # cell -1 picks the last entry: not shown
        row_of.append(np.where(visible, row, -1))
        level_of.append(np.zeros_like(row))
        if levels:
            index = np.flatnonzero(row_of[-1] >= 0)
            level_of[-1][index] = pack(row[index], side.trace.start_ns[index], side.trace.end_ns[index])
    depth = np.ones(len(keys), dtype=np.int64)
    for row, level in zip(row_of, level_of, strict=True):
        np.maximum.at(depth, row[row >= 0], level[row >= 0] + 1)
    rows, total = _stack(list(keys), depth.tolist())
    return Placement(rows, total, tuple(row_of), tuple(level_of))


def pack(row: NDArray[np.int64], start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give overlapping spans of a row different levels: each takes the lowest that is free when it starts.

    Beyond MAX_LEVELS spans share the last level.
    """
    level = np.zeros(len(row), dtype=np.int64)
    busy_until: dict[int, list[int]] = {}
    order = np.lexsort((-end_ns, start_ns, row))
    meets = (np.diff(row[order]) == 0) & (start_ns[order][1:] < end_ns[order][:-1])
    order = order[np.isin(row[order], row[order][1:][meets])]  # rows where nothing overlaps need no walk
    spans = zip(order.tolist(), row[order].tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True)
    for index, which, start, end in spans:
        ends = busy_until.setdefault(which, [])
        free = next((at for at, until in enumerate(ends) if until <= start), len(ends))
        if free == len(ends) and free < MAX_LEVELS:
            ends.append(end)
        free = min(free, MAX_LEVELS - 1)
        ends[free] = max(ends[free], end)
        level[index] = free
    return level


def _stack(keys: Sequence[tuple[int, str, bool]], depth: Sequence[int]) -> tuple[tuple[LaneRow, ...], float]:
    """Stack the rows from the top, with a gap between lanes and a wider one between ranks."""
    rows: list[LaneRow] = []
    top = 0.0
    num_ranks = len({rank for rank, _, _ in keys})
    rank_gap = CLOSE_GAP if num_ranks == len(keys) and num_ranks >= CLOSE_RANKS else RANK_GAP
    for (rank, lane, predicted), num_levels in zip(keys, depth, strict=True):
        if rows and rows[-1].rank != rank:
            top += rank_gap
        elif rows and rows[-1].lane != lane:
            top += LANE_GAP
        height = (PREDICTED_HEIGHT if predicted else 1.0) * (1 + 0.55 * (num_levels - 1))
        rows.append(LaneRow(rank, lane, predicted, top, height, num_levels))
        top += height
    return tuple(rows), top


def shaded(trace: Trace) -> Trace:
    """Give the passes of each rank's stages kinds of their own: F for its first stage, F~1 for its second, and so on.

    A trace of one stage per rank, or of none, comes back as it is.
    """
    words, num_words = list(trace.words), len(trace.words)
    if not len(trace) or trace.stage.max() < 1:
        return trace
    is_pass = np.isin(words, PASSES)
    rows = is_pass[trace.kind] & (trace.stage >= 0)
    present = stages_of_ranks(trace.rank[rows], trace.stage[rows])
    if (present.sum(axis=1) < 2).all():
        return trace
    which = np.cumsum(present, axis=1) - 1  # a stage's place among those of its rank
    shade = np.zeros(len(trace), np.int32)
    shade[rows] = which[trace.rank[rows], trace.stage[rows]]
    for number in range(1, int(shade.max()) + 1):
        words += [f"{word}{SHADE}{number}" for word in trace.words]
    return replace(trace, kind=trace.kind + shade * np.int32(num_words), words=tuple(words))


def stages_of_ranks(rank: NDArray[np.int32], stage: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which stages each rank has: [ranks, stages]."""
    shape = int(rank.max(initial=-1)) + 1, int(stage.max(initial=-1)) + 1
    present = np.zeros(shape, bool)
    present[rank, stage] = True
    return present
