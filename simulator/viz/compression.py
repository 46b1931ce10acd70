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
from simulator.viz.drawing.pen import Picture
from simulator.viz.drawing.plot import GRID, axes_pixels, frame, mark_ticks, name_axes, new_figure, put_title
from simulator.viz.drawing.theme import DPI, FAINT, INK, SMALL_PT, line_look

NAME_CHARACTERS = 30


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


def draw_compression(sweep: CompressionSweep, at_bytes_per_s: float) -> Picture:
    """Draw the step's time at each bandwidth, plain and with each compression; a ring marks each break-even.

    Args:
        sweep: what `sweep_compression` returned.
        at_bytes_per_s: a bandwidth to mark and read off, between those of the sweep.
    """
    figure = new_figure(5.6)
    axes = frame(figure, left=1.2, right=3.1, top=1.05, bottom=0.85)
    speeds, named = np.array(sweep.bytes_per_s), {compression_label(line.compression): line for line in sweep.lines}
    axes.set(xscale="log", yscale="log", xlim=(speeds[0], speeds[-1]))
    axes.axhline(sweep.alone_s, color=FAINT, linewidth=1.5, linestyle=(0, (5, 4)), zorder=2)
    axes.text(speeds[-1], sweep.alone_s, "no communication ", color=FAINT, fontsize=SMALL_PT, va="top", ha="right")
    axes.plot(speeds, sweep.plain_s, color=INK, linewidth=3.0, zorder=4, gid="plain")
    for index, (name, line) in enumerate(named.items()):
        look = line_look(index)
        axes.plot(speeds, line.duration_s, linewidth=2.0, markersize=6, markevery=4, zorder=5, gid=name, **look)
        if speeds[0] <= line.break_even_bytes_per_s <= speeds[-1]:
            place = (line.break_even_bytes_per_s, _between(sweep, sweep.plain_s, line.break_even_bytes_per_s))
            ring: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 2.6, "zorder": 7}
            axes.plot(*place, marker="o", markersize=11, markeredgecolor=look["color"], gid="break-even", **ring)
    axes.axvline(at_bytes_per_s, color=INK, linewidth=1.3, linestyle=(0, (4, 3)), gid="chosen")
    _label(axes, sweep)
    _name_lines(axes, sweep)
    ways = [("uncompressed", _between(sweep, sweep.plain_s, at_bytes_per_s))]
    ways += [(name, _between(sweep, line.duration_s, at_bytes_per_s)) for name, line in named.items()]
    plain_s, (best, *_) = ways[0][1], sorted(ways, key=itemgetter(1))
    told = [f"{name} {format_s(seconds)}" for name, seconds in sorted(ways, key=itemgetter(1))]
    where = f"At {format_bytes_per_s(at_bytes_per_s)}"
    title = f"{where} {best[0]} is best: the step takes {percent(best[1] / plain_s)} of the plain one"
    if best[0] == "uncompressed":
        title = f"{where} no compression pays"
    put_title(figure, title, f"Fastest: {', '.join(told[:3])}.")
    lines = [f"{title}.", f"Without any communication the step takes {format_s(sweep.alone_s)}."]
    lines += [f"{name}: {stops(line)}." for name, line in named.items()]
    lines.append("Only time counts here, not what compression does to the loss.")
    return Picture(figure, "\n".join([*lines, f"{where}: {', '.join(told)}."]))


def stops(line: CompressionLine) -> str:
    """Say up to which bandwidth a compression pays."""
    if line.break_even_bytes_per_s == 0:
        return "never pays"
    if math.isinf(line.break_even_bytes_per_s):
        return "pays at any bandwidth"
    return f"pays below {format_bytes_per_s(line.break_even_bytes_per_s)}"


def _between(sweep: CompressionSweep, seconds: Sequence[float], bytes_per_s: float) -> float:
    """Return the height of a curve at one bandwidth, between the points that were computed (straight in log-log)."""
    return float(np.exp(np.interp(np.log(bytes_per_s), np.log(sweep.bytes_per_s), np.log(seconds))))


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
    beside: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    look: dict[str, Any] = {"transform": axes.transAxes, "fontsize": SMALL_PT, "va": "top", "ha": "left"}
    place, apart = 1.0, 2.1 * 1.35 * SMALL_PT * DPI / 72 / axes_pixels(axes)[1]
    axes.text(1.05, place, "uncompressed", color=INK, weight="bold", **look)
    axes.plot([1.018, 1.042], [place - 0.025] * 2, color=INK, linewidth=3.0, **beside)
    order = sorted(range(len(sweep.lines)), key=lambda index: -sweep.lines[index].duration_s[0])
    for index in order:
        line = sweep.lines[index]
        place -= apart
        words = textwrap.fill(f"{compression_label(line.compression)}: {stops(line)}", NAME_CHARACTERS)
        axes.text(1.05, place, words, color=INK, **look)
        axes.plot([1.03], [place - 0.025], markersize=8, **line_look(index), **beside)
