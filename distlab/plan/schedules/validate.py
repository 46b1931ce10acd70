"""Is a pipeline schedule right? Order, every micro-batch once, no deadlock, and how much a rank holds at its peak.

Plans assume that sends are buffered (a send never waits), that messages between two ranks arrive first in, first out,
and that a receive blocks until its message is there. In a schedule of computations alone, an action waits for the
action of the neighbouring stage that it needs. What is valid implies its sends and receives: `add_communication`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import KINDS, RECV_B, RECV_F, SEND_B, SEND_F, Action, B, F, I, Schedule, W

Rows = NDArray[np.int64]
NONE = "none of it in the schedule"


@dataclass(frozen=True)
class ScheduleReport:
    """What `validate` found out about a schedule that is right.

    Attributes:
        peak_in_flight: for each rank, the most micro-batches (once per stage) whose activations it holds at once:
            forward passes run, less those that a B has freed, or a W where the backward pass is split. An I frees none.
        longest_chain: actions on the longest chain of dependencies: slots of the step if every action took one.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_actions: int
    peak_in_flight: tuple[int, ...]
    longest_chain: int

    def __str__(self) -> str:
        return (
            f"valid: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{self.num_actions} actions; longest chain {self.longest_chain} actions; "
            f"peak in flight {', '.join(map(str, self.peak_in_flight))} (freed by B or W)"
        )


def validate(schedule: Schedule, *, forward_only: bool = False) -> ScheduleReport:
    """Check that a schedule runs and computes the right thing; sends and receives are checked where it has them.

    Args:
        schedule: what each rank runs.
        forward_only: the schedule must have no backward pass (inference); without, it must have all of them, each as
            one B or as an I and a W.

    Raises:
        ValueError: a rank without an action.
        ScheduleError: the first fault found: a stage on two ranks, something missing or run twice, an order that breaks
            a dependency, messages that overtake each other, a deadlock.
    """
    if (idle := np.flatnonzero(np.diff(schedule.offsets) == 0)).size:
        raise ValueError(f"rank {idle[0]} has no action in the schedule; give it a stage's passes, or leave it out")
    _check_ranks_of_stages(schedule)
    _check_forward_once(schedule)
    _check_backward_once(schedule, forward_only)
    messages = _find_messages(schedule)
    if schedule.has_communication:
        _check_messages_once(schedule, messages)
    _check_order(schedule, messages)
    sizes = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, len(schedule))
    return ScheduleReport(*sizes, _peaks(schedule), int(_slots(schedule, _needs(schedule, messages)).max()) + 1)


def slots_of(schedule: Schedule) -> Rows:
    """Return the slot in which each action runs if every one takes one: causes come before consequences.

    The schedule must be valid, as `validate` says.
    """
    return _slots(schedule, _needs(schedule, _find_messages(schedule)))


class ScheduleMessages(NamedTuple):
    """What stages hand to their neighbours: one entry per hand-over, in the order of the makers' rows.

    Attributes:
        producer: row of the action that makes it.
        consumer: row of the action that needs it.
        is_forward: an activation, on its way to the next stage; else a gradient, on its way to the previous one.
        crosses: the two stages live on different ranks, so that it must be sent.
    """

    producer: Rows
    consumer: Rows
    is_forward: NDArray[np.bool_]
    crosses: NDArray[np.bool_]


def _find_messages(schedule: Schedule) -> ScheduleMessages:
    """Pair the maker and the user of everything that passes between neighbouring stages.

    The schedule must run every forward pass once, and every backward pass once or none at all.
    """
    last, width, key = schedule.num_stages - 1, schedule.num_microbatches, _keys_of(schedule)
    row_of, backward = _rows_of(schedule), np.isin(schedule.kind, (B, I))
    hands_on = ((schedule.kind == F) & (schedule.stage < last)) | (backward & (schedule.stage > 0))
    producer = np.flatnonzero(hands_on)
    is_forward = schedule.kind[producer] == F
    there = key[producer] + np.where(is_forward, width, -width)
    consumer = np.where(is_forward, row_of[F, there], np.maximum(row_of[B, there], row_of[I, there]))
    rank = schedule.rank
    return ScheduleMessages(producer, consumer, is_forward, rank[producer] != rank[consumer])


