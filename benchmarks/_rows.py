"""Benchmark rows: two programs timed in interleaved blocks, a ratio with an interval, and whether a bar holds.

On a shared machine a single time says little. So the two programs take turns block by block, and each block gives one
ratio. We report the median of the blocks' ratios with a bootstrap interval, and the noise: the ratio of the peer to
itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from distlab import measure  # its names load on first use: of these one loads torch


@dataclass(frozen=True)
class Row:
    """One claim and what was measured.

    Attributes:
        claim: the sentence that is tested.
        ours: our median, in `unit`.
        peer: the peer's median in `unit`, or None where the bar is absolute.
        ratio: median of the blocks' ratios ours / peer, or None.
        interval: 95 % interval of the ratio (or of ours where the bar is absolute).
        unit: unit of ours and peer.
        bar: what the claim promises, such as "<= 1.0x" or "<= 0.15 s".
        holds: whether the measurement meets the bar; None where the row only informs (noise, context).
        note: conditions that a reader needs.
    """

    claim: str
    ours: float
    peer: float | None
    ratio: float | None
    interval: tuple[float, float]
    unit: str
    bar: str
    holds: bool | None
    note: str = ""

    def __str__(self) -> str:
        """Two lines for a terminal: the verdict, then the figures."""
        verdict = {True: "holds", False: "FALLS SHORT", None: "info"}[self.holds]
        peer = "" if self.peer is None else f", peer {self.peer:.4g} {self.unit}"
        ratio = "" if self.ratio is None else f", ratio {self.ratio:.3f}"
        interval = f"95 % {self.interval[0]:.3g} to {self.interval[1]:.3g}"
        figures = f"ours {self.ours:.4g} {self.unit}{peer}{ratio}, {interval}{'  ' + self.note if self.note else ''}"
        return f"{verdict:<11} {self.claim}  [bar {self.bar}]\n            {figures}"

    def as_dict(self) -> dict[str, object]:
        """Return the row as JSON-ready values."""
        return asdict(self) | {"interval": list(self.interval)}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the median, from 2,000 resamples with a fixed seed."""
    data = np.asarray(values, dtype=float)
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(data, (2000, data.size)), axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_ratio(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of the blocks' ratios ours / peer and its 95 % interval.

    Raises:
        ValueError: the two have different numbers of blocks, or fewer than two.
    """
    if len(ours) != len(peer) or len(ours) < 2:
        raise ValueError(f"{len(ours)} blocks of ours and {len(peer)} of the peer; give the same number, at least 2")
    ratios = np.asarray(ours, dtype=float) / np.asarray(peer, dtype=float)
    return float(np.median(ratios)), median_interval(ratios.tolist())


def ratio_holds(ratio: float, interval: tuple[float, float], bar: float) -> bool:
    """Judge a ratio: at a bar of 1.0 by median <= 1.05 and an interval that reaches 1.00, below by the upper end."""
    if math.isclose(bar, 1.0):
        return ratio <= 1.05 and interval[0] <= 1.0
    return interval[1] <= bar


def compare(
    claim: str, ours: Sequence[float], peer: Sequence[float], *, bar: float = 1.0, unit: str = "s", note: str = ""
) -> Row:
    """Make the row of a ratio from the times of interleaved blocks."""
    ratio, interval = paired_ratio(ours, peer)
    holds = ratio_holds(ratio, interval, bar)
    note = note if len(ours) >= measure.MIN_BLOCKS else f"{note} (only {len(ours)} blocks: a smoke run)".strip()
    middles = float(np.median(ours)), float(np.median(peer))
    return Row(claim, *middles, ratio, interval, unit, f"<= {bar:g}x", holds, note)


def compare_counts(claim: str, ours: float, peer: float, *, bar: float = 1.0, unit: str = "B", note: str = "") -> Row:
    """Make the row of a ratio of two counts, such as bytes: they repeat, so one of each is enough."""
    ratio = ours / peer
    return Row(claim, ours, peer, ratio, (ratio, ratio), unit, f"<= {bar:g}x", ratio <= bar, note)


def noise(claim: str, first: Sequence[float], second: Sequence[float], *, unit: str = "s") -> Row:
    """Make the row of the peer against itself: what the machine's noise alone does to a ratio."""
    ratio, interval = paired_ratio(first, second)
    middles = float(np.median(first)), float(np.median(second))
    return Row(f"noise: {claim}", *middles, ratio, interval, unit, "-", None, "peer against itself")


def without_bar(row: Row) -> Row:
    """Return the row as one that informs and claims nothing."""
    return replace(row, bar="-", holds=None)


def single(
    claim: str, values: Sequence[float], unit: str, *, bar: str = "-", holds: bool | None = None, note: str = ""
) -> Row:
    """Make the row of a value by itself, the median of some; without a bar it informs and claims nothing."""
    middle = float(np.median(values))
    interval = median_interval(values) if len(values) > 1 else (middle, middle)
    return Row(claim, middle, None, None, interval, unit, bar, holds, note)


def absolute(claim: str, values: Sequence[float], *, bar: float, unit: str, note: str = "") -> Row:
    """Make the row of a value that has an upper limit: the median must be at most `bar`."""
    holds = float(np.median(values)) <= bar
    return single(claim, values, unit, bar=f"<= {bar:g} {unit}", holds=holds, note=note)


def judged(claim: str, windows: Sequence[measure.Window], bar: float) -> Row:
    """Make the row of predictions of measured windows: the median of their errors."""
    verdict = measure.judge(windows, bar=bar)
    errors = [abs(window.error) for window in windows if window.calm] or [verdict.median_error]
    note = f"bias {verdict.signed_error:+.1%}; {verdict}"
    words = f"<= {bar} or twice the repeat spread"
    row = single(claim, errors, "relative", bar=words, holds=verdict.holds, note=note)
    return replace(row, ours=verdict.median_error)  # of all windows where few are calm
