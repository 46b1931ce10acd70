"""Levels: run a pipeline's actions level by level, all ranks at once, and skip ahead once the steady state repeats.

An action's level lies above that of its rank's previous action and of what it needs, so that one level is

    end[level] = max(free[level - 1], end of what is needed + latency) + duration       (a vector over ranks)
    free[level] = end[level] + the weight gradients that ride behind it

In the steady part of a schedule the rows of durations, latencies and needs repeat, and a need lies a few levels below
(or far below, where the ends already known are looked at). Maximum and addition then carry a shift through: once the
last rows equal earlier ones plus one number, every row that follows equals its own earlier one plus that number, for as
long as the inputs repeat. Those are filled in at once. That is exact, not an approximation.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Rows = NDArray[np.int32]
Number = TypeVar("Number", np.int32, np.int64)

NEVER = -(1 << 60)  # latency of an action that needs nothing
BEAT = 2  # a steady state repeats its inputs every two levels: a forward, a backward
NEAR = 4  # levels below which the state reaches; a need further down is looked up
BLOCK = 64  # levels between two looks for a repetition


class _Inputs(NamedTuple):
    """What a run takes by level and rank [L, p]: durations and latencies, by number or as they are; what rides behind.

    Attributes:
        codes: what stands for a duration and a latency in each cell.
        durations: of each code, or laid out.
        latencies: of each code, or laid out.
        ride: of what rides behind, or None.
    """

    codes: NDArray[np.integer] | None
    durations: Ints
    latencies: Ints
    ride: Ints | None

    def rows(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """Return durations and latencies of some levels."""
        if self.codes is None:
            return self.durations[first:stop], self.latencies[first:stop]
        codes = self.codes[first:stop]
        return self.durations.take(codes), self.latencies.take(codes)


class _Riders:
    """Actions without a level of their own: they follow one that has, one after the other."""

    def __init__(self, rows: Ints, cell: Rows) -> None:
        self.rows = rows
        begins = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
        self.begins, self.lengths = begins, np.diff(begins, append=len(rows))
        self.cells = cell.take(rows[begins]).astype(np.int64)

    def behind(self, duration_ns: Ints, size: int) -> tuple[Ints, Ints]:
        """Return what rides behind each cell, and how long after it each rider ends."""
        so_far = np.cumsum(duration_ns.take(self.rows))
        before = np.append(0, so_far).take(self.begins)
        ride = np.zeros(size, np.int64)
        ride[self.cells] = np.diff(before, append=so_far[-1])
        return ride, so_far - np.repeat(before, self.lengths)


class Grid:
    """Actions laid out by level and rank; made once, run with any durations and latencies."""

    def __init__(self, level: Rows, rank: Rows, *, need: Rows, riders: Ints | None, turns: int) -> None:
        """Lay out the actions.

        Args:
            level: of each action.
            rank: of each action.
            need: the action on another rank that each waits for, or -1.
            riders: actions that ride behind the one before them; None: each has a level of its own.
            turns: stages at which each rank takes turns.
        """
        self.num_ranks = num_ranks = int(rank.max(initial=0)) + 1
        self.num_levels = int(level.max(initial=-1)) + 1
        self._turns, count = turns, len(level)
        first = level * np.int32(num_ranks)
        self.cell = first + rank
        self._riders = None if riders is None else _Riders(riders, self.cell)
        # The action of each cell; an empty one has a number that no action has.
        self._action = np.full(self.num_levels * num_ranks, count, np.int32)
        self._action[self.cell.astype(np.int64)] = np.arange(count, dtype=np.int32)  # by wide numbers: twice as fast
        if self._riders is not None:  # of the actions in one cell the first one has it
            self._action[self._riders.cells] = self._riders.rows[self._riders.begins] - 1
        self._empty = np.flatnonzero(self._action == count)
        # Where the need lies, counted back in cells from the own level's first; what needs nothing reads the own rank.
        first -= self.cell.take(need, mode="clip")
        self._free = need < 0
        self._back = self._lay_out(np.where(self._free, np.int32(num_ranks) - rank, first), 1)
        self._structure: dict[int, NDArray[np.bool_]] = {}
        self._codes: NDArray[np.integer] | None = None

    def _lay_out(self, values: NDArray[Number], empty: int) -> NDArray[Number]:
        """Put one value an action into its cell."""
        grid = values.take(self._action, mode="clip")
        grid[self._empty] = empty
        return grid.reshape(self.num_levels, self.num_ranks)

    def run(self, duration_ns: Ints, latency_ns: Ints | int) -> Ints:
        """Return the end of each action; a latency is read where something on another rank is needed."""
        latency = np.where(self._free, NEVER, latency_ns)
        return self._run(duration_ns, (None, self._lay_out(duration_ns, 0), self._lay_out(latency, NEVER)))

    def run_by_code(self, code: Rows, tables: tuple[Ints, Ints], duration_ns: Ints) -> Ints:
        """Return the end of each action, whose code says which duration and latency of the tables it has.

        `duration_ns` are the same durations, one an action. Whether a steady state repeats is seen from the codes, and
        what repeats is never laid out. Codes are the same at each call; the latency of what needs nothing on another
        rank is NEVER.
        """
        if self._codes is None:
            self._codes = self._lay_out(code, len(tables[0]))
        return self._run(duration_ns, (self._codes, np.append(tables[0], 0), np.append(tables[1], NEVER)))

    def _run(self, duration_ns: Ints, inputs: tuple[NDArray[np.integer] | None, Ints, Ints]) -> Ints:
        if self._riders is None:
            return self._ends(_Inputs(*inputs, None)).reshape(-1).take(self.cell)
        ride, later = self._riders.behind(duration_ns, self.num_levels * self.num_ranks)
        ride = ride.reshape(self.num_levels, self.num_ranks)
        end = self._ends(_Inputs(*inputs, ride)).reshape(-1).take(self.cell)
        end[self._riders.rows] += later
        return end

    def _ends(self, inputs: _Inputs) -> Ints:
        """Return the ends by level and rank."""
        shape = (NEAR + self.num_levels, self.num_ranks)  # the first rows: nothing has run yet
        end = np.empty(shape, np.int64)
        free = end if inputs.ride is None else np.empty(shape, np.int64)
        end[: NEAR + 1] = free[:NEAR] = 0  # what needs nothing reads the first cell at first
        beat, first, stop = self._repeating(inputs)
        level = 0
        while level < self.num_levels:
            block = min(level + BLOCK, self.num_levels)
            self._advance(level, block, inputs, (end, free))
            level = block
            if level < self.num_levels and stop[level] - level > BLOCK:
                level = self._skip(level, beat, (int(first[level]), int(stop[level])), (end, free))
        return end[NEAR:]

    def _advance(self, level: int, stop: int, inputs: _Inputs, state: tuple[Ints, Ints]) -> None:
        """Run some levels.

        What each rank does in them anyway is taken off its ends first and added again behind the loop, so that a level
        is one look-up, one sum and one maximum.
        """
        end, free = state
        start, take = np.empty(self.num_ranks, np.int64), end[NEAR:].reshape(-1).take
        add, maximum = np.add, np.maximum
        rows, out = slice(level, stop), slice(NEAR + level, NEAR + stop)
        duration, latency = inputs.rows(level, stop)
        ride = 0 if inputs.ride is None else inputs.ride[rows]
        done = np.zeros((stop - level + 1, self.num_ranks), np.int64)  # by the rank, when a level begins
        np.cumsum(duration + ride, axis=0, out=done[1:])
        taken_off = np.append(0, done[1:] - ride)  # of what is needed; nothing of an earlier level
        back = np.arange(stop - level)[:, None] * self.num_ranks - self._back[rows]
        wait = latency - done[:-1] + taken_off.take(np.maximum(back + 1, 0))
        before = free[NEAR + level - 1]
        for needed, extra, row in zip(np.maximum(back + level * self.num_ranks, 0), wait, end[out], strict=True):
            take(needed, None, start, "clip")
            add(start, extra, start)
            maximum(start, before, out=row)
            before = row
        end[out] += done[1:]
        if inputs.ride is not None:
            free[out] = end[out]
            end[out] -= ride

    def _repeating(self, inputs: _Inputs) -> tuple[int, Ints, Ints]:
        """Return the beat, and for each level where the run of repeating levels around it begins and where it stops."""
        for beat in (BEAT, BEAT * self._turns * self.num_ranks):  # a long one: until a rank is back at its first stage
            if beat >= self.num_levels:
                continue
            repeats = self._steady(beat).copy()
            grids = (inputs.durations, inputs.latencies) if inputs.codes is None else (inputs.codes,)
            for grid in (*grids, inputs.ride):
                if grid is not None:
                    repeats[beat:] &= ~(grid[beat:] != grid[:-beat]).any(axis=1)
            if 3 * np.count_nonzero(repeats) > self.num_levels:
                break
        else:
            beat, repeats = BEAT, np.zeros(self.num_levels, np.bool_)
        levels = np.arange(self.num_levels)
        first = np.maximum.accumulate(np.where(repeats, 0, levels + 1))
        stop = np.minimum.accumulate(np.where(repeats, self.num_levels, levels)[::-1])[::-1]
        return beat, first, stop

    def _steady(self, beat: int) -> NDArray[np.bool_]:
        """Return which levels need what those a beat ago did, counted from their own level."""
        if beat not in self._structure:
            steady = np.zeros(self.num_levels, np.bool_)
            steady[beat:] = ~(self._back[beat:] != self._back[:-beat]).any(axis=1)
            self._structure[beat] = steady
        return self._structure[beat]

    def _skip(self, level: int, beat: int, bounds: tuple[int, int], state: tuple[Ints, Ints]) -> int:
        """Fill the repeating levels from `level` to `stop` if the state repeats; return the level to go on with.

        The state is what the last NEAR levels ended with. The inputs of each level since a period ago must repeat,
        which `first` bounds.
        """
        end, free = state
        first, stop = bounds
        at = NEAR + level  # the row of `level`
        for period in (beat, beat * self.num_ranks) if beat == BEAT else (beat,):
            if level - period + beat < first or level - period < NEAR:
                continue
            shift = int(end[at - 1, 0] - end[at - 1 - period, 0])
            grids = (end,) if free is end else (end, free)
            now, ago = slice(at - NEAR, at), slice(at - NEAR - period, at - period)
            if not all((rows[now] - rows[ago] == shift).all() for rows in grids):
                continue
            stop = self._far_needs_shift((level, stop), period, shift, end)
            count = -(-(stop - level) // period)
            steps = np.arange(1, count + 1)[:, None, None] * shift
            for rows in grids:
                pattern = rows[at - period : at]
                rows[at : NEAR + stop] = (pattern[None] + steps).reshape(-1, self.num_ranks)[: stop - level]
            return stop
        return level

    def _far_needs_shift(self, levels: tuple[int, int], period: int, shift: int, end: Ints) -> int:
        """Return up to which of `levels` what is needed from below them, beyond the state, moved by `shift` too."""
        level, stop = levels
        rows, ranks = np.nonzero(self._back[level:stop] > NEAR * self.num_ranks)
        need = (level + rows) * self.num_ranks - self._back[level + rows, ranks]
        below = need < level * self.num_ranks  # what is at these levels moves as they do
        rows, need, ago = rows[below], need[below], need[below] - period * self.num_ranks
        known = end[NEAR:].reshape(-1)
        strays = np.flatnonzero((ago < 0) | (known.take(need) - known.take(ago, mode="clip") != shift))
        return level + int(rows[strays[0]]) if strays.size else stop
