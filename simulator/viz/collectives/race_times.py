"""Compute which all-reduce is the fastest at which size on a link: the numbers behind the picture of the race."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Link
from simulator.hardware import presets as hardware
from simulator.hardware.cost import Steps, all_reduce_steps, hierarchical_all_reduce_s, steps_s
from simulator.units import format_bytes
from simulator.viz.drawing.style import KindStyle
from simulator.viz.drawing.wording import capitalised

SMALLEST_BYTES, LARGEST_BYTES = 1e3, 1e9
NUM_SIZES = 361  # 60 a decade
NEAR = 1.1  # within a tenth of the winner
HIERARCHICAL = "hierarchical"
Floats = NDArray[np.float64]


def steps_of(algorithm: str, num_ranks: int) -> Steps:
    """Return the steps of an algorithm on one link: those of the cost model, and of the two that lessons begin with."""
    if algorithm == "naive":
        return Steps(num_ranks - 1, num_ranks - 1)
    if algorithm == "binomial_tree":
        levels = math.ceil(math.log2(num_ranks)) if num_ranks > 1 else 0
        return Steps(2 * levels, 2 * levels)
    return all_reduce_steps(num_ranks, algorithm)


STYLES: Mapping[str, KindStyle] = MappingProxyType(
    {
        "naive": KindStyle("#666666", "N", "ring of whole tensors"),
        "binomial_tree": KindStyle("#D55E00", "B", "binomial tree"),
        "ring": KindStyle("#0072B2", "R", "ring"),
        "tree": KindStyle("#E69F00", "T", "double tree"),
        "halving_doubling": KindStyle("#009E73", "H", "halving-doubling"),
        "in_network": KindStyle("#332288", "S", "in the switch"),
        HIERARCHICAL: KindStyle("#CC79A7", "2", "hierarchical"),
    }
)


class Stretch(NamedTuple):
    """A range of sizes in which one algorithm is the fastest."""

    algorithm: str
    first_bytes: float
    last_bytes: float


class Race(NamedTuple):
    """The times of some algorithms at some sizes.

    Attributes:
        link: what they run on, in words.
        num_ranks: how many ranks.
        sizes_bytes: sizes, rising.
        times_s: seconds of each algorithm, one a size.
        stretches: who is the fastest where, from the smallest size to the largest.
    """

    link: str
    num_ranks: int
    sizes_bytes: Floats
    times_s: dict[str, Floats]
    stretches: tuple[Stretch, ...]


def race(
    link: Link | str,
    num_ranks: int,
    algorithms: Sequence[str] | None = None,
    *,
    inter_node: Link | str | None = None,
    ranks_per_node: int = 8,
) -> Race:
    """Compute the times of the algorithms at sizes from 1 kB to 1 GB, and who is the fastest where.

    With `inter_node` ranks stand in nodes of `ranks_per_node`. Then an algorithm that knows no nodes runs at the pace
    of the slower link, and "hierarchical" may take part: reduce-scatter inside nodes over `link`, all-reduce across
    them on a node's share over `inter_node`, all-gather inside.

    Raises:
        ValueError: fewer than 2 ranks, an unknown algorithm or link, or hierarchical without whole nodes.
    """
    if num_ranks < 2:
        raise ValueError(f"an all-reduce race has {num_ranks} ranks; pass at least 2")
    inside = hardware.link(link) if isinstance(link, str) else link
    across = hardware.link(inter_node) if isinstance(inter_node, str) else inter_node
    spans = across is not None and num_ranks > ranks_per_node
    if algorithms is None:
        algorithms = ("ring", "tree", "halving_doubling", *((HIERARCHICAL,) if spans else ()))
    wrong = [name for name in algorithms if name not in STYLES]
    if wrong or not algorithms:
        raise ValueError(f"all-reduce algorithm is {wrong[0] if wrong else None!r}; choose of {', '.join(STYLES)}")
    if HIERARCHICAL in algorithms and (not spans or num_ranks % ranks_per_node):
        raise ValueError(
            f"hierarchical wants whole nodes and a link between them: {num_ranks} ranks in nodes of {ranks_per_node}, "
            f"inter_node {across.name if across else None!r}; pass inter_node, and a multiple of {ranks_per_node} ranks"
        )
    sizes = np.logspace(math.log10(SMALLEST_BYTES), math.log10(LARGEST_BYTES), NUM_SIZES)
    links = [inside] if across is None or not spans else [inside, across]

    def seconds(algorithm: str, num_bytes: float) -> float:
        if algorithm != HIERARCHICAL:
            return max(steps_s(num_bytes, steps_of(algorithm, num_ranks), wire) for wire in links)
        nodes = num_ranks // ranks_per_node
        return hierarchical_all_reduce_s(num_bytes, ranks_per_node, nodes, intra_node=links[0], inter_node=links[1])

    times = {name: np.array([seconds(name, size) for size in sizes.tolist()]) for name in algorithms}
    words = inside.name if len(links) == 1 else f"{inside.name} in nodes of {ranks_per_node}, {links[1].name} between"
    return Race(words, num_ranks, sizes, times, _stretches(sizes, times, seconds))


def _stretches(
    sizes: Floats, times: Mapping[str, Floats], seconds: Callable[[str, float], float]
) -> tuple[Stretch, ...]:
    """Find who is the fastest at each size (the first named of equals) and halve each crossing to a thousandth."""
    names = list(times)
    table = np.stack([times[name] for name in names])
    winner = (table <= table.min(axis=0) * (1 + 1e-9)).argmax(axis=0)
    stretches: list[Stretch] = []
    start = float(sizes[0])
    for index in np.flatnonzero(np.diff(winner)).tolist():
        before, after = names[winner[index]], names[winner[index + 1]]
        low, high = float(sizes[index]), float(sizes[index + 1])
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if seconds(before, middle) <= seconds(after, middle) else (low, middle)
        stretches.append(Stretch(before, start, high))
        start = high
    return (*stretches, Stretch(names[winner[-1]], start, float(sizes[-1])))


def race_takeaway(facts: Race) -> str:
    """Return the title: who wins where, with the sizes at which the winner changes."""
    stretches = facts.stretches
    words = [STYLES[stretch.algorithm].words for stretch in stretches]
    if len(stretches) == 1:
        text = f"{capitalised(words[0])} wins at every size"
        name = stretches[0].algorithm
        close = [
            (float(facts.sizes_bytes[int(from_)]), STYLES[other].words)
            for other, times in facts.times_s.items()
            if other != name and (from_ := _close_from(times, facts.times_s[name])) is not None
        ]
        if close and min(close)[0] > SMALLEST_BYTES:
            size, other = min(close)
            text += f"; {other} is within 10 % from {format_bytes(size)} on"
        elif close:
            text += f"; {min(close)[1]} is within 10 % everywhere"
        return text
    parts = [f"{words[0]} wins below {format_bytes(stretches[0].last_bytes)}"]
    for stretch, word in zip(stretches[1:-1], words[1:-1], strict=True):
        parts.append(f"{word} up to {format_bytes(stretch.last_bytes)}")
    parts.append(f"{words[-1]} above")
    return capitalised(", ".join(parts))


def _close_from(times: Floats, best: Floats) -> int | None:
    """Return the first index from which on a time stays within a tenth of the best, or None."""
    far = np.flatnonzero(times > NEAR * best)
    first = 0 if not far.size else int(far[-1]) + 1
    return first if first < len(times) else None
