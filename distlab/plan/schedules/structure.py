"""The parts of `validate` that need no clock: what a schedule must hold, on which rank, and in which order there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.fault import ScheduleError
from distlab.plan.schedules.grammar import KINDS, RECV_B, RECV_F, SEND_B, SEND_F, Action, B, F, I, Schedule, W

Rows = NDArray[np.int64]
NONE = "none of it in the schedule"


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


def find_messages(schedule: Schedule) -> ScheduleMessages:
    """Pair the maker and the user of everything that passes between neighbouring stages.

    The schedule must run every forward pass once, and every backward pass once or none at all.
    """
    last, width, key = schedule.num_stages - 1, schedule.num_microbatches, keys_of(schedule)
    row_of, backward = rows_of(schedule), np.isin(schedule.kind, (B, I))
    hands_on = ((schedule.kind == F) & (schedule.stage < last)) | (backward & (schedule.stage > 0))
    producer = np.flatnonzero(hands_on)
    is_forward = schedule.kind[producer] == F
    there = key[producer] + np.where(is_forward, width, -width)
    consumer = np.where(is_forward, row_of[F, there], np.maximum(row_of[B, there], row_of[I, there]))
    rank = schedule.rank
    return ScheduleMessages(producer, consumer, is_forward, rank[producer] != rank[consumer])


def check_ranks_of_stages(schedule: Schedule, copies: int) -> None:
    """Check that all actions of a stage are on one rank, or on as many as there are copies of the model."""
    width = schedule.num_ranks
    places, first = np.unique(schedule.stage.astype(np.int64) * width + schedule.rank, return_index=True)
    stage, rank = places // width, places % width
    many = np.flatnonzero(np.bincount(np.unique(stage, return_inverse=True)[1]) > copies)
    if not many.size:
        return
    mine = np.flatnonzero(stage == np.unique(stage)[many[0]])
    mine = mine[np.argsort(first[mine])]  # the ranks of the stage, in the order in which the schedule names them
    row, homes = int(first[mine[copies]]), rank[mine[:copies]].tolist()
    if copies == 1:
        expected, got = "on one rank", f"some on rank {homes[0]} and some on rank {schedule.rank[row]}"
    else:
        expected, got = f"on {copies} ranks, one for each copy", f"some on rank {schedule.rank[row]} too"
    expected = f"all actions of stage {schedule.stage[row]} {expected}"
    advice = f"move this action to rank {' or '.join(map(str, homes))}"
    raise ScheduleError(schedule, row, expected=expected, got=got, advice=advice)


def check_copies(schedule: Schedule, copies: int) -> None:
    """Check that every micro-batch stays in one copy of the model, forward and backward.

    The schedule must run every forward pass once.
    """
    width, rank, key = schedule.num_microbatches, schedule.rank, keys_of(schedule)
    way = np.empty(schedule.num_stages * width, np.int64)  # rank of each stage and micro-batch
    forward = schedule.kind == F
    way[key[forward]] = rank[forward]
    strays = np.flatnonzero(way[key] != rank)
    _, first, counts = np.unique(way.reshape(-1, width), axis=1, return_index=True, return_counts=True)
    if strays.size:
        row = int(strays[0])
        home = way[key[row]]
        expected, got = f"it on rank {home}, where its forward pass ran", f"it on rank {rank[row]}"
        advice = f"move it to rank {home}: a micro-batch goes through one copy of the model"
        raise ScheduleError(schedule, row, expected=expected, got=got, advice=advice)
    if len(first) > copies:  # the ways that most micro-batches go are right
        microbatch = int(first[np.argsort(-counts, kind="stable")[copies:]].min())
        row = int(np.flatnonzero(forward & (schedule.microbatch == microbatch) & (schedule.stage == 0))[0])
        expected = f"micro-batch {microbatch} on the ranks of one copy of the model, of which there are {copies}"
        got = f"its stages on ranks {', '.join(map(str, way.reshape(-1, width)[:, microbatch]))}"
        raise ScheduleError(schedule, row, expected=expected, got=got, advice="move it through one copy, as the others")


def check_forward_once(schedule: Schedule) -> None:
    """Check that every stage runs the forward pass of every micro-batch once."""
    _check_no_repeat(schedule, (F,), "remove one of the two")
    keys = np.unique(keys_of(schedule)[schedule.kind == F])
    if keys.size < schedule.num_stages * schedule.num_microbatches:  # the first gap in 0, 1, 2, ...
        gap = np.searchsorted(keys - np.arange(keys.size), 0, side="right")
        expected = f"every forward pass of {schedule.num_stages} stages x {schedule.num_microbatches} micro-batches"
        advice = "add it, or number stages and micro-batches from 0 without gaps"
        raise ScheduleError(schedule, _action(schedule, gap, F), expected=expected, got=NONE, advice=advice)


def check_backward_once(schedule: Schedule, forward_only: bool) -> None:
    """Check that every forward pass has one backward pass, as a B or as an I and a W; or none at all."""
    key, kind = keys_of(schedule), schedule.kind
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


def check_messages_once(schedule: Schedule, messages: ScheduleMessages) -> None:
    """Check that the sends and the receives are exactly those that the computations imply."""
    key = keys_of(schedule)
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


def check_order(schedule: Schedule, messages: ScheduleMessages) -> None:
    """Check what must come first on one and the same rank, and that no message overtakes an earlier one."""
    row_of = rows_of(schedule)
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


def keys_of(schedule: Schedule) -> Rows:
    """Number (stage, micro-batch) pairs: stage x micro-batches + micro-batch."""
    return schedule.stage.astype(np.int64) * schedule.num_microbatches + schedule.microbatch


def rows_of(schedule: Schedule) -> Rows:
    """Return the row of each kind of each (stage, micro-batch) pair, -1 for none [kinds, pairs]."""
    row_of = np.full((len(KINDS), schedule.num_stages * schedule.num_microbatches), -1, np.int64)
    row_of[schedule.kind, keys_of(schedule)] = np.arange(len(schedule))
    return row_of


def _has(schedule: Schedule, keys: Rows) -> NDArray[np.bool_]:
    """Say of each (stage, micro-batch) pair whether it is among the keys."""
    return np.bincount(keys, minlength=schedule.num_stages * schedule.num_microbatches) > 0


def _action(schedule: Schedule, key: np.integer, kind: int) -> Action:
    stage, microbatch = divmod(int(key), schedule.num_microbatches)
    return Action(stage, KINDS[kind], microbatch)


def _check_no_repeat(schedule: Schedule, kinds: tuple[int, ...], advice: str) -> None:
    rows = np.flatnonzero(np.isin(schedule.kind, kinds))
    key = keys_of(schedule)[rows]
    order = np.argsort(key, kind="stable")
    repeats = np.flatnonzero(key[order][1:] == key[order][:-1])
    if repeats.size:
        first, again = rows[order[repeats[0]]], rows[order[repeats[0] + 1]]
        stage, microbatch = schedule.stage[again], schedule.microbatch[again]
        expected = f"{' or '.join(KINDS[kind] for kind in kinds)} of stage {stage}, micro-batch {microbatch} once"
        got = f"{schedule.action(int(first))} at step {schedule.step[first]} and this at step {schedule.step[again]}"
        raise ScheduleError(schedule, int(again), expected=expected, got=got, advice=advice)
