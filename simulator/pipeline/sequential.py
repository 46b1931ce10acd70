"""Run a pipeline's actions one by one, for schedules in which few ranks compute at a time.

A vector operation over all ranks is worth it where most of them have work. In naive model parallelism one rank
computes at a time: 64 ranks and 1,024 micro-batches take 131,072 levels of one action each. There a plain loop is
faster.
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedule_arrays import Ints, Rows, ScheduleArrays


class Sequence:
    """All actions in one order, in which each action follows those that it needs.

    Attributes:
        actions: the actions that can be reached.
        pointers: of each rank, the action that can never start, or the end of its actions.
    """

    def __init__(self, order: ScheduleArrays, needed: Rows) -> None:
        """Let every rank go on until it has to wait; `needed` is the action on another rank that each waits for."""
        needed_by, stops = needed.tolist(), order.offsets[1:].tolist()
        is_done = [False] * len(needed_by) + [True]  # number -1, for an action that needs nothing
        pointers, actions = order.offsets[:-1].tolist(), []
        waiting: dict[int, list[int]] = {}  # ranks, by the action that they wait for
        ready = list(range(order.num_ranks))
        while ready:
            rank = ready.pop()
            action, stop = pointers[rank], stops[rank]
            while action < stop:
                needed_action = needed_by[action]
                if not is_done[needed_action]:
                    waiting.setdefault(needed_action, []).append(rank)
                    break
                is_done[action] = True
                actions.append(action)
                if action in waiting:
                    ready += waiting.pop(action)
                action += 1
            pointers[rank] = action
        self.actions: list[int] = actions
        self.pointers: list[int] = pointers
        self._needed, self._rank = needed_by, order.rank.tolist()

    @property
    def level(self) -> Ints:
        """Level of each action: above that of its rank's previous one and of the one that it needs."""
        ones = np.ones(len(self._needed), np.int64)
        return self.run(ones, 0) - 1

    def run(self, duration_ns: Ints, latency_ns: Ints | int) -> Ints:
        """Return the end of each action; a latency is read where something from another rank is needed."""
        duration, latency = duration_ns.tolist(), np.broadcast_to(latency_ns, duration_ns.shape).tolist()
        end, free = [0] * len(duration), [0] * len(self.pointers)
        needed_by, ranks = self._needed, self._rank
        for action in self.actions:
            needed, rank = needed_by[action], ranks[action]
            start = free[rank]
            if needed >= 0 and end[needed] + latency[action] > start:
                start = end[needed] + latency[action]
            free[rank] = end[action] = start + duration[action]
        return np.array(end, np.int64)
