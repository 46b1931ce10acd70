"""Fit a link: its latencies and bandwidths from measured times of one collective at several sizes.

A collective on one protocol is a straight line in the size: `steps x latency + factor / bandwidth x size`. A library
that switches protocols gives the lower of two lines. The fit tries every place where the switch could be, and draws
the line of least relative error through the points on each side. It keeps the pair with the least error in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Link, Protocol
from simulator.hardware.cost import Steps, all_reduce_steps, steps_s

Floats = NDArray[np.float64]
Line = tuple[float, float]

MIN_POINTS_A_LINE = 3
EXACT = 1e-3  # a line this close (mean relative error) needs no second one


def fit_link(
    sizes_bytes: Sequence[float],
    times_s: Sequence[float],
    num_ranks: int,
    algorithm: str = "ring",
    *,
    name: str = "fitted",
    source: str = "",
) -> Link:
    """Fit a link with one or two protocols to the measured times of an all-reduce.

    A second protocol is kept only where it lowers the mean relative error by a fifth: four numbers fit any noise.

    Error: least mean absolute relative error (not squared: one disturbed measurement must not move the line).

    Raises:
        ValueError: there are fewer than two different sizes, fewer than two ranks, or not as many times as sizes; or a
            time or a size is not positive; or the times do not grow with the size.
    """
    return fit_steps(sizes_bytes, times_s, all_reduce_steps(num_ranks, algorithm), name=name, source=source)


def fit_steps(
    sizes_bytes: Sequence[float], times_s: Sequence[float], steps: Steps, *, name: str = "fitted", source: str = ""
) -> Link:
    """Fit a link to the measured times of any collective, given its steps (`Steps(1, 1.0)`: one message)."""
    sizes, times = _checked(sizes_bytes, times_s)
    if steps.bytes_factor <= 0:
        raise ValueError("one rank alone sends nothing; measure a collective among at least 2 ranks to fit a link")
    one = [_line(sizes, times)]
    error = _error(one, sizes, times)
    two = _two_lines(sizes, times) if error > EXACT else []
    lines = two if two and _error(two, sizes, times) < 0.8 * error else one
    protocols = tuple(
        Protocol(
            latency_s=start / steps.num_latencies if steps.num_latencies else 0.0,
            bytes_per_s=steps.bytes_factor / slope,
        )
        for start, slope in lines
    )
    return Link(name=name, protocols=protocols, source=source)


def relative_errors(sizes_bytes: Sequence[float], times_s: Sequence[float], link: Link, steps: Steps) -> Floats:
    """Return (predicted - measured) / measured at each size."""
    predicted = np.array([steps_s(size, steps, link) for size in sizes_bytes])
    return np.asarray(predicted / np.asarray(times_s, dtype=float) - 1.0)


def _checked(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[Floats, Floats]:
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_s, dtype=float)
    if sizes.shape != times.shape or sizes.ndim != 1:
        raise ValueError(f"{sizes.size} sizes and {times.size} times; give one time for each size")
    if not (np.isfinite(sizes).all() and np.isfinite(times).all() and (sizes > 0).all() and (times > 0).all()):
        raise ValueError("a size or a time is not a positive number; leave such a measurement out")
    if np.unique(sizes).size < 2:
        raise ValueError(
            f"{np.unique(sizes).size} different sizes; measure at least two to tell latency from bandwidth"
        )
    order = np.argsort(sizes, kind="stable")
    return sizes[order], times[order]


def _line(sizes: Floats, times: Floats) -> Line:
    """Draw the line of least mean relative error that starts at or above zero and rises.

    Least absolute deviations by reweighting: the weights of least squares become 1 / |error| until they settle.
    """
    x, weight = sizes / times, np.ones_like(sizes)  # relative error of a line: start / time + slope * size / time - 1
    y = 1.0 / times
    best: Line = 0.0, float(np.median(times / sizes))  # through zero
    best_error = _error([best], sizes, times)
    for _ in range(60):
        yy, xy, xx = weight @ (y * y), weight @ (x * y), weight @ (x * x)
        determinant = yy * xx - xy * xy
        if determinant <= 1e-12 * yy * xx:
            break
        sum_y, sum_x = weight @ y, weight @ x
        start, slope = (xx * sum_y - xy * sum_x) / determinant, (yy * sum_x - xy * sum_y) / determinant
        if start >= 0 and slope > 0:
            error = _error([(float(start), float(slope))], sizes, times)
            if error < best_error:
                best, best_error = (float(start), float(slope)), error
        weight = 1.0 / np.maximum(np.abs(start * y + slope * x - 1.0), 1e-6)
    if best[1] <= 0:
        raise ValueError("the times do not grow with the size; measure larger messages")
    return best


def _two_lines(sizes: Floats, times: Floats) -> list[Line]:
    """Return the pair of lines whose lower envelope has the least error, or nothing where there are too few points."""
    best: list[Line] = []
    best_error = np.inf
    for split in range(MIN_POINTS_A_LINE, sizes.size - MIN_POINTS_A_LINE + 1):
        if sizes[split] == sizes[split - 1]:
            continue
        pair = [_line(sizes[:split], times[:split]), _line(sizes[split:], times[split:])]
        error = _error(pair, sizes, times)
        if error < best_error:
            best, best_error = pair, error
    return best


def _error(lines: list[Line], sizes: Floats, times: Floats) -> float:
    predicted = np.min([start + slope * sizes for start, slope in lines], axis=0)
    return float(np.abs(predicted / times - 1.0).mean())
