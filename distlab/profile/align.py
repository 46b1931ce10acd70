"""Ranks' clocks brought together by the calls that the ranks made together.

No rank leaves a collective before the last one has come: each ends after the other has started. That gives two bounds
for the difference of two clocks, one from each rank's end. The bounds of all collectives leave an interval. Ranks leave
a collective at nearly the same time, so the median difference of ends counts where it lies in the interval.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.profile.calls import TOGETHER, Calls, calls_of
from distlab.profile.sections import windows_of
from distlab.trace import Trace

Ints = NDArray[np.int64]
SAME_NS = 1_000_000  # clocks this near are one clock, where the calls allow it


class Offset(NamedTuple):
    """What to add to a rank's times, how many calls say so, and how far it can be off; all in nanoseconds."""

    add_ns: int
    num_calls: int
    error_ns: int


def align(trace: Trace, *, one_host: bool = False) -> tuple[Trace, dict[int, Offset]]:
    """Move every rank's times to the clock of the first rank, where they are not on it already.

    Args:
        trace: all ranks, each on its own clock.
        one_host: the ranks share a clock, unless their calls rule that out.

    Raises:
        ValueError: ranks share no collective and no time; or their collectives contradict each other, so that no
            constant difference of clocks explains them.
    """
    first, *others = trace.ranks
    calls = calls_of(trace, windows_of(trace))
    together = calls.take(calls.spans.is_word("kind", *TOGETHER) & (calls.number >= 0))
    offsets = {}
    for rank in others:
        offsets[rank] = _offset(trace, together, first, rank, one_host=one_host)
    moved = [trace.select(trace.rank == first)]
    moved += [trace.select(trace.rank == rank).shifted(offset.add_ns) for rank, offset in offsets.items()]
    return Trace.concatenate(moved), offsets


def _offset(trace: Trace, calls: Calls, first: int, rank: int, *, one_host: bool) -> Offset:
    mine, theirs = (_by_number(calls, one) for one in (first, rank))
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return _without_calls(trace, first, rank)
    start, end = np.array([mine[number] for number in common]).T
    its_start, its_end = np.array([theirs[number] for number in common]).T
    low, high = int((start - its_end).max()), int((end - its_start).min())
    if low > high:
        # a few calls may have been matched wrongly, or their ends been seen late: the middle half has to agree
        low, high = int(np.percentile(start - its_end, 75)), int(np.percentile(end - its_start, 25))
        if low > high:
            raise ValueError(
                f"the clocks of rank {first} and rank {rank} cannot be aligned: their {len(common)} common collectives "
                f"contradict each other by {(low - high) / 1e6:.3g} ms; are these traces of the same run, and of the "
                "same steps?"
            )
    apart, (least, most) = int(np.median(end - its_end)), np.percentile(end - its_end, (10, 90)).tolist()
    if low <= 0 <= high and (one_host or abs(apart) < SAME_NS or least <= 0 <= most):
        return Offset(0, len(common), 0)
    add = min(max(apart, low), high)
    return Offset(add, len(common), max(high - add, add - low))


def _by_number(calls: Calls, rank: int) -> dict[int, tuple[int, int]]:
    rows = np.flatnonzero(calls.spans.rank == rank)
    times = zip(calls.spans.start_ns[rows].tolist(), calls.spans.end_ns[rows].tolist(), strict=True)
    return dict(zip(calls.number[rows].tolist(), times, strict=True))


def _without_calls(trace: Trace, first: int, rank: int) -> Offset:
    """Take the clocks as one where the ranks' times overlap."""
    spans = [trace.select(trace.rank == one) for one in (first, rank)]
    starts, ends = [int(one.start_ns.min()) for one in spans], [int(one.end_ns.max()) for one in spans]
    if max(starts) >= min(ends):
        apart_s = (max(starts) - min(ends)) / 1e9
        raise ValueError(
            f"rank {rank}'s trace has a different clock than rank {first}'s (they are {apart_s:.3g} s apart), and no "
            "collective to align them on; give traces of the same steps of one run, with their collectives"
        )
    return Offset(0, 0, 0)
