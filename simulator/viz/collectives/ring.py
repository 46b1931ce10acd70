"""Draw a recorded ring, one small picture a step: ranks with their chunks, and the chunk on every arrow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from simulator.units import format_bytes, format_s
from simulator.viz.collectives.ring_record import Record, RingSteps, chunk_name, ring_steps, ring_takeaway, step_verb
from simulator.viz.drawing.plot import new_figure, put_title
from simulator.viz.drawing.style import FAINT, INK, SMALL_PT, TEXT_PT, WIDTH_IN, pale, text_colour

CHUNK_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#882255")
MARGIN_IN, TOP_IN = 0.3, 1.0
Point = NDArray[np.float64]


class _Panel(NamedTuple):
    """The place of one step: all in inches on one pair of axes, so that shapes keep their form."""

    axes: Axes
    extent: Point
    middle: Point
    places: Point
    box: Point


def draw_ring_steps(
    record: Record,
    operation: str | None = None,
    *,
    title: str | None = None,
    max_steps: int = 15,
) -> Figure:
    """Draw each step of a recorded ring: arrows carry the chunk's letter, bars show how much of the sum a chunk holds.

    `record` is what a recorder returns (an iterable of calls), or a trace whose send and recv spans name their peers.
    The first `max_steps` steps are drawn.

    Raises:
        ValueError: the record is no ring's, or max_steps is below 1.
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
    figure = new_figure(height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH_IN)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    for number in range(shown):
        row, column = divmod(number, columns)
        corner = np.array([MARGIN_IN + column * wide, height - TOP_IN - (row + 1) * extent[1]])
        panel = _panel(axes, corner, extent, size)
        _draw_words(panel, steps, number)
        _draw_messages(panel, steps, number)
        _draw_ranks(panel, steps, number)
    note = f"{format_s(steps.duration_s)} from the first send to the last receive. "
    note += "Bars are a rank's chunks before the step: full height is the sum over all ranks."
    note += f" Steps 1-{shown} of {total}." if shown < total else ""
    put_title(figure, title or ring_takeaway(steps), note)
    return figure


def _panel(axes: Axes, corner: Point, extent: Point, size: int) -> _Panel:
    """Put the ranks on an ellipse, clockwise from the top left, small enough to leave room for arrows."""
    box = np.array([0.8, 0.38]) if size <= 4 else np.array([1.9, 1.3]) / size + (0.06, 0.03)
    beside = 0.1 if size in (3, 4) else 0.3 if size <= 5 else 0.2  # room for what stands left and right of the ring
    radius = np.array([min(extent[0] / 2 - box[0] / 2 - beside, 1.45), extent[1] / 2 - 0.31 - box[1] / 2 - 0.22])
    if size == 4:
        radius = radius * (1.25, 1.3)  # corners of a box, not points of an ellipse
    first = np.pi * (1.0 if size == 2 else 0.5 + 1 / size if size % 2 == 0 else 0.5)
    angle = first - 2 * np.pi * np.arange(size) / size
    middle = corner + extent * 0.5 - (0.0, 0.24)
    return _Panel(axes, extent, middle, middle + np.stack([np.cos(angle), np.sin(angle)], axis=1) * radius, box)


def _draw_words(panel: _Panel, steps: RingSteps, number: int) -> None:
    """Write what the step is, how much each rank sends, and how long it took."""
    x, y = panel.middle[0], panel.middle[1] + 0.24 + panel.extent[1] / 2 - 0.04
    look: dict[str, Any] = {"ha": "center", "va": "top"}
    panel.axes.text(
        x, y, f"step {number + 1}: {step_verb(steps, number)}", size=TEXT_PT, weight="bold", color=INK, **look
    )
    words = f"{format_bytes(float(steps.num_bytes[number].max()))} in {format_s(float(steps.span_s[number]))}"
    panel.axes.text(x, y - 0.25, words, fontsize=SMALL_PT, color=FAINT, **look)


