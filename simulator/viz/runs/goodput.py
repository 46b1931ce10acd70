"""Draw where a run's time goes: by the interval between checkpoints, and by the number of devices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from simulator.runs.failures import Failures, Goodput, best_s, daly_s, goodput, young_s
from simulator.runs.monte_carlo import goodput_by_trial
from simulator.units import counted, format_span, percent
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import (
    GRID,
    count_axis,
    frame,
    mark_ticks,
    name_axes,
    name_line_ends,
    new_figure,
    put_heading,
    put_title,
)
from simulator.viz.drawing.style import INK, LINE_COLOURS, SMALL_PT, text_on_white

HEIGHT_IN, TOP_IN, BOTTOM_IN = 5.6, 1.45, 0.85
PARTS = ("useful", "saving", "lost", "restarting", "slow")
COLOURS = ("#56B4E9", "#009E73", "#D55E00", "#882255", "#BDBDBD")
AROUND = (0.05, 20.0)  # of the best interval
POINTS, TRIALS = 60, 13
Floats = NDArray[np.float64]


def draw_goodput(failures: Failures, num_devices: int, save_s: float, *, seed: int = 0) -> Picture:
    """Draw the goodput against the interval between checkpoints, drawn and computed, and the parts against devices.

    Args:
        failures: what interrupts the run.
        num_devices: of the run.
        save_s: training waits so long for a checkpoint.
        seed: of the failures that are drawn.

    Raises:
        ValueError: nothing fails, or failures leave almost no time.
    """
    good = _with_failures(failures, num_devices, save_s)
    figure = new_figure(HEIGHT_IN)
    left = frame(figure, left=0.95, right=7.0, top=TOP_IN, bottom=BOTTOM_IN)
    right = frame(figure, left=7.0, right=1.75, top=TOP_IN, bottom=BOTTOM_IN)
    _draw_intervals(left, good, failures.restart_s, seed)
    _draw_devices(right, failures, num_devices, save_s)
    put_title(figure, _takeaway(good), _setting(failures, num_devices, save_s))
    return Picture(figure, _say(good, failures, num_devices, save_s))


def _say(good: Goodput, failures: Failures, num_devices: int, save_s: float) -> str:
    """Say the parts of the time, the best interval, and what other numbers of devices give."""
    both = (good.save_s, good.mtbf_s)
    parts = ", ".join(f"{name} {percent(getattr(good, name), 1)}" for name in PARTS if getattr(good, name) > 0)
    lines = [f"{_takeaway(good)}. {_setting(failures, num_devices, save_s)}", f"Parts of the time: {parts}."]
    lines.append(
        f"Best interval: {format_span(best_s(*both))}; by Young {format_span(young_s(*both))}, by Daly "
        f"{format_span(daly_s(*both))}."
    )
    for count, each in _by_devices(failures, num_devices, save_s):
        lines.append(f"{counted(count, 'device')}: {percent(each.useful, 1)} useful.")
    return "\n".join(lines)


def _with_failures(failures: Failures, num_devices: int, save_s: float) -> Goodput:
    good = failures.goodput(num_devices, save_s)
    if math.isinf(good.mtbf_s):
        raise ValueError('nothing fails in this run; pass failures, such as Failures("llama-3")')
    return good


def _useful(good: Goodput, restart_s: float, intervals: Floats) -> Floats:
    found = []
    for interval in intervals.tolist():
        try:
            found.append(goodput(good.save_s, good.mtbf_s, restart_s=restart_s, interval_s=interval).useful)
        except ValueError:
            found.append(0.0)
    return np.array(found)


def _draw_intervals(axes: Axes, good: Goodput, restart_s: float, seed: int) -> None:
    best = best_s(good.save_s, good.mtbf_s)
    low, high = (min(AROUND[0] * best, good.interval_s), max(AROUND[1] * best, good.interval_s))
    intervals = np.geomspace(low, high, POINTS)
    useful = _useful(good, restart_s, intervals)
    tried = np.geomspace(low, high, TRIALS)
    drawn = goodput_by_trial(good.save_s, good.mtbf_s, tried, restart_s=restart_s, seed=seed)
    axes.set_xscale("log")
    axes.plot(intervals, useful, color=LINE_COLOURS[0], linewidth=2.4, gid="computed", label="computed", zorder=3)
    dots: dict[str, Any] = {"marker": "o", "markersize": 7, "linestyle": "none", "color": LINE_COLOURS[1]}
    axes.plot(tried, drawn, gid="drawn", label="failures drawn", zorder=4, **dots)
    axes.axvline(good.interval_s, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), gid="chosen")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(low, high)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    mark_ticks(axes.xaxis, [good.interval_s / 10, good.interval_s, good.interval_s * 10], format_span)
    name_axes(axes, "training between checkpoints")
    axes.grid(color=GRID, linewidth=0.6, zorder=0)
    axes.legend(loc="lower left", frameon=False, fontsize=SMALL_PT)
    put_heading(axes, "goodput")


def _by_devices(failures: Failures, num_devices: int, save_s: float) -> list[tuple[int, Goodput]]:
    """Return the goodput of other numbers of devices with the same checkpoints, as far as the run gets on."""
    found = []
    for power in range(-6, 7):
        count = round(num_devices * 2.0**power)
        try:
            found += [(count, failures.goodput(count, save_s))] if count >= 1 else []
        except ValueError:
            break
    return found


def _draw_devices(axes: Axes, failures: Failures, num_devices: int, save_s: float) -> None:
    rows = _by_devices(failures, num_devices, save_s)
    counts = [count for count, _ in rows]
    parts = np.array([[getattr(each, name) for each in (good for _, good in rows)] for name in PARTS])
    tops = parts.cumsum(axis=0)
    count_axis(axes, counts[:: -(-len(counts) // 5)], "devices", grid=False)
    for place, (name, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        below = tops[place - 1] if place else np.zeros(len(counts))
        axes.fill_between(counts, below, tops[place], color=colour, gid=name, linewidth=0, zorder=3)
    axes.axvline(num_devices, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), zorder=5)
    axes.set_xlim(counts[0], max(counts[-1], counts[0] * 2))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    shown = [
        (name, colour, tops[place][-1] - parts[place][-1] / 2)
        for place, (name, colour) in enumerate(zip(PARTS, COLOURS, strict=True))
        if parts[place].max() > 0
    ]
    name_line_ends(
        axes, [at for *_, at in shown], [name for name, *_ in shown], [text_on_white(colour) for _, colour, _ in shown]
    )
    put_heading(axes, "where the time goes, with these checkpoints")


def _takeaway(good: Goodput) -> str:
    mtbf, interval = format_span(good.mtbf_s), format_span(good.interval_s)
    return f"{percent(good.useful, 1)} of the time counts: a failure every {mtbf}, a save every {interval}"


def _setting(failures: Failures, num_devices: int, save_s: float) -> str:
    save, restart = format_span(save_s), format_span(failures.restart_s)
    return f"{counted(num_devices, 'device')}; {save} to save, {restart} to restart; {failures.published.source}."
