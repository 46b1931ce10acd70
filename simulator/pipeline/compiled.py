"""A schedule with its dependencies and levels worked out once, to be run with any durations and latencies.

end[action] = max(end of the rank's previous action, end of the action it needs + latency) + duration

Dependencies are looked up for all actions at once. A table holds the row of each F, of each B or I (both pass a
gradient back) and of each W, by stage and micro-batch. What each action depends on is the same table, moved by one
stage.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from simulator.pipeline.runners import Chain, Frontier, find_chain
from simulator.pipeline.schedule_arrays import F, Ints, Rows, ScheduleArrays, W, action_name, last_actions

SHOWN = 8
NOTHING, MISSING = -1, -2  # in place of the action that is needed


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

    def run_with_wires(self, duration_ns: Ints, message_ns: Ints) -> tuple[list[int], list[int]]:
        """Return the end of each action, and of the message after it (the action's own where the message takes 0).

        A rank sends one message at a time in each direction, in the order of its actions.
        """
        num_actions, num_ranks = len(self.rank), self.order.num_ranks
        end, sent = [0] * num_actions, [0] * (num_actions + 1)  # what needs no other rank reads the last
        free, wires = [0] * num_ranks, [0] * (2 * num_ranks)
        wire = 2 * self.rank + (self.order.kind != F)
        by_level = np.argsort(self.level, kind="stable")
        needed = np.where(self.remote, self.needed, num_actions)
        columns = (by_level, *(c[by_level] for c in (self.rank, needed, duration_ns, message_ns, wire)))
        for action, rank, need, duration, message, lane in zip(*(c.tolist() for c in columns), strict=True):
            now, arrival = free[rank], sent[need]
            if arrival > now:
                now = arrival
            free[rank] = end[action] = now = now + duration
            if message:
                begin = wires[lane]
                wires[lane] = now = (now if now > begin else begin) + message
            sent[action] = now
        return end, sent[:-1]

    def run_rows(self, duration_ns: Ints, latency_ns: Ints, wanted: Ints) -> Ints:
        """Return the ends of some actions under rows of times of the stages' passes.

        Args:
            duration_ns: of each stage's F, then of each stage's B, then of each stage's last B [R, 3 S].
            latency_ns: of the message that each of them waits for [R, 3 S].
            wanted: actions [N].

        Shapes: -> [N, R]
        """
        num_stages = duration_ns.shape[1] // 3
        key = np.asarray(self.order.stage + (self.order.kind != F) * num_stages, np.int64)
        key[last_actions(self.order)] += num_stages
        if isinstance(self._runner, Frontier):
            return self._runner.run_rows(key, duration_ns, latency_ns, wanted)
        rows = zip(duration_ns, latency_ns, strict=True)
        return np.array([self.run(own[key], wait[key])[wanted] for own, wait in rows]).T


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
