"""Draw what a step holds in memory: by rank and over time, of several plans, and measured over predicted.

Where each rank of the pipeline has one stage, the picture calls it by its stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from numpy.typing import NDArray

from distlab.plan.require import require_positive
from simulator.memory.memory import KINDS, Memory
from simulator.units import byte_unit, format_bytes, percent
from simulator.viz.drawing import plot, theme
from simulator.viz.drawing.lanes import CHARACTER_WIDTH
from simulator.viz.drawing.pen import Picture, put_legend

MEMORY_KINDS = theme.styles("memory")
TOP_IN, BOTTOM_IN = 1.35, 1.15
CAPACITY_LINE: Mapping[str, Any] = MappingProxyType({"color": theme.INK, "linestyle": (0, (4, 3)), "linewidth": 1.4})


def draw_memory(memory: Memory, *, capacity_bytes: float) -> Picture:
    """Draw each rank's peak as a stacked bar, and next to it the fullest rank from the step's start to its end.

    A dashed line marks `capacity_bytes`, the device's memory, where it is within the picture.

    Raises:
        ValueError: the capacity is not above zero.
    """
    require_positive("memory", capacity_bytes=capacity_bytes)
    height = TOP_IN + BOTTOM_IN + min(max(2.6, 0.42 * len(memory.peak_bytes)), 5.5)
    figure = plot.new_figure(height)
    half = theme.WIDTH_IN / 2
    bars = plot.frame(figure, left=1.15, right=half + 0.75, top=TOP_IN, bottom=BOTTOM_IN, bare=True)
    time = plot.frame(figure, left=half + 0.45, right=0.35, top=TOP_IN, bottom=BOTTOM_IN, bare=True)
    limit = memory.max_bytes * 1.16 or 1.0
    if capacity_bytes <= 1.6 * memory.max_bytes:
        limit = max(limit, capacity_bytes * 1.08)
    rank, several = memory.fullest_stage, len(memory.peak_bytes) > 1
    names = [_name(memory, each) if several else "each rank" for each in range(len(memory.peak_bytes))]
    stack_bars(bars, memory.at_peak_bytes, names, limit)
    plot.put_heading(bars, "at the peak")
    stack_area(time, *memory.over_time(rank), limit=limit, timed=memory.clock is not None)
    plot.put_heading(time, f"{_name(memory, rank)} over the step" if several else "over the step")
    if capacity_bytes <= limit:
        bars.axvline(capacity_bytes, **CAPACITY_LINE)
        time.axhline(capacity_bytes, **CAPACITY_LINE)
    put_legend(figure, boxes_of_kinds(memory.peak_bytes))
    title, note, words = _say(memory, capacity_bytes)
    plot.put_title(figure, title, note)
    return Picture(figure, words)


def _say(memory: Memory, capacity_bytes: float) -> tuple[str, str, str]:
    """Say how full the fullest rank is and what fills it most, the share of the device; what all ranks hold."""
    rank, peak, several = memory.fullest_stage, memory.max_bytes, len(memory.peak_bytes) > 1
    row, name = memory.at_peak_bytes[rank], _name(memory, rank).capitalize()
    most, where = MEMORY_KINDS[KINDS[int(row.argmax())]].words, name if several else "A rank"
    title = f"{where} peaks at {format_bytes(peak)}, {percent(int(row.max()) / peak if peak else 0.0)} of it {most}"
    if peak > capacity_bytes:
        title = f"Does not fit: {where.lower()} needs {format_bytes(peak)}"
    share = percent(peak / capacity_bytes, 1 if peak < 0.1 * capacity_bytes else 0)
    note = f"{share} of the device's {format_bytes(capacity_bytes)}"
    each = f"{name} of {len(memory.peak_bytes)}" if several else "Each rank"
    words = f"Memory: {each} peaks at {format_bytes(peak)}: {name_kinds(row)}."
    times, rows = memory.over_time(rank)
    words += f" Between the peaks it falls to {format_bytes(int(rows.sum(axis=1).min()))}." if len(times) > 1 else ""
    if several:
        least = int(memory.total_bytes.argmin())
        words += f" The least full, {_name(memory, least)}, peaks at {format_bytes(int(memory.total_bytes[least]))}."
    return title, note, f"{words} {note}."


def _name(memory: Memory, rank: int) -> str:
    """Return what a rank of the pipeline is called: the stage that it has, if each has one."""
    alone = all(len(order.stages) == 1 for order in memory.order)
    return f"stage {memory.order[rank].stages[0]}" if alone else f"rank {rank}"


def name_kinds(row: NDArray[np.int64]) -> str:
    """Say what one moment's bytes are, the most first."""
    order = (-row).argsort(kind="stable")
    return ", ".join(f"{MEMORY_KINDS[KINDS[kind]].words} {format_bytes(row[kind])}" for kind in order if row[kind])


