"""Steady: leave most of a schedule's steady part out, so that what is left is run like any other, and is soon run.

In the middle of 1F1B every rank runs F and B of one micro-batch after the other; ZB-H1 repeats F I W, interleaved 1F1B
a round of micro-batches through all of a rank's stages. With 1,024 micro-batches nine tenths of the columns of such a
schedule (a column: the k-th action of every rank) say the same again, for later micro-batches. `fold` takes whole beats
out of that part, so that the same schedule for fewer micro-batches is left; its `unfold` puts them back, exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.compiled import CompiledOrder
from simulator.pipeline.folds import Columns, Cut, Fold, columns_of
from simulator.pipeline.parts import WORTH, fold_parts, num_parts
from simulator.pipeline.schedule_arrays import Order, W

SMALL = 20_000  # actions, fewer of which are not worth it
NEAR = 8  # columns on both sides of the cut whose ends must have moved, at least: a need may lie as far away
SETTLING = 3  # columns a rank until the ends of waves repeat; where they take longer, nothing is left out

Bools = NDArray[np.bool_]


def likely_periods(order: Order) -> list[int]:
    """Return after how many beats the ends may repeat, likeliest first.

    Weight gradients keep ranks busy: every beat is like the one before. Without them ranks wait for waves, and a wave
    may go round all ranks before the state is there again.
    """
    return [1, order.num_ranks] if (order.kind == W).any() else [order.num_ranks]


def fold(order: Order, period: int) -> Fold | None:
    """Take beats out of an order; None where it has no long steady part, or lacks something.

    Args:
        order: the order.
        period: beats after which the ends are expected to repeat. Of a long beat, or of parts, each one does.
    """
    ranks, counts = order.num_ranks, np.diff(order.offsets)
    if len(order.kind) < SMALL or not (counts == counts[0]).all():
        return None
    columns = Columns(*(column.reshape(ranks, -1) for column in order[:3]))
    parts = num_parts(columns)
    try:  # the error that the whole order raises names the right action
        return fold_parts(columns, parts) if parts else _fold_beats(columns, period)
    except ValueError:
        return None


def _fold_beats(columns: Columns, period: int) -> Fold | None:
    ranks, length = columns.kind.shape
    steady = _steady_part(columns, -(-(int(columns.stage.max()) + 1) // ranks))
    if steady is None:
        return None
    first, stop, beat, later = steady
    if beat >= 2 * ranks:  # whole rounds have room for any wave
        period, settling = 1, SETTLING * ranks
    else:
        settling = SETTLING * ranks if period > 1 else ranks // 8
    reach = -(-NEAR // beat) * beat
    cut = first + -(-(reach + settling + period * beat) // beat) * beat
    count = (stop - cut - reach) // beat // period * period
    left = length - count * beat
    if count <= 0 or WORTH * left > length:
        return None
    small = columns.only(np.append(np.arange(cut), np.arange(cut + count * beat, length)))
    small.microbatch[:, cut:] -= np.int32(count * later)
    folded = Fold(CompiledOrder(small.order()), (Cut(cut, beat, count),), reach, period)
    return folded if _can_be_put_back(folded, first, stop - count * beat, later) else None


def _steady_part(columns: Columns, turns: int) -> tuple[int, int, int, int] | None:
    """Return where the steady part begins and stops, the columns of its beat, and micro-batches of a beat."""
    ranks, length = columns.kind.shape
    middle = length // 2
    # F B or F I W of each of a rank's stages, or of a whole round of micro-batches.
    for beat in (2 * turns, 3 * turns, 2 * turns * ranks, 3 * turns * ranks):
        width = 2 * turns * ranks + beat
        if middle <= width or not _repeats(_around(columns, middle, width), beat)[0].all():
            continue
        same, later = _repeats(columns, beat)
        if later <= 0:
            continue
        breaks = np.flatnonzero(~same) + beat
        place = int(np.searchsorted(breaks, middle))
        first = int(breaks[place - 1]) + 1 - beat if place else 0
        return first, int(breaks[place]) if place < len(breaks) else length, beat, later
    return None


def _repeats(columns: Columns, beat: int) -> tuple[Bools, int]:
    """Return which columns, counted from `beat`, repeat the one a beat before, and by how many micro-batches."""
    kind, stage, microbatch = columns
    middle = kind.shape[1] // 2
    later = int(microbatch[0, middle] - microbatch[0, middle - beat])
    differ = kind[:, beat:] != kind[:, :-beat]
    differ |= stage[:, beat:] != stage[:, :-beat]
    differ |= microbatch[:, beat:] - microbatch[:, :-beat] != later
    return ~differ.any(axis=0), later


def _around(columns: Columns, middle: int, width: int) -> Columns:
    """Return some columns."""
    return Columns(*(each[:, middle - width : middle + width] for each in columns))


def _can_be_put_back(folded: Fold, first: int, stop: int, later: int) -> bool:
    """Return whether the beats that were taken out hold what they must, and need what they would.

    `first` and `stop` bound the steady part of what is left; `later` is a beat's micro-batches. Asked is, of a table of
    the columns in which each stage's F, B or I, and W of each micro-batch stand:

    - The columns before the cut hold the first micro-batches, and those before the beat in front of it hold `later`
      fewer: so the beats that were taken out hold the next ones, each once.
    - What is needed across the cut from another rank is near, and in the steady part, so that each beat has its own.

    What a rank needs of its own is no question of time, only of order. Of what is left `CompiledOrder` makes sure of
    that, and the beats that were taken out are ordered as the one in front of them.
    """
    cut, beat, _ = folded.cuts[0]
    found = columns_of(folded.left)
    if found is None:
        return False
    table, _ = found
    before, earlier = table < cut, table < cut - beat
    if (before[..., 1:] > before[..., :-1]).any() or (earlier[..., 1:] > earlier[..., :-1]).any():
        return False
    if (before.sum(axis=-1) - earlier.sum(axis=-1) != later).any():
        return False
    forward, backward = table[0], table[1]
    for needed, needs in ((forward[:-1], forward[1:]), (backward[1:], backward[:-1])):
        across = np.flatnonzero((needed < cut) != (needs < cut))
        needed, needs = needed.reshape(-1).take(across), needs.reshape(-1).take(across)
        if ((needed < first) & (needs >= cut)).any() or ((needed >= stop) & (needs < cut)).any():
            return False
        if (np.abs(needs - needed) > folded.reach).any():
            return False
    return True
