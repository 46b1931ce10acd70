"""Draw which rank holds which slice of each weight, from the weights that the ranks really hold.

A weight is drawn as it is used, y = x W: inputs down, outputs across (torch keeps a layer's weight the other way
round). So a column-parallel layer is cut into columns, a row-parallel one into rows, and an embedding by its tokens. A
colour is a rank, a stronger dot a larger number. Between the layers stand f and g, all that the ranks exchange.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from simulator.units import percent
from simulator.viz.drawing.pen import Pen, sheet
from simulator.viz.drawing.plot import put_title
from simulator.viz.drawing.style import FAINT, IDLE, INK, RANK_COLOURS, SHARED, TEXT_PT, WIDTH_IN, LegendBox
from simulator.viz.tensor_parallel.shard_card import FUSED, STRIP_IN, Card, draw_card
from simulator.viz.tensor_parallel.shard_parts import Shards, SplitLike, shards_of

MAX_RANKS = 8
TOP_IN, FOOT_IN, HEAD_IN, MARK_IN, LEFT_IN = 1.0, 1.15, 0.3, 0.62, 0.3
MARKS = ("f", "g")
MEANINGS = {
    "f": "f: forward nothing, backward an all-reduce",
    "g": "g: forward an all-reduce, backward nothing",
}
MARK = "#1A1A1A"


class _Region(NamedTuple):
    """Layers between an f and a g."""

    name: str
    cards: tuple[Card, ...]

    @property
    def wide(self) -> float:
        """From the arrow before f to that behind g."""
        return 2 * MARK_IN + sum(card.extent for card in self.cards) + 0.5 * (len(self.cards) - 1)

    @property
    def tall(self) -> float:
        """With the names over a weight, and as much below, so that middles are level."""
        return max(card.tall + (2 * STRIP_IN + 0.4 if card.across else 0.0) for card in self.cards)


def shards_figure(
    parts: Sequence[Mapping[str, Any]], splits: Mapping[str, SplitLike], *, num_heads: int | None = None
) -> Figure:
    """Draw the weights of a tensor-parallel model, each place in the colour of the rank that holds it.

    Drawn are weights of two dims that are cut, of several equal blocks those of the first.

    Args:
        parts: what every rank holds by name, rank 0 first: arrays or tensors (as `state_dict` returns them on each
            rank). `cut_weights` makes them of whole weights.
        splits: how they are cut (`splits_of(model)`); what is not named is whole on every rank.
        num_heads: attention heads of the whole model, to name those of each rank.

    Raises:
        ValueError: as `shards_of`; more than 8 ranks; nothing is cut.
    """
    found = shards_of(parts, splits)
    regions = _regions(found, _chosen(found))
    lines = [_widened(line) for line in _lines(regions)]
    height = TOP_IN + sum(HEAD_IN + max(region.tall for region in line) + 0.4 for line in lines) + FOOT_IN
    figure, pen = sheet(height)
    top = height - TOP_IN
    for line in lines:
        x, tall = LEFT_IN, max(region.tall for region in line)
        for region in line:
            _draw_region(pen, region, (x, top, tall), num_heads, MARKS)
            x += region.wide + 0.3
        top -= HEAD_IN + tall + 0.4
    _draw_foot(pen, found, len(parts))
    pen.flush()
    put_title(figure, _share_that_is_cut(found, len(parts)), _whole_weights(found))
    return figure


def describe_shards(parts: Sequence[Mapping[str, Any]], splits: Mapping[str, SplitLike]) -> str:
    """Say in words which rank holds which rows or columns; arguments and errors as `shards_figure`."""
    found = shards_of(parts, splits)
    lines = [f"{_share_that_is_cut(found, len(parts))}. {_whole_weights(found)}"]
    for name in _chosen(found):
        one = found[name]
        turned = _turned(name)
        if one.dim is None:
            lines.append(f"{name} {list(one.shape)}: whole on every rank.")
            continue
        what = ("outputs" if turned else "tokens") if one.dim == 0 else "inputs"
        each = [
            f"rank {rank} {' and '.join(f'{low}-{high - 1}' for low, high in one.slices(rank) if high > low)}"
            for rank in range(one.num_ranks)
        ]
        lines.append(f"{name} {list(one.shape)}, cut by {what}: {'; '.join(each)}.")
    return "\n".join(lines)


def _turned(name: str) -> bool:
    """Tell whether a weight is kept as outputs by inputs: all but embeddings are."""
    return "embedding" not in name


def _chosen(found: Mapping[str, Shards]) -> list[str]:
    """Return the weights of two dims that are cut, of several equal blocks those of the first."""
    if next(iter(found.values())).num_ranks > MAX_RANKS:
        raise ValueError(f"more than {MAX_RANKS} ranks cannot be told apart by colour; draw fewer")
    cut = [name for name, one in found.items() if one.dim is not None and one.values.ndim == 2]
    first = min((int(number) for name in cut for number in re.findall(r"\.(\d+)\.", f".{name}")), default=0)
    names = [name for name in cut if all(int(n) == first for n in re.findall(r"\.(\d+)\.", f".{name}"))]
    if not names:
        raise ValueError("no weight of two dims is cut; pass splits that name some, as splits_of(model) does")
    return names


def _regions(found: Mapping[str, Shards], names: Sequence[str]) -> list[_Region]:
    """Group weights by the module above their layer, in the order of the model."""
    width = min(min(found[name].shape) for name in names)
    groups: dict[str, list[Card]] = {}
    for name in names:
        words = name.split(".")
        one, turned = found[name], _turned(name)
        rows, columns = one.shape[::-1] if turned else one.shape
        tall, wide = (min(2.6, max(0.6, 1.4 * (size / width) ** 0.5)) for size in (rows, columns))
        wide *= 1.6 if turned and len(one.sections) == len(FUSED) else 1.0  # room to name three times the ranks
        bias = found.get(".".join([*words[:-1], "bias"]))
        groups.setdefault(".".join(words[:-2] or words[:-1]), []).append(Card(one, turned, wide, tall, bias))
    return [_Region(name, tuple(cards)) for name, cards in groups.items()]


def _lines(regions: Sequence[_Region]) -> list[list[_Region]]:
    lines: list[list[_Region]] = [[]]
    for region in regions:
        used = sum(other.wide + 0.3 for other in lines[-1])
        if lines[-1] and LEFT_IN + used + region.wide > WIDTH_IN - 0.2:
            lines.append([])
        lines[-1].append(region)
    return lines


def _widened(line: Sequence[_Region]) -> list[_Region]:
    """Give the weights of a line the width that is left, up to three times their own."""
    left = WIDTH_IN - 0.2 - LEFT_IN - sum(region.wide for region in line) - 0.3 * (len(line) - 1)
    factor = min(3.0, 1 + left / sum(card.wide for region in line for card in region.cards))
    return [
        region._replace(cards=tuple(card._replace(wide=factor * card.wide) for card in region.cards)) for region in line
    ]


def _share_that_is_cut(found: Mapping[str, Shards], num_ranks: int) -> str:
    whole = sum(int(np.prod(one.shape)) for one in found.values())
    cut = sum(int(np.prod(one.shape)) for one in found.values() if one.dim is not None)
    held = sum(one.held for one in found.values())
    if num_ranks == 1:
        return f"1 rank: it holds all {whole:,} numbers"
    return f"{num_ranks} ranks: {percent(cut / whole)} of {whole:,} numbers are cut, and each rank holds {held:,}"


def _whole_weights(found: Mapping[str, Shards]) -> str:
    whole = [one for one in found.values() if one.dim is None]
    count = sum(one.values.size for one in whole)
    kept = f"{count:,} numbers of {len(whole)} weights are whole on every rank" if whole else "no weight is whole"
    return f"Drawn as y = x W: inputs down, outputs across; stronger is larger. In addition, {kept}."


def _draw_region(
    pen: Pen, region: _Region, place: tuple[float, float, float], num_heads: int | None, marks: tuple[str, str]
) -> None:
    """Draw a region's weights in a line, f before a column cut and g after a row cut or an embedding.

    `place` is the left end, the top, and the height that the line leaves for weights.
    """
    left, top, tall = place
    pen.heading((left, top - 0.1), region.name)
    base = top - HEAD_IN - tall / 2
    x = left
    heads = num_heads if any(len(card.shards.sections) == len(FUSED) for card in region.cards) else None
    opens, closes = region.cards[0], region.cards[-1]
    if opens.shards.dim is not None and opens.across and opens.turned:
        _draw_mark(pen, (x + 0.3, base), marks[0])
    x += MARK_IN
    for number, card in enumerate(region.cards):
        if number:
            pen.arrow((x + 0.06, base), (x + 0.42, base), FAINT, line=2.0)
            x += 0.5
        draw_card(pen, card, (x + card.strip, base - card.tall / 2), heads)
        x += card.extent
    if closes.shards.dim is not None and not closes.across:
        _draw_mark(pen, (x + 0.32, base), marks[1])


def _draw_mark(pen: Pen, spot: tuple[float, float], letter: str) -> None:
    pen.arrow((spot[0] - 0.28, spot[1]), (spot[0] + 0.28, spot[1]), FAINT, line=2.0)
    pen.box((spot[0] - 0.14, spot[1] - 0.16), 0.26, 0.32, MARK)
    pen.words((spot[0] - 0.01, spot[1]), letter, size=TEXT_PT, bold=True, colour="white")


def _draw_foot(pen: Pen, found: Mapping[str, Shards], num_ranks: int) -> None:
    """Write what the marks mean, and a legend of ranks."""
    for number, mark in enumerate(MARKS):
        pen.words((LEFT_IN, 0.86 - 0.24 * number), MEANINGS[mark], side="left", colour=INK)
    boxes = [LegendBox(RANK_COLOURS[rank], "white", f"r{rank}", f"rank {rank}") for rank in range(num_ranks)]
    if any((one.owner < 0).any() for one in found.values()):
        boxes.append(LegendBox(IDLE, FAINT, "", "padding"))
    if any(one.dim is None for one in found.values()):
        boxes.append(LegendBox(SHARED, "white", "", "whole on every rank"))
    pen.legend(boxes)
