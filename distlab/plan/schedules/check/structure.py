"""The parts of `validate` that need no clock: what a schedule must hold, where, and in which order on a rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.check.fault import ScheduleError
from distlab.plan.schedules.check.messages import ScheduleMessages
from distlab.plan.schedules.grammar import KINDS, RECV_B, RECV_F, SEND_B, SEND_F, Action, B, F, I, Schedule, W

Rows = NDArray[np.int64]


def _key(schedule: Schedule) -> Rows:
    """Number (stage, micro-batch) pairs: stage x micro-batches + micro-batch."""
    return schedule.stage.astype(np.int64) * schedule.num_microbatches + schedule.microbatch


def _action(schedule: Schedule, key: int, kind: int) -> Action:
    stage, microbatch = divmod(int(key), schedule.num_microbatches)
    return Action(stage, KINDS[kind], microbatch)


def _check_no_repeat(schedule: Schedule, kinds: tuple[int, ...], advice: str) -> None:
    rows = np.flatnonzero(np.isin(schedule.kind, kinds))
    key = _key(schedule)[rows]
    order = np.argsort(key, kind="stable")
    repeats = np.flatnonzero(key[order][1:] == key[order][:-1])
    if repeats.size:
        first, again = rows[order[repeats[0]]], rows[order[repeats[0] + 1]]
        letters = " or ".join(KINDS[kind] for kind in kinds)
        stage, microbatch = schedule.stage[again], schedule.microbatch[again]
        raise ScheduleError(
            schedule,
            int(again),
            expected=f"{letters} of stage {stage}, micro-batch {microbatch} once",
            got=f"{schedule.action(int(first))} at step {schedule.step[first]} and this at step {schedule.step[again]}",
            advice=advice,
        )


def check_forward_once(schedule: Schedule) -> None:
    """Check that every stage runs the forward pass of every micro-batch once."""
    _check_no_repeat(schedule, (F,), "remove one of the two")
    keys = np.unique(_key(schedule)[schedule.kind == F])
    total = schedule.num_stages * schedule.num_microbatches
    if keys.size < total:  # the first gap in 0, 1, 2, ...
        gap = int(np.searchsorted(keys - np.arange(keys.size), 0, side="right"))
        raise ScheduleError(
            schedule,
            _action(schedule, gap, F),
            expected=f"every forward pass of {schedule.num_stages} stages x {schedule.num_microbatches} micro-batches",
            got="none of it in the schedule",
            advice="add it, or number stages and micro-batches from 0 without gaps",
        )


def check_backward_once(schedule: Schedule, forward_only: bool) -> None:
    """Check that every forward pass has one backward pass, as a B or as an I and a W; or none at all."""
    key, kind = _key(schedule), schedule.kind
    stray = np.flatnonzero(np.isin(kind, (B, I, W)))
    if forward_only and stray.size:
        raise ScheduleError(
            schedule,
            int(stray[0]),
            expected="forward passes only",
            got="a backward pass",
            advice="call without forward_only",
        )
    if forward_only:
        return
    _check_no_repeat(schedule, (B, I), "B is I and W in one: keep one B, or one I and one W")
    _check_no_repeat(schedule, (W,), "remove one of the two")
    total = schedule.num_stages * schedule.num_microbatches
    has = {code: np.bincount(key[kind == code], minlength=total) > 0 for code in (B, I, W)}
    unwanted = np.flatnonzero((kind == W) & has[B][key])
    if unwanted.size:
        row = int(unwanted[0])
        raise ScheduleError(
            schedule,
            row,
            expected=f"no W next to {_action(schedule, key[row], B)}, which computes the weight gradient too",
            got="both",
            advice="remove the W, or make the B an I",
        )
    for code, missing in ((B, ~has[B] & ~has[I]), (W, has[I] & ~has[W])):
        if missing.any():
            backward = "a backward pass, as one B or as I and W, for every forward pass"
            raise ScheduleError(
                schedule,
                _action(schedule, int(np.flatnonzero(missing)[0]), code),
                expected=backward if code == B else "a W for every I: together they are the backward pass",
                got="none of it in the schedule",
                advice="add it" if code == W else "add it, or say forward_only=True where nothing is trained",
            )


def check_messages_once(schedule: Schedule, messages: ScheduleMessages) -> None:
    """Check that the sends and the receives are exactly those that the computations imply."""
    key, total = _key(schedule), schedule.num_stages * schedule.num_microbatches
    ups, downs = messages.crosses & messages.is_forward, messages.crosses & ~messages.is_forward
    ends = {SEND_F: messages.producer[ups], RECV_F: messages.consumer[ups]}
    ends |= {SEND_B: messages.producer[downs], RECV_B: messages.consumer[downs]}
    for code, rows in ends.items():
        _check_no_repeat(schedule, (code,), "remove one of the two")
        wanted = np.bincount(key[rows], minlength=total) > 0
        found = np.bincount(key[schedule.kind == code], minlength=total) > 0
        extra = np.flatnonzero((schedule.kind == code) & ~wanted[key])
        if extra.size:
            raise ScheduleError(
                schedule,
                int(extra[0]),
                expected=f"{KINDS[code]} between stages that are neighbours and live on different ranks",
                got="one with no stage at its other end, or with both ends on one rank",
                advice="remove it",
            )
        missing = np.flatnonzero(wanted & ~found)
        if missing.size:
            raise ScheduleError(
                schedule,
                _action(schedule, int(missing[0]), code),
                expected="a send and a receive for every message between ranks",
                got="none of it in the schedule",
                advice="add it, or let add_communication derive all sends and receives",
            )


def check_order(schedule: Schedule, messages: ScheduleMessages) -> None:
    """Check what must come first on one and the same rank, and that no message overtakes an earlier one."""
    key, kind = _key(schedule), schedule.kind
    row_of = np.full((len(KINDS), schedule.num_stages * schedule.num_microbatches), -1, np.int64)
    row_of[kind, key] = np.arange(len(schedule))
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
        raise ScheduleError(
            schedule,
            row,
            expected=f"{needed} before it",
            got=f"{needed} at step {schedule.step[before[early]]}",
            advice=f"move {needed} to before step {schedule.step[row]}",
        )
