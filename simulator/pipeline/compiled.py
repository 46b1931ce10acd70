"""A schedule with its dependencies and levels worked out once, to be run with any durations and latencies.

end[action] = max(end of the rank's previous action, end of the action it needs + latency) + duration

Dependencies are looked up for all actions at once. A table holds the row of each F, of each B or I (both pass a
gradient back) and of each W, by stage and micro-batch. What each action depends on is the same table, moved by one
stage.

`Frontier` runs all ranks level by level. At each level every rank whose next action has what it needs runs that action.
So an action's level is above the level of its rank's previous action, and above the level of the action that it needs.
One level is one vector operation over the ranks:

    end[level] = max(end[level - 1], end of what is needed + latency) + duration

`Chain` is for actions of which each has to wait until the one before it ends, as in naive model parallelism. 64 ranks
and 1,024 micro-batches take 131,072 levels of one action each. In a chain the ends are one cumulative sum; nothing has
to be compared.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from simulator.pipeline.schedule_arrays import F, Ints, Rows, ScheduleArrays, W, action_name

SHOWN = 8
NOTHING, MISSING = -1, -2  # in place of the action that is needed
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


class CompiledSchedule:
    """A schedule whose dependencies are known and which has no deadlock; `run` takes any durations and latencies.

    Attributes:
        order: the actions, rank after rank.
        rank: rank of each action.
        needed: the action that each one waits for, in addition to its rank's previous one, or -1.
        remote: whether that action is on a different rank.
    """

    def __init__(self, order: ScheduleArrays) -> None:
        """Find dependencies and levels.

        Raises:
            ValueError: an action is there twice, needs one that no rank runs, or comes before it on the same rank; or
                ranks wait for one another in a circle (a deadlock).
        """
        self.order = order
        self.rank = order.rank
        self.needed = find_dependencies(order, self.rank)
        self.remote = (self.needed >= 0) & (self.rank.take(self.needed, mode="clip") != self.rank)
        from_elsewhere = np.where(self.remote, self.needed, np.int32(-1))
        self._runner: Frontier | Chain = find_chain(order, from_elsewhere) or _frontier(order, from_elsewhere)

    @cached_property
    def level(self) -> Ints:
        """A number for each action, above those of its rank's previous action and of the action that it needs."""
        return self._runner.level

    def run(self, duration_ns: Ints, latency_ns: Ints | int = 0) -> Ints:
        """Return the end of each action.

        Args:
            duration_ns: of each action.
            latency_ns: between the end of an action on a different rank and the earliest start of what needs it.
                One number, or one per action. Values of actions that wait for no other rank are ignored.
        """
        return self._runner.run(duration_ns, latency_ns)

    @cached_property
    def _by_level(self) -> tuple[Ints, list[int], list[int], list[int], list[int]]:
        """Return the actions level by level; their numbers, ranks, what each needs of a different rank, its wire."""
        by_level = np.argsort(self.level, kind="stable")
        needed = np.where(self.remote, self.needed, len(self.rank))
        wire = 2 * self.rank + (self.order.kind != F)
        ranks, needs, wires = (column[by_level].tolist() for column in (self.rank, needed, wire))
        return by_level, by_level.tolist(), ranks, needs, wires

    def run_with_wires(self, duration_ns: Ints, message_ns: Ints) -> tuple[list[int], list[int]]:
        """Return the end of each action, and of the message after it (the action's own where the message takes 0).

        A rank sends one message at a time in each direction, in the order of its actions.
        """
        num_actions, num_ranks = len(self.rank), self.order.num_ranks
        end, sent = [0] * num_actions, [0] * (num_actions + 1)  # what needs no other rank reads the last
        free, wires = [0] * num_ranks, [0] * (2 * num_ranks)
        by_level, *fixed = self._by_level
        own = (duration_ns[by_level].tolist(), message_ns[by_level].tolist())
        for action, rank, need, lane, duration, message in zip(*fixed, *own, strict=True):
            now, arrival = free[rank], sent[need]
            if arrival > now:
                now = arrival
            free[rank] = end[action] = now = now + duration
            if message:
                begin = wires[lane]
                wires[lane] = now = (now if now > begin else begin) + message
            sent[action] = now
        return end, sent[:-1]


