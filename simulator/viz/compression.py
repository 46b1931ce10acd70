"""Draw when compression pays: the step's time against the bandwidth between replicas, and where each stops paying."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from distlab.plan.compression import Compression
from simulator.sweeps.compression import CompressionLine, CompressionSweep
from simulator.units import format_bytes_per_s, format_s, percent, time_unit
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import GRID, axes_pixels, frame, mark_ticks, name_axes, new_figure, put_title
from simulator.viz.drawing.style import DPI, FAINT, INK, SMALL_PT, line_look

HEIGHT_IN, TOP_IN, BOTTOM_IN, RIGHT_IN = 5.6, 1.05, 0.85, 3.1
NAME_CHARACTERS = 30
TIME_ONLY = "Only time counts here, not what compression does to the loss."


def compression_label(compression: Compression) -> str:
    """Return a short name of a compression: "top-k 1 %", "quantize 4 bits", "PowerSGD rank 2"."""
    share = f"{compression.ratio * 100:.3g} %"
    return {
        "top_k": f"top-k {share}",
        "random_k": f"random-k {share}",
        "quantize": f"quantize {compression.bits} bit{'s' if compression.bits > 1 else ''}",
        "sign": "sign",
        "powersgd": f"PowerSGD rank {compression.rank}",
    }[compression.method]


def draw_compression(sweep: CompressionSweep, *, at_bytes_per_s: float | None = None) -> Picture:
    """Draw the step's time at each bandwidth, plain and with each compression; a ring marks each break-even.

    Args:
        sweep: what `sweep_compression` returned.
        at_bytes_per_s: a bandwidth to mark and read off, between those of the sweep.
    """
    figure = new_figure(HEIGHT_IN)
    axes = frame(figure, left=1.2, right=RIGHT_IN, top=TOP_IN, bottom=BOTTOM_IN)
    speeds = np.array(sweep.bytes_per_s)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(speeds[0], speeds[-1] if len(speeds) > 1 else speeds[0] * 1.1)
    axes.axhline(sweep.alone_s, color=FAINT, linewidth=1.5, linestyle=(0, (5, 4)), zorder=2)
    axes.text(speeds[-1], sweep.alone_s, "no communication ", color=FAINT, fontsize=SMALL_PT, va="top", ha="right")
    axes.plot(speeds, sweep.plain_s, color=INK, linewidth=3.0, zorder=4, gid="plain")
    for index, line in enumerate(sweep.lines):
        look = line_look(index)
        axes.plot(speeds, line.duration_s, linewidth=2.0, markersize=6, markevery=4, zorder=5, gid=_name(line), **look)
        if speeds[0] <= line.break_even_bytes_per_s <= speeds[-1]:
            place = (line.break_even_bytes_per_s, _plain_at(sweep, line.break_even_bytes_per_s))
            ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 2.6, "zorder": 7}
            axes.plot(*place, marker="o", markersize=11, markeredgecolor=look["color"], gid="break-even", **ring)
    if at_bytes_per_s is not None:
        axes.axvline(at_bytes_per_s, color=INK, linewidth=1.3, linestyle=(0, (4, 3)), gid="chosen")
    _label(axes, sweep)
    _name_lines(axes, sweep)
    put_title(figure, _best_or_break_even(sweep, at_bytes_per_s), _fastest_ways(sweep, at_bytes_per_s))
    return Picture(figure, _say(sweep, at_bytes_per_s))


def _say(sweep: CompressionSweep, at_bytes_per_s: float | None) -> str:
    """Say where each compression stops to pay, and at one bandwidth which way is fastest."""
    lines = [f"{_best_or_break_even(sweep, at_bytes_per_s)}."]
    lines.append(f"Without any communication the step takes {format_s(sweep.alone_s)}.")
    lines += [f"{_name(line)}: {stops(line)}." for line in sweep.lines]
    lines.append(TIME_ONLY)
    if at_bytes_per_s is not None:
        ranked = ", ".join(f"{name} {format_s(seconds)}" for name, seconds in ranking(sweep, at_bytes_per_s))
        lines.append(f"At {format_bytes_per_s(at_bytes_per_s)}: {ranked}.")
    return "\n".join(lines)


def ranking(sweep: CompressionSweep, at_bytes_per_s: float) -> tuple[tuple[str, float], ...]:
    """Return the ways to send gradients at a bandwidth, the fastest first, each with the step's seconds."""
    ways = [("uncompressed", _plain_at(sweep, at_bytes_per_s))]
    ways += [(_name(line), _between(sweep, line.duration_s, at_bytes_per_s)) for line in sweep.lines]
    return tuple(sorted(ways, key=itemgetter(1)))


