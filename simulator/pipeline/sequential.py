"""One by one: orders in which few ranks compute at a time, run action after action.

A vector step of all ranks pays where most of them have something to do. In naive model parallelism one rank computes
at a time: 64 ranks and 1,024 micro-batches take 131,072 levels of one action each. There a plain loop is faster.
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedule_arrays import Ints, Order, Rows, W


class Walk:
    """All actions in an order in which each one follows those that it needs.

    Attributes:
        sequence: the actions that could be reached.
        level: of each action; weight gradients share that of the action before them.
        pointers: of each rank, the action at which it waits for ever, or the end of its order.
    """

    def __init__(self, order: Order, need: Rows) -> None:
        """Let every rank go on until it has to wait; `need` is what each action waits for on another rank, or -1."""
        wants, is_weight, stops = need.tolist(), (order.kind == W).tolist(), order.offsets[1:].tolist()
        level, reached = [-1] * len(wants), [-1] * order.num_ranks
        self.pointers: list[int] = order.offsets[:-1].tolist()
        self.sequence: list[int] = []
        waiting: dict[int, list[int]] = {}  # ranks, by the action that they wait for
        ready = list(range(order.num_ranks))
        while ready:
            rank = ready.pop()
            action, stop, at = self.pointers[rank], stops[rank], reached[rank]
            while action < stop:
                needed = wants[action]
                if needed >= 0:
                    if level[needed] < 0:
                        waiting.setdefault(needed, []).append(rank)
                        break
                    if level[needed] > at:
                        at = level[needed]
                at += not is_weight[action]
                level[action] = at
                self.sequence.append(action)
                if action in waiting:
                    ready += waiting.pop(action)
                action += 1
            self.pointers[rank], reached[rank] = action, at
        self.level = np.array(level, np.int32)
        self._need, self._rank = wants, np.repeat(np.arange(order.num_ranks), np.diff(order.offsets)).tolist()

    def run(self, duration_ns: Ints, latency_ns: Ints | int) -> Ints:
        """Return the end of each action; a latency is read where something on another rank is needed."""
        duration, latency = duration_ns.tolist(), np.broadcast_to(latency_ns, duration_ns.shape).tolist()
        end, free = [0] * len(duration), [0] * (max(self._rank) + 1)
        need, ranks = self._need, self._rank
        for action in self.sequence:
            needed, rank = need[action], ranks[action]
            start = free[rank]
            if needed >= 0 and end[needed] + latency[action] > start:
                start = end[needed] + latency[action]
            free[rank] = end[action] = start + duration[action]
        return np.array(end, np.int64)
