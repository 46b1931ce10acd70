"""Is a pipeline schedule right? Order, every micro-batch once, no deadlock, and how much a rank holds at its peak.

Plans assume that sends are buffered (a send never waits), that messages between two ranks arrive first in, first out,
and that a receive blocks until its message is there. In a schedule of computations alone, an action waits for the
action of the neighbouring stage that it needs. What is valid implies its sends and receives: `add_communication`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.fault import ScheduleError
from distlab.plan.schedules.grammar import KINDS, RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, Schedule, W
from distlab.plan.schedules.structure import (
    Rows,
    ScheduleMessages,
    check_backward_once,
    check_copies,
    check_forward_once,
    check_messages_once,
    check_order,
    check_ranks_of_stages,
    find_messages,
    keys_of,
    rows_of,
)


@dataclass(frozen=True)
class ScheduleReport:
    """What `validate` found out about a schedule that is right.

    Attributes:
        peak_in_flight: for each rank, the most micro-batches (once per stage) whose activations it holds at once:
            forward passes run, less those that a B has freed, or a W where the backward pass is split. An I frees none.
        peak_waiting: for each rank, the most W (counted once per stage) whose I has run: inputs and output gradients of
            layers that are kept for the weight gradients alone.
        longest_chain: actions on the longest chain of dependencies: slots of the step if every action took one.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_actions: int
    peak_in_flight: tuple[int, ...]
    peak_waiting: tuple[int, ...]
    longest_chain: int

    def __str__(self) -> str:
        waiting = f"; W waiting {', '.join(map(str, self.peak_waiting))}" if any(self.peak_waiting) else ""
        return (
            f"valid: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{self.num_actions} actions; longest chain {self.longest_chain} actions; "
            f"peak in flight {', '.join(map(str, self.peak_in_flight))} (freed by B or W){waiting}"
        )


def validate(schedule: Schedule, *, forward_only: bool = False, copies: int = 1) -> ScheduleReport:
    """Check that a schedule runs and computes the right thing; sends and receives are checked where it has them.

    Args:
        schedule: what each rank runs.
        forward_only: the schedule must have no backward pass (inference); without, it must have all of them, each as
            one B or as an I and a W.
        copies: of the model: a stage may be on so many ranks, and a micro-batch stays in one copy. DualPipe has 2.

    Raises:
        ScheduleError: the first fault found: a stage on two ranks, something missing or run twice, an order that breaks
            a dependency, messages that overtake each other, a deadlock.
    """
    if not len(schedule):
        raise ValueError("the schedule has no action; give every stage its forward and backward passes")
    check_ranks_of_stages(schedule, copies)
    check_forward_once(schedule)
    check_backward_once(schedule, forward_only)
    if copies > 1:
        check_copies(schedule, copies)
    messages = find_messages(schedule)
    if schedule.has_communication:
        check_messages_once(schedule, messages)
    check_order(schedule, messages)
    need = _needs(schedule, messages)
    sizes = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, len(schedule))
    peaks = (_peaks(schedule, (F,), (B, W)), _peaks(schedule, (I,), (W,)))
    return ScheduleReport(*sizes, *peaks, _longest_chain(schedule, need))


