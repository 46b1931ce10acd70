"""Draw the step's time against the bucket size: too small pays latency, too large has nothing to hide behind."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator.sweeps.buckets_and_compression import BucketSweep
from simulator.units import format_bytes, format_s
from simulator.viz.drawing.plot import frame, mark_ticks, name_axes, new_figure, put_title
from simulator.viz.drawing.style import FAINT, INK, SMALL_PT
from simulator.viz.drawing.wording import counted, percent, time_unit

COMPUTE, WAITS, BEST, CHOSEN = "#56B4E9", "#D55E00", "#117733", "#1A1A1A"
HEIGHT_IN, TOP_IN, BOTTOM_IN = 5.4, 1.3, 1.15


def draw_bucket_sweep(sweep: BucketSweep, *, at_bytes: int | None = None, title: str | None = None) -> Figure:
    """Draw the step's time at each bucket size, the exposed part shaded, the optimum marked.

    Args:
        sweep: what `sweep_buckets` returned.
        at_bytes: a bucket size to mark and read off; the nearest one of the sweep is taken.
        title: replaces the takeaway.
    """
    figure = new_figure(HEIGHT_IN)
    axes = frame(figure, left=0.95, right=0.6, top=TOP_IN, bottom=BOTTOM_IN)
    sizes, total = np.array(sweep.bucket_bytes, float), np.array(sweep.duration_s)
    scale, unit = time_unit(float(total.max()))
    total, exposed = total * scale, np.array(sweep.exposed_s) * scale
    axes.set_xscale("log")
    axes.set_xlim(sizes[0], sizes[-1] if len(sizes) > 1 else sizes[0] * 1.1)
    axes.fill_between(sizes, 0, total - exposed, color=COMPUTE, alpha=0.45, linewidth=0, gid="compute")
    axes.fill_between(sizes, total - exposed, total, color=WAITS, alpha=0.55, linewidth=0, gid="exposed")
    axes.plot(sizes, total, color=INK, linewidth=2.2, gid="step")
    low, high = sweep.good_bucket_bytes()
    axes.axvspan(low, high, ymax=0.022, color=BEST, linewidth=0, gid="good")
    best = sweep.best
    _mark(axes, (sizes[best], total[best]), BEST, "*", gid="optimum")
    if at_bytes is not None:
        chosen = nearest(sweep, at_bytes)
        _mark(axes, (sizes[chosen], total[chosen]), CHOSEN, "o", gid="chosen")
        axes.axvline(sizes[chosen], color=CHOSEN, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_ylim(0, float(total.max()) * 1.12)
    _label(axes, sweep, unit)
    put_title(figure, title or _best_size(sweep), _chosen_and_best(sweep, at_bytes))
    return figure


def describe_bucket_sweep(sweep: BucketSweep, *, at_bytes: int | None = None) -> str:
    """Say in words what `draw_bucket_sweep` shows."""
    low, high = sweep.good_bucket_bytes()
    lines = [f"{_best_size(sweep)}. {_chosen_and_best(sweep, at_bytes)}"]
    lines.append(f"Every size from {format_bytes(low)} to {format_bytes(high)} is within 1 % of the best.")
    for words, index in (("Smallest", 0), ("Largest", len(sweep.bucket_bytes) - 1)):
        lines.append(f"{words}: {point(sweep, index)}.")
    return "\n".join(lines)


def nearest(sweep: BucketSweep, at_bytes: float) -> int:
    """Return the index of the size nearest to one, on a log scale."""
    away = np.abs(np.log(np.array(sweep.bucket_bytes, float)) - np.log(max(at_bytes, 1)))
    return int(away.argmin())


def point(sweep: BucketSweep, index: int) -> str:
    """Say what one size gives."""
    count = sweep.num_buckets[index]
    return (
        f"{format_bytes(sweep.bucket_bytes[index])}, {counted(count, 'bucket')}: "
        f"step {format_s(sweep.duration_s[index])}, {format_s(sweep.exposed_s[index])} of it exposed"
    )


def _best_size(sweep: BucketSweep) -> str:
    best, worst = sweep.duration_s[sweep.best], max(sweep.duration_s)
    if worst <= best * 1.005:
        return "The bucket size hardly matters here"
    where = format_bytes(sweep.best_bucket_bytes)
    return f"Buckets of {where} make the shortest step; the worst size costs {percent(worst / best - 1)} more"


def _chosen_and_best(sweep: BucketSweep, at_bytes: int | None) -> str:
    words = f"Best: {point(sweep, sweep.best)}."
    return words if at_bytes is None else f"Chosen: {point(sweep, nearest(sweep, at_bytes))}. {words}"


def _mark(axes: Axes, place: tuple[float, float], colour: str, marker: str, *, gid: str) -> None:
    look: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 1.2, "zorder": 6, "clip_on": False}
    axes.plot(*place, marker=marker, markersize=19 if marker == "*" else 12, color=colour, gid=gid, **look)


def _label(axes: Axes, sweep: BucketSweep, unit: str) -> None:
    """Label a few sizes with bytes and number of buckets, and name the areas."""
    places = sorted({*np.linspace(0, len(sweep.bucket_bytes) - 1, 9).round().astype(int).tolist()})
    words = {
        float(sweep.bucket_bytes[place]): f"{format_bytes(sweep.bucket_bytes[place])}\n{sweep.num_buckets[place]}"
        for place in places
    }
    mark_ticks(axes.xaxis, list(words), lambda value: words.get(float(value), ""))
    name_axes(axes, "bucket size, and under it the number of buckets", f"step ({unit})")
    names = (("exposed communication", WAITS), ("computing", COMPUTE), ("within 1 % of the best", BEST))
    look: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    for place, (name, colour) in zip((0.0, 0.24, 0.38), names, strict=True):
        axes.plot([place + 0.008], [1.055], marker="s", color=colour, markersize=9, alpha=0.7, **look)
        axes.text(place + 0.02, 1.05, name, ha="left", va="center", color=FAINT, fontsize=SMALL_PT, **look)
