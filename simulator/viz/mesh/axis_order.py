"""Draw what the order of a mesh's axes costs: one bar per order, and which axes leave the node in it.

A node holds neighbouring ranks, so the axes that vary fastest stay on its wires, and the others go between nodes. An
axis that leaves the node is drawn hollow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.step.simulate import Step
from simulator.sweeps.axis_order import axes_inside_nodes
from simulator.units import format_s, percent
from simulator.viz.drawing.pen import Pen, sheet
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import spread_evenly
from simulator.viz.drawing.theme import FAINT, TEXT_PT, WIDTH_IN, LegendBox, text_colour
from simulator.viz.mesh.degrees import COMPUTE, parts_of
from simulator.viz.mesh.mesh import axis_style

TOP_IN, FOOT_IN, LINE_IN, LEFT_IN, CHIP_IN, RIGHT_IN = 1.35, 0.95, 0.5, 0.25, 0.5, 2.2
MOST = 8
Order = Sequence[str]


class _Row(NamedTuple):
    """One order: its axes of more than one rank, slowest first, those that leave the node, and its step."""

    axes: tuple[str, ...]
    outside: frozenset[str]
    step: Step

    @property
    def name(self) -> str:
        """The axes in words."""
        return ", ".join(self.axes)


def draw_placement(orders: Sequence[tuple[Order, Step]]) -> Picture:
    """Draw the step's time under each order of the axes, the fastest first.

    Of more than MOST orders the fastest, the slowest, and some evenly between are drawn.

    Args:
        orders: pairs of an order, slowest axis first, and its step, as `rank_orders` returns them. Orders that differ
            in axes of one rank alone are drawn once.

    Raises:
        ValueError: there is no order.
    """
    rows = _rows(orders)
    shown = [rows[index] for index in spread_evenly(len(rows), MOST)]
    height = TOP_IN + LINE_IN * len(shown) + FOOT_IN
    _, pen = sheet(height)
    left = LEFT_IN + CHIP_IN * max(len(row.axes) for row in shown) + 0.35
    room, longest = WIDTH_IN - left - RIGHT_IN, shown[-1].step.duration_s
    top = height - TOP_IN
    pen.words((LEFT_IN, top + 0.2), "slow to fast axis", colour=FAINT, side="left")
    for number, row in enumerate(shown):
        y = top - (number + 1) * LINE_IN
        _draw_chips(pen, row, y)
        pieces = [
            (part.seconds * room / longest, part.colour, (part.words if part.name == COMPUTE else part.letter,))
            for part in parts_of(row.step)
        ]
        end = pen.bar((left, y + 0.06), LINE_IN - 0.12, pieces)
        pen.words((end + 0.1, y + LINE_IN / 2), _figures(row, shown[0]), side="left", bold=not number)
    used = {part.name: part for row in shown for part in parts_of(row.step) if part.seconds > 0}
    pen.legend([LegendBox(part.colour, "white", part.letter, part.words) for part in used.values()])
    legend = "a filled letter: the axis stays inside a node; a hollow one: it leaves the node"
    pen.words((LEFT_IN, 0.6), legend, side="left")
    picture = pen.finish(_fastest_order(rows), _what_is_compared(rows, len(shown)))
    return picture._replace(words=_say(rows))


def _say(rows: Sequence[_Row]) -> str:
    """Say each order's time, and what stays inside a node."""
    lines = [f"{_fastest_order(rows)}. {_what_is_compared(rows, len(rows))}"]
    for row in rows:
        inside = [axis for axis in row.axes if axis not in row.outside]
        where = f"inside a node: {', '.join(inside) or 'none'}"
        exposed = [f"{part.words} {format_s(part.seconds)}" for part in parts_of(row.step) if part.seconds > 0]
        lines.append(f"{row.name} ({where}): {_figures(row, rows[0])}; {', '.join(exposed)}.")
    return "\n".join(lines)


def _rows(orders: Sequence[tuple[Order, Step]]) -> list[_Row]:
    """Return the orders that differ, fastest first."""
    if not orders:
        raise ValueError("there is no order; pass pairs of an order and its step, as rank_orders returns them")
    found: dict[tuple[str, ...], _Row] = {}
    for order, step in orders:
        axes = tuple(axis for axis in order if getattr(step.plan, axis) > 1) or (order[-1],)
        if axes not in found:
            inside = axes_inside_nodes(step.cluster, step.plan, order)
            found[axes] = _Row(axes, frozenset(axes) - frozenset(inside), step)
    return sorted(found.values(), key=lambda row: row.step.duration_s)


def _fastest_order(rows: Sequence[_Row]) -> str:
    best, worst = rows[0], rows[-1]
    inside = [axis for axis in best.axes if axis not in best.outside]
    ratio = worst.step.duration_s / best.step.duration_s
    if len(rows) == 1 or ratio < 1.005:
        return "The order of the axes makes no difference here"
    where = f"{' and '.join(inside)} inside a node" if inside else "every axis between nodes"
    return f"Fastest with {where}; the worst order takes {ratio:.2f}x as long"


def _what_is_compared(rows: Sequence[_Row], shown: int) -> str:
    step = rows[0].step
    degrees = " x ".join(f"{axis} ({getattr(step.plan, axis)})" for axis in rows[0].axes)
    text = f"{step.workload.name} on {step.cluster.name}, nodes of {step.cluster.devices_per_node}: {degrees}"
    return f"{text}. {shown} of {len(rows)} orders." if shown < len(rows) else f"{text}."


def _figures(row: _Row, best: _Row) -> str:
    slower = row.step.duration_s / best.step.duration_s - 1
    text = format_s(row.step.duration_s)
    return f"{text}, {percent(slower, 1, '+')}" if slower > 0 else text


def _draw_chips(pen: Pen, row: _Row, y: float) -> None:
    """Draw the axes of an order, slowest first: filled inside a node, hollow between nodes."""
    for number, axis in enumerate(row.axes):
        style, corner = axis_style(axis), (LEFT_IN + CHIP_IN * number, y + 0.08)
        fill = "white" if axis in row.outside else style.colour
        pen.box(corner, CHIP_IN - 0.1, LINE_IN - 0.16, fill, edge=style.colour, line=2.0)
        spot = (corner[0] + (CHIP_IN - 0.1) / 2, y + LINE_IN / 2)
        pen.words(spot, style.letter, size=TEXT_PT, bold=True, colour=text_colour(fill))