def stops(line: CompressionLine) -> str:
    """Say up to which bandwidth a compression pays."""
    if line.break_even_bytes_per_s == 0:
        return "never pays"
    if math.isinf(line.break_even_bytes_per_s):
        return "pays at any bandwidth"
    return f"pays below {format_bytes_per_s(line.break_even_bytes_per_s)}"


def _name(line: CompressionLine) -> str:
    return compression_label(line.compression)


def _plain_at(sweep: CompressionSweep, bytes_per_s: float) -> float:
    return _between(sweep, sweep.plain_s, bytes_per_s)


def _between(sweep: CompressionSweep, seconds: Sequence[float], bytes_per_s: float) -> float:
    """Return the height of a curve at one bandwidth, between the points that were computed (straight in log-log)."""
    return float(np.exp(np.interp(np.log(bytes_per_s), np.log(sweep.bytes_per_s), np.log(seconds))))


def _best_or_break_even(sweep: CompressionSweep, at_bytes_per_s: float | None) -> str:
    if at_bytes_per_s is not None:
        best, plain = ranking(sweep, at_bytes_per_s)[0], _plain_at(sweep, at_bytes_per_s)
        where = f"At {format_bytes_per_s(at_bytes_per_s)}"
        if best[0] == "uncompressed":
            return f"{where} no compression pays"
        return f"{where} {best[0]} is best: the step takes {percent(best[1] / plain)} of the plain one"
    top = max(sweep.lines, key=lambda line: line.break_even_bytes_per_s)
    if top.break_even_bytes_per_s == 0:
        return "Compression never pays here"
    if math.isinf(top.break_even_bytes_per_s):
        return f"{_name(top)} pays at any bandwidth"
    return f"Above {format_bytes_per_s(top.break_even_bytes_per_s)} no compression pays"


def _fastest_ways(sweep: CompressionSweep, at_bytes_per_s: float | None) -> str:
    if at_bytes_per_s is None:
        return f"A ring marks break-even: to its right the plain step is shorter. {TIME_ONLY}"
    three = ranking(sweep, at_bytes_per_s)[:3]
    return "Fastest: " + ", ".join(f"{name} {format_s(seconds)}" for name, seconds in three) + "."


def _label(axes: Axes, sweep: CompressionSweep) -> None:
    every = [*sweep.plain_s, sweep.alone_s, *(value for line in sweep.lines for value in line.duration_s)]
    scale, unit = time_unit(min(every))
    axes.set_ylim(min(every) / 1.6, max(every) * 1.15)
    mark_ticks(axes.xaxis, LogLocator(10), format_bytes_per_s)
    mark_ticks(axes.yaxis, LogLocator(10, subs=(1.0, 2.0, 5.0)), lambda value: f"{value * scale:,.6g}")
    axes.grid(color=GRID, linewidth=0.6, zorder=0)
    name_axes(axes, "bandwidth between replicas, one way", f"step ({unit})")


def _name_lines(axes: Axes, sweep: CompressionSweep) -> None:
    """Name the lines on the right of the picture, in the order of their left ends, and say how far each pays."""
    look: dict[str, Any] = {"transform": axes.transAxes, "fontsize": SMALL_PT, "va": "top", "ha": "left"}
    tall = axes_pixels(axes)[1]
    place = 1.0
    axes.text(1.05, place, "uncompressed", color=INK, weight="bold", **look)
    stroke: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "linewidth": 3.0}
    axes.plot([1.018, 1.042], [place - 0.025] * 2, color=INK, **stroke)
    order = sorted(range(len(sweep.lines)), key=lambda index: -sweep.lines[index].duration_s[0])
    for index in order:
        line = sweep.lines[index]
        place -= 2.1 * 1.35 * SMALL_PT * DPI / 72 / tall
        words = textwrap.fill(f"{_name(line)}: {stops(line)}", NAME_CHARACTERS)
        axes.text(1.05, place, words, color=INK, **look)
        tick: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "markersize": 8}
        axes.plot([1.03], [place - 0.025], **line_look(index), **tick)
