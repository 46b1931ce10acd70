"""Two ways to run a pipeline's actions, made once and used with any durations and latencies.

`Frontier` runs all ranks level by level. At each level every rank whose next action has what it needs runs that action.
So an action's level is above the level of its rank's previous action, and above the level of the action that it needs.
One level is one vector operation over the ranks:

    end[level] = max(end[level - 1], end of what is needed + latency) + duration

`Chain` is for actions of which each has to wait until the one before it ends, as in naive model parallelism. 64 ranks
and 1,024 micro-batches take 131,072 levels of one action each. In a chain the ends are one cumulative sum; nothing has
to be compared.
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedule_arrays import Ints, Rows, ScheduleArrays

BLOCK = 32  # levels between two checks whether any rank goes on
NEVER = -(1 << 60)  # latency of an action that needs nothing from a different rank


class Frontier:
    """Actions laid out by level and rank; made once, run with any durations and latencies.

    Attributes:
        pointers: of each rank, the action that can never start, or the end of its actions.
    """

    def __init__(self, order: ScheduleArrays, needed: Rows) -> None:
        """Find the levels; `needed` is the action on a different rank that each one waits for, or -1."""
        self._num_ranks = order.num_ranks
        next_actions = self._walk(order, needed)
        self.pointers = next_actions[-1] - np.arange(self._num_ranks)
        moves = np.flatnonzero(next_actions[1:] != next_actions[:-1])
        ranks = (moves % self._num_ranks).astype(np.int32)
        self._action = next_actions.reshape(-1).take(moves) - ranks  # of each cell that is not empty
        self._moves = moves
        self.num_levels = int(moves[-1]) // self._num_ranks + 1 if len(moves) else 0
        # The ends have an extra first row of zeros, before level 0; an action that needs nothing reads its first cell.
        self._cell = np.zeros(len(needed), np.int64)
        self._cell[self._action] = moves + self._num_ranks
        self._free = needed < 0
        self._needed_cell = self._lay_out(np.where(self._free, 0, self._cell.take(needed, mode="clip")), 0)

    @property
    def level(self) -> Ints:
        """Level of each action."""
        return self._cell // self._num_ranks - 1

    def _walk(self, order: ScheduleArrays, needed: Rows) -> Rows:
        """Return each rank's next action before every level, and after the last one [L + 1, P].

        Every rank has one more place behind its actions, at which it stays. So action a of rank r has number a + r.
        """
        ranks = self._num_ranks
        size = len(needed) + ranks
        place = np.arange(len(needed)) + order.rank
        always, never = size, size + 1
        wants = np.full(size, never)
        wants[place] = np.where(needed < 0, always, place.take(needed, mode="clip"))
        is_done = np.zeros(size + 2, np.int64)
        is_done[always] = 1
        pointer = order.offsets[:-1] + np.arange(ranks)
        want, goes = np.empty(ranks, np.int64), np.ones(ranks, np.int64)
        blocks = []
        while goes.any():
            block = np.empty((BLOCK, ranks), np.int32)
            for row in block:
                row[:] = pointer
                wants.take(pointer, None, want, "clip")
                is_done.take(want, None, goes, "clip")
                is_done[pointer] = goes
                pointer += goes
            blocks.append(block)
        return np.concatenate([*blocks, pointer[None].astype(np.int32)])

    def _lay_out(self, values: Ints, empty: int) -> Ints:
        """Put the value of each action into its cell [L, P]."""
        grid = np.full(self.num_levels * self._num_ranks, empty, np.int64)
        grid[self._moves] = values.take(self._action)
        return grid.reshape(self.num_levels, self._num_ranks)

    def run_rows(self, key: Ints, duration_ns: Ints, latency_ns: Ints, wanted: Ints) -> Ints:
        """Return the ends of some actions under many times at once.

        Args:
            key: of each action, its column in the next two [A].
            duration_ns: rows of durations [R, K].
            latency_ns: rows of latencies, read where something from a different rank is needed [R, K].
            wanted: actions [N].

        Shapes: -> [N, R]
        """
        empty = duration_ns.shape[1]
        durations = np.concatenate([duration_ns.T, np.zeros((1, len(duration_ns)), np.int64)])
        latencies = np.concatenate([latency_ns.T, np.full((1, len(latency_ns)), NEVER)])
        works, waits = self._lay_out(key, empty), self._lay_out(np.where(self._free, empty, key), empty)
        ends = np.zeros((self.num_levels + 1, self._num_ranks, len(duration_ns)), np.int64)
        flat, before = ends.reshape(-1, len(duration_ns)), ends[0]
        for needed, work, wait, end in zip(self._needed_cell, works, waits, ends[1:], strict=True):
            flat.take(needed, 0, end, "clip")
            end += latencies.take(wait, 0)
            np.maximum(end, before, out=end)
            end += durations.take(work, 0)
            before = end
        return flat[self._cell[wanted]]

    def run(self, duration_ns: Ints, latency_ns: Ints | int) -> Ints:
        """Return the end of each action; a latency is read where something from a different rank is needed."""
        latency = self._lay_out(np.where(self._free, NEVER, latency_ns), NEVER)
        ends = np.zeros((self.num_levels + 1, self._num_ranks), np.int64)
        before, start, take = ends[0], np.empty(self._num_ranks, np.int64), ends.reshape(-1).take
        for needed, wait, duration, end in zip(
            self._needed_cell, latency, self._lay_out(duration_ns, 0), ends[1:], strict=True
        ):
            take(needed, None, start, "clip")
            start += wait
            np.maximum(start, before, out=end)
            end += duration
            before = end
        return ends.reshape(-1).take(self._cell)


class Chain:
    """All actions in the only order in which they can run.

    Attributes:
        actions: the actions, first to last.
        level: the place of each action in the chain.
    """

    def __init__(self, actions: Ints, needed: Rows) -> None:
        """`needed` is the action on a different rank that each one waits for, or -1."""
        self.actions = actions
        self.level: Ints = np.argsort(actions)
        self._waits_for_other_rank = needed >= 0

    def run(self, duration_ns: Ints, latency_ns: Ints | int) -> Ints:
        """Return the end of each action; a latency is read where something from a different rank is needed."""
        spent_ns = duration_ns + np.where(self._waits_for_other_rank, latency_ns, 0)
        return np.cumsum(spent_ns[self.actions])[self.level]


def find_chain(order: ScheduleArrays, needed: Rows) -> Chain | None:
    """Return the schedule as a chain, or None where some actions could run at the same time.

    Each action is placed after the one from a different rank that it needs, or else after its rank's previous one.
    """
    num_actions = len(needed)
    action = np.arange(num_actions)
    starts_rank = np.zeros(num_actions + 1, bool)
    starts_rank[order.offsets[:-1]] = True
    has_previous = ~starts_rank[:-1]
    before = np.where(needed >= 0, needed, np.where(has_previous, action - 1, -1))
    behind = np.full(num_actions, -1)
    behind[before[before >= 0]] = action[before >= 0]
    first = np.flatnonzero(before < 0)
    if len(first) != 1 or np.count_nonzero(behind >= 0) != num_actions - 1:
        return None  # two actions follow the same one
    following = behind.tolist()
    actions, at = [], int(first[0])
    while at >= 0:
        actions.append(at)
        at = following[at]
    if len(actions) < num_actions:
        return None  # the others wait for one another in a circle
    chain = Chain(np.array(actions), needed)
    previous_is_earlier = np.diff(chain.level) > 0
    return chain if previous_is_earlier[has_previous[1:]].all() else None
