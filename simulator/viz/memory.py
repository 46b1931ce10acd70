"""Draw what a step holds in memory: the peak of every stage by kind, and the fullest stage over time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from simulator.memory import KINDS, Memory
from simulator.units import format_bytes
from simulator.viz.boxes import CHARACTER_WIDTH, axes_pixels
from simulator.viz.style import (
    DPI,
    FAINT,
    INK,
    SMALL_PT,
    TEXT_PT,
    WIDTH_IN,
    KindStyle,
    LegendBox,
    byte_unit,
    frame,
    new_figure,
    percent,
    put_legend,
    put_title,
    text_colour,
    time_unit,
)

MEMORY_KINDS: Mapping[str, KindStyle] = MappingProxyType(
    {
        "parameters": KindStyle("#0072B2", "P", "parameters"),
        "gradients": KindStyle("#E69F00", "G", "gradients"),
        "optimizer": KindStyle("#CC79A7", "O", "optimizer state"),
        "activations": KindStyle("#009E73", "A", "activations"),
        "buckets": KindStyle("#F0E442", "B", "gradient buckets"),
        "errors": KindStyle("#8C564B", "E", "errors kept by compression"),
    }
)
TOP_IN, BOTTOM_IN = 1.35, 1.15


def draw_memory(memory: Memory, *, capacity_bytes: float | None = None, title: str | None = None) -> Figure:
    """Draw each stage's peak as a stacked bar, and beside it the fullest stage from the step's start to its end.

    A dashed line marks `capacity_bytes`, the device's memory, where it is within the picture.

    Raises:
        ValueError: the capacity is not above zero.
    """
    if capacity_bytes is not None and not capacity_bytes > 0:
        raise ValueError(f"capacity_bytes is {capacity_bytes}; pass the device's memory, above zero, or None")
    num_stages = len(memory.peak_bytes)
    height = TOP_IN + BOTTOM_IN + min(max(2.6, 0.42 * num_stages), 5.5)
    figure = new_figure(height)
    half = WIDTH_IN / 2
    bars = frame(figure, left=1.15, right=half + 0.75, top=TOP_IN, bottom=BOTTOM_IN)
    time = frame(figure, left=half + 0.45, right=0.35, top=TOP_IN, bottom=BOTTOM_IN)
    limit = memory.max_bytes * 1.16 or 1.0
    if capacity_bytes is not None and capacity_bytes <= 1.6 * memory.max_bytes:
        limit = max(limit, capacity_bytes * 1.08)
    _draw_peaks(bars, memory, limit)
    _draw_over_time(time, memory, _fullest(memory), limit)
    if capacity_bytes is not None and capacity_bytes <= limit:
        dashes: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1.4}
        bars.axvline(capacity_bytes, **dashes)
        time.axhline(capacity_bytes, **dashes)
    used = [style for kind, style in MEMORY_KINDS.items() if memory.peak_bytes[:, KINDS.index(kind)].any()]
    put_legend(figure, [LegendBox(style.colour, "white", style.letter, style.words) for style in used])
    put_title(figure, title or memory_takeaway(memory, capacity_bytes), _capacity_note(memory, capacity_bytes))
    return figure


def describe_memory(memory: Memory, *, capacity_bytes: float | None = None) -> str:
    """Say in one paragraph what `draw_memory` shows."""
    stage = _fullest(memory)
    parts = [
        f"{MEMORY_KINDS[kind].words} {format_bytes(memory.of(kind, stage))}" for kind in KINDS if memory.of(kind, stage)
    ]
    where = f"Stage {stage} of {len(memory.peak_bytes)}" if len(memory.peak_bytes) > 1 else "Each rank"
    text = f"Memory: {where} peaks at {format_bytes(memory.max_bytes)}: {', '.join(parts)}."
    times, rows = memory.over_time(stage)
    lowest = int(rows.sum(axis=1).min())
    text += f" Between the peaks it falls to {format_bytes(lowest)}." if len(times) > 1 else ""
    if len(memory.peak_bytes) > 1:
        least = int(memory.total_bytes.argmin())
        text += f" The least full, stage {least}, peaks at {format_bytes(int(memory.total_bytes[least]))}."
    note = _capacity_note(memory, capacity_bytes)
    return f"{text} {note}." if note else text


def memory_takeaway(memory: Memory, capacity_bytes: float | None) -> str:
    """Return the title: how full the fullest stage is, and what fills it most."""
    stage = _fullest(memory)
    kind = KINDS[int(memory.peak_bytes[stage].argmax())]
    share = memory.of(kind, stage) / memory.max_bytes if memory.max_bytes else 0.0
    where = f"Stage {stage}" if len(memory.peak_bytes) > 1 else "A rank"
    text = f"{where} peaks at {format_bytes(memory.max_bytes)}, {percent(share)} of it {MEMORY_KINDS[kind].words}"
    if capacity_bytes is not None and memory.max_bytes > capacity_bytes:
        text = f"Does not fit: {where.lower()} needs {format_bytes(memory.max_bytes)}"
    return text


def _fullest(memory: Memory) -> int:
    return int(memory.total_bytes.argmax())


def _capacity_note(memory: Memory, capacity_bytes: float | None) -> str:
    if capacity_bytes is None:
        return ""
    share = percent(memory.max_bytes / capacity_bytes, 1 if memory.max_bytes < 0.1 * capacity_bytes else 0)
    return f"{share} of the device's {format_bytes(capacity_bytes)}"


def _draw_peaks(axes: Axes, memory: Memory, limit: float) -> None:
    """Draw one stacked bar a stage, with a letter in each part that has room for one."""
    num_stages = len(memory.peak_bytes)
    axes.set_xlim(0, limit)
    axes.set_ylim(num_stages - 0.4, -0.6)
    wide, tall = axes_pixels(axes)
    size = min(TEXT_PT, 0.6 * tall / num_stages * 72 / DPI)
    left = np.zeros(num_stages)
    for kind, style in MEMORY_KINDS.items():
        held = memory.peak_bytes[:, KINDS.index(kind)].astype(float)
        axes.barh(np.arange(num_stages), held, 0.72, left=left, color=style.colour, edgecolor="white", linewidth=0.8)
        for stage in np.flatnonzero(held / limit * wide > 1.6 * CHARACTER_WIDTH * size * DPI / 72).tolist():
            words: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": text_colour(style.colour)}
            if size >= 6.5:
                axes.text(left[stage] + held[stage] / 2, stage, style.letter, fontsize=size, **words)
        left += held
    for stage in range(num_stages) if size >= 9 else ():
        axes.text(
            left[stage] + 0.008 * limit, stage, format_bytes(left[stage]), fontsize=SMALL_PT, color=INK, va="center"
        )
    every = -(-num_stages * 20 // max(1, int(tall)))
    ticks = list(range(0, num_stages, max(1, every)))
    axes.set_yticks(ticks, [f"stage {stage}" if num_stages > 1 else "each rank" for stage in ticks])
    axes.tick_params(axis="y", length=0)
    _label_bytes(axes, "x", limit)
    axes.set_title("at the peak", fontsize=TEXT_PT, loc="left", color=FAINT)


def _draw_over_time(axes: Axes, memory: Memory, stage: int, limit: float) -> None:
    """Draw one stage's bytes by kind, stacked, from the start of the step to the end of its last backward."""
    times_ns, rows = memory.over_time(stage)
    end = float(times_ns[-1]) / 1e9
    times = np.append(times_ns / 1e9, end * 1.04 if end else 1e-6)  # what is held after the last change goes on
    below = np.zeros(len(times))
    for kind, style in MEMORY_KINDS.items():
        column = rows[:, KINDS.index(kind)].astype(float)
        above = below + np.append(column, column[-1])
        if column.any():
            axes.fill_between(times, below, above, step="post", color=style.colour, linewidth=0)
            axes.step(times, above, where="post", color="white", linewidth=0.8)
        below = above
    axes.set_xlim(0, times[-1])
    axes.set_ylim(0, limit)
    scale, unit = time_unit(end)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:,.6g}"))
    axes.set_xlabel(f"time since the step began ({unit})", fontsize=TEXT_PT, color=INK)
    _label_bytes(axes, "y", limit)
    where = f"stage {stage} over the step" if len(memory.peak_bytes) > 1 else "over the step"
    axes.set_title(where, fontsize=TEXT_PT, loc="left", color=FAINT)


def _label_bytes(axes: Axes, which: str, limit: float) -> None:
    size, unit = byte_unit(limit)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:,.6g}"))
    axis.set_label_text(f"memory ({unit})", fontsize=TEXT_PT if which == "x" else SMALL_PT, color=INK)