def boxes_of_kinds(rows: NDArray[np.int64]) -> list[theme.LegendBox]:
    """Return a legend's entries for the kinds that some row [..., K] holds."""
    used = [style for kind, style in MEMORY_KINDS.items() if rows[..., KINDS.index(kind)].any()]
    return [theme.LegendBox(style.colour, "white", style.letter, style.words) for style in used]


def stack_bars(axes: Axes, rows: NDArray[np.int64], names: Sequence[str], limit: float) -> None:
    """Draw one stacked bar per row of `rows` [R, K], with a letter in each part that has room for one."""
    num_rows = len(rows)
    axes.set_xlim(0, limit)
    axes.set_ylim(num_rows - 0.4, -0.6)
    wide, tall = plot.axes_pixels(axes)
    size = min(theme.TEXT_PT, 0.6 * tall / num_rows * 72 / theme.DPI)
    left, corners, fills = np.zeros(num_rows), [], []
    for kind, style in MEMORY_KINDS.items():
        held = rows[:, KINDS.index(kind)].astype(float)
        across = np.stack([left, left + held, left + held, left], axis=1)
        corners.append(np.stack([across, np.arange(num_rows)[:, None] + np.array([-0.36, -0.36, 0.36, 0.36])], axis=2))
        fills += [style.colour] * num_rows
        for row in np.flatnonzero(held / limit * wide > 1.6 * CHARACTER_WIDTH * size * theme.DPI / 72).tolist():
            words: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": theme.text_colour(style.colour)}
            if size >= theme.LEAST_PT:
                axes.text(left[row] + held[row] / 2, row, style.letter, fontsize=size, **words)
        left += held
    look: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.8, "gid": "bars"}
    axes.add_collection(PolyCollection(np.concatenate(corners), facecolors=fills, **look), autolim=False)  # type: ignore[arg-type]
    behind: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # a line goes behind the figure
    for row in range(num_rows) if size >= 9 else ():
        text, look = format_bytes(left[row]), {"fontsize": theme.SMALL_PT, "color": theme.INK, "va": "center"}
        axes.text(left[row] + 0.008 * limit, row, text, bbox=behind, **look)
    every = max(1, -(-num_rows * 20 // max(1, int(tall))))
    ticks = list(range(0, num_rows, every))
    plot.draw_scale(axes, "y", {row: names[row] for row in ticks}, line=False)
    draw_byte_scale(axes, "x", limit)


def stack_area(
    axes: Axes, times_ns: NDArray[np.int64], rows: NDArray[np.int64], *, limit: float, timed: bool = True
) -> None:
    """Draw bytes by kind [T, K], stacked, each from its moment [T] to the next.

    Where there are more moments than pixels, a pixel shows the most of each kind.
    """
    times_ns, rows = fewer_moments(times_ns, rows, int(plot.axes_pixels(axes)[0]))
    end = float(times_ns[-1]) / 1e9
    times = np.append(times_ns / 1e9, end * 1.04 if end else 1e-6)  # what is held after the last change goes on
    below = np.zeros(len(times))
    line = 0.8 if len(times) < 120 else 0.0
    for kind, style in MEMORY_KINDS.items():
        column = rows[:, KINDS.index(kind)].astype(float)
        above = below + np.append(column, column[-1])
        if column.any():
            axes.fill_between(times, below, above, step="post", color=style.colour, linewidth=0)
            axes.step(times, above, where="post", color="white", linewidth=line)
        below = above
    axes.set_xlim(0, times[-1])
    axes.set_ylim(0, limit)
    if timed:
        plot.draw_time_scale(axes)
    else:
        ticks = plot.even_ticks(0, times[-1], 6, 1e9)
        plot.draw_scale(axes, "x", ticks, "work since the step began (forwards of a layer)")
    draw_byte_scale(axes, "y", limit)


def fewer_moments(
    times_ns: NDArray[np.int64], rows: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return moments of which no two are in the same of `most` equal parts, each with the most of every kind."""
    if len(times_ns) <= most:
        return times_ns, rows
    part = times_ns * most // max(1, int(times_ns[-1]))
    first = np.flatnonzero(np.diff(part, prepend=-1))
    return times_ns[first], np.maximum.reduceat(rows, first, axis=0)


def draw_byte_scale(axes: Axes, which: str, limit: float) -> None:
    """Draw the axis of bytes along bare axes, in the unit that suits its end."""
    size, unit = byte_unit(limit)
    label_pt = theme.TEXT_PT if which == "x" else theme.SMALL_PT
    plot.draw_scale(axes, which, plot.even_ticks(0, limit, 5, 1 / size), f"memory ({unit})", label_pt=label_pt)


Ints = NDArray[np.int64]
Curve = tuple[Ints, Ints]


def draw_memory_of_plans(plans: Mapping[str, Memory], *, capacity_bytes: float) -> Picture:
    """Draw one stacked bar per plan: what its fullest rank holds at its peak, by kind.

    A dashed line marks `capacity_bytes`, the device's memory, where it is within the picture.

    Raises:
        ValueError: the capacity is not above zero.
    """
    require_positive("memory", capacity_bytes=capacity_bytes)
    rows = np.array([memory.at_peak_bytes[memory.fullest_stage] for memory in plans.values()], np.int64)
    figure = plot.new_figure(1.15 + BOTTOM_IN + min(max(1.6, 0.5 * len(rows)), 7.0))
    left = min(0.5 + 0.095 * max(map(len, plans)), 0.4 * theme.WIDTH_IN)
    axes = plot.frame(figure, left=left, right=0.9, top=1.15, bottom=BOTTOM_IN, bare=True)
    limit = float(rows.sum(axis=1).max()) * 1.1 or 1.0
    stack_bars(axes, rows, list(plans), limit)
    if capacity_bytes < limit:
        axes.axvline(capacity_bytes, **CAPACITY_LINE)
        words: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": theme.SMALL_PT, "color": theme.FAINT}
        axes.text(capacity_bytes, -0.6, f"device: {format_bytes(capacity_bytes)}", **words)
    put_legend(figure, boxes_of_kinds(rows))
    sizes = {name: memory.max_bytes for name, memory in plans.items()}
    least, where = min(sizes, key=sizes.__getitem__), f"in {format_bytes(capacity_bytes)}"
    fitting = [name for name, size in sizes.items() if size <= capacity_bytes]
    takeaway = f"{len(fitting)} of {len(sizes)} plans fit {where}; {least} is leanest, {format_bytes(sizes[least])}"
    if not fitting:
        takeaway = f"No plan fits {where}: the leanest, {least}, holds {format_bytes(sizes[least])}"
    elif len(fitting) == 1:
        takeaway = f"Only {fitting[0]} fits {where}, with {format_bytes(sizes[fitting[0]])}"
    plot.put_title(figure, takeaway, "memory of the fullest rank at its peak")
    parts = [
        f"{name}: {format_bytes(int(row.sum()))} ({name_kinds(row)})" for name, row in zip(plans, rows, strict=True)
    ]
    return Picture(figure, f"{takeaway}. {'; '.join(parts)}.")


def draw_measured_memory(predicted: Curve, measured: Curve) -> Picture:
    """Draw what a step held as measured, over what was predicted, on one scale of bytes; each on its own clock.

    Args:
        predicted: moments in nanoseconds [T] and bytes of each kind from then on [T, len(KINDS)].
        measured: the same of the real run.

    Raises:
        ValueError: the shapes of a curve do not belong together.
    """
    both = {"measured": measured, "predicted": predicted}
    for name, (times, rows) in both.items():
        if rows.shape != (len(times), len(KINDS)):
            raise ValueError(f"{name} has {len(times)} moments, bytes {rows.shape}; pass [T] and [T, {len(KINDS)}]")
    figure = plot.new_figure(6.6)
    limit = 1.08 * max(float(rows.sum(axis=1).max()) for _, rows in both.values()) or 1.0
    margins = {"measured": {"top": 1.15, "bottom": 3.8}, "predicted": {"top": 3.8, "bottom": BOTTOM_IN}}
    peaks = {name: int(rows.sum(axis=1).max()) for name, (_, rows) in both.items()}
    for name, (times, rows) in both.items():
        axes = plot.frame(figure, left=1.15, right=0.35, bare=True, **margins[name])
        stack_area(axes, times, rows, limit=limit)
        plot.put_heading(axes, f"{name}: peak {format_bytes(peaks[name])}")
        for other in both.keys() - {name}:  # the other's peak, to read the difference
            axes.axhline(peaks[other], color=theme.INK, linestyle=(0, (2, 3)), linewidth=1.0)
    put_legend(figure, boxes_of_kinds(np.concatenate([rows for _, rows in both.values()])))
    error = percent(peaks["predicted"] / peaks["measured"] - 1, 1, "+") if peaks["measured"] else "not to be compared"
    takeaway = f"Predicted peak {format_bytes(peaks['predicted'])}, measured {format_bytes(peaks['measured'])}: {error}"
    plot.put_title(figure, takeaway, "dotted: the other's peak")
    said = [f"{takeaway}."]
    for name, (_, rows) in both.items():
        said.append(f"{name.capitalize()} at its peak: {name_kinds(rows[rows.sum(axis=1).argmax()])}.")
    apart = measured[1].max(axis=0) - predicted[1].max(axis=0)
    kind = int(np.abs(apart).argmax())
    if apart[kind]:
        words, far = MEMORY_KINDS[KINDS[kind]].words, format_bytes(abs(int(apart[kind])))
        said.append(f"Most apart: {words}, measured {far} {'more' if apart[kind] > 0 else 'less'}.")
    return Picture(figure, " ".join(said))
