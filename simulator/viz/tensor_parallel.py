"""Draw whose is which part of a weight: what the ranks hold, put together again with an owner for each row or column.

Works on arrays and on anything that says how a tensor is cut: `distlab.tensor_parallel.Split` is such a thing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from simulator.units import percent
from simulator.viz.drawing import theme
from simulator.viz.drawing.pen import Pen, Picture, sheet
from simulator.viz.drawing.plot import width_in


class SplitLike(Protocol):
    """How a tensor is cut along `dim`: `sections`, as query, key and value of a fused weight, are cut apart each."""

    dim: int
    sections: Sequence[int]


class CutWeight(NamedTuple):
    """One weight as the ranks hold it.

    `values` are the whole. It is cut along `dim`, None where every rank holds it all: `sections` are the lengths of
    what is cut apart, and `owner` is the rank of each place.
    """

    name: str
    values: NDArray[np.float64]
    dim: int | None
    sections: tuple[int, ...]
    owner: NDArray[np.int64]
    num_ranks: int

    def slices(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of a rank's part of each section, along dim of the whole."""
        begins = np.cumsum([0, *self.sections[:-1]]).tolist()
        each = [(begin, size // self.num_ranks) for begin, size in zip(begins, self.sections, strict=True)]
        return [(begin + rank * width, begin + (rank + 1) * width) for begin, width in each]


def shards_of(parts: Sequence[Mapping[str, Any]], splits: Mapping[str, SplitLike]) -> dict[str, CutWeight]:
    """Put the ranks' parts together, and say whose each is; arguments as `draw_shards`.

    Raises:
        ValueError: there is no rank or more than 8, or a rank's weights have other names or shapes than expected.
    """
    if not 1 <= len(parts) <= MAX_RANKS:
        raise ValueError(f"{len(parts)} ranks; pass what each of 1 to {MAX_RANKS} ranks holds: colours tell them apart")
    arrays = [
        {name: np.asarray(value.detach() if hasattr(value, "detach") else value, float) for name, value in part.items()}
        for part in parts
    ]
    shapes = {name: first.shape for name, first in arrays[0].items()}
    for name in splits.keys() & shapes.keys():
        whole = list(shapes[name])
        whole[splits[name].dim] = sum(splits[name].sections) // len(parts)
        if any(size % len(parts) for size in splits[name].sections):
            raise ValueError(
                f"{name} has {list(splits[name].sections)} to cut, which {len(parts)} ranks do not divide; padding is "
                "not drawn: draw a model whose sizes they divide"
            )
        shapes[name] = tuple(whole)
    for rank, own in enumerate(arrays):
        for name in sorted(own.keys() | shapes.keys()):
            got, expected = (own[name].shape if name in own else None, shapes.get(name))
            if got != expected:
                raise ValueError(
                    f"rank {rank}: {name} has shape {got}; expected {expected}: pass each rank's own part of the same "
                    "weights"
                )
    return {name: _joined(name, [own[name] for own in arrays], splits.get(name)) for name in shapes}


def _joined(name: str, arrays: Sequence[NDArray[np.float64]], split: SplitLike | None) -> CutWeight:
    if split is None:
        return CutWeight(name, arrays[0], None, (), np.zeros(0, np.int64), len(arrays))
    num_ranks, dim, sections = len(arrays), split.dim, tuple(split.sections)
    pieces, begin = [], 0
    for size in sections:
        width = size // num_ranks
        pieces += [np.take(array, range(begin, begin + width), axis=dim) for array in arrays]
        begin += width
    owner = np.concatenate([np.repeat(np.arange(num_ranks), size // num_ranks) for size in sections])
    return CutWeight(name, np.concatenate(pieces, axis=dim), dim, sections, owner, num_ranks)


MAX_RANKS = 8
TOP_IN, FOOT_IN, HEAD_IN, MARK_IN, LEFT_IN = 1.0, 1.15, 0.3, 0.62, 0.3
MEANINGS = ("f: forward nothing, backward an all-reduce", "g: forward an all-reduce, backward nothing")
STRIP_IN, BIAS_IN = 0.4, 0.13
FUSED = ("Q", "K", "V")


class _WeightCard(NamedTuple):
    """One weight as it is drawn, and the bias of its layer, or None; sizes in inches."""

    shards: CutWeight
    wide: float
    tall: float
    bias: CutWeight | None

    @property
    def turned(self) -> bool:
        """Whether it is kept as outputs by inputs, and drawn the other way round: all but embeddings are."""
        return "embedding" not in self.shards.name

    @property
    def across(self) -> bool:
        """Whether slices stand side by side: a column-parallel layer."""
        return (self.shards.dim == 0) == self.turned

    @property
    def strip(self) -> float:
        """Room left of the weight for the names of its rows' owners."""
        return 0.0 if self.across else 0.45


class _Region(NamedTuple):
    """Layers between an f and a g."""

    name: str
    cards: tuple[_WeightCard, ...]

    @property
    def wide(self) -> float:
        """From the arrow before f to that behind g."""
        return 2 * MARK_IN + sum(card.strip + card.wide for card in self.cards) + 0.5 * (len(self.cards) - 1)

    @property
    def tall(self) -> float:
        """With the names over a weight, and as much below, so that middles are level."""
        return max(card.tall + (2 * STRIP_IN + 0.4 if card.across else 0.0) for card in self.cards)


def draw_shards(parts: Sequence[Mapping[str, Any]], splits: Mapping[str, SplitLike], *, num_heads: int) -> Picture:
    """Draw the weights of a tensor-parallel model, each place in the colour of the rank that holds it.

    Drawn are weights of two dims that are cut, of several equal blocks those of the first.

    Args:
        parts: what every rank holds by name, rank 0 first: arrays or tensors (as `state_dict` returns them on each
            rank).
        splits: how they are cut (`splits_of(model)`); what is not named is whole on every rank.
        num_heads: attention heads of the whole model: those of each rank are named.

    Raises:
        ValueError: as `shards_of`; nothing is cut.
    """
    found = shards_of(parts, splits)
    lines = [_widened(line) for line in _lines(_regions(found))]
    height = TOP_IN + sum(HEAD_IN + max(region.tall for region in line) + 0.4 for line in lines) + FOOT_IN
    _, pen = sheet(height)
    top = height - TOP_IN
    for line in lines:
        x, tall = LEFT_IN, max(region.tall for region in line)
        for region in line:
            _draw_region(pen, region, (x, top, tall), num_heads)
            x += region.wide + 0.3
        top -= HEAD_IN + tall + 0.4
    for number, meaning in enumerate(MEANINGS):
        pen.words((LEFT_IN, 0.86 - 0.24 * number), meaning, side="left")
    boxes = [
        theme.LegendBox(colour, "white", f"r{rank}", f"rank {rank}")
        for rank, colour in enumerate(theme.RANK_COLOURS[: len(parts)])
    ]
    if any(one.dim is None for one in found.values()):
        boxes.append(theme.LegendBox(theme.SHARED, "white", "", "whole on every rank"))
    pen.legend(boxes)
    return pen.finish(*_say(found, [card for line in lines for region in line for card in region.cards]))


def _say(found: Mapping[str, CutWeight], cards: Sequence[_WeightCard]) -> list[str]:
    """Say how much is cut, how to read the picture, and which rank holds which rows or columns of each weight."""
    num_ranks = cards[0].shards.num_ranks
    whole = sum(int(np.prod(one.values.shape)) for one in found.values())
    kept = [one.values.size for one in found.values() if one.dim is None]
    title = f"{num_ranks} ranks: {percent(1 - sum(kept) / whole)} of {whole:,} numbers are cut, and each rank holds "
    title += f"{sum(kept) + (whole - sum(kept)) // num_ranks:,}"
    if num_ranks == 1:
        title = f"1 rank: it holds all {whole:,} numbers"
    rest = f"{sum(kept):,} numbers of {len(kept)} weights are whole on every rank" if kept else "no weight is whole"
    said = [title, f"Drawn as y = x W: inputs down, outputs across; stronger is larger. In addition, {rest}."]
    for card in cards:
        one = card.shards
        what = ("outputs" if card.turned else "tokens") if one.dim == 0 else "inputs"
        each = [
            f"rank {rank} {' and '.join(f'{low}-{high - 1}' for low, high in one.slices(rank))}"
            for rank in range(num_ranks)
        ]
        said.append(f"{one.name} {list(one.values.shape)}, cut by {what}: {'; '.join(each)}.")
    return said


def _regions(found: Mapping[str, CutWeight]) -> list[_Region]:
    """Group weights of two dims that are cut, of several equal blocks those of the first, by the module above them."""
    cut = {name: one for name, one in found.items() if one.dim is not None and one.values.ndim == 2}
    blocks = {name: [int(number) for number in re.findall(r"\.(\d+)\.", f".{name}")] for name in cut}
    first = min((number for numbers in blocks.values() for number in numbers), default=0)
    drawn = {name: one for name, one in cut.items() if all(number == first for number in blocks[name])}
    if not drawn:
        raise ValueError("no weight of two dims is cut; pass splits that name some, as splits_of(model) does")
    width = min(min(one.values.shape) for one in drawn.values())
    groups: dict[str, list[_WeightCard]] = {}
    for name, one in drawn.items():
        words = name.split(".")
        card = _WeightCard(one, 0.0, 0.0, found.get(".".join([*words[:-1], "bias"])))
        rows, columns = one.values.shape[::-1] if card.turned else one.values.shape
        tall, wide = (min(2.6, max(0.6, 1.4 * (size / width) ** 0.5)) for size in (rows, columns))
        wide *= 1.6 if card.turned and len(one.sections) == len(FUSED) else 1.0  # room to name three times the ranks
        groups.setdefault(".".join(words[:-2] or words[:-1]), []).append(card._replace(wide=wide, tall=tall))
    return [_Region(name, tuple(cards)) for name, cards in groups.items()]


def _lines(regions: Sequence[_Region]) -> list[list[_Region]]:
    lines: list[list[_Region]] = [[]]
    for region in regions:
        used = sum(other.wide + 0.3 for other in lines[-1])
        if lines[-1] and LEFT_IN + used + region.wide > theme.WIDTH_IN - 0.2:
            lines.append([])
        lines[-1].append(region)
    return lines


def _widened(line: Sequence[_Region]) -> list[_Region]:
    """Give the weights of a line the width that is left, up to three times their own."""
    left = theme.WIDTH_IN - 0.2 - LEFT_IN - sum(region.wide for region in line) - 0.3 * (len(line) - 1)
    factor = min(3.0, 1 + left / sum(card.wide for region in line for card in region.cards))
    return [
        region._replace(cards=tuple(card._replace(wide=factor * card.wide) for card in region.cards)) for region in line
    ]


def _draw_region(pen: Pen, region: _Region, place: tuple[float, float, float], num_heads: int) -> None:
    """Draw a region's weights in a line, f before a column cut and g after a row cut or an embedding.

    `place` is the left end, the top, and the height that the line leaves for weights.
    """
    left, top, tall = place
    pen.heading((left, top - 0.1), region.name)
    base = top - HEAD_IN - tall / 2
    x = left
    fused = any(len(card.shards.sections) == len(FUSED) for card in region.cards)
    each = num_heads // region.cards[0].shards.num_ranks if fused else 0
    opens, closes = region.cards[0], region.cards[-1]
    if opens.across and opens.turned:
        _draw_mark(pen, (x + 0.3, base), "f")
    x += MARK_IN
    for number, card in enumerate(region.cards):
        if number:
            pen.arrow((x + 0.06, base), (x + 0.42, base), theme.FAINT, line=2.0)
            x += 0.5
        _draw_card(pen, card, (x + card.strip, base - card.tall / 2), each)
        x += card.strip + card.wide
    if not closes.across:
        _draw_mark(pen, (x + 0.32, base), "g")


def _draw_mark(pen: Pen, spot: tuple[float, float], letter: str) -> None:
    pen.arrow((spot[0] - 0.28, spot[1]), (spot[0] + 0.28, spot[1]), theme.FAINT, line=2.0)
    pen.box((spot[0] - 0.14, spot[1] - 0.16), 0.26, 0.32, theme.INK)
    pen.words((spot[0] - 0.01, spot[1]), letter, size=theme.TEXT_PT, bold=True, colour="white")


def _draw_card(pen: Pen, card: _WeightCard, corner: tuple[float, float], heads: int) -> None:
    """Draw one weight as an image, its bias under it, and the ranks of its slices along the cut."""
    one, (x, y) = card.shards, corner
    image = _image(one)
    _stamp(pen, image.transpose(1, 0, 2) if card.turned else image, (x, y), card.wide, card.tall, gid=one.name)
    pen.outline((x, y), card.wide, card.tall, theme.FAINT, line=0.8)
    rows, columns = one.values.shape[::-1] if card.turned else one.values.shape
    name = one.name.split(".")[-2]
    below = y - 0.14
    if card.bias is not None:
        _stamp(pen, _image(card.bias)[None], (x, y - 0.05 - BIAS_IN), card.wide, BIAS_IN, gid=card.bias.name)
        below -= BIAS_IN + 0.05
    label = f"{name} {rows} x {columns}"
    room = (card.strip + card.wide + 0.5) / max(width_in(label, theme.SMALL_PT), 0.1)
    pen.words((x + card.wide / 2, below), label, size=theme.SMALL_PT * min(1.0, room))
    _draw_owners(pen, card, corner, heads)


def _stamp(
    pen: Pen, image: NDArray[np.float64], corner: tuple[float, float], wide: float, tall: float, *, gid: str
) -> None:
    """Put an image on the sheet."""
    (x, y), axes = corner, pen.surface
    assert isinstance(axes, Axes), "a sheet's pen draws on axes"
    axes.imshow(image, extent=(x, x + wide, y, y + tall), aspect="auto", interpolation="nearest", gid=gid, zorder=3)


def _draw_owners(pen: Pen, card: _WeightCard, corner: tuple[float, float], heads: int) -> None:
    """Write the rank next to each slice, and its `heads` attention heads if any; a letter over each fused part."""
    one, (x, y) = card.shards, corner
    length, begin = len(one.owner), 0
    for number, size in enumerate(one.sections):
        for rank in range(one.num_ranks):
            low, high = (end / length for end in one.slices(rank)[number])
            spot, room = (x + low * card.wide, y + card.tall + 0.03), ((high - low) * card.wide, STRIP_IN)
            if not card.across:
                room = (card.strip - 0.05, (high - low) * card.tall)
                spot = (x - room[0] - 0.03, y + card.tall * (1 - high))
            last = f"-{(rank + 1) * heads - 1}" if heads > 1 else ""
            _draw_owner(pen, spot, room, rank, f"h{rank * heads}{last}" if heads else "")
        begin += size
        if len(one.sections) == len(FUSED):
            middle = (begin - size / 2) / length
            pen.words((x + middle * card.wide, y + card.tall + STRIP_IN + 0.15), FUSED[number], bold=True)


def _draw_owner(pen: Pen, corner: tuple[float, float], room: tuple[float, float], rank: int, heads: str) -> None:
    """Draw a box in the rank's colour, with its name, and its heads in a second line."""
    fill = theme.RANK_COLOURS[rank]
    pen.box(corner, *room, fill)
    x, y = corner[0] + room[0] / 2, corner[1] + room[1] / 2
    apart = min(0.09, 0.23 * room[1]) if heads else 0.0
    for text, at in ((f"r{rank}", y + apart), (heads, y - apart)):
        fits = theme.SMALL_PT * (room[0] - 0.03) / max(width_in(text, theme.SMALL_PT), 0.05)
        size = min(theme.SMALL_PT, fits, 130 * apart if heads else theme.SMALL_PT)
        pen.words((x, at), text, size=size, colour=theme.text_colour(fill))


def _image(one: CutWeight) -> NDArray[np.float64]:
    """Return a colour for every number: the owner's, the stronger the larger the number."""
    values = np.abs(one.values)
    most = float(np.quantile(values, 0.99)) or float(values.max()) or 1.0
    share = 0.22 + 0.78 * np.clip(values / most, 0, 1)
    colours = np.array(to_rgb(theme.SHARED))
    if one.dim is not None:
        along = [1] * values.ndim
        along[one.dim] = len(one.owner)
        colours = np.array(list(map(to_rgb, theme.RANK_COLOURS)))[one.owner].reshape(*along, 3)
    return np.asarray(1 - share[..., None] * (1 - colours))
