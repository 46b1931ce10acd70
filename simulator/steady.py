"""Steady: leave most of a schedule's steady part out, run what is left, and put the rest back, exactly.

In the middle of 1F1B every rank runs F and B of one micro-batch after the other; ZB-H1 repeats F I W, interleaved 1F1B
a round of micro-batches through all of a rank's stages. With 1,024 micro-batches nine tenths of the columns of such a
schedule (a column: the k-th action of every rank) say the same again, for later micro-batches. `fold` takes whole beats
out of that part, so that the same schedule for fewer micro-batches is left. It is run like any other. If the ends of
its actions around the cut are those of some beats earlier plus one number, `unfold` puts the beats back, each later by
that number.

Why this is exact: the ends are the one solution of

    end = max(end of the rank's previous action, end of what it needs + latency) + duration

What is put together solves it. Each action has the duration of the one some beats before it, and what it needs lies as
many columns away (`fold` makes sure of both), so that both sides of the equation are later by the same number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.orders import F, Ints, Order, Rows, W

SMALL = 20_000  # actions, fewer of which are not worth it
NEAR = 8  # columns on both sides of the cut whose ends must have moved, at least: a need may lie as far away
SETTLING = 3  # columns a rank until the steady part's ends repeat; where they take longer, nothing is left out
WORTH = 2  # times as many actions as are left

Bools = NDArray[np.bool_]


class Fold(NamedTuple):
    """An order without some beats of its steady part.

    Attributes:
        order: what is left: a schedule of fewer micro-batches.
        cut: the column at which the beats were taken out.
        beat: columns of a beat.
        num_beats: how many were taken out.
        reach: columns on both sides of the cut that must have moved for the beats to be put back.
    """

    order: Order
    cut: int
    beat: int
    num_beats: int
    reach: int

    def unfold(self, end_ns: Ints) -> Ints | None:
        """Return the ends of all actions from those of what is left; None where these do not repeat.

        Shapes: end_ns [A'] -> [A]
        """
        ranks = self.order.num_ranks
        end = end_ns.reshape(ranks, -1)
        for period in (self.beat, self.beat * ranks):  # a wave may go round the ranks before the state is there again
            if self.num_beats * self.beat % period == 0 and (shift := self._shift(end, period)) is not None:
                break
        else:
            return None
        stop = self.cut + self.num_beats * self.beat
        whole = np.empty((ranks, end.shape[1] + stop - self.cut), np.int64)
        whole[:, : self.cut] = end[:, : self.cut]
        at, known = self.cut, period  # columns filled; how many of them are known to repeat: twice as many each time
        while at < stop:
            width = min(known, stop - at)
            later = known // period * shift
            np.add(whole[:, at - known : at - known + width], later, out=whole[:, at : at + width])
            at, known = at + width, 2 * known
        np.add(end[:, self.cut :], (stop - self.cut) // period * shift, out=whole[:, stop:])
        return whole.reshape(-1)

    def _shift(self, end: Ints, period: int) -> int | None:
        """Return by how much later everything around the cut ends than a period before; None where that differs."""
        first, stop = self.cut - self.reach, self.cut + self.reach
        if first < period:
            return None
        shift = int(end[0, self.cut] - end[0, self.cut - period])
        moved = end[:, first:stop] - end[:, first - period : stop - period]
        return shift if (moved == shift).all() else None


def fold(order: Order) -> Fold | None:
    """Take beats out of an order; None where it has no long steady part.

    What is left must be in order for this to be right: `CompiledOrder(fold.order)` raises where it is not.
    """
    ranks, counts = order.num_ranks, np.diff(order.offsets)
    if len(order.kind) < SMALL or not (counts == counts[0]).all():
        return None
    columns = _Columns(*(column.reshape(ranks, -1) for column in order[:3]))
    steady = _steady_part(columns, -(-(int(order.stage.max()) + 1) // ranks))
    if steady is None:
        return None
    first, stop, beat, later = steady
    reach = -(-NEAR // beat) * beat
    short = beat < 2 * ranks
    cut = first + -(-(reach + SETTLING * ranks + (beat * ranks if short else beat)) // beat) * beat
    count = (stop - cut - reach) // beat
    count -= count % ranks if short else 0
    left = columns.kind.shape[1] - count * beat
    if count <= 0 or WORTH * left > columns.kind.shape[1]:
        return None
    behind = cut + count * beat
    kind, stage, microbatch = (np.concatenate([each[:, :cut], each[:, behind:]], axis=1) for each in columns)
    microbatch[:, cut:] -= np.int32(count * later)
    offsets = np.arange(ranks + 1, dtype=np.int64) * left
    small = Order(kind.reshape(-1), stage.reshape(-1), microbatch.reshape(-1), offsets)
    folded = Fold(small, cut, beat, count, reach)
    return folded if _can_be_put_back(folded, first, stop - count * beat, later) else None


class _Columns(NamedTuple):
    """An order whose ranks all run as many actions; each [ranks, actions of a rank]."""

    kind: NDArray[np.integer]
    stage: NDArray[np.integer]
    microbatch: NDArray[np.integer]

    def repeats(self, beat: int) -> tuple[Bools, int]:
        """Return which columns, counted from `beat`, repeat the one a beat before, and by how many micro-batches."""
        kind, stage, microbatch = self
        middle = kind.shape[1] // 2
        later = int(microbatch[0, middle] - microbatch[0, middle - beat])
        differ = kind[:, beat:] != kind[:, :-beat]
        differ |= stage[:, beat:] != stage[:, :-beat]
        differ |= microbatch[:, beat:] - microbatch[:, :-beat] != later
        return ~differ.any(axis=0), later

    def around(self, middle: int, width: int) -> _Columns:
        """Return some columns."""
        return _Columns(*(each[:, middle - width : middle + width] for each in self))


def _steady_part(columns: _Columns, turns: int) -> tuple[int, int, int, int] | None:
    """Return where the steady part begins and stops, the columns of its beat, and micro-batches of a beat."""
    ranks, length = columns.kind.shape
    middle = length // 2
    # F B or F I W of each of a rank's stages, or of a whole round of micro-batches.
    for beat in (2 * turns, 3 * turns, 2 * turns * ranks, 3 * turns * ranks):
        width = 2 * turns * ranks + beat
        if middle <= width or not columns.around(middle, width).repeats(beat)[0].all():
            continue
        same, later = columns.repeats(beat)
        if later <= 0:
            continue
        breaks = np.flatnonzero(~same) + beat
        place = int(np.searchsorted(breaks, middle))
        first = int(breaks[place - 1]) + 1 - beat if place else 0
        return first, int(breaks[place]) if place < len(breaks) else length, beat, later
    return None


def _can_be_put_back(folded: Fold, first: int, stop: int, later: int) -> bool:
    """Return whether the beats that were taken out hold what they must, and need what they would.

    `first` and `stop` bound the steady part of what is left; `later` is a beat's micro-batches. Asked is, of a table of
    the columns in which each stage's F, B or I, and W of each micro-batch stand:

    - The columns before the cut hold the first micro-batches, and those before the beat in front of it hold `later`
      fewer: so the beats that were taken out hold the next ones, each once.
    - What is needed across the cut is in the steady part, so that each beat has its own; what another rank makes is
      near.
    """
    cut, order = folded.cut, folded.order
    table = _column_table(order)
    if table is None:
        return False
    before, earlier = table < cut, table < cut - folded.beat
    if (before[..., 1:] > before[..., :-1]).any() or (earlier[..., 1:] > earlier[..., :-1]).any():
        return False
    if (before.sum(axis=-1) - earlier.sum(axis=-1) != later).any():
        return False
    forward, backward = table[0], table[1]
    from_others = [(forward[:-1], forward[1:]), (backward[1:], backward[:-1])]
    own = [(forward, backward), *([(backward, table[2])] if len(table) == 3 else [])]
    for pairs, reach in ((from_others, folded.reach), (own, table.size)):
        for needed, needs in pairs:
            across = np.flatnonzero((needed < cut) != (needs < cut))
            needed, needs = needed.reshape(-1).take(across), needs.reshape(-1).take(across)
            if ((needed < first) & (needs >= cut)).any() or ((needed >= stop) & (needs < cut)).any():
                return False
            if (np.abs(needs - needed) > reach).any():
                return False
    return True


def _column_table(order: Order) -> Rows | None:
    """Return the column of each F, of each B or I, and of each W [2 or 3, stages, micro-batches]; None if one lacks."""
    shape = (3 if order.kind.max() == W else 2, int(order.stage.max()) + 1, int(order.microbatch.max()) + 1)
    if int(np.prod(shape)) != len(order.kind) or order.microbatch.min() < 0:
        return None
    slot = order.stage.astype(np.int64)
    slot += (order.kind != F) * shape[1]
    slot += (order.kind == W) * shape[1]
    slot *= shape[2]
    slot += order.microbatch
    table = np.full(shape, -1, np.int32)
    table.reshape(-1)[slot.reshape(order.num_ranks, -1)] = np.arange(len(slot) // order.num_ranks, dtype=np.int32)
    return table if table.min() >= 0 else None
