"""Which all-reduce wins at which size on a link: the times, and a picture of them with a band that names the winner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from distlab.plan import Link
from distlab.plan.require import chosen
from simulator.hardware import presets as hardware
from simulator.hardware.cost import Steps, all_reduce_steps, hierarchical_all_reduce_s, steps_s
from simulator.units import capitalised, format_bytes, format_s, percent
from simulator.viz.drawing import plot
from simulator.viz.drawing.lanes import CHARACTER_WIDTH
from simulator.viz.drawing.pen import Picture
from simulator.viz.drawing.theme import DPI, INK, TEXT_PT, styles, text_colour

SMALLEST_BYTES, LARGEST_BYTES = 1e3, 1e9
RANKS_PER_NODE = 8
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


STYLES = styles("all_reduce")


class Stretch(NamedTuple):
    """A range of sizes in which one algorithm is the fastest."""

    algorithm: str
    first_bytes: float
    last_bytes: float


class Race(NamedTuple):
    """The times of some algorithms at some sizes, rising.

    `link` is what they run on, in words; `times_s` has the seconds of each algorithm, one a size; `stretches` who is
    the fastest where, from the smallest size to the largest.
    """

    link: str
    sizes_bytes: Floats
    times_s: dict[str, Floats]
    stretches: tuple[Stretch, ...]


def race(
    link: Link | str, num_ranks: int, algorithms: Sequence[str] | None = None, *, inter_node: Link | str | None = None
) -> Race:
    """Compute the times of the algorithms at sizes from 1 kB to 1 GB, and who is the fastest where.

    With `inter_node` ranks stand in nodes of RANKS_PER_NODE. Then an algorithm that knows no nodes runs at the pace
    of the slower link, and "hierarchical" may take part: reduce-scatter inside nodes over `link`, all-reduce across
    them on a node's share over `inter_node`, all-gather inside.

    Raises:
        ValueError: fewer than 2 ranks, an unknown algorithm or link, or hierarchical without whole nodes.
    """
    if num_ranks < 2:
        raise ValueError(f"an all-reduce race has {num_ranks} ranks; pass at least 2")
    inside = hardware.link(link) if isinstance(link, str) else link
    across = hardware.link(inter_node) if isinstance(inter_node, str) else inter_node
    spans = across is not None and num_ranks > RANKS_PER_NODE
    if algorithms is None:
        algorithms = ("ring", "tree", "halving_doubling", *((HIERARCHICAL,) if spans else ()))
    for name in algorithms:
        chosen("all-reduce algorithm", name, STYLES)
    if HIERARCHICAL in algorithms and (not spans or num_ranks % RANKS_PER_NODE):
        raise ValueError(f"hierarchical: {num_ranks} ranks; pass inter_node, and a multiple of {RANKS_PER_NODE} ranks")
    sizes = np.logspace(math.log10(SMALLEST_BYTES), math.log10(LARGEST_BYTES), NUM_SIZES)
    links = [inside] if across is None or not spans else [inside, across]

    def seconds(algorithm: str, num_bytes: float) -> float:
        if algorithm != HIERARCHICAL:
            return max(steps_s(num_bytes, steps_of(algorithm, num_ranks), wire) for wire in links)
        nodes = num_ranks // RANKS_PER_NODE
        return hierarchical_all_reduce_s(num_bytes, RANKS_PER_NODE, nodes, intra_node=links[0], inter_node=links[1])

    times = {name: np.array([seconds(name, size) for size in sizes.tolist()]) for name in algorithms}
    words = inside.name if len(links) == 1 else f"{inside.name} in nodes of {RANKS_PER_NODE}, {links[1].name} between"
    return Race(words, sizes, times, _stretches(sizes, times, seconds))


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
        best, sizes = facts.times_s[stretches[0].algorithm], facts.sizes_bytes
        close = []  # from which size on a time stays within a tenth of the best
        for other, times in facts.times_s.items():
            far = np.flatnonzero(times > NEAR * best)
            first = int(far[-1]) + 1 if far.size else 0
            if other != stretches[0].algorithm and first < len(sizes):
                close.append((float(sizes[first]), STYLES[other].words))
        if close:
            size, other = min(close)
            where = f"from {format_bytes(size)} on" if size > SMALLEST_BYTES else "everywhere"
            text += f"; {other} is within 10 % {where}"
        return text
    last = [format_bytes(stretch.last_bytes) for stretch in stretches]
    parts = [f"{word} up to {end}" for word, end in zip(words[1:-1], last[1:-1], strict=True)]
    return capitalised(", ".join([f"{words[0]} wins below {last[0]}", *parts, f"{words[-1]} above"]))


TOP_IN, BOTTOM_IN, BAND_IN, LEFT_IN, RIGHT_IN = 1.0, 0.75, 0.5, 1.0, 2.35
Points = tuple[Sequence[float], Sequence[float]]
DASHES = ("-", (0, (6, 2)), (0, (3, 2)), "-.", (0, (1, 1)), "-")  # lines that lie on each other stay visible


def draw_race(
    link: Link | str,
    num_ranks: int,
    algorithms: Sequence[str] | None = None,
    *,
    inter_node: Link | str | None = None,
    measured: Mapping[str, Points] | None = None,
    title: str | None = None,
) -> Picture:
    """Draw the time of each all-reduce against its size, and under it a band with the fastest at each size.

    Args:
        link: a Link, or the name of a preset (`simulator.names("links")`).
        num_ranks: ranks that take part.
        algorithms: some of "ring", "tree" (double binary), "halving_doubling", "in_network", "hierarchical", "naive"
            (whole tensors around the ring) and "binomial_tree"; by default ring, tree and halving_doubling, and
            hierarchical where there are several nodes.
        inter_node: the link between nodes; None is one node, however many ranks.
        measured: for each algorithm its sizes in bytes and its times in seconds, drawn as points over the lines, and
            compared with them.
        title: replaces the takeaway, and begins the words.

    Raises:
        ValueError: as `race`.
    """
    facts = race(link, num_ranks, algorithms, inter_node=inter_node)
    figure = plot.new_figure(6.4)
    axes = plot.frame(figure, left=LEFT_IN, right=RIGHT_IN, top=TOP_IN, bottom=BOTTOM_IN + BAND_IN + 0.1)
    axes.set(xscale="log", yscale="log", xlim=(SMALLEST_BYTES, LARGEST_BYTES))
    table = np.stack(list(facts.times_s.values()))
    points = [time for _, times in (measured or {}).values() for time in times]
    axes.set_ylim(min([table.min(), *points]) / 1.5, max([table.max(), *points]) * 1.3)
    for stretch in facts.stretches:
        colour = STYLES[stretch.algorithm].colour
        axes.axvspan(stretch.first_bytes, stretch.last_bytes, color=colour, alpha=0.09, linewidth=0, zorder=0)
    for index, (name, times) in enumerate(facts.times_s.items()):
        look: dict[str, Any] = {"linewidth": 2.8, "zorder": 3, "linestyle": DASHES[index % len(DASHES)]}
        axes.plot(facts.sizes_bytes, times, color=STYLES[name].colour, gid=f"line {name}", **look)
    look = {"s": 70, "edgecolors": INK, "linewidths": 1.0, "zorder": 4, "clip_on": False}
    for name, (sizes, points_s) in (measured or {}).items():
        axes.scatter(np.asarray(sizes), np.asarray(points_s), c=STYLES[name].colour, gid=f"measured {name}", **look)
    last = [float(times[-1]) for times in facts.times_s.values()]
    names = [f"{STYLES[name].words}\n{format_s(time)}" for name, time in zip(facts.times_s, last, strict=True)]
    plot.name_line_ends(axes, last, names, [STYLES[name].colour for name in facts.times_s])
    plot.mark_ticks(axes.xaxis, LogLocator(10), lambda _: "")
    plot.mark_ticks(axes.yaxis, LogLocator(10, numticks=12), format_s)
    axes.grid(color=plot.GRID, linewidth=0.6, zorder=0)
    axes.set_ylabel("time of one all-reduce", fontsize=TEXT_PT, color=INK)
    _draw_band(figure, facts)
    note = f"All-reduce among {num_ranks} ranks over {facts.link}"
    words = f"{f'{title}. ' if title else ''}{note}: {_say(facts, measured or {})}"
    note += "; lines predicted, points measured." if measured else "; predicted by latency and bandwidth."
    plot.put_title(figure, title or race_takeaway(facts), note)
    return Picture(figure, words)


def _say(facts: Race, measured: Mapping[str, Points]) -> str:
    """Say who wins at which size, the times at both ends, and how far predictions are off."""
    ends = [
        f"{STYLES[name].words} {format_s(float(times[0]))} and {format_s(float(times[-1]))}"
        for name, times in facts.times_s.items()
    ]
    text = f"{race_takeaway(facts)}. Times at 1 kB and at 1 GB: {'; '.join(ends)}."
    for name, (sizes, times) in measured.items():
        predicted = np.exp(np.interp(np.log(sizes), np.log(facts.sizes_bytes), np.log(facts.times_s[name])))
        error = float(np.median(np.abs(predicted / np.asarray(times, dtype=float) - 1)))
        text += f" Measured {STYLES[name].words}: the prediction is off by {percent(error)} (median of {len(times)})."
    return text


def _draw_band(figure: Figure, facts: Race) -> None:
    """Draw the band of winners on the same axis of sizes, each with its name where there is room, else its letter."""
    top = figure.get_size_inches()[1] - BOTTOM_IN - BAND_IN
    axes = plot.frame(figure, left=LEFT_IN, right=RIGHT_IN, top=top, bottom=BOTTOM_IN)
    axes.set(xscale="log", xlim=(SMALLEST_BYTES, LARGEST_BYTES), ylim=(0, 1), yticks=[])
    axes.spines["left"].set_visible(False)
    width_px = plot.axes_pixels(axes)[0]
    decades = math.log10(LARGEST_BYTES / SMALLEST_BYTES)
    for stretch in facts.stretches:
        style = STYLES[stretch.algorithm]
        width = stretch.last_bytes - stretch.first_bytes
        axes.add_patch(Rectangle((stretch.first_bytes, 0), width, 1, facecolor=style.colour, edgecolor="white"))
        room = math.log10(stretch.last_bytes / stretch.first_bytes) / decades * width_px * 72 / DPI
        most = room / (CHARACTER_WIDTH * TEXT_PT * 1.08)
        label = next((t for t in (f"{style.words} wins", style.words, style.letter) if len(t) < most), "")
        middle = math.sqrt(stretch.first_bytes * stretch.last_bytes)
        look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": text_colour(style.colour)}
        axes.text(middle, 0.46, label, fontsize=TEXT_PT, weight="bold", **look)
    plot.mark_ticks(axes.xaxis, [10.0**power for power in range(3, 10)], format_bytes)
    plot.name_axes(axes, "size of the tensor that every rank holds")
