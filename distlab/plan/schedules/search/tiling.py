"""Tiling: plan a few micro-batches, find the part of each rank's order that repeats, and repeat it for all the others.

In its steady state a rank repeats one F, one I and one W, in some order; where memory is short, something longer with
as many of each. What is followed by the same once more can be put in as often as wanted: the rank's lead, debt and
memory are the same after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import F, I, Schedule, W
from distlab.plan.schedules.search.rules import Draft, PassCosts

Kinds = NDArray[np.int8]


class Steady(NamedTuple):
    """Where a draft repeats.

    Attributes:
        period: micro-batches after which it does.
        cut: for each rank, the place before the 3 x period actions to repeat.
        cycle: time that they take, on the slowest rank.
    """

    period: int
    cut: NDArray[np.int64]
    cycle: float


def find_steady(draft: Draft, longest_period: int) -> Iterator[Steady]:
    """Find the periods that every rank keeps to for a while, the shortest first.

    Each rank is cut as near as can be to the same moment, since what ranks do at one moment fits together.
    """
    kinds, ends = np.array(draft.kinds, np.int8), np.array(draft.input_ends)  # [p, 3 m] and [p, m]
    length, rows = kinds.shape[1], np.arange(len(kinds))
    num_f, num_i = (np.pad(np.cumsum(kinds == kind, axis=1, dtype=np.int32), ((0, 0), (1, 0))) for kind in (F, I))
    done = (ends <= draft.end // 2).sum(axis=1)  # each rank's I at half-time, and its place then
    halfway = (num_i[:, 1:] < done[:, None]).sum(axis=1)
    distance = np.abs(np.arange(length) - halfway[:, None])
    for period in range(1, min(longest_period, length // 9) + 1):
        width = 3 * period
        # Places at which two periods have ended that are like what follows, with one F, I and W a micro-batch.
        repeats = _run_lengths(kinds[:, :-width] == kinds[:, width:])[:, width - 1 :] >= 2 * width
        for count in (num_f, num_i):
            repeats &= count[:, width:-width] - count[:, : -2 * width] == period
        if repeats.any(axis=1).all():
            cut = np.where(repeats, distance[:, : repeats.shape[1]], length).argmin(axis=1)
            first = num_i[rows, cut]
            yield Steady(period, cut, float((ends[rows, first + period] - ends[rows, first]).max()))


def _run_lengths(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count, for each place in a row, the true ones in a row that end there."""
    index = np.arange(flags.shape[1])
    return index - np.maximum.accumulate(np.where(flags, -1, index), axis=1)


def tile(draft: Draft, steady: Steady, num_copies: int) -> Kinds:
    """Return the kinds of the draft with the steady part of each rank that many times more."""
    width, rows = 3 * steady.period, []
    for row, cut in zip(np.array(draft.kinds, np.int8), steady.cut.tolist(), strict=True):
        rows.append(np.concatenate([row[:cut], np.tile(row[cut : cut + width], num_copies), row[cut:]]))
    return np.stack(rows)


def can_run(kinds: Kinds) -> bool:
    """Say whether ranks with this order never wait for each other in a circle.

    They do not where, for every j, each rank has run at least as many F before I j as the rank behind it. For then this
    runs: for j = 0, 1, ..., from the first rank to the last all F that come before I j, then I j from the last rank to
    the first. Where a rank has run fewer, the two wait for each other.
    """
    num_ranks, length = kinds.shape
    before = np.cumsum(kinds == F, axis=1, dtype=np.int32)[kinds == I].reshape(num_ranks, length // 3)
    own = before[-1] > np.arange(length // 3)
    return bool(own.all() and (before[1:] <= before[:-1]).all())


def span_and_end(kinds: Kinds, costs: PassCosts) -> tuple[int, int]:
    """Return the longest time from a rank's first start to its last end, and when the last rank ends.

    The cost of a tiled schedule is first guessed from its draft; before one is chosen, this runs it. In the order that
    `can_run` shows to be possible: for each micro-batch j, from the first rank to the last all that comes before I j,
    then I j from the last rank to the first.
    """
    num_ranks, length = kinds.shape
    last, rows = num_ranks - 1, [iter(row) for row in kinds.tolist()]
    clock, start = [0] * num_ranks, [-1] * num_ranks
    inputs: list[list[int]] = [[0] * (length // 3)] + [[] for _ in range(num_ranks)]  # when each arrives at each rank
    num_f, num_w = [0] * num_ranks, [0] * num_ranks
    for _microbatch in range(length // 3):
        for rank in range(num_ranks):
            now = clock[rank]
            for kind in rows[rank]:
                if kind == I:
                    break
                if kind == W:
                    now += costs.weight_gradient[rank]
                    num_w[rank] += 1
                    continue
                assert kind == F
                begin = max(now, inputs[rank][num_f[rank]])
                if start[rank] < 0:
                    start[rank] = begin
                now = begin + costs.forward[rank]
                num_f[rank] += 1
                inputs[rank + 1].append(now + costs.communication[rank])
            clock[rank] = now
        gradient = 0
        for rank in range(last, -1, -1):
            clock[rank] = max(clock[rank], gradient) + costs.input_gradient[rank]
            gradient = clock[rank] + costs.communication[rank]
    for rank, done in enumerate(num_w):
        clock[rank] += (length // 3 - done) * costs.weight_gradient[rank]
    return max(end - begin for begin, end in zip(start, clock, strict=True)), max(clock)


def schedule_of(kinds: Kinds) -> Schedule:
    """Number the micro-batches of each kind in order, one stage per rank."""
    num_ranks, length = kinds.shape
    microbatch = np.empty(kinds.shape, np.int32)
    for kind in (F, I, W):
        microbatch[kinds == kind] = np.tile(np.arange(length // 3, dtype=np.int32), num_ranks)
    stage = np.repeat(np.arange(num_ranks, dtype=np.int32), length)
    return Schedule.from_columns(stage=stage, kind=kinds, microbatch=microbatch, lengths=[length] * num_ranks)
