"""Draw sweeps: when compression pays, by the bandwidth between replicas; and how large a unit of sharding should be."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from distlab.plan.compression import Compression
from simulator.step.simulate import Step
from simulator.sweeps.compression import CompressionLine, CompressionSweep
from simulator.sweeps.fsdp_units import UnitSweep
from simulator.units import byte_unit, counted, format_bytes, format_bytes_per_s, format_s, percent, time_unit
from simulator.viz.drawing import plot
from simulator.viz.drawing.lanes import Scene, scene_of
from simulator.viz.drawing.pen import Picture, finished, put_legend
from simulator.viz.drawing.plot import draw_time_scale, frame, mark_ticks, name_axes, new_figure
from simulator.viz.drawing.theme import DPI, FAINT, INK, SMALL_PT, TEXT_PT, WIDTH_IN, LegendBox, line_look
from simulator.viz.timeline.timeline import fill_rows

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
    every = [*sweep.plain_s, sweep.alone_s, *(value for line in sweep.lines for value in line.duration_s)]
    scale, unit = time_unit(min(every))
    axes.set_ylim(min(every) / 1.6, max(every) * 1.15)
    mark_ticks(axes.xaxis, LogLocator(10), format_bytes_per_s)
    mark_ticks(axes.yaxis, LogLocator(10, subs=(1.0, 2.0, 5.0)), lambda value: f"{value * scale:,.6g}")
    axes.grid(color=plot.GRID, linewidth=0.6, zorder=0)
    name_axes(axes, "bandwidth between replicas, one way", f"step ({unit})")
    _name_lines(axes, sweep)
    ways = [("uncompressed", _between(sweep, sweep.plain_s, at_bytes_per_s))]
    ways += [(name, _between(sweep, line.duration_s, at_bytes_per_s)) for name, line in named.items()]
    plain_s, (best, *_) = ways[0][1], sorted(ways, key=itemgetter(1))
    told = [f"{name} {format_s(seconds)}" for name, seconds in sorted(ways, key=itemgetter(1))]
    where = f"At {format_bytes_per_s(at_bytes_per_s)}"
    title = f"{where} {best[0]} is best: the step takes {percent(best[1] / plain_s)} of the plain one"
    if best[0] == "uncompressed":
        title = f"{where} no compression pays"
    plot.put_title(figure, title, f"Fastest: {', '.join(told[:3])}.")
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


def _name_lines(axes: Axes, sweep: CompressionSweep) -> None:
    """Name the lines on the right of the picture, in the order of their left ends, and say how far each pays."""
    beside: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    look: dict[str, Any] = {"transform": axes.transAxes, "fontsize": SMALL_PT, "va": "top", "ha": "left"}
    place, apart = 1.0, 2.1 * 1.35 * SMALL_PT * DPI / 72 / plot.axes_pixels(axes)[1]
    axes.text(1.05, place, "uncompressed", color=INK, weight="bold", **look)
    axes.plot([1.018, 1.042], [place - 0.025] * 2, color=INK, linewidth=3.0, **beside)
    order = sorted(range(len(sweep.lines)), key=lambda index: -sweep.lines[index].duration_s[0])
    for index in order:
        line = sweep.lines[index]
        place -= apart
        words = textwrap.fill(f"{compression_label(line.compression)}: {stops(line)}", NAME_CHARACTERS)
        axes.text(1.05, place, words, color=INK, **look)
        axes.plot([1.03], [place - 0.025], markersize=8, **line_look(index), **beside)


COMPUTE, WAITS, GATHERED, REST = "#56B4E9", "#D55E00", "#332288", "#B8BCC4"
CURVES_IN, TOP_IN, MIDDLE_IN, LANE_IN, FOOT_IN = 2.75, 1.35, 1.25, 0.46, 1.2
LEFT_IN, RIGHT_IN, GAP_IN = 1.15, 0.4, 1.25
Floats = NDArray[np.float64]


def draw_sharding(sweep: UnitSweep, step: Step) -> Picture:
    """Draw memory and step time at each unit size, with the step's own size marked, and the step's timeline under them.

    Args:
        sweep: what `sweep_units` returned.
        step: one step of stage 3; its unit size is the one that is marked.
    """
    scene = scene_of(step.layer_trace.select(step.layer_trace.rank == 0))
    height = TOP_IN + CURVES_IN + MIDDLE_IN + LANE_IN * len(scene.rows) + FOOT_IN
    figure = new_figure(height)
    half = (WIDTH_IN - LEFT_IN - RIGHT_IN - GAP_IN) / 2
    bottom = height - TOP_IN - CURVES_IN
    sizes = np.arange(len(sweep.unit_layers), dtype=float)
    wanted = step.plan.sharding.unit_layers
    at = min(range(len(sizes)), key=lambda index: abs(sweep.unit_layers[index] - wanted))
    memory = frame(figure, left=LEFT_IN, right=RIGHT_IN + half + GAP_IN, top=TOP_IN, bottom=bottom)
    _draw_memory(memory, sizes, sweep, step)
    time = frame(figure, left=LEFT_IN + half + GAP_IN, right=RIGHT_IN, top=TOP_IN, bottom=bottom)
    _draw_time(time, sizes, sweep)
    for axes in (memory, time):
        _mark(axes, sizes, sweep, at)
    _draw_timeline(figure, scene)
    return finished(figure, *_say(sweep, step, at))


def _say(sweep: UnitSweep, step: Step, at: int) -> list[str]:
    """Say what the chosen size costs beside the fastest, what is sharded, and what three sizes give."""
    named = {"Chosen": at, "Fastest": sweep.fastest, "Holding least": sweep.smallest}
    lines = []
    for name, index in named.items():
        layers, units = counted(sweep.unit_layers[index], "layer"), counted(sweep.num_units[index], "unit")
        held, gathered = format_bytes(sweep.memory_bytes[index]), format_bytes(sweep.gathered_bytes[index])
        step_s, exposed_s = format_s(sweep.duration_s[index]), format_s(sweep.exposed_s[index])
        lines.append(f"{name}: {layers} per unit, {units}: {held} per rank, {gathered} of it gathered; ")
        lines[-1] += f"step {step_s}, {exposed_s} of it exposed."
    own = f"Units of {counted(sweep.unit_layers[at], 'layer')}"
    held = f"{format_bytes(sweep.memory_bytes[at])} per rank"
    slower = percent(sweep.duration_s[at] / sweep.duration_s[sweep.fastest] - 1, 1)
    change = sweep.memory_bytes[at] - sweep.memory_bytes[sweep.fastest]
    words = f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'}" if change else "the same memory"
    title = f"{own}: {held}, {words} than the fastest size, and a step {slower} longer"
    if at == sweep.fastest:
        exposed = percent(sweep.exposed_s[at] / sweep.duration_s[at])
        title = f"{own} make the shortest step, {exposed} exposed, with {held}"
    sharding, data = step.plan.sharding, step.plan.data
    sets = "" if sharding.replicas == 1 else f" in {sharding.replicas} sets of {data // sharding.replicas}"
    kept = "" if sharding.reshard_after_forward else ", parameters kept after forward"
    note = f"{step.workload.name} on {data} ranks of {step.cluster.name}{sets}, {counted(sharding.prefetch, 'unit')} "
    note += f"gathered ahead{kept}; {format_bytes(max(step.sent_bytes_per_rank))} sent per rank."
    return [title, note, *lines]


def _draw_memory(axes: Axes, sizes: Floats, sweep: UnitSweep, step: Step) -> None:
    unit, name = byte_unit(float(max(sweep.memory_bytes)))
    total = np.array(sweep.memory_bytes, float) / unit
    limit = step.cluster.device.memory_bytes / unit
    is_near = limit < 1.6 * total.max()
    names = (("gathered units", GATHERED, "gathered", 0.55), ("all else", REST, "rest", 1.0))
    _draw_areas(axes, "memory", sizes, total, np.minimum(np.array(sweep.gathered_bytes) / unit, total), names)
    if is_near:
        axes.axhline(limit, color=WAITS, linewidth=1.6, linestyle=(0, (5, 3)), gid="capacity")
        axes.text(0, limit, " the device's memory", color=WAITS, fontsize=SMALL_PT, ha="left", va="bottom")
    axes.set_ylim(0, max(float(total.max()), limit if is_near else 0.0) * 1.14)
    axes.set_ylabel(f"held by a rank at its peak ({name})", fontsize=TEXT_PT - 1, color=INK)


def _draw_time(axes: Axes, sizes: Floats, sweep: UnitSweep) -> None:
    scale, name = time_unit(max(sweep.duration_s))
    total = np.array(sweep.duration_s) * scale
    names = (("exposed communication", WAITS, "exposed", 0.6), ("computing", COMPUTE, "compute", 0.5))
    _draw_areas(axes, "step", sizes, total, np.array(sweep.exposed_s) * scale, names)
    axes.set_ylim(0, float(total.max()) * 1.14)
    axes.set_ylabel(f"step ({name})", fontsize=TEXT_PT - 1, color=INK)


def _draw_areas(
    axes: Axes, gid: str, sizes: Floats, total: Floats, upper: Floats, names: Sequence[tuple[str, str, str, float]]
) -> None:
    """Draw a line over two areas, the upper one first in `names`: words, colour, gid and opacity of each."""
    below = total - upper
    for low, high, (_, colour, name, alpha) in ((0 * total, below, names[1]), (below, total, names[0])):
        axes.fill_between(sizes, low, high, color=colour, alpha=alpha, linewidth=0, gid=name)
    axes.plot(sizes, total, color=INK, linewidth=2.2, marker="o", markersize=5, gid=gid)
    look: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    for start, (words, colour, *_) in zip((0.0, 0.5), names, strict=True):
        axes.plot([start + 0.015], [1.07], marker="s", color=colour, markersize=9, alpha=0.75, **look)
        axes.text(start + 0.045, 1.065, words, ha="left", va="center", color=FAINT, fontsize=SMALL_PT, **look)


def _mark(axes: Axes, sizes: Floats, sweep: UnitSweep, at: int) -> None:
    """Mark the chosen size, and label the sizes."""
    axes.axvline(sizes[at], color=INK, linewidth=1.4, linestyle=(0, (4, 3)), gid="chosen")
    values = np.asarray(axes.lines[0].get_ydata(), float)
    look: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 1.2, "zorder": 6, "clip_on": False}
    axes.plot(sizes[at], values[at], marker="o", markersize=12, color=INK, **look)
    axes.set_xlim(-0.3, len(sizes) - 0.7)
    mark_ticks(axes.xaxis, sizes.tolist(), lambda value: str(sweep.unit_layers[round(value)]))
    name_axes(axes, "layers per unit", size=TEXT_PT - 1)


def _draw_timeline(figure: Figure, scene: Scene) -> None:
    top = TOP_IN + CURVES_IN + MIDDLE_IN
    axes = frame(figure, left=LEFT_IN, right=RIGHT_IN, top=top, bottom=FOOT_IN, bare=True)
    fill_rows(axes, scene, (0.0, scene.sides[0].trace.duration_s or 1e-9))
    look: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": TEXT_PT - 1, "color": FAINT}
    for row in scene.rows:
        axes.text(-0.008, row.top + row.height / 2, row.lane, ha="right", va="center", **look)
    draw_time_scale(axes, "on every rank: time since the step began", label_pt=TEXT_PT - 1)
    put_legend(figure, [LegendBox(s.colour, s.colour, s.letter, s.words) for s in scene.styles.values()])
