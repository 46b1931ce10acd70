"""Draw a recorded ring, one small picture per step: ranks with their chunks, and the chunk on every arrow."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from simulator.units import format_bytes, format_s
from simulator.viz.collectives.ring_record import Record, RingSteps, chunk_name, ring_steps, ring_takeaway, step_verb
from simulator.viz.drawing.pen import Pen, sheet
from simulator.viz.drawing.plot import put_title
from simulator.viz.drawing.style import FAINT, INK, TEXT_PT, WIDTH_IN, pale, text_colour

CHUNK_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#882255")
MARGIN_IN, TOP_IN = 0.3, 1.0
Point = NDArray[np.float64]


class _Panel(NamedTuple):
    """One step's place in inches: its middle, the ranks' places, and the size of a rank's box."""

    middle: Point
    places: Point
    box: Point


def draw_ring_steps(
    record: Record, operation: str | None = None, *, title: str | None = None, max_steps: int = 15
) -> Figure:
    """Draw each step of a recorded ring: arrows carry the chunk's letter, bars show how complete each chunk's sum is.

    `record` is what a recorder returns (an iterable of calls), or a trace whose send and recv spans name their peers.
    The first `max_steps` steps are drawn.

    Raises:
        ValueError: the record is not of a ring, or max_steps is below 1.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps}; pass at least 1")
    steps = ring_steps(record, operation)
    size, total = len(steps.ranks), len(steps.chunk)
    shown = min(total, max_steps)
    columns = min(shown, {2: 2, 4: 3}.get(size, 4 if size <= 5 else 5))  # 4 ranks: one row adds, the next copies
    wide = (WIDTH_IN - 2 * MARGIN_IN) / columns
    extent = np.array([wide, 3.0 if size in (3, 5, 6, 7, 8) else 2.8])
    height = TOP_IN + -(-shown // columns) * extent[1] + 0.15
    figure, pen = sheet(height)
    for number in range(shown):
        row, column = divmod(number, columns)
        corner = np.array([MARGIN_IN + column * wide, height - TOP_IN - (row + 1) * extent[1]])
        panel = _panel(corner, extent, size)
        x, y = panel.middle[0], panel.middle[1] + 0.08 + extent[1] / 2
        pen.words((x, y), f"step {number + 1}: {step_verb(steps, number)}", size=TEXT_PT, bold=True)
        sent = format_bytes(float(steps.num_bytes[number].max()))
        pen.words((x, y - 0.24), f"{sent} in {format_s(float(steps.span_s[number]))}", colour=FAINT)
        _draw_messages(pen, panel, steps.chunk[number].tolist())
        _draw_ranks(pen, panel, steps, number)
    pen.flush()
    note = f"{format_s(steps.duration_s)} from the first send to the last receive. "
    note += "Bars are a rank's chunks before the step: full height is the sum over all ranks."
    note += f" Steps 1-{shown} of {total}." if shown < total else ""
    put_title(figure, title or ring_takeaway(steps), note)
    return figure


def _panel(corner: Point, extent: Point, size: int) -> _Panel:
    """Put the ranks on an ellipse, clockwise from the top left, small enough to leave room for arrows."""
    box = np.array([0.8, 0.38]) if size <= 4 else np.array([1.9, 1.3]) / size + (0.06, 0.03)
    side_room = 0.1 if size in (3, 4) else 0.3 if size <= 5 else 0.2
    radius = np.array([min(extent[0] / 2 - box[0] / 2 - side_room, 1.45), extent[1] / 2 - 0.31 - box[1] / 2 - 0.22])
    if size == 4:
        radius = radius * (1.25, 1.3)  # corners of a box, not points of an ellipse
    first = np.pi * (1.0 if size == 2 else 0.5 + 1 / size if size % 2 == 0 else 0.5)
    angle = first - 2 * np.pi * np.arange(size) / size
    middle = corner + extent * 0.5 - (0.0, 0.24)
    return _Panel(middle, middle + np.stack([np.cos(angle), np.sin(angle)], axis=1) * radius, box)


def _draw_messages(pen: Pen, panel: _Panel, chunks: list[int]) -> None:
    """Draw an arrow from each rank to the next, with the chunk's letter on it."""
    size = len(chunks)
    bend = 0.5 if size == 2 else 0.0
    for place, chunk in enumerate(chunks):
        start, end = panel.places[place], panel.places[(place + 1) % size]
        along = end - start
        lift = bend * np.array([-along[1], along[0]])
        first = _edge(start, along / 2 + lift, panel.box)
        last = _edge(end, lift - along / 2, panel.box)
        colour = CHUNK_COLOURS[chunk % len(CHUNK_COLOURS)]
        pen.arrow(first, last, colour, bend=bend, line=2.4)
        straight = last - first
        spot = (first + last) / 2 + bend / 2 * np.array([-straight[1], straight[0]])
        if size > 5:  # short arrows: letters stand next to them, outside the ring
            spot = spot + 0.17 * (spot - panel.middle) / np.linalg.norm(spot - panel.middle)
        half = 0.12 if size <= 4 else 0.09
        pen.box(spot - half, 2 * half, 2 * half, colour, line=1.2)
        letter_pt = TEXT_PT - 1 if size <= 4 else 9.0
        pen.words(spot, chunk_name(chunk), size=letter_pt, bold=True, colour=text_colour(colour))


def _edge(centre: Point, direction: Point, box: Point) -> Point:
    """Return the point where a ray from a box's centre leaves it, and a little further."""
    unit = direction / np.linalg.norm(direction)
    return np.asarray(centre + ((box / 2 / np.maximum(np.abs(unit), 1e-9)).min() + 0.06) * unit)


def _draw_ranks(pen: Pen, panel: _Panel, steps: RingSteps, number: int) -> None:
    """Draw each rank's chunks as bars, as they stand before the step, and the rank's name outside the ring."""
    size, (wide, tall) = len(steps.ranks), panel.box
    for rank, spot, held in zip(steps.ranks, panel.places, steps.held[number].tolist(), strict=True):
        low = spot - panel.box / 2
        for chunk, share in enumerate(held):
            corner, colour = low + (chunk * wide / size, 0.0), CHUNK_COLOURS[chunk % len(CHUNK_COLOURS)]
            pen.box(corner, wide / size, tall, pale(colour, 0.15), line=0.4)
            pen.box(corner, wide / size, tall * share / size, colour, line=0.4)
        pen.outline(low, wide, tall, INK, line=1.0)
        away = (spot - panel.middle) / np.linalg.norm(spot - panel.middle)
        if size in (3, 4):
            away = np.array([0.0, np.sign(away[1])])
        at = spot + away * ((panel.box / 2 / np.maximum(np.abs(away), 1e-9)).min() + 0.04)
        side = "center" if abs(away[0]) < 0.35 else "left" if away[0] > 0 else "right"
        at = at + (0.0, 0.1 * np.sign(away[1]) if abs(away[1]) >= 0.35 else 0.0)
        pen.words(at, f"rank {rank}" if size <= 4 else f"{rank}", side=side)
