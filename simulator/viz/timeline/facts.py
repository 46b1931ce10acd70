"""What a timeline says in numbers: how long, how busy, and how much communication is not hidden.

All of it is lengths of unions of intervals: two spans of one rank that overlap keep the rank busy once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace

Interval = tuple[float, float]  # start and end, in seconds


class Facts(NamedTuple):
    """The figures of one trace; shares are of ranks x duration.

    Attributes:
        num_ranks: ranks that have a span.
        duration_s: from the earliest start to the latest end of any rank.
        compute_share: share of the time in which a rank computes.
        communication_s: time in which a rank communicates, the mean over ranks.
        exposed_s: time in which a rank communicates and does not compute, the mean over ranks.
        last_rank: the rank that ends last; None: all of several ranks end at the same time.
    """

    num_ranks: int
    duration_s: float
    compute_share: float
    communication_s: float
    exposed_s: float
    last_rank: int | None

    @property
    def bubble_fraction(self) -> float:
        """Idle time over total time, where only compute counts as work."""
        return 1.0 - self.compute_share


def covered_ns(rank: NDArray[np.int32], start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> int:
    """Return the time in which each rank has at least one span, summed over ranks."""
    if not len(rank):
        return 0
    origin = start_ns.min()
    width = np.int64(end_ns.max() - origin + 1)
    shift = np.unique(rank, return_inverse=True)[1] * width - origin  # ranks side by side on one line: no two can meet
    start, end = start_ns + shift, end_ns + shift
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.concatenate(([start[0]], np.maximum.accumulate(end)[:-1]))  # how far earlier spans already cover
    return int(np.maximum(0, end - np.maximum(start, reached)).sum())


def computes(trace: Trace) -> NDArray[np.bool_]:
    """Mark the spans in which a rank computes: those on the compute lane that are not waits."""
    return trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait")


def facts_of(trace: Trace) -> Facts:
    """Compute the figures of a trace.

    Raises:
        ValueError: the trace has no spans.
    """
    if not len(trace):
        raise ValueError("the trace has no spans; record or simulate at least one step, then draw it")
    compute = computes(trace)
    moves = ~trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait")

    def covered(mask: NDArray[np.bool_]) -> int:
        return covered_ns(trace.rank[mask], trace.start_ns[mask], trace.end_ns[mask])

    num_ranks, busy = len(trace.ranks), covered(compute)
    last = np.unique(trace.rank[trace.end_ns == trace.end_ns.max()])
    total = trace.duration_s * 1e9 * num_ranks
    return Facts(
        num_ranks=num_ranks,
        duration_s=trace.duration_s,
        compute_share=busy / total if total else 0.0,
        communication_s=covered(moves) / 1e9 / num_ranks,
        exposed_s=(covered(compute | moves) - busy) / 1e9 / num_ranks,
        last_rank=None if 1 < len(last) == num_ranks else int(last[0]),
    )


def union(trace: Trace) -> list[Interval]:
    """Return the time in which there is at least one span, as intervals in order."""
    merged: list[list[float]] = []
    for start, end in sorted(zip(trace.start_ns.tolist(), trace.end_ns.tolist(), strict=True)):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start / 1e9, end / 1e9) for start, end in merged if end > start]


def split(moves: Sequence[Interval], busy: Sequence[Interval]) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Cut communication into the parts under compute and the parts that are not."""
    hidden, exposed = [], []
    for start, end in moves:
        now = start
        for from_, to in busy:
            if to <= now or from_ >= end:
                continue
            if from_ > now:
                exposed.append((now, from_))
            hidden.append((max(now, from_), min(to, end)))
            now = min(to, end)
        if now < end:
            exposed.append((now, end))
    return tuple(hidden), tuple(exposed)