def _peaks(schedule: Schedule, takes: tuple[int, ...], frees: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for each rank, the most that it holds at once if some kinds of action take one and others free one."""
    change = np.zeros(len(KINDS), np.int64)
    change[list(takes)], change[list(frees)] = 1, -1
    held = np.cumsum(change[schedule.kind])
    bounds = zip(schedule.offsets[:-1].tolist(), schedule.offsets[1:].tolist(), strict=True)
    before = np.concatenate([[0], held])  # what all ranks above hold is taken off again
    return tuple(int(held[start:stop].max(initial=before[start]) - before[start]) for start, stop in bounds)


def _needs(schedule: Schedule, messages: ScheduleMessages) -> Rows:
    """Find, for each row, the row on a different rank that it waits for, or -1."""
    need = np.full(len(schedule), -1, np.int64)
    if not schedule.has_communication:
        need[messages.consumer[messages.crosses]] = messages.producer[messages.crosses]
        return need
    row_of, key, up = rows_of(schedule), keys_of(schedule), messages.is_forward[messages.crosses]
    sends = row_of[np.where(up, SEND_F, SEND_B), key[messages.producer[messages.crosses]]]
    receives = row_of[np.where(up, RECV_F, RECV_B), key[messages.consumer[messages.crosses]]]
    pair = schedule.rank[sends] * schedule.num_ranks + schedule.rank[receives]
    sent, received = np.lexsort((sends, pair)), np.lexsort((receives, pair))  # pair by pair, in the order of either end
    wrong = np.flatnonzero(sent != received)
    if wrong.size:
        row, first = int(receives[received[wrong[0]]]), int(sends[sent[wrong[0]]])
        expected = f"to receive {schedule.action(first)}, the next message that rank {schedule.rank[first]} sends"
        advice = "messages between two ranks arrive in the order of their sends: receive in that order"
        raise ScheduleError(schedule, row, expected=expected, got=str(schedule.action(row)), advice=advice)
    need[receives] = sends
    return need


def _longest_chain(schedule: Schedule, need: Rows) -> int:
    """Slot by slot, let every rank run its next action if its inputs are there; return the number of slots.

    Raises:
        ScheduleError: deadlock, with who waits for whom.
    """
    done = np.zeros(len(schedule) + 1, np.bool_)
    done[-1] = True  # what an action without a need reads: row -1
    need = np.append(need, -1)
    place, stop, slots = schedule.offsets[:-1].copy(), schedule.offsets[1:], 0
    while (left := place < stop).any():
        ready = done[need[place]] & left
        if not ready.any():
            raise _deadlock(schedule, need, place, left)
        done[place[ready]] = True
        place += ready
        slots += 1
    return slots


def _deadlock(schedule: Schedule, need: Rows, place: Rows, left: NDArray[np.bool_]) -> ScheduleError:
    """Follow who waits for whom until a rank comes up again: that circle is the deadlock."""
    rank, path = int(np.flatnonzero(left)[0]), []
    while rank not in path:
        path.append(rank)
        rank = int(schedule.rank[need[place[rank]]])
    circle = path[path.index(rank) :]
    waits = []
    for rank in circle[:6]:
        stuck, wanted = int(place[rank]), int(need[place[rank]])
        waits.append(
            f"rank {rank} waits at step {schedule.step[stuck]} ({schedule.action(stuck)}) "
            f"for {schedule.action(wanted)}, which is step {schedule.step[wanted]} of rank {schedule.rank[wanted]}"
        )
    more = f"; and {len(circle) - 6} more ranks in the circle" if len(circle) > 6 else ""
    stuck, wanted = int(place[circle[0]]), int(need[place[circle[0]]])
    blocker = int(place[schedule.rank[wanted]])
    return ScheduleError(
        schedule,
        stuck,
        expected=f"{schedule.action(wanted)} to happen",
        got="a deadlock: " + "; ".join(waits) + more,
        advice=f"break the circle, for instance let rank {schedule.rank[wanted]} run {schedule.action(wanted)} "
        f"before {schedule.action(blocker)}",
    )


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


def _receive_places(schedule: Schedule, producer: Rows, consumer: Rows) -> Rows:
    """Find the row before which each message is received: the latest that keeps the messages of a pair in order."""
    pair = schedule.rank[producer] * schedule.num_ranks + schedule.rank[consumer]
    order = np.lexsort((producer, pair))[::-1]  # pair by pair, from the last message sent to the first
    group = np.unique(pair[order], return_inverse=True)[1].astype(np.int64)
    room = len(schedule) + 1
    lowered = consumer[order] + group * room  # a running minimum in groups: lower groups follow, and lie below
    before = np.empty_like(consumer)
    before[order] = np.minimum.accumulate(lowered) - group * room
    return before
