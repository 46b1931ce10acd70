"""The sends and receives that a schedule of computations implies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import RECV_B, RECV_F, SEND_B, SEND_F, B, I, Schedule
from distlab.plan.schedules.structure import find_messages
from distlab.plan.schedules.validate import validate


def add_communication(schedule: Schedule, *, copies: int = 1) -> Schedule:
    """Derive the sends and receives of a schedule of computations.

    A send follows the action that makes its message. A receive stands right before the action that needs it, or earlier
    where the messages between two ranks would otherwise overtake each other: they arrive first in, first out. Stages
    that share a rank hand over in memory. `copies` of the model are as in `validate`.

    Raises:
        ScheduleError: the schedule is not valid, so that a message would have no sender or no receiver.
        ValueError: the schedule has sends or receives already.
    """
    if schedule.has_communication:
        raise ValueError("the schedule already has sends and receives; pass the schedule of computations alone")
    validate(schedule, forward_only=not np.isin(schedule.kind, (B, I)).any(), copies=copies)
    messages = find_messages(schedule)
    crosses = messages.crosses
    producer, consumer = messages.producer[crosses], messages.consumer[crosses]
    before = _receive_places(schedule, producer, consumer)

    rows = np.arange(len(schedule))
    sends = np.where(messages.is_forward[crosses], SEND_F, SEND_B)
    receives = np.where(messages.is_forward[crosses], RECV_F, RECV_B)
    place = np.concatenate([rows, producer, before])  # next to which computation: a receive, the computation, its send
    side = np.concatenate([np.full_like(rows, 1), np.full_like(producer, 2), np.full_like(before, 0)])
    origin = np.concatenate([rows, producer, producer])
    order = np.lexsort((origin, side, place))
    column_from = np.concatenate([rows, producer, consumer])[order]
    added = np.bincount(schedule.rank[producer], minlength=schedule.num_ranks)
    added += np.bincount(schedule.rank[consumer], minlength=schedule.num_ranks)
    return Schedule.from_columns(
        stage=schedule.stage[column_from],
        kind=np.concatenate([schedule.kind, sends, receives])[order],
        microbatch=schedule.microbatch[column_from],
        lengths=np.diff(schedule.offsets) + added,
    )


def _receive_places(schedule: Schedule, producer: NDArray[np.int64], consumer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find the row before which each message is received: the latest that keeps the messages of a pair in order."""
    pair = schedule.rank[producer] * schedule.num_ranks + schedule.rank[consumer]
    order = np.lexsort((producer, pair))[::-1]  # pair by pair, from the last message sent to the first
    group = np.unique(pair[order], return_inverse=True)[1].astype(np.int64)
    room = len(schedule) + 1
    lowered = consumer[order] + group * room  # a running minimum in groups: lower groups follow, and lie below
    before = np.empty_like(consumer)
    before[order] = np.minimum.accumulate(lowered) - group * room
    return before
