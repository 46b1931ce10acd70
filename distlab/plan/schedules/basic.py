"""The two classic schedules, and the sends and receives that a schedule implies.

With p stages and m micro-batches both take m + p - 1 slots of (F + B) when communication is free: the bubble is
(p - 1) slots. They differ in memory. GPipe runs all forward passes first and keeps m micro-batches; 1F1B starts each
backward as soon as it can, so that stage i keeps min(m, p - i).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, Schedule
from distlab.plan.schedules.messages import find_messages
from distlab.plan.validate import validate


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Plan GPipe: every rank runs all forward passes, then all backward passes, each in the order of micro-batches.

    Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3; the backward order is torch's ScheduleGPipe (the paper
        runs it from the last micro-batch to the first).
    """
    _require_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    step = np.arange(2 * num_microbatches, dtype=np.int32)
    kind = np.where(step < num_microbatches, F, B)
    shape = (num_stages, 2 * num_microbatches)
    return _one_stage_a_rank(np.broadcast_to(kind, shape), np.broadcast_to(step % num_microbatches, shape))


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Plan 1F1B: a rank warms up, then alternates one forward and one backward, then drains.

    Rank r warms up with min(m, p - 1 - r) forward passes; any m will do, m < p too.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1, without interleaving.
    """
    _require_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    step = np.arange(2 * num_microbatches, dtype=np.int32)[None]
    warm = np.minimum(num_stages - 1 - np.arange(num_stages, dtype=np.int32), num_microbatches)[:, None]
    steady = step - warm  # steps since the warm-up ended: even ones are forward passes, odd ones backward
    drain = step >= 2 * num_microbatches - warm
    kind = np.where(((steady >= 0) & (steady % 2 == 1)) | drain, B, F)
    paired = steady // 2 + np.where(kind == F, warm, 0)  # the k-th pair runs F of warm + k, then B of k
    microbatch = np.where(steady < 0, step, np.where(drain, step - num_microbatches, paired))
    return _one_stage_a_rank(kind, microbatch)


def add_communication(schedule: Schedule) -> Schedule:
    """Derive the sends and receives of a schedule of computations.

    A send follows the action that makes its message. A receive stands right before the action that needs it, or earlier
    where the messages between two ranks would otherwise overtake each other: they arrive first in, first out. Stages
    that share a rank hand over in memory.

    Raises:
        ScheduleError: the schedule is not valid, so that a message would have no sender or no receiver.
        ValueError: the schedule has sends or receives already.
    """
    if schedule.has_communication:
        raise ValueError("the schedule already has sends and receives; pass the schedule of computations alone")
    validate(schedule, forward_only=not np.isin(schedule.kind, (B, I)).any())
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


def _one_stage_a_rank(kind: NDArray[np.generic], microbatch: NDArray[np.generic]) -> Schedule:
    num_stages, length = kind.shape
    stage = np.broadcast_to(np.arange(num_stages, dtype=np.int32)[:, None], (num_stages, length))
    return Schedule.from_columns(stage=stage, kind=kind, microbatch=microbatch, lengths=[length] * num_stages)


def _require_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"{name} is {count!r}; pass a whole number of at least 1")