def _frontier(order: ScheduleArrays, needed: Rows) -> Frontier:
    """Find the levels of a schedule, and refuse one in which ranks wait for one another in a circle."""
    frontier = Frontier(order, needed)
    ranks = np.flatnonzero(frontier.pointers < order.offsets[1:])
    texts = [
        f"rank {rank} at {action_name(order, action)} waits for {action_name(order, int(needed[action]))}"
        for rank, action in zip(ranks[:SHOWN], frontier.pointers[ranks].tolist(), strict=False)
    ]
    if texts:
        more = f"; and {len(ranks) - SHOWN} ranks more" if len(ranks) > SHOWN else ""
        raise ValueError(f"deadlock: {'; '.join(texts)}{more}")
    return frontier


def find_dependencies(order: ScheduleArrays, rank: Ints) -> Rows:
    """Return the action that each one needs, or NOTHING: F from the stage before, B and I from the stage behind.

    The last stage's backward needs its own forward; W needs its own I. `rank` is the rank of each action.

    Raises:
        ValueError: an action is there twice, needs one that no rank runs, or comes before it on the same rank.
    """
    num_actions = len(order.kind)
    if num_actions == 0:
        return np.zeros(0, np.int32)
    stages, microbatches = int(order.stage.max()) + 1, int(order.microbatch.max()) + 1
    size, tables = stages * microbatches, 3 if order.kind.max() == W else 2
    if 4 * size >= 2**31:
        raise ValueError(f"{stages} stages x {microbatches} micro-batches are too many to simulate; use fewer")
    # A slot for each F, for each B or I, and for each W; 32 bits need half the memory traffic of 64.
    slot = order.stage * np.int32(microbatches)
    slot += order.microbatch
    slot += (order.kind != F) * np.int32(size)
    if tables == 3:
        slot += (order.kind == W) * np.int32(size)
    place = np.full(tables * size, MISSING, np.int32)
    place[slot.astype(np.int64)] = np.arange(num_actions, dtype=np.int32)  # 64-bit indices: twice as fast
    if np.count_nonzero(place >= 0) < num_actions:
        twice = int(np.flatnonzero(place.take(slot) != np.arange(num_actions))[0])
        raise ValueError(f"rank {rank[twice]}: {action_name(order, twice)} is in the schedule twice; run it once")
    table = place.reshape(tables, stages, microbatches)
    needed_by = np.empty_like(table)  # by the action of each slot
    needed_by[0, 0], needed_by[0, 1:] = NOTHING, table[0, :-1]
    needed_by[1, :-1], needed_by[1, -1] = table[1, 1:], table[0, -1]
    needed_by[2:] = table[1]
    needed = needed_by.reshape(-1).take(slot)
    _check(order, rank, needed, own_forward=table[0].reshape(-1).take(slot % np.int32(size)))
    return needed


def _check(order: ScheduleArrays, rank: Ints, needed: Rows, *, own_forward: Rows) -> None:
    """Refuse an action whose dependency is missing, or comes later on the same rank."""
    rows = np.arange(len(needed), dtype=np.int32)
    first = np.repeat(order.offsets[:-1], np.diff(order.offsets))
    wrong = np.flatnonzero((own_forward < first) | (own_forward > rows))
    if wrong.size:
        text = f"rank {rank[wrong[0]]}: {action_name(order, int(wrong[0]))} comes before its own forward on that rank"
        raise ValueError(f"deadlock: {text}; run the forward first")
    missing = np.flatnonzero(needed == MISSING)
    if missing.size:
        row = int(missing[0])
        raise ValueError(f"rank {rank[row]}: what {action_name(order, row)} needs is in no rank's order")
    late = np.flatnonzero((needed > rows) & (rank.take(needed, mode="clip") == rank))
    if late.size:
        row = int(late[0])
        text = f"rank {rank[row]}: {action_name(order, row)} comes before {action_name(order, int(needed[row]))}"
        raise ValueError(f"deadlock: {text}, which it needs, on the same rank; swap them")
