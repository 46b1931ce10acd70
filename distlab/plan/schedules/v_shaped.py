"""Two stages per rank, laid out as a V: down the ranks and up again. Stage s and stage 2p - 1 - s are on rank s.

The first rank has the last stage too: a micro-batch's backward pass starts where its forward pass began, and nothing
waits for the far end of the pipeline. Every rank holds about the same at its peak. A stage is half of what it is with
one stage per rank: "p half-stages" is as much memory as p / 2 micro-batches of 1F1B.

zb_v and dualpipe_v are told step by step (`Row`), the way papers tell it: "n times: a forward of this half, a backward
of that".

v_half and v_min repeat one pattern: the time from a forward pass to its backward pass is the memory it costs. Where F,
I and W take one slot each, a rank with two half-stages starts a micro-batch every 6 slots. A micro-batch that is held
for n slots then costs n / 6 of a half-stage. Down the V and up again, forward and then backward, its passes can move on
by one slot per rank, or by more: 1 + 1 + 1 + 1 slots per rank make V-Min, 2 + 1 + 2 + 1 V-Half.

The price is a bubble. With F = I = W the authors state about two thirds of 1F1B's 6 (p - 1) slots for V-Min, half of it
for V-Half. Simulated, the pattern alone leaves 4 p - 5 slots in V-Min and 3.25 p - 2 in V-Half (4, 8, 16 and 32 ranks).
So V-Min has the stated bubble as it is. V-Half lacks p / 4 slots of it: the authors' code goes over the warm-up and the
drain once more, to fill gaps, which is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from distlab.plan.require import require_count
from distlab.plan.schedules.grammar import KINDS, F, I, Schedule, W
from distlab.plan.schedules.turns import Ints

BEAT = 6
HALF = np.array([0, 1, 1, 0, 1, 0], np.int32)  # of the six actions that a rank runs of a micro-batch, in this order
KIND = np.array([F, F, I, I, W, W], np.int32)
OLDEST = -1


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan ZB-V: no bubble where F = I = W, with the memory of 1F1B's first rank (2p half-stages) on every rank.

    The pattern needs 2p - 1 micro-batches; with fewer, those that are not there are left out of it.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 6, in the order of torch's ScheduleZBVZeroBubble.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    count = max(num_microbatches, 2 * num_ranks - 1)
    rows = [_zb_v_row(num_ranks, rank, count) for rank in range(num_ranks)]
    return _join_rows(rows, num_microbatches)


def _zb_v_row(num_ranks: int, rank: int, count: int) -> Ints:
    to_the_end = num_ranks - rank  # ranks from here to the point of the V, this one included
    row = Row()
    row.add(2 * to_the_end - 1, "0F")  # until the first micro-batch comes back up
    row.add(rank, "1F 0F")
    row.add(to_the_end, "1F 1I 1W")
    left = count - (2 * to_the_end - 1) - rank  # forward passes of half 0
    row.add(left, "0F 0I 0W 1F 1I 1W")
    row.add(count - num_ranks - left, "0I 0W 1F 1I 1W")
    row.add(rank, "0I 1I")  # the W wait, so that the ranks above get their gradients at once
    row.add(to_the_end, "0I 0W")
    row.add(rank, "1W")
    row.add(rank, "0W")
    return row.columns()


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan DualPipeV: DualPipe cut in half, so that one copy of the model is enough.

    In the steady state a forward of one half meets a backward of the other; on GPUs the two may run interleaved, each
    hiding the communication of the other. The pattern needs 2p micro-batches; with fewer, those that are not there are
    left out of it.

    Source: the order that DeepSeek published with DualPipe (github.com/deepseek-ai/DualPipe, after arXiv:2412.19437),
        and that of torch's ScheduleDualPipeV; the "cut in half" is Sea AI Lab's.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    count = max(num_microbatches, 2 * num_ranks)
    rows = [_dualpipe_row(num_ranks, rank, count) for rank in range(num_ranks)]
    return _join_rows(rows, num_microbatches)


def _dualpipe_row(num_ranks: int, rank: int, count: int) -> Ints:
    """Order a rank's actions: micro-batches come by as half 0, from the near end, and as half 1, from the far one."""
    behind = num_ranks - 1 - rank
    row = Row()
    row.add(2 * behind, "0F")
    row.add(rank + 1, "0F 1F")
    row.add(behind, "1I W 1F")
    row.add(count - 2 * num_ranks + rank + 1, "0F 1B 1F 0B")  # the steady state
    row.add(behind, "1B 1F 0B")
    # The rest has no forward passes to hide: from its middle on, the backward passes are split.
    whole = rank + 1
    row.add(whole // 2, "1B 0B")
    if whole % 2:
        row.add(1, "1B 0I")
    row.add(whole // 2, "1I 0I")
    row.add(behind, "W 0I")
    row.add(whole, "W")
    return row.columns()


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan V-Half: about half the memory of 1F1B's first rank, p half-stages and a few, on every rank.

    Source: Qi et al. 2024 (arXiv:2405.15362), V-Half; see this module for what differs.
    """
    return _repeat(num_ranks, num_microbatches, hops=(2, 1, 2, 1))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan V-Min: about a third of the memory of 1F1B's first rank, 2p / 3 half-stages and a few, on every rank.

    Passes follow each other without slack: where F, I and W take different times, ranks wait in the steady state too.

    Source: Qi et al. 2024 (arXiv:2405.15362), V-Min; see this module for what differs.
    """
    return _repeat(num_ranks, num_microbatches, hops=(1, 1, 1, 1))


def _repeat(num_ranks: int, num_microbatches: int, hops: tuple[int, int, int, int]) -> Schedule:
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    slots = _block(num_ranks, hops)  # [rank, action of the block]
    microbatch = np.repeat(np.arange(num_microbatches, dtype=np.int32), BEAT)
    half, kind = np.tile(HALF, num_microbatches), np.tile(KIND, num_microbatches)
    rows = []
    for slot in slots:
        order = np.argsort(np.add.outer(BEAT * np.arange(num_microbatches), slot).reshape(-1), kind="stable")
        rows.append(np.stack([half[order], kind[order], microbatch[order]], axis=1))
    return _join_rows(rows, num_microbatches)


def _block(num_ranks: int, hops: tuple[int, int, int, int]) -> NDArray[np.int64]:
    """Give each rank's six actions of micro-batch 0 their slots, such that no two ever want the same one.

    The passes wait at the three turns of the V, as little as can be; W take the slots that are left.
    """
    rank = np.arange(num_ranks)
    behind = num_ranks - 1 - rank
    shortest = sorted(product(range(1, BEAT + 1), repeat=3), key=sum)
    for turns in shortest:
        down = hops[0] * rank
        up = down[-1] + turns[0] + hops[1] * behind
        gradient_down = up[0] + turns[1] + hops[2] * rank
        gradient_up = gradient_down[-1] + turns[2] + hops[3] * behind
        passes = np.stack([down, up, gradient_down, gradient_up], axis=1)
        beats = np.sort(passes % BEAT, axis=1)
        if (beats[:, 1:] != beats[:, :-1]).all():
            return np.concatenate([passes, [_weight_slots(slots) for slots in passes]], axis=1)
    raise AssertionError(f"no pattern of {hops} slots per rank fits {num_ranks} ranks")


def _weight_slots(passes: NDArray[np.int64]) -> list[int]:
    """Find the first free slots after the two I of a rank."""
    free = set(range(BEAT)) - set((passes % BEAT).tolist())
    slots = []
    for gradient in passes[2:].tolist():
        slot = next(slot for slot in range(gradient + 1, gradient + BEAT + 1) if slot % BEAT in free)
        free.remove(slot % BEAT)
        slots.append(slot)
    return slots


class Row:
    """The growing order of a rank with two halves, 0 and 1: parts of the model.

    `row.add(3, "0F 1F")` appends 0F 1F 0F 1F 0F 1F. Each half and kind goes through the micro-batches in order; a B
    counts as an I and a W. A "W" without a half is the weight gradient of the oldest I whose W has not come yet; a row
    that has one must write all its W in this way.
    """

    def __init__(self) -> None:
        self._next = {(half, kind): 0 for half in (0, 1) for kind in "FIW"}  # micro-batch of the next action
        self._parts: list[Ints] = [np.empty((0, 3), np.int32)]

    def add(self, times: int, actions: str) -> None:
        """Append the actions, in their order, as often as told."""
        if times <= 0:
            return
        names = actions.split()
        part = np.full((times, len(names), 3), OLDEST, np.int32)
        for place, name in enumerate(names):
            part[:, place, 1] = KINDS.index(name[-1])
            if name != "W":
                part[:, place, 0] = int(name[0])
                part[:, place, 2] = self._count(int(name[0]), name[1], times) + np.arange(times)
        self._parts.append(part.reshape(-1, 3))

    def _count(self, half: int, kind: str, times: int) -> int:
        """Return the next micro-batch of a half and kind, and count on."""
        first = self._next[half, "I" if kind == "B" else kind]
        for counter in "IW" if kind == "B" else kind:
            self._next[half, counter] += times
        return first

    def columns(self) -> Ints:
        """Return (half, kind, micro-batch) of each action."""
        table = np.concatenate(self._parts)
        oldest = np.flatnonzero(table[:, 0] == OLDEST)
        if oldest.size:
            table[oldest] = table[np.flatnonzero(table[:, 1] == I)]
            table[oldest, 1] = W
        return table


def _join_rows(rows: Sequence[Ints], num_microbatches: int) -> Schedule:
    """Put the ranks' rows together, without the micro-batches that were only there to fill the pattern.

    Args:
        rows: (half, kind, micro-batch) of each rank's actions; half 0 is on the way down the ranks, 1 on the way up.
        num_microbatches: micro-batches to keep: the first ones.
    """
    kept = [row if row[:, 2].max() < num_microbatches else row[row[:, 2] < num_microbatches] for row in rows]
    table, last = np.concatenate(kept), 2 * len(rows) - 1
    return Schedule.from_columns(
        stage=np.concatenate([np.where(row[:, 0] == 0, rank, last - rank) for rank, row in enumerate(kept)]),
        kind=table[:, 1],
        microbatch=table[:, 2],
        lengths=[len(row) for row in kept],
    )