def _draw_messages(panel: _Panel, steps: RingSteps, number: int) -> None:
    """Draw an arrow from each rank to its neighbour, with the chunk's letter on it."""
    size = len(steps.ranks)
    start, end = panel.places, np.roll(panel.places, -1, axis=0)
    along = end - start
    aside = np.stack([along[:, 1], -along[:, 0]], axis=1)
    control = (start + end) / 2 - (0.5 if size == 2 else 0.0) * aside
    start, end = _edge(start, control - start, panel.box), _edge(end, control - end, panel.box)
    share = np.linspace(0, 1, 17)[None, :, None]
    curve = (1 - share) ** 2 * start[:, None] + 2 * share * (1 - share) * control[:, None] + share**2 * end[:, None]
    forward = end - control
    forward = forward / np.linalg.norm(forward, axis=1, keepdims=True)
    sideways = np.stack([-forward[:, 1], forward[:, 0]], axis=1)
    long, half = 0.15, 0.08
    heads = np.stack([end, end - long * forward + half * sideways, end - long * forward - half * sideways], axis=1)
    curve[:, -1] -= 0.6 * long * forward
    colours = [CHUNK_COLOURS[chunk % len(CHUNK_COLOURS)] for chunk in steps.chunk[number].tolist()]
    panel.axes.add_collection(LineCollection(list(curve), colors=colours, linewidths=2.8), autolim=False)
    panel.axes.add_collection(PolyCollection(list(heads), facecolors=colours, linewidths=0), autolim=False)
    spots = curve[:, 8]
    if size > 5:  # short arrows: letters stand beside them, outside the ring
        outward = spots - panel.middle
        spots = spots + 0.17 * outward / np.linalg.norm(outward, axis=1, keepdims=True)
    large = size <= 4
    look: dict[str, Any] = {"s": 330 if large else 190, "c": colours, "edgecolors": "white", "linewidths": 1.2}
    panel.axes.scatter(spots[:, 0], spots[:, 1], zorder=4, clip_on=False, **look)
    for spot, chunk, colour in zip(spots, steps.chunk[number].tolist(), colours, strict=True):
        letter = _centred(TEXT_PT - 1 if large else 9.0, text_colour(colour))
        panel.axes.text(spot[0], spot[1], chunk_name(chunk), weight="bold", **letter)


def _edge(centre: Point, direction: Point, box: Point) -> Point:
    """Return the points where rays from the centres leave their boxes, and a little further."""
    unit = direction / np.linalg.norm(direction, axis=1, keepdims=True)
    reach = (box / 2 / np.maximum(np.abs(unit), 1e-9)).min(axis=1, keepdims=True)
    return np.asarray(centre + (reach + 0.06) * unit)


def _draw_ranks(panel: _Panel, steps: RingSteps, number: int) -> None:
    """Draw each rank's buffer as a bar a chunk, as it stands before the step, and the rank's name outside the ring."""
    size, box = len(steps.ranks), panel.box
    low = np.repeat(panel.places - box / 2, size, axis=0)
    low[:, 0] += np.tile(np.arange(size), size) * box[0] / size
    held = steps.held[number].reshape(-1) / size * box[1]
    colours = [CHUNK_COLOURS[chunk % len(CHUNK_COLOURS)] for chunk in range(size)] * size
    for tall, fills in ((np.full(size * size, box[1]), [pale(c, 0.15) for c in colours]), (held, map(to_rgb, colours))):
        bars = _rectangles(low, np.stack([np.full(size * size, box[0] / size), tall], axis=1))
        look: dict[str, Any] = {"facecolors": list(fills), "edgecolors": "white", "linewidths": 0.4, "zorder": 3}
        panel.axes.add_collection(PolyCollection(bars, **look), autolim=False)
    frames = _rectangles(panel.places - box / 2, np.broadcast_to(box, (size, 2)))
    look = {"facecolors": "none", "edgecolors": INK, "linewidths": 1.0, "zorder": 3}
    panel.axes.add_collection(PolyCollection(frames, **look), autolim=False)
    for rank, spot in zip(steps.ranks, panel.places, strict=True):
        away = (spot - panel.middle) / np.linalg.norm(spot - panel.middle)
        if size in (3, 4):
            away = np.array([0.0, np.sign(away[1])])
        at = spot + away * ((box / 2 / np.maximum(np.abs(away), 1e-9)).min() + 0.04)
        words: dict[str, Any] = {
            "color": INK,
            "ha": _side(away[0], "right", "left"),
            "va": _side(away[1], "top", "bottom"),
        }
        panel.axes.text(at[0], at[1], f"rank {rank}" if size <= 4 else f"{rank}", fontsize=SMALL_PT, **words)


def _side(away: float, below: str, above: str) -> str:
    return "center" if abs(away) < 0.35 else above if away > 0 else below


def _rectangles(low: Point, extent: Point) -> list[Point]:
    """Return the corners of rectangles from their lower left corners and extents."""
    shape = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    return list(low[:, None] + extent[:, None] * shape[None])


def _centred(points: float, colour: str) -> dict[str, Any]:
    return {"fontsize": points, "color": colour, "ha": "center", "va": "center_baseline", "zorder": 5}
