"""Draw one weight and whose its slices are: an image of its numbers, names along the cut, its bias under it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from simulator.viz.drawing.pen import Pen
from simulator.viz.drawing.style import FAINT, IDLE, RANK_COLOURS, SHARED, SMALL_PT, text_colour
from simulator.viz.drawing.words import width_in
from simulator.viz.tensor_parallel.shard_parts import Shards

STRIP_IN, BIAS_IN = 0.4, 0.13
FUSED = ("Q", "K", "V")


class Card(NamedTuple):
    """One weight as it is drawn.

    Attributes:
        shards: the weight.
        turned: it is kept as outputs by inputs, and drawn the other way round.
        wide, tall: inches.
        bias: of the same layer, or None.
    """

    shards: Shards
    turned: bool
    wide: float
    tall: float
    bias: Shards | None

    @property
    def across(self) -> bool:
        """Whether slices stand side by side: a column-parallel layer."""
        return (self.shards.dim == 0) == self.turned

    @property
    def strip(self) -> float:
        """Room left of the weight for the names of its rows' owners."""
        return 0.45 if not self.across and self.shards.dim is not None else 0.0

    @property
    def extent(self) -> float:
        """How wide the weight is with that."""
        return self.strip + self.wide


def draw_card(pen: Pen, card: Card, corner: tuple[float, float], num_heads: int | None) -> None:
    """Draw one weight as an image, its bias under it, and the ranks of its slices along the cut."""
    one, (x, y) = card.shards, corner
    image = _image(one)
    _stamp(pen, image.transpose(1, 0, 2) if card.turned else image, (x, y), card.wide, card.tall, gid=one.name)
    pen.outline((x, y), card.wide, card.tall, FAINT, line=0.8)
    rows, columns = one.shape[::-1] if card.turned else one.shape
    name = one.name.split(".")[-2]
    below = y - 0.14
    if card.bias is not None:
        _stamp(pen, _image(card.bias)[None], (x, y - 0.05 - BIAS_IN), card.wide, BIAS_IN, gid=card.bias.name)
        below -= BIAS_IN + 0.05
    label = f"{name} {rows} x {columns}"
    size = min(SMALL_PT, SMALL_PT * (card.extent + 0.5) / max(width_in(label, SMALL_PT), 0.1))
    pen.words((x + card.wide / 2, below), label, size=size)
    if one.dim is not None:
        _draw_owners(pen, card, corner, num_heads)


def _stamp(
    pen: Pen, image: NDArray[np.float64], corner: tuple[float, float], wide: float, tall: float, *, gid: str
) -> None:
    """Put an image on the sheet, whose limits it must not move."""
    (x, y), axes = corner, pen.surface
    assert isinstance(axes, Axes), "a sheet's pen draws on axes"
    limits = axes.get_xlim(), axes.get_ylim()
    axes.imshow(image, extent=(x, x + wide, y, y + tall), aspect="auto", interpolation="nearest", gid=gid, zorder=3)
    axes.set_xlim(limits[0])
    axes.set_ylim(limits[1])


def _draw_owners(pen: Pen, card: Card, corner: tuple[float, float], num_heads: int | None) -> None:
    """Write the rank next to each slice, and its heads where they are known; a letter over each fused part."""
    one, (x, y) = card.shards, corner
    length, begin = len(one.owner), 0
    for number, size in enumerate(one.sections):
        width = -(-size // one.num_ranks)
        for rank in range(one.num_ranks):
            low, high = (begin + rank * width) / length, (begin + (rank + 1) * width) / length
            if card.across:
                spot, room = (x + low * card.wide, y + card.tall + 0.03), ((high - low) * card.wide, STRIP_IN)
            else:
                room = (card.strip - 0.05, (high - low) * card.tall)
                spot = (x - room[0] - 0.03, y + card.tall * (1 - high))
            _draw_owner(pen, spot, room, rank, _heads_of(rank, one.num_ranks, num_heads))
        if len(one.sections) == len(FUSED):
            middle = (begin + width * one.num_ranks / 2) / length
            pen.words((x + middle * card.wide, y + card.tall + STRIP_IN + 0.15), FUSED[number], bold=True)
        begin += width * one.num_ranks


def _draw_owner(pen: Pen, corner: tuple[float, float], room: tuple[float, float], rank: int, heads: str) -> None:
    """Draw a box in the rank's colour, with its name, and its heads in a second line."""
    fill = RANK_COLOURS[rank]
    pen.box(corner, *room, fill)
    x, y = corner[0] + room[0] / 2, corner[1] + room[1] / 2
    apart = min(0.09, 0.23 * room[1]) if heads else 0.0
    for text, at in ((f"r{rank}", y + apart), (heads, y - apart)):
        fits = SMALL_PT * (room[0] - 0.03) / max(width_in(text, SMALL_PT), 0.05)
        pen.words((x, at), text, size=min(SMALL_PT, fits, 130 * apart if heads else SMALL_PT), colour=text_colour(fill))


def _heads_of(rank: int, num_ranks: int, num_heads: int | None) -> str:
    """Name a rank's heads: 'h0-1'; nothing where the heads are not asked for."""
    if num_heads is None:
        return ""
    each = num_heads // num_ranks
    return f"h{rank * each}" + (f"-{(rank + 1) * each - 1}" if each > 1 else "")


def _image(one: Shards) -> NDArray[np.float64]:
    """Return a colour for every number: the owner's, the stronger the larger the number."""
    values = np.abs(one.values)
    most = float(np.quantile(values, 0.99)) or float(values.max()) or 1.0
    share = 0.22 + 0.78 * np.clip(values / most, 0, 1)
    if one.dim is None:
        colours = np.broadcast_to(np.array(to_rgb(SHARED)), (*values.shape, 3))
    else:
        table = np.array([*[to_rgb(RANK_COLOURS[rank]) for rank in range(one.num_ranks)], to_rgb(IDLE)])
        shape = [1] * values.ndim + [3]
        shape[one.dim] = len(one.owner)
        colours = np.broadcast_to(table[one.owner].reshape(shape), (*values.shape, 3))
        padding = [1] * values.ndim
        padding[one.dim] = len(one.owner)
        share = np.where((one.owner < 0).reshape(padding), 1.0, share)
    return np.asarray(1 - share[..., None] * (1 - colours))
