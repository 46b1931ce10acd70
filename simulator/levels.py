"""Levels: run a pipeline's actions level by level, all ranks at once, and skip ahead once the steady state repeats.

An action's level lies above that of its rank's previous action and of what it needs, so that one level is

    end[level] = max(end[level - 1], end of what is needed + latency) + duration        (a vector over ranks)

In the steady part of a schedule the rows of durations, latencies and needs repeat, and each need lies one level below.
Maximum and addition then carry a shift through: once a whole row equals an earlier one plus one number, every row that
follows equals its own earlier one plus that number, for as long as the inputs repeat. Those are filled in at once.
That is exact, not an approximation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NEVER = -(1 << 60)  # latency of an action that needs nothing
BEAT = 2  # a steady state repeats its inputs every two levels: a forward, a backward
BLOCK = 32  # levels between two looks for a repetition


class Grid:
    """Actions laid out by level and rank; made once, run with any durations and latencies."""

    def __init__(self, level: Ints, rank: Ints, need: Ints, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_levels = int(level.max(initial=-1)) + 1
        self.cell = level * num_ranks + rank
        size, count = self.num_levels * num_ranks, len(level)
        self._action = np.full(size, count)  # the action of each cell
        self._action[self.cell] = np.arange(count)
        self._empty = np.flatnonzero(self._action == count)
        # Where the need lies, counted from the first cell of the level below; what needs nothing reads its own rank.
        below = np.where(need >= 0, self.cell.take(need, mode="clip") - (level - 1) * num_ranks, rank)
        grid = self._lay_out(below, 0)
        self._needed = grid + np.arange(-1, self.num_levels - 1)[:, None] * num_ranks
        self._repeats = np.zeros(self.num_levels, bool)
        # Unsigned, so that what is below zero is large.
        near = np.asarray((grid.view(np.uint64) < num_ranks).all(axis=1))
        self._repeats[BEAT:] = (grid[BEAT:] == grid[:-BEAT]).all(axis=1) & near[BEAT:] & near[:-BEAT]

    def _lay_out(self, values: Ints, empty: int) -> Ints:
        """Put one value an action into its cell."""
        grid = values.take(self._action, mode="clip")
        grid[self._empty] = empty
        return grid.reshape(self.num_levels, self.num_ranks)

    def run(self, duration_ns: Ints, latency_ns: Ints) -> Ints:
        """Return the end of each action; latency NEVER where nothing is needed."""
        duration, latency = self._lay_out(duration_ns, 0), self._lay_out(latency_ns, NEVER)
        end = np.zeros((self.num_levels + 1, self.num_ranks), np.int64)  # row 0: nothing has run yet
        first, stop = self._repeating(duration, latency)
        level = 0
        while level < self.num_levels:
            block = min(level + BLOCK, self.num_levels)
            self._advance(level, block, (duration, latency, end))
            level = block
            if level < self.num_levels and stop[level] - level > BLOCK:
                level = self._skip(level, int(first[level]), int(stop[level]), end)
        return end[1:].reshape(-1).take(self.cell)

    def _advance(self, level: int, stop: int, arrays: tuple[Ints, Ints, Ints]) -> None:
        duration, latency, end = arrays
        start, take = np.empty(self.num_ranks, np.int64), end[1:].reshape(-1).take
        add, maximum = np.add, np.maximum
        rows = slice(level, stop)
        columns = (self._needed[rows], latency[rows], duration[rows], end[rows], end[level + 1 : stop + 1])
        for needed, wait, length, before, row in zip(*columns, strict=True):
            take(needed, None, start, "clip")
            add(start, wait, start)
            maximum(start, before, out=start)
            add(start, length, row)

    def _repeating(self, duration: Ints, latency: Ints) -> tuple[Ints, Ints]:
        """Return, for each level, where the run of repeating levels around it begins and where it stops."""
        repeats = self._repeats.copy()
        repeats[BEAT:] &= (duration[BEAT:] == duration[:-BEAT]).all(axis=1)
        repeats[BEAT:] &= (latency[BEAT:] == latency[:-BEAT]).all(axis=1)
        levels = np.arange(self.num_levels)
        first = np.maximum.accumulate(np.where(repeats, 0, levels + 1))
        stop = np.minimum.accumulate(np.where(repeats, self.num_levels, levels)[::-1])[::-1]
        return first, stop

    def _skip(self, level: int, first: int, stop: int, end: Ints) -> int:
        """Fill the repeating levels from `level` to `stop` if the state repeats; return the level to go on with.

        `end[level]` is the row of the level before `level`. Its inputs and those of each row since must repeat a period
        ago, which `first` bounds.
        """
        for period in (BEAT, BEAT * self.num_ranks):
            if level - period + BEAT < first or level - period < 1:
                continue
            shift = end[level] - end[level - period]
            if (shift == shift[0]).all():
                count = -(-(stop - level) // period)
                pattern = end[level - period + 1 : level + 1]
                steps = np.arange(1, count + 1)[:, None, None] * shift[0]
                end[level + 1 : stop + 1] = (pattern[None] + steps).reshape(-1, self.num_ranks)[: stop - level]
                return stop
        return level
