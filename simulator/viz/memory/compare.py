"""Compare memory: the peaks of several plans side by side, and what was measured over what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.memory.memory import KINDS, Memory
from simulator.units import format_bytes, percent
from simulator.viz.drawing.pen import put_legend
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import frame, new_figure, put_heading, put_title
from simulator.viz.drawing.style import FAINT, INK, SMALL_PT, WIDTH_IN
from simulator.viz.memory.memory import (
    CAPACITY_LINE,
    MEMORY_KINDS,
    boxes_of_kinds,
    check_capacity,
    name_kinds,
    stack_area,
    stack_bars,
)

Ints = NDArray[np.int64]
Curve = tuple[Ints, Ints]
TOP_IN, BOTTOM_IN = 1.15, 1.15


def draw_memory_of_plans(plans: Mapping[str, Memory], *, capacity_bytes: float | None = None) -> Picture:
    """Draw one stacked bar per plan: what its fullest rank holds at its peak, by kind.

    A dashed line marks `capacity_bytes`, the device's memory, where it is within the picture.

    Raises:
        ValueError: there is no plan, or the capacity is not above zero.
    """
    rows = _rows(plans, capacity_bytes)
    figure = new_figure(TOP_IN + BOTTOM_IN + min(max(1.6, 0.5 * len(rows)), 7.0))
    longest = max(len(name) for name in plans)
    axes = frame(
        figure, left=min(0.5 + 0.095 * longest, 0.4 * WIDTH_IN), right=0.9, top=TOP_IN, bottom=BOTTOM_IN, bare=True
    )
    limit = float(rows.sum(axis=1).max()) * 1.1 or 1.0
    stack_bars(axes, rows, list(plans), limit)
    if capacity_bytes is not None and capacity_bytes < limit:
        axes.axvline(capacity_bytes, **CAPACITY_LINE)
        words: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": SMALL_PT, "color": FAINT}
        axes.text(capacity_bytes, -0.6, f"device: {format_bytes(capacity_bytes)}", **words)
    put_legend(figure, boxes_of_kinds(rows))
    takeaway = plans_takeaway(plans, capacity_bytes)
    put_title(figure, takeaway, "memory of the fullest rank at its peak")
    parts = [
        f"{name}: {format_bytes(int(row.sum()))} ({name_kinds(row)})" for name, row in zip(plans, rows, strict=True)
    ]
    return Picture(figure, f"{takeaway}. {'; '.join(parts)}.")


def plans_takeaway(plans: Mapping[str, Memory], capacity_bytes: float | None) -> str:
    """Return the title: which plans fit, or what the leanest plan saves."""
    sizes = {name: memory.max_bytes for name, memory in plans.items()}
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if capacity_bytes is not None:
        fitting = [name for name, size in sizes.items() if size <= capacity_bytes]
        where = f"in {format_bytes(capacity_bytes)}"
        if not fitting:
            return f"No plan fits {where}: the leanest, {least}, holds {format_bytes(sizes[least])}"
        if len(fitting) == 1:
            return f"Only {fitting[0]} fits {where}, with {format_bytes(sizes[fitting[0]])}"
        return f"{len(fitting)} of {len(sizes)} plans fit {where}; {least} is leanest, {format_bytes(sizes[least])}"
    if len(sizes) == 1 or not sizes[least]:
        return f"{least} holds {format_bytes(sizes[least])}"
    return f"{least} holds {sizes[most] / sizes[least]:.3g} times less than {most}"


def draw_measured_memory(predicted: Curve, measured: Curve) -> Picture:
    """Draw what a step held as measured, over what was predicted, on one scale of bytes; each on its own clock.

    Args:
        predicted: moments in nanoseconds [T] and bytes of each kind from then on [T, len(KINDS)].
        measured: the same of the real run.

    Raises:
        ValueError: a curve is empty, or its shapes do not belong together.
    """
    both = {"measured": measured, "predicted": predicted}
    for name, (times, rows) in both.items():
        if len(times) == 0 or rows.shape != (len(times), len(KINDS)):
            raise ValueError(
                f"{name} has {len(times)} moments and bytes of shape {rows.shape}; pass [T] and [T, {len(KINDS)}]"
            )
    figure = new_figure(6.6)
    limit = 1.08 * max(float(rows.sum(axis=1).max()) for _, rows in both.values()) or 1.0
    bottoms = {"measured": 3.8, "predicted": BOTTOM_IN}
    tops = {"measured": TOP_IN, "predicted": 3.8}
    for name, (times, rows) in both.items():
        axes = frame(figure, left=1.15, right=0.35, top=tops[name], bottom=bottoms[name], bare=True)
        stack_area(axes, times, rows, limit=limit)
        put_heading(axes, f"{name}: peak {format_bytes(_peak(rows))}")
        for other, (_, values) in both.items():
            if other != name:  # the other's peak, to read the difference
                axes.axhline(_peak(values), color=INK, linestyle=(0, (2, 3)), linewidth=1.0)
    put_legend(figure, boxes_of_kinds(np.concatenate([rows for _, rows in both.values()])))
    put_title(figure, measured_takeaway(predicted, measured), "dotted: the other's peak")
    return Picture(figure, _say_measured(predicted, measured))


def _say_measured(predicted: Curve, measured: Curve) -> str:
    """Say both peaks, and which kind differs most."""
    text = f"{measured_takeaway(predicted, measured)}."
    for name, (_, rows) in (("Measured", measured), ("Predicted", predicted)):
        row = rows[rows.sum(axis=1).argmax()]
        text += f" {name} at its peak: {name_kinds(row)}."
    apart = measured[1].max(axis=0) - predicted[1].max(axis=0)
    kind = int(np.abs(apart).argmax())
    if apart[kind]:
        more = "more" if apart[kind] > 0 else "less"
        words = MEMORY_KINDS[KINDS[kind]].words
        text += f" Most apart: {words}, measured {format_bytes(abs(int(apart[kind])))} {more}."
    return text


def measured_takeaway(predicted: Curve, measured: Curve) -> str:
    """Return the title: how far the measured peak is from the predicted one."""
    ours, theirs = _peak(predicted[1]), _peak(measured[1])
    error = percent(ours / theirs - 1, 1, "+") if theirs else "not to be compared"
    return f"Predicted peak {format_bytes(ours)}, measured {format_bytes(theirs)}: {error}"


def _peak(rows: Ints) -> int:
    return int(rows.sum(axis=1).max())


def _rows(plans: Mapping[str, Memory], capacity_bytes: float | None) -> Ints:
    if not plans:
        raise ValueError("there is no plan; pass at least one Memory by name")
    check_capacity(capacity_bytes)
    return np.array([memory.at_peak_bytes[memory.fullest_stage] for memory in plans.values()], np.int64)
