"""A schedule as columns of numbers: kind, stage and micro-batch of every action, rank after rank.

The letters are the pipeline's: F forward, I input gradient, W weight gradient, B = I + W. The zero-bubble papers call
our I "B".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Schedule

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.int32]

F, B, I, W = range(4)  # noqa: E741 - the field's letter
LETTERS = "FBIW"
CHANGE = np.array([1, -1, 0, -1])  # of what is in flight, by an F, B, I and W


class ScheduleArrays(NamedTuple):
    """What each rank runs, in columns; rank r owns the actions from offsets[r] to offsets[r + 1].

    Attributes:
        kind: F, B, I or W.
        stage: the part of the model, 0 first.
        microbatch: the micro-batch.
        offsets: the first action of each rank, and the number of actions [P + 1].
    """

    kind: NDArray[np.integer]
    stage: NDArray[np.integer]
    microbatch: NDArray[np.integer]
    offsets: Ints

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.offsets) - 1

    @property
    def rank(self) -> Ints:
        """Rank of each action."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.offsets))


def arrays_of(schedule: Schedule) -> ScheduleArrays:
    """Return the computations of any schedule; its sends and receives are left out, since the engine derives them."""
    if not schedule.has_communication:
        return ScheduleArrays(schedule.kind, schedule.stage, schedule.microbatch, schedule.offsets)
    keep = schedule.kind <= W
    offsets = np.append(0, np.cumsum(keep))[schedule.offsets]
    return ScheduleArrays(schedule.kind[keep], schedule.stage[keep], schedule.microbatch[keep], offsets)


def last_actions(order: ScheduleArrays) -> Ints:
    """Return the action that completes each stage's gradients: its last B or W; -1 for a stage that has none."""
    rows = np.flatnonzero((order.kind == B) | (order.kind == W))
    last = np.full(int(order.stage.max(initial=-1)) + 1, -1, np.int64)
    np.maximum.at(last, order.stage[rows], rows)
    return last


def peak_in_flight(order: ScheduleArrays) -> Ints:
    """Return, for each rank, the largest number of micro-batches (per stage) that it holds at once.

    It holds a micro-batch from its forward to its B or W. An I frees nothing here: W still needs what I needed.
    """
    ranks = np.split(CHANGE[order.kind], order.offsets[1:-1])
    return np.array([np.cumsum(own).max(initial=0) for own in ranks], np.int64)


def action_name(order: ScheduleArrays, action: int) -> str:
    """Return an action as the grammar writes it, such as 2F0."""
    return f"{order.stage[action]}{LETTERS[order.kind[action]]}{order.microbatch[action]}"
