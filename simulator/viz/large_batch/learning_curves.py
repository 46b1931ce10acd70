"""Draw what a larger batch does to what was learned: one line per optimizer, every run a point, the mean a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import FuncFormatter

from simulator.units import percent
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import (
    count_axis,
    frame,
    name_line_ends,
    new_figure,
    put_heading,
    put_title,
)
from simulator.viz.drawing.style import line_look

Results = Mapping[str, Mapping[int, Sequence[float]]]

HEIGHT_IN, TOP_IN, BOTTOM_IN = 5.6, 1.35, 0.85


class Point(NamedTuple):
    """The runs of one optimizer with one batch.

    Attributes:
        batch: samples per update.
        mean: mean accuracy of the runs.
        low: of the worst run.
        high: of the best.
    """

    batch: int
    mean: float
    low: float
    high: float


def points(results: Results) -> dict[str, tuple[Point, ...]]:
    """Return each line's points, by rising batch.

    Raises:
        ValueError: no line, no batch, no run, or an accuracy outside 0 to 1.
    """
    if not results:
        raise ValueError("no lines to draw; pass a mapping from names to accuracies by batch")
    found: dict[str, tuple[Point, ...]] = {}
    for name, by_batch in results.items():
        if not by_batch or any(len(runs) == 0 for runs in by_batch.values()):
            raise ValueError(f"{name!r} has a batch without runs, or no batch; pass at least one accuracy each")
        if any(not 0.0 <= run <= 1.0 for runs in by_batch.values() for run in runs):
            raise ValueError(f"{name!r} has an accuracy outside 0 to 1; pass shares, not percentages")
        found[name] = tuple(
            Point(batch, float(np.mean(runs)), min(runs), max(runs)) for batch, runs in sorted(by_batch.items())
        )
    return found


def draw_batch_sizes(results: Results, *, subtitle: str = "") -> Picture:
    """Draw accuracy against the batch: each line's mean, and a bar from its worst to its best run.

    Args:
        results: accuracies of the runs (of several seeds) by batch, by the line's name.
        subtitle: what was trained.

    Raises:
        ValueError: as `points`.
    """
    lines = points(results)
    figure = new_figure(HEIGHT_IN)
    axes = frame(figure, left=0.95, right=3.4, top=TOP_IN, bottom=BOTTOM_IN)
    batches = sorted({point.batch for line in lines.values() for point in line})
    for index, line in enumerate(lines.values()):
        shift = 1.0 + 0.03 * (index - (len(lines) - 1) / 2)  # bars of one batch stand side by side
        x = [point.batch * shift for point in line]
        look = line_look(index) | {"clip_on": False, "zorder": 4}
        axes.plot(x, [p.mean for p in line], markersize=7.5, linewidth=2.2, **look)
        del look["marker"]
        axes.vlines(x, [p.low for p in line], [p.high for p in line], linewidth=1.6, **look)
    count_axis(axes, batches, "samples in a batch (the number of epochs stays)")
    axes.set_xlim(batches[0] / 1.15, batches[-1] * 1.15)
    lowest = min(point.low for line in lines.values() for point in line)
    axes.set_ylim(max(0.0, lowest - 0.05 * (1.0 - lowest)), 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    put_heading(axes, "test accuracy: mean, worst and best run")
    last = [line[-1].mean for line in lines.values()]
    names = [f"{percent(end, 1)}  {name}" for end, name in zip(last, lines, strict=True)]
    name_line_ends(axes, last, names, [line_look(index)["color"] for index in range(len(lines))])
    takeaway = _best_and_worst(lines)
    put_title(figure, takeaway, subtitle)
    said = [
        f"{name}: {', '.join(f'{p.batch:,}: {p.mean:.1%} ({p.low:.1%} to {p.high:.1%})' for p in line)}."
        for name, line in lines.items()
    ]
    return Picture(figure, "\n".join([f"{takeaway}.", *said]))


def _best_and_worst(lines: Mapping[str, Sequence[Point]]) -> str:
    """Return the title: who is best and worst with the largest batch."""
    last = {name: line[-1] for name, line in lines.items()}
    batch = max(point.batch for point in last.values())
    ends = {name: point.mean for name, point in last.items() if point.batch == batch}
    best, worst = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
    if best == worst:
        return f"{best}: {ends[best]:.1%} with {batch:,} samples per batch"
    left, least = percent(ends[best], 1), percent(ends[worst], 1)
    return f"With {batch:,} samples per batch {best} is left with {left}, {worst} with {least}"
