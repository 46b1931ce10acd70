"""Run a pipeline's actions when they form a chain: each one has to wait until the one before it ends.

Naive model parallelism is a chain: one rank computes at a time. 64 ranks and 1,024 micro-batches take 131,072 levels
of one action each. In a chain the ends are one cumulative sum; nothing has to be compared.
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedule_arrays import Ints, Rows, ScheduleArrays


class Chain:
    """All actions in the only order in which they can run.

    Attributes:
        actions: the actions, first to last.
        level: the place of each action in the chain.
    """

    def __init__(self, actions: Ints, needed: Rows) -> None:
        """`needed` is the action on another rank that each one waits for, or -1."""
        self.actions = actions
        self.level: Ints = np.argsort(actions)
        self._waits_for_other_rank = needed >= 0

    def run(self, duration_ns: Ints, latency_ns: Ints | int) -> Ints:
        """Return the end of each action; a latency is read where something from another rank is needed."""
        spent_ns = duration_ns + np.where(self._waits_for_other_rank, latency_ns, 0)
        return np.cumsum(spent_ns[self.actions])[self.level]


def find_chain(order: ScheduleArrays, needed: Rows) -> Chain | None:
    """Return the schedule as a chain, or None where some actions could run at the same time.

    Each action is placed after the one from another rank that it needs, or else after its rank's previous one.
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