def _check_ranks_of_stages(schedule: Schedule) -> None:
    """Check that all actions of a stage are on one rank."""
    rank, (_, first, own) = schedule.rank, np.unique(schedule.stage, return_index=True, return_inverse=True)
    home = rank[first][own]  # where the stage of each row comes first
    strays = np.flatnonzero(home != rank)
    if strays.size:
        row = int(strays[np.argmin(own[strays])])
        expected = f"all actions of stage {schedule.stage[row]} on one rank"
        got, advice = f"some on rank {home[row]} and some on rank {rank[row]}", f"move this action to rank {home[row]}"
        raise ScheduleError(schedule, row, expected=expected, got=got, advice=advice)


def _check_forward_once(schedule: Schedule) -> None:
    """Check that every stage runs the forward pass of every micro-batch once."""
    _check_no_repeat(schedule, (F,), "remove one of the two")
    keys = np.unique(_keys_of(schedule)[schedule.kind == F])
    if keys.size < schedule.num_stages * schedule.num_microbatches:  # the first gap in 0, 1, 2, ...
        gap = np.searchsorted(keys - np.arange(keys.size), 0, side="right")
        expected = f"every forward pass of {schedule.num_stages} stages x {schedule.num_microbatches} micro-batches"
        advice = "add it, or number stages and micro-batches from 0 without gaps"
        raise ScheduleError(schedule, _action(schedule, gap, F), expected=expected, got=NONE, advice=advice)


def _check_backward_once(schedule: Schedule, forward_only: bool) -> None:
    """Check that every forward pass has one backward pass, as a B or as an I and a W; or none at all."""
    key, kind = _keys_of(schedule), schedule.kind
    stray = np.flatnonzero(np.isin(kind, (B, I, W)))
    if forward_only and stray.size:
        expected, advice = "forward passes only", "call without forward_only"
        raise ScheduleError(schedule, int(stray[0]), expected=expected, got="a backward pass", advice=advice)
    if forward_only:
        return
    _check_no_repeat(schedule, (B, I), "B is I and W in one: keep one B, or one I and one W")
    _check_no_repeat(schedule, (W,), "remove one of the two")
    has = {code: _has(schedule, key[kind == code]) for code in (B, I, W)}
    unwanted = np.flatnonzero((kind == W) & has[B][key])
    if unwanted.size:
        row, advice = int(unwanted[0]), "remove the W, or make the B an I"
        expected = f"no W next to {_action(schedule, key[row], B)}, which computes the weight gradient too"
        raise ScheduleError(schedule, row, expected=expected, got="both", advice=advice)
    backward = "a backward pass, as one B or as I and W, for every forward pass"
    trained = "add it, or say forward_only=True where nothing is trained"
    both = "a W for every I: together they are the backward pass"
    for code, missing, expected, advice in (
        (B, ~has[B] & ~has[I], backward, trained),
        (W, has[I] & ~has[W], both, "add it"),
    ):
        if missing.any():
            action = _action(schedule, missing.argmax(), code)
            raise ScheduleError(schedule, action, expected=expected, got=NONE, advice=advice)


def _check_messages_once(schedule: Schedule, messages: ScheduleMessages) -> None:
    """Check that the sends and the receives are exactly those that the computations imply."""
    key = _keys_of(schedule)
    ups, downs = messages.crosses & messages.is_forward, messages.crosses & ~messages.is_forward
    ends = {SEND_F: messages.producer[ups], RECV_F: messages.consumer[ups]}
    ends |= {SEND_B: messages.producer[downs], RECV_B: messages.consumer[downs]}
    for code, rows in ends.items():
        _check_no_repeat(schedule, (code,), "remove one of the two")
        wanted, found = _has(schedule, key[rows]), _has(schedule, key[schedule.kind == code])
        extra = np.flatnonzero((schedule.kind == code) & ~wanted[key])
        if extra.size:
            expected = f"{KINDS[code]} between stages that are neighbours and live on different ranks"
            got = "one with no stage at its other end, or with both ends on one rank"
            raise ScheduleError(schedule, int(extra[0]), expected=expected, got=got, advice="remove it")
        if (missing := wanted & ~found).any():
            action = _action(schedule, missing.argmax(), code)
            expected = "a send and a receive for every message between ranks"
            advice = "add it, or let add_communication derive all sends and receives"
            raise ScheduleError(schedule, action, expected=expected, got=NONE, advice=advice)


