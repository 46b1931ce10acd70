"""Draw a mesh: the ranks as they stand in the nodes, once for each axis, with a line through every group.

A row is a node. So a group whose line runs across stays on the wires inside a node, and one whose line runs down leaves
it: which axis belongs on which wire is seen at a glance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Mesh
from simulator.units import counted, listed
from simulator.viz.drawing import theme
from simulator.viz.drawing.pen import Pen, Picture, sheet

MAX_RANKS, MAX_COLUMNS = 256, 16
TOP_IN, HEAD_IN, FOOT_IN, MARGIN_IN, NODE_IN = 1.05, 0.62, 0.2, 0.2, 0.75
BOX_TALL, BOX_WIDE, BOX_WIDER = 0.72, 0.66, 0.8  # of a cell; wider for ranks of three digits; lines run between boxes
ONE_LINE_IN = 0.42  # a box this wide has room for a rank and a letter side by side
GROUP_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class _Tile(NamedTuple):
    """One axis' picture: its grid's upper left, a cell's size in inches, ranks per row, and the width of a box."""

    left: float
    top: float
    wide: float
    tall: float
    columns: int
    box_wide: float

    def middle(self, rank: int) -> NDArray[np.float64]:
        """Return where a rank's cell has its middle."""
        row, column = divmod(rank, self.columns)
        return np.array([self.left + (column + 0.5) * self.wide, self.top - (row + 0.5) * self.tall])


