"""Draw which all-reduce wins at which size: the time of each against the bytes, and a band that names the winner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from distlab.plan import Link
from simulator.units import format_bytes, format_s
from simulator.viz.collectives.race_times import LARGEST_BYTES, SMALLEST_BYTES, STYLES, Race, race, race_takeaway
from simulator.viz.drawing.boxes import CHARACTER_WIDTH
from simulator.viz.drawing.plot import (
    GRID,
    axes_pixels,
    frame,
    mark_ticks,
    name_axes,
    name_line_ends,
    new_figure,
    put_title,
)
from simulator.viz.drawing.style import DPI, INK, TEXT_PT, text_colour
from simulator.viz.drawing.wording import percent

TOP_IN, BOTTOM_IN, BAND_IN, LEFT_IN, RIGHT_IN = 1.0, 0.75, 0.5, 1.0, 2.35
Points = tuple[Sequence[float], Sequence[float]]
DASHES = ("-", (0, (6, 2)), (0, (3, 2)), "-.", (0, (1, 1)), "-")  # lines that lie on one another stay visible


def draw_race(
    link: Link | str,
    num_ranks: int,
    algorithms: Sequence[str] | None = None,
    *,
    inter_node: Link | str | None = None,
    ranks_per_node: int = 8,
    measured: Mapping[str, Points] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the time of each all-reduce against its size, and under it a band with the fastest at each size.

    Args:
        link: a Link, or the name of a preset (`simulator.names("links")`).
        num_ranks: ranks that take part.
        algorithms: some of "ring", "tree" (double binary), "halving_doubling", "in_network", "hierarchical", "naive"
            (whole tensors around the ring) and "binomial_tree"; by default ring, tree and halving_doubling, and
            hierarchical where there are several nodes.
        inter_node: the link between nodes; None is one node, however many ranks.
        ranks_per_node: ranks of a node, where `inter_node` is given.
        measured: for each algorithm its sizes in bytes and its times in seconds, drawn as points over the lines.
        title: replaces the takeaway.

    Raises:
        ValueError: as `race`, or a measured algorithm that does not take part.
    """
    facts = race(link, num_ranks, algorithms, inter_node=inter_node, ranks_per_node=ranks_per_node)
    figure = new_figure(6.4)
    axes = frame(figure, left=LEFT_IN, right=RIGHT_IN, top=TOP_IN, bottom=BOTTOM_IN + BAND_IN + 0.1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(SMALLEST_BYTES, LARGEST_BYTES)
    table = np.stack(list(facts.times_s.values()))
    points = [time for _, times in (measured or {}).values() for time in times]
    axes.set_ylim(min([table.min(), *points]) / 1.5, max([table.max(), *points]) * 1.3)
    for stretch in facts.stretches:
        colour = STYLES[stretch.algorithm].colour
        axes.axvspan(stretch.first_bytes, stretch.last_bytes, color=colour, alpha=0.09, linewidth=0, zorder=0)
    for index, (name, times) in enumerate(facts.times_s.items()):
        look: dict[str, Any] = {"linewidth": 2.8, "zorder": 3, "linestyle": DASHES[index % len(DASHES)]}
        axes.plot(facts.sizes_bytes, times, color=STYLES[name].colour, gid=f"line {name}", **look)
    _draw_measured(axes, facts, measured or {})
    last = [float(times[-1]) for times in facts.times_s.values()]
    names = [f"{STYLES[name].words}\n{format_s(time)}" for name, time in zip(facts.times_s, last, strict=True)]
    name_line_ends(axes, last, names, [STYLES[name].colour for name in facts.times_s])
    _label_axes(axes)
    _draw_band(figure, facts)
    note = f"All-reduce among {num_ranks} ranks over {facts.link}"
    note += "; lines predicted, points measured." if measured else "; predicted by latency and bandwidth."
    put_title(figure, title or race_takeaway(facts), note)
    return figure


def describe_race(
    link: Link | str,
    num_ranks: int,
    algorithms: Sequence[str] | None = None,
    *,
    inter_node: Link | str | None = None,
    ranks_per_node: int = 8,
    measured: Mapping[str, Points] | None = None,
) -> str:
    """Say in words what `draw_race` shows: who wins at which size, and by how much; arguments and errors as there."""
    facts = race(link, num_ranks, algorithms, inter_node=inter_node, ranks_per_node=ranks_per_node)
    text = f"All-reduce among {num_ranks} ranks over {facts.link}: {race_takeaway(facts)}."
    ends = [
        f"{STYLES[name].words} {format_s(float(times[0]))} and {format_s(float(times[-1]))}"
        for name, times in facts.times_s.items()
    ]
    text += f" Times at 1 kB and at 1 GB: {'; '.join(ends)}."
    for name, (sizes, times) in (measured or {}).items():
        _check_measured(facts, name)
        predicted = np.exp(np.interp(np.log(sizes), np.log(facts.sizes_bytes), np.log(facts.times_s[name])))
        error = float(np.median(np.abs(predicted / np.asarray(times, dtype=float) - 1)))
        text += f" Measured {STYLES[name].words}: the prediction is off by {percent(error)} (median of {len(times)})."
    return text


def _check_measured(facts: Race, name: str) -> None:
    if name not in facts.times_s:
        raise ValueError(f"measured has {name!r}, which is not in the race of {', '.join(facts.times_s)}; add it there")


def _draw_measured(axes: Axes, facts: Race, measured: Mapping[str, Points]) -> None:
    for name, (sizes, times) in measured.items():
        _check_measured(facts, name)
        look: dict[str, Any] = {"s": 70, "edgecolors": INK, "linewidths": 1.0, "zorder": 4, "clip_on": False}
        axes.scatter(np.asarray(sizes), np.asarray(times), c=STYLES[name].colour, gid=f"measured {name}", **look)


def _label_axes(axes: Axes) -> None:
    mark_ticks(axes.xaxis, LogLocator(10), lambda _: "")
    mark_ticks(axes.yaxis, LogLocator(10, numticks=12), format_s)
    axes.grid(color=GRID, linewidth=0.6, zorder=0)
    axes.set_ylabel("time of one all-reduce", fontsize=TEXT_PT, color=INK)


def _draw_band(figure: Figure, facts: Race) -> None:
    """Draw the band of winners on the same axis of sizes, each with its name where there is room, else its letter."""
    top = figure.get_size_inches()[1] - BOTTOM_IN - BAND_IN
    axes = frame(figure, left=LEFT_IN, right=RIGHT_IN, top=top, bottom=BOTTOM_IN)
    axes.set_xscale("log")
    axes.set_xlim(SMALLEST_BYTES, LARGEST_BYTES)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    width_px = axes_pixels(axes)[0]
    decades = math.log10(LARGEST_BYTES / SMALLEST_BYTES)
    for stretch in facts.stretches:
        style = STYLES[stretch.algorithm]
        width = stretch.last_bytes - stretch.first_bytes
        axes.add_patch(Rectangle((stretch.first_bytes, 0), width, 1, facecolor=style.colour, edgecolor="white"))
        room = math.log10(stretch.last_bytes / stretch.first_bytes) / decades * width_px * 72 / DPI
        label = next((t for t in (f"{style.words} wins", style.words, style.letter) if _wide(t) < room), "")
        middle = math.sqrt(stretch.first_bytes * stretch.last_bytes)
        look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": text_colour(style.colour)}
        axes.text(middle, 0.46, label, fontsize=TEXT_PT, weight="bold", **look)
    mark_ticks(axes.xaxis, [10.0**power for power in range(3, 10)], format_bytes)
    name_axes(axes, "size of the tensor that every rank holds")


def _wide(text: str) -> float:
    return len(text) * CHARACTER_WIDTH * TEXT_PT * 1.08