def _check_order(schedule: Schedule, messages: ScheduleMessages) -> None:
    """Check what must come first on one and the same rank, and that no message overtakes an earlier one."""
    row_of = _rows_of(schedule)
    backward = np.maximum(row_of[B], row_of[I])
    first = [row_of[F], row_of[I], row_of[F], row_of[RECV_F], backward, row_of[RECV_B]]
    then = [backward, row_of[W], row_of[SEND_F], row_of[F], row_of[SEND_B], backward]
    first.append(messages.producer[~messages.crosses])  # stages that share a rank hand over in memory
    then.append(messages.consumer[~messages.crosses])
    before, after = np.concatenate(first), np.concatenate(then)
    wrong = np.flatnonzero((before >= 0) & (after >= 0) & (before > after))
    if wrong.size:
        early = wrong[np.argmin(schedule.step[after[wrong]])]
        row, needed = int(after[early]), schedule.action(int(before[early]))
        got = f"{needed} at step {schedule.step[before[early]]}"
        advice = f"move {needed} to before step {schedule.step[row]}"
        raise ScheduleError(schedule, row, expected=f"{needed} before it", got=got, advice=advice)


def _keys_of(schedule: Schedule) -> Rows:
    """Number (stage, micro-batch) pairs: stage x micro-batches + micro-batch."""
    return schedule.stage.astype(np.int64) * schedule.num_microbatches + schedule.microbatch


def _rows_of(schedule: Schedule) -> Rows:
    """Return the row of each kind of each (stage, micro-batch) pair, -1 for none [kinds, pairs]."""
    row_of = np.full((len(KINDS), schedule.num_stages * schedule.num_microbatches), -1, np.int64)
    row_of[schedule.kind, _keys_of(schedule)] = np.arange(len(schedule))
    return row_of


def _has(schedule: Schedule, keys: Rows) -> NDArray[np.bool_]:
    """Say of each (stage, micro-batch) pair whether it is among the keys."""
    return np.bincount(keys, minlength=schedule.num_stages * schedule.num_microbatches) > 0


def _action(schedule: Schedule, key: np.integer, kind: int) -> Action:
    stage, microbatch = divmod(int(key), schedule.num_microbatches)
    return Action(stage, KINDS[kind], microbatch)


def _check_no_repeat(schedule: Schedule, kinds: tuple[int, ...], advice: str) -> None:
    rows = np.flatnonzero(np.isin(schedule.kind, kinds))
    key = _keys_of(schedule)[rows]
    order = np.argsort(key, kind="stable")
    repeats = np.flatnonzero(key[order][1:] == key[order][:-1])
    if repeats.size:
        first, again = rows[order[repeats[0]]], rows[order[repeats[0] + 1]]
        stage, microbatch = schedule.stage[again], schedule.microbatch[again]
        expected = f"{' or '.join(KINDS[kind] for kind in kinds)} of stage {stage}, micro-batch {microbatch} once"
        got = f"{schedule.action(int(first))} at step {schedule.step[first]} and this at step {schedule.step[again]}"
        raise ScheduleError(schedule, int(again), expected=expected, got=got, advice=advice)


