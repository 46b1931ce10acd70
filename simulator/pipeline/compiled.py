"""A schedule with its dependencies and levels worked out once, to be run with any durations and latencies.

end[action] = max(end of the rank's previous action, end of the action it needs + latency) + duration
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from simulator.pipeline.chain import Chain, find_chain
from simulator.pipeline.dependencies import find_dependencies
from simulator.pipeline.frontier import Frontier
from simulator.pipeline.schedule_arrays import F, Ints, Rows, ScheduleArrays, action_name, last_actions

SHOWN = 8


class CompiledSchedule:
    """A schedule whose dependencies are known and which has no deadlock; `run` takes any durations and latencies.

    Attributes:
        order: the actions, rank after rank.
        rank: rank of each action.
        needed: the action that each one waits for, in addition to its rank's previous one, or -1.
        remote: whether that action is on another rank.
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
            latency_ns: between the end of an action on another rank and the earliest start of the one that needs it.
                One number, or one per action. Values of actions that wait for no other rank are ignored.
        """
        return self._runner.run(duration_ns, latency_ns)

    def run_with_wires(self, duration_ns: Ints, message_ns: Ints) -> tuple[list[int], list[int]]:
        """Return the end of each action, and of the message after it (the action's own where the message takes 0).

        A rank sends one message at a time in each direction, in the order of its actions.
        """
        num_actions, num_ranks = len(self.rank), self.order.num_ranks
        end, sent = [0] * num_actions, [0] * (num_actions + 1)  # what needs nothing from another rank reads the last
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
