"""Folds: a long order from which beats were taken out, and how the ends of what is left give those of all, exactly.

The ends of an order's actions are the one solution of

    end = max(end of the rank's previous action, end of what it needs + latency) + duration

If the ends around a cut are those of some beats earlier plus one number, the beats that were taken out are put back as
copies of those in front of the cut, each later by that number. Each action then has the duration of the one some beats
before it, and what it needs lies as many columns away (a column: the k-th action of every rank), so that both sides of
the equation are later by the same number. `steady` makes sure that durations and needs are like that, `parts` too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.compiled import CompiledOrder
from simulator.pipeline.schedule_arrays import Ints, Order, Rows


class Columns(NamedTuple):
    """An order whose ranks all run as many actions; each [ranks, actions of a rank]."""

    kind: NDArray[np.integer]
    stage: NDArray[np.integer]
    microbatch: NDArray[np.integer]

    def only(self, kept: Ints) -> Columns:
        """Return copies of some columns."""
        return Columns(*(each.take(kept, axis=1) for each in self))

    def order(self) -> Order:
        """Return the columns as an order."""
        offsets = np.arange(len(self.kind) + 1, dtype=np.int64) * self.kind.shape[1]
        return Order(self.kind.reshape(-1), self.stage.reshape(-1), self.microbatch.reshape(-1), offsets)


class Cut(NamedTuple):
    """A place at which beats were taken out.

    Attributes:
        column: of what is left, the first one behind the cut.
        beat: columns of a beat.
        num_beats: how many were taken out.
    """

    column: int
    beat: int
    num_beats: int


class Fold(NamedTuple):
    """An order without some beats.

    Attributes:
        left: what is left: a schedule of fewer micro-batches.
        cuts: the places at which beats were taken out, in their order.
        reach: columns on both sides of a cut that must have moved for the beats to be put back.
        period: beats; how many were taken out is a multiple of it.
        unwaited: actions of what is left that must not have waited for what they need.
    """

    left: CompiledOrder
    cuts: tuple[Cut, ...]
    reach: int
    period: int = 1
    unwaited: Ints = np.zeros(0, np.int64)

    def unfold(self, duration_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints] | None:
        """Return starts and ends of all actions from those of what is left; None where these do not repeat.

        Shapes: duration_ns, end_ns [A'] -> [A], [A]
        """
        start_ns = end_ns - duration_ns
        if (start_ns.take(self.unwaited) != end_ns.take(self.unwaited - 1)).any():
            return None
        rows = self._by_rank(end_ns)
        found = [self._period_and_shift(rows, cut) for cut in self.cuts]
        moves = [each for each in found if each is not None]
        if len(moves) < len(found):
            return None
        return self._put_back(self._by_rank(start_ns), moves), self._put_back(rows, moves)

    def other_period(self, end_ns: Ints) -> int | None:
        """Return after how many beats, fewer than `period`, the ends in front of the first cut repeat, or None.

        A wave goes round some of the ranks before the state is there again: with V-Min's 32 ranks every 21 beats.
        """
        rows, cut = self._by_rank(end_ns), self.cuts[0]
        before = cut._replace(column=cut.column - self.reach)
        for period in range(2, self.period):
            if self._shift(rows, before, period * cut.beat) is not None:
                return period
        return None

    def _by_rank(self, values: Ints) -> Ints:
        return values.reshape(self.left.order.num_ranks, -1)

    def _period_and_shift(self, end: Ints, cut: Cut) -> tuple[int, int] | None:
        """Return after how many columns the ends around a cut repeat, and how much later; None where they do not."""
        for period in (cut.beat, cut.beat * self.period):
            if (shift := self._shift(end, cut, period)) is not None:
                return period, shift
        return None

    def _shift(self, end: Ints, cut: Cut, period: int) -> int | None:
        """Return by how much later everything around a cut ends than a period before; None where that differs."""
        first, stop = cut.column - self.reach, cut.column + self.reach
        if first < period:
            return None
        shift = int(end[0, cut.column] - end[0, cut.column - period])
        moved = end[:, first:stop] - end[:, first - period : stop - period]
        return shift if (moved == shift).all() else None

    def _put_back(self, times: Ints, moves: list[tuple[int, int]]) -> Ints:
        """Put the beats back at each cut, of which `moves` has the period in columns and the shift.

        Shapes: times [p, A' / p] -> [A]
        """
        taken_out = sum(cut.beat * cut.num_beats for cut in self.cuts)
        whole = np.empty((len(times), times.shape[1] + taken_out), np.int64)
        done = at = later = 0  # columns of what is left, and of the whole; how much later they are in the whole
        for cut, (period, shift) in zip(self.cuts, moves, strict=True):
            known = at + cut.column - done
            np.add(times[:, done : cut.column], later, out=whole[:, at:known])
            done, at = cut.column, known + cut.beat * cut.num_beats
            _repeat(whole[:, :at], known, period, shift)
            later += (at - known) // period * shift
        np.add(times[:, done:], later, out=whole[:, at:])
        return whole.reshape(-1)


def columns_of(left: CompiledOrder) -> tuple[Rows, Rows] | None:
    """Return the column of each F, of each B or I, and of each W, and the first action of each stage's rank.

    None of an order that lacks one, or has a stage on two ranks.

    Shapes: -> [2 or 3, stages, micro-batches], [stages, 1]
    """
    if left.table is None or left.home is None:
        return None
    first: Rows = left.order.offsets.take(left.home).astype(np.int32)[:, None]
    return left.table - first, first


def _repeat(whole: Ints, known: int, period: int, shift: int) -> None:
    """Fill the columns from `known` on with those a period before, plus a number: twice as many each time."""
    at, known = known, period
    while at < whole.shape[1]:
        width = min(known, whole.shape[1] - at)
        later = known // period * shift
        np.add(whole[:, at - known : at - known + width], later, out=whole[:, at : at + width])
        at, known = at + width, 2 * known