def _peaks(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, the most that it holds at once: an F takes one, a B or a W frees one."""
    change, first = (schedule.kind == F).astype(np.int64) - np.isin(schedule.kind, (B, W)), schedule.offsets[:-1]
    held = np.cumsum(change)
    return tuple((np.maximum.reduceat(held, first) - (held - change)[first]).tolist())  # less what ranks above hold


def _needs(schedule: Schedule, messages: ScheduleMessages) -> Rows:
    """Find, for each row, the row on a different rank that it waits for, or -1."""
    need = np.full(len(schedule), -1, np.int64)
    if not schedule.has_communication:
        need[messages.consumer[messages.crosses]] = messages.producer[messages.crosses]
        return need
    row_of, key, up = _rows_of(schedule), _keys_of(schedule), messages.is_forward[messages.crosses]
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


def _slots(schedule: Schedule, need: Rows) -> Rows:
    """Slot by slot, let every rank run its next action if its inputs are there; return the slot of each action.

    Raises:
        ScheduleError: deadlock, with who waits for whom.
    """
    slots = np.full(len(schedule) + 1, len(schedule), np.int64)  # of what has not run
    slots[-1] = -1  # what an action without a need reads: row -1
    need = np.append(need, -1)
    place, stop, slot = schedule.offsets[:-1].copy(), schedule.offsets[1:], 0
    while (left := place < stop).any():
        ready = (slots[need[place]] < slot) & left
        if not ready.any():
            raise _deadlock(schedule, need, place, left)
        slots[place[ready]] = slot
        place += ready
        slot += 1
    return slots[:-1]


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
    expected, got = f"{schedule.action(wanted)} to happen", f"a deadlock: {'; '.join(waits)}{more}"
    sooner = f"run {schedule.action(wanted)} before {schedule.action(blocker)}"
    advice = f"break the circle, for instance let rank {schedule.rank[wanted]} {sooner}"
    return ScheduleError(schedule, stuck, expected=expected, got=got, advice=advice)


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
    messages = _find_messages(schedule)
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


class ScheduleError(ValueError):
    """A schedule that cannot run, or would compute something else.

    Attributes:
        rank: rank of the fault, or None where no rank runs the stage.
        step: place in that rank's order, from 0, or None where something is missing.
        near: the step that the grid points at: `step`, or the step next to which the missing action belongs, if any.
        action: the action at fault, or the one that is missing.
        expected: what a right schedule has there.
        got: what this one has.
        advice: what to do.
        schedule: the whole schedule.
    """

    def __init__(self, schedule: Schedule, row: int | Action, *, expected: str, got: str, advice: str) -> None:
        """Describe the fault at a row of the schedule, or that of an action which is missing."""
        self.schedule, self._row = schedule, row
        self.expected, self.got, self.advice = expected, got, advice
        self.step: int | None = None
        self.rank: int | None = None
        self.near: int | None = None
        if isinstance(row, Action):
            self.action = row
            owned = np.flatnonzero(schedule.stage == row.stage)
            beside = owned[schedule.microbatch[owned] == row.microbatch]
            self.rank = int(schedule.rank[(beside if beside.size else owned)[-1]]) if owned.size else None
            self.near = int(schedule.step[beside[-1]]) if beside.size else None
        else:
            self.action = schedule.action(row)
            self.rank, self.step = int(schedule.rank[row]), int(schedule.step[row])
            self.near = self.step
        where = "no rank" if self.rank is None else f"rank {self.rank}"
        where += "" if self.step is None else f", step {self.step}"
        super().__init__(f"{where}, {self.action}: expected {expected}; got {got}; {advice}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the parts, so that the error travels from a rank to its launcher."""
        make = partial(ScheduleError, expected=self.expected, got=self.got, advice=self.advice)
        return make, (self.schedule, self._row)

    @property
    def grid(self) -> str:
        """The steps around the fault as text, with an arrow: at it, or where what is missing belongs."""
        return text_grid(self.schedule, self, context=3)


def text_grid(schedule: Schedule, fault: ScheduleError | None = None, *, context: int | None = None) -> str:
    """Print a schedule as a grid: one column per rank, one row per step, and an arrow at the row of the fault.

    A step is a place in a rank's order, not a time: ranks do not run their steps in lockstep. With `context`, only that
    many rows before and after the fault are printed.
    """
    rank, step = (None, None) if fault is None else (fault.rank, fault.near)
    missing = f"{fault.action} is missing" if fault is not None and fault.step is None else ""
    columns = [[str(action) for action in schedule.actions(r)] for r in range(schedule.num_ranks)]
    rows = [list(cells) for cells in zip_longest(*columns, fillvalue="")]
    shown = range(len(rows))
    if context is not None and step is not None:
        shown = range(max(step - context, 0), min(step + context + 1, len(rows)))
    labels = [f"step {index}" for index in shown]
    heads = [f"rank {index}" for index in range(len(columns))]
    widths = [max(len(head), *(len(rows[index][r]) for index in shown), 0) for r, head in enumerate(heads)]
    margin = max(map(len, labels), default=0)
    lines = [" " * margin + "  " + "  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))]
    for label, index in zip(labels, shown, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(rows[index], widths, strict=True))
        arrow = f"  <-- rank {rank}: {missing or rows[index][rank]}" if index == step and rank is not None else ""
        lines.append(f"{label.ljust(margin)}  {cells}{arrow}")
    return "\n".join(line.rstrip() for line in lines)
