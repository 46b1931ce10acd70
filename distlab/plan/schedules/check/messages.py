"""Which action needs what a different action made: the dependencies between neighbouring stages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import B, F, I, Schedule


class ScheduleMessages(NamedTuple):
    """What stages hand to their neighbours: one entry per hand-over, in the order of the makers' rows.

    Attributes:
        producer: row of the action that makes it.
        consumer: row of the action that needs it.
        is_forward: an activation, on its way to the next stage; else a gradient, on its way to the previous one.
        crosses: the two stages live on different ranks, so that it must be sent.
    """

    producer: NDArray[np.int64]
    consumer: NDArray[np.int64]
    is_forward: NDArray[np.bool_]
    crosses: NDArray[np.bool_]


def find_messages(schedule: Schedule) -> ScheduleMessages:
    """Pair the maker and the user of everything that passes between neighbouring stages.

    The schedule must run every forward pass once, and every backward pass once or none at all.
    """
    last, width = schedule.num_stages - 1, schedule.num_microbatches
    backward = np.isin(schedule.kind, (B, I))
    key = schedule.stage.astype(np.int64) * width + schedule.microbatch
    row_of = np.full((2, (last + 1) * width), -1, np.int64)  # (forward or backward, stage and micro-batch) -> row
    for direction, mask in enumerate((schedule.kind == F, backward)):
        row_of[direction, key[mask]] = np.flatnonzero(mask)
    hands_on = ((schedule.kind == F) & (schedule.stage < last)) | (backward & (schedule.stage > 0))
    producer = np.flatnonzero(hands_on)
    is_forward = schedule.kind[producer] == F
    consumer = row_of[np.where(is_forward, 0, 1), key[producer] + np.where(is_forward, width, -width)]
    rank = schedule.rank
    return ScheduleMessages(producer, consumer, is_forward, rank[producer] != rank[consumer])
