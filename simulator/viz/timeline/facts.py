"""What a timeline says in numbers: how long, how busy, how much communication is not hidden; and an overlay of two.

All of it is lengths of unions of intervals: two spans of one rank that overlap keep the rank busy once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.units import format_s, percent
from simulator.viz.drawing.lanes import View

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
    """Mark the spans in which a rank computes: those on the compute lane that wait for nothing, samples included."""
    return trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait", "data")


def facts_of(trace: Trace) -> Facts:
    """Compute the figures of a trace.

    Raises:
        ValueError: the trace has no spans.
    """
    if not len(trace):
        raise ValueError("the trace has no spans; record or simulate at least one step, then draw it")
    compute = computes(trace)
    moves = ~trace.is_word("lane", "compute", "loader") & ~trace.is_word("kind", "wait")

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


MODEL_ERROR = 0.10
"""Half the width of a prediction's band, relative: the bar that benchmarks/predicted.py sets for the median error."""
AGAIN = "Calibrate again: close other programs and run this cell again."


@dataclass(frozen=True)
class Overlay:
    """Steps that were timed between calibrations, and what each calibration predicted for them.

    Attributes:
        measured: what the ranks did in the median step, from the moment at which it began.
        predicted: the step that the median calibration predicts.
        measured_s: seconds of each step.
        predicted_s: seconds that the calibrations around each window of steps predict.
        trouble: why the machine was not calm, in a sentence; "" where it was.
    """

    measured: Trace
    predicted: Trace
    measured_s: Sequence[float]
    predicted_s: Sequence[float]
    trouble: str = ""

    @property
    def middle_s(self) -> tuple[float, float]:
        """The median step, measured (of an even number the lower of the two) and predicted."""
        return median_low(self.measured_s), float(np.median(self.predicted_s))

    @property
    def error(self) -> float:
        """Signed relative error of the predicted step: below zero is too early."""
        measured_s, predicted_s = self.middle_s
        return predicted_s / measured_s - 1

    @property
    def bands_s(self) -> tuple[View, View]:
        """From where to where: half of the measured steps; nine in ten predictions, with MODEL_ERROR on both sides."""
        low, high = np.percentile(self.measured_s, (25, 75)).tolist()
        early, late = np.percentile(self.predicted_s, (5, 95)).tolist()
        return (low, high), (early * (1 - MODEL_ERROR), late * (1 + MODEL_ERROR))

    @property
    def inside(self) -> bool:
        """Whether the measured step lies in the predicted band."""
        low, high = self.bands_s[1]
        return low <= self.middle_s[0] <= high

    @property
    def verdict(self) -> str:
        """One sentence: measured and predicted with their bands, and whether the one lies in the other."""
        said = [
            f"{what} {format_s(middle)} ({format_s(low)} to {format_s(high)})"
            for what, middle, (low, high) in zip(("measured", "predicted"), self.middle_s, self.bands_s, strict=True)
        ]
        early = "early" if self.error < 0 else "late"
        place = "inside the band" if self.inside else f"outside the band, {percent(abs(self.error))} {early}"
        return f"{', '.join(said)}: {place}"

    @property
    def title(self) -> str:
        """What the picture says first: that the machine was not calm, or where the measured step lies."""
        if self.trouble:
            return "The machine was not calm: this picture says nothing about the prediction"
        place = "inside" if self.inside else "outside"
        return f"The measured step lies {place} the predicted band: {percent(self.error, 0, '+')}"

    @property
    def advice(self) -> str:
        """What differed most; and where the machine was not calm, why, and what to do."""
        return f"{self.trouble} {AGAIN}" if self.trouble else self.difference

    @property
    def difference(self) -> str:
        """The kind of time in which the two steps differ most: compute, communication or waiting."""
        more = {kind: self._seconds(self.measured)[kind] - said for kind, said in self._seconds(self.predicted).items()}
        kind = max(more, key=lambda name: abs(more[name]))
        way = "more" if more[kind] > 0 else "less"
        return f"The largest difference is {kind}: {format_s(abs(more[kind]))} {way} per rank than predicted."

    @staticmethod
    def _seconds(trace: Trace) -> dict[str, float]:
        """Divide a step of the mean rank: it computes, it communicates without computing, or it does neither."""
        facts = facts_of(trace)
        compute_s = facts.compute_share * facts.duration_s
        waiting_s = facts.duration_s - compute_s - facts.exposed_s
        return {"compute": compute_s, "communication": facts.exposed_s, "waiting": waiting_s}

    def __str__(self) -> str:
        verdict = self.verdict[0].upper() + self.verdict[1:]
        return "\n".join([f"{verdict}.", *([self.trouble, AGAIN] if self.trouble else [self.difference])])