def draw_mesh(mesh: Mesh, *, devices_per_node: int, rank: int | None = None) -> Picture:
    """Draw the ranks of a mesh once for each axis of at least two ranks: a colour, a letter and a line for each group.

    Args:
        mesh: the ranks; at most 256.
        devices_per_node: ranks in a node, a row of the picture: 1 to 16.
        rank: if given, only this rank's groups are coloured: who its neighbours are on each axis.

    Raises:
        ValueError: more than 256 ranks, no such rank, or a node without or with more than 16 devices.
    """
    if mesh.size > MAX_RANKS:
        raise ValueError(f"the mesh {mesh} has more than {MAX_RANKS} ranks to draw; draw a smaller one of its shape")
    if not 1 <= devices_per_node <= MAX_COLUMNS:
        raise ValueError(f"devices_per_node is {devices_per_node}; pass 1 to {MAX_COLUMNS}")
    axes = [name for name, size in reversed(mesh.axes) if size > 1] or [mesh.names[-1]]
    columns = min(mesh.size, devices_per_node)
    rows = -(-mesh.size // columns)
    across = min(len(axes), 3 if columns <= 8 and mesh.size <= 100 else 2 if columns <= 12 else 1)
    margin = MARGIN_IN + NODE_IN
    room = (theme.WIDTH_IN - MARGIN_IN) / across
    wide = min(0.85, (room - margin - 0.1) / columns)
    box_wide = wide * (BOX_WIDE if mesh.size <= 100 else BOX_WIDER)
    tall = min(0.62, max(0.3 if box_wide > ONE_LINE_IN else 0.5, 4.2 / rows))
    block = HEAD_IN + rows * tall + FOOT_IN
    height = TOP_IN + block * -(-len(axes) // across) + 0.1
    _, pen = sheet(height)
    for number, axis in enumerate(axes):
        down, place = divmod(number, across)
        tile = _Tile(place * room + margin, height - TOP_IN - down * block - HEAD_IN, wide, tall, columns, box_wide)
        _draw_axis(pen, mesh, axis, tile, devices_per_node, rank)
    large = [(name, size) for name, size in mesh.axes if size > 1] or list(mesh.axes[-1:])
    title = f"{counted(mesh.size, 'rank')} = {' x '.join(f'{name} ({size})' for name, size in large)}"
    if mesh.size > devices_per_node:
        inside = [name for name, _ in large if not mesh.crosses_nodes(name, devices_per_node)]
        outside = [name for name, _ in large if name not in inside]
        stay, leave = "stays" if len(inside) == 1 else "stay", "leaves" if len(outside) == 1 else "leave"
        title += ": every axis leaves the node" if not inside else "" if outside else ": no axis leaves its node"
        title += f": {listed(inside)} {stay} inside a node, {listed(outside)} {leave} it" if inside and outside else ""
    said = [title, "A row is a node. Ranks of one colour and letter are a group: they talk to each other on that axis."]
    if rank is not None:
        own = f"Coloured, with its group's letter: the group of rank {rank}, whom it talks to on that axis."
        spot = ", ".join(f"{name} {at}" for name, at in mesh.coordinates(rank).items())
        said = [title, f"A row is a node. {own}", f"Rank {rank} stands at {spot}."]
    for axis in axes:
        found = mesh.groups(axis) if rank is None else [mesh.group_of(rank, axis)]
        shown = ", ".join("(" + " ".join(map(str, group)) + ")" for group in found[:8])
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        said.append(f"{axis}: {_kind_of(mesh, axis, devices_per_node)}: {shown}{more}.")
    return pen.finish(*said)


def axis_style(axis: str) -> theme.KindStyle:
    """Return the colour, letter and word of an axis, also of one with a name of its own."""
    return theme.AXIS_STYLES[axis] if axis in theme.AXIS_STYLES else theme.kind_styles([axis])[axis]


def _kind_of(mesh: Mesh, axis: str, devices_per_node: int) -> str:
    where = "between nodes" if mesh.crosses_nodes(axis, devices_per_node) else "inside a node"
    return f"{counted(len(mesh.groups(axis)), 'group')} of {mesh.axis_size(axis)}, {where}"


def _draw_axis(pen: Pen, mesh: Mesh, axis: str, tile: _Tile, devices_per_node: int, only: int | None) -> None:
    style = axis_style(axis)
    spot = (tile.left, tile.top + 0.4)
    pen.block((spot[0], spot[1] - 0.12), 0.28, 0.24, style.colour, style.letter, size=theme.TEXT_PT, bold=True)
    pen.heading((spot[0] + 0.38, spot[1]), f"{axis} ({mesh.axis_size(axis)})")
    pen.words((spot[0], spot[1] - 0.25), _kind_of(mesh, axis, devices_per_node), colour=theme.FAINT, side="left")
    for node in range(-(-mesh.size // tile.columns)):
        y = tile.top - (node + 0.5) * tile.tall
        pen.words((tile.left - 0.1, y), f"node {node}", colour=theme.FAINT, side="right")
        corner = (tile.left, y - tile.tall / 2 + 0.02)
        pen.outline(corner, tile.columns * tile.wide, tile.tall - 0.04, "#B8BCC4", line=1.2)
    for number, group in enumerate(mesh.groups(axis)):
        shown = only is None or only in group
        fill = theme.RANK_COLOURS[number % len(theme.RANK_COLOURS)] if shown else theme.IDLE
        letter = GROUP_LETTERS[number] if number < len(GROUP_LETTERS) else str(number)
        if shown:
            for one, other in zip(group[:-1], group[1:], strict=True):
                _connect(pen, tile, one, other, fill)
        for member in group:
            _draw_rank(pen, tile, member, fill, letter if shown else "", framed=member == only)


def _connect(pen: Pen, tile: _Tile, one: int, other: int, colour: str) -> None:
    """Draw a line between two ranks: straight between neighbours, else around those that lie between them."""
    start, end = tile.middle(one), tile.middle(other)
    (row, column), (to_row, to_column) = divmod(one, tile.columns), divmod(other, tile.columns)
    bend = 0.0
    if row == to_row and abs(to_column - column) > 1:
        lift = np.array([0.0, 0.3 * tile.tall])
        start, end = start + lift, end + lift
        bend = 0.42 * tile.tall / (abs(to_column - column) * tile.wide)
    elif column == to_column and abs(to_row - row) > 1:
        lift = np.array([0.3 * tile.wide, 0.0])
        start, end = start + lift, end + lift
        bend = 0.5 * tile.wide / (abs(to_row - row) * tile.tall)
    pen.line(start, end, colour, bend=bend, line=3.0)


def _draw_rank(pen: Pen, tile: _Tile, rank: int, fill: str, letter: str, *, framed: bool) -> None:
    spot, wide, tall = tile.middle(rank), tile.box_wide, BOX_TALL * tile.tall
    pen.box(spot - np.array([wide / 2, tall / 2]), wide, tall, fill)
    if framed:
        pen.outline(spot - np.array([wide / 2, tall / 2]), wide, tall, theme.INK, line=2.2)
    ink, size = theme.text_colour(fill), theme.TEXT_PT if rank < 100 and tall > 0.3 else theme.LEAST_PT
    if not letter:
        pen.words(spot, str(rank), size=size if wide > ONE_LINE_IN else theme.LEAST_PT, colour=theme.FAINT)
    elif wide > ONE_LINE_IN:
        pen.words(spot - np.array([0.24 * wide, 0]), str(rank), size=size, colour=ink)
        pen.words(spot + np.array([0.28 * wide, 0]), letter, size=min(theme.SMALL_PT, size), bold=True, colour=ink)
    else:
        pen.words(spot + np.array([0, 0.23 * tall]), str(rank), size=theme.LEAST_PT, colour=ink)
        pen.words(spot - np.array([0, 0.25 * tall]), letter, size=theme.LEAST_PT, bold=True, colour=ink)
