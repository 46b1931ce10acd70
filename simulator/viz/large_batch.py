"""More ranks and larger batches: how much faster a step is, and what the larger batch does to what is learned."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from simulator.step.simulate import Step
from simulator.units import percent
from simulator.viz.drawing import plot
from simulator.viz.drawing.pen import Picture
from simulator.viz.drawing.theme import FAINT, SMALL_PT, line_look

Results = Mapping[str, Mapping[int, Sequence[float]]]
StepOf = Callable[[int], Step]
Claim = tuple[int, float, float]
NUM_RANKS = (1, 2, 4, 8, 16, 32, 64)
CLAIM = "#882255"
NAME_CHARACTERS = 26


def draw_batch_sizes(results: Results, *, subtitle: str = "") -> Picture:
    """Draw accuracy against the batch: each line's mean, and a bar from its worst to its best run.

    Args:
        results: accuracies of the runs (of several seeds) by batch, by the line's name.
        subtitle: what was trained.

    Raises:
        ValueError: there is no line, batch or run, or an accuracy outside 0 to 1.
    """
    every = [runs for by_batch in results.values() for runs in by_batch.values()]
    if not every or not all(results.values()) or not all(runs and 0 <= min(runs) <= max(runs) <= 1 for runs in every):
        raise ValueError(f"accuracies are {results}; pass shares from 0 to 1, at least one for each batch of each line")
    lines = {
        name: [(batch, float(np.mean(runs)), min(runs), max(runs)) for batch, runs in sorted(line.items())]
        for name, line in results.items()
    }
    figure = plot.new_figure(5.6)
    axes = plot.frame(figure, left=0.95, right=3.4, top=1.35, bottom=0.85)
    batches = sorted({batch for line in lines.values() for batch, *_ in line})
    for index, line in enumerate(lines.values()):
        shift = 1.0 + 0.03 * (index - (len(lines) - 1) / 2)  # bars of one batch stand side by side
        x, means, lows, highs = zip(*((batch * shift, *rest) for batch, *rest in line), strict=True)
        look = line_look(index) | {"clip_on": False, "zorder": 4}
        axes.plot(x, means, markersize=7.5, linewidth=2.2, **look)
        del look["marker"]
        axes.vlines(x, lows, highs, linewidth=1.6, **look)
    plot.count_axis(axes, batches, "samples in a batch (the number of epochs stays)")
    axes.set_xlim(batches[0] / 1.15, batches[-1] * 1.15)
    lowest = min(low for line in lines.values() for _, _, low, _ in line)
    axes.set_ylim(max(0.0, lowest - 0.05 * (1.0 - lowest)), 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    plot.put_heading(axes, "test accuracy: mean, worst and best run")
    last = [line[-1][1] for line in lines.values()]
    names = [f"{percent(end, 1)}  {name}" for end, name in zip(last, lines, strict=True)]
    plot.name_line_ends(axes, last, names, [line_look(index)["color"] for index in range(len(lines))])
    ends = {name: line[-1][1] for name, line in lines.items() if line[-1][0] == batches[-1]}
    best, worst = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
    takeaway = f"With {batches[-1]:,} samples per batch {best} is left with {percent(ends[best], 1)}, "
    takeaway += f"{worst} with {percent(ends[worst], 1)}"
    if best == worst:
        takeaway = f"{best}: {ends[best]:.1%} with {batches[-1]:,} samples per batch"
    plot.put_title(figure, takeaway, subtitle)
    said = [
        f"{name}: {', '.join(f'{batch:,}: {mean:.1%} ({low:.1%} to {high:.1%})' for batch, mean, low, high in line)}."
        for name, line in lines.items()
    ]
    return Picture(figure, "\n".join([f"{takeaway}.", *said]))


class Scaling(NamedTuple):
    """The speed-up of one line: samples per second over those of one rank, by the number of ranks.

    `exposed` is the share of the step on most ranks that waits for communication.
    """

    name: str
    speed_up: dict[int, float]
    exposed: float

    @property
    def efficiency(self) -> list[float]:
        """Speed-up over the number of ranks."""
        return [speed / count for count, speed in self.speed_up.items()]


def draw_scaling(step_of_n: Mapping[str, StepOf], *, claims: Mapping[str, Claim]) -> Picture:
    """Draw the speed-up against the number of ranks, with the ideal, and the efficiency, with claims as bars.

    Args:
        step_of_n: the simulated step on n ranks, by the line's name.
        claims: claims by their words, each (number of ranks, lowest speed-up, highest speed-up).
    """
    lines = []
    for name, step_of in step_of_n.items():
        steps = {count: step_of(count) for count in NUM_RANKS}
        speed_up = {count: step.samples_per_s / steps[1].samples_per_s for count, step in steps.items()}
        last_step = steps[NUM_RANKS[-1]]
        lines.append(Scaling(name, speed_up, last_step.exposed_communication_s / last_step.duration_s))
    figure = plot.new_figure(5.9)
    left = plot.frame(figure, left=0.95, right=7.55, top=1.45, bottom=0.8)
    right = plot.frame(figure, left=6.55, right=2.75, top=1.45, bottom=0.8)
    ends = (NUM_RANKS[0], NUM_RANKS[-1])
    for axes, ideal in ((left, ends), (right, (1, 1))):
        axes.plot(ends, ideal, color=FAINT, linewidth=1.6, linestyle=(0, (5, 4)), zorder=2)
    left.text(0.98, 0.985, "ideal", transform=left.transAxes, ha="right", va="bottom", color=FAINT, size=SMALL_PT)
    for index, line in enumerate(lines):
        look = line_look(index)
        look |= {"linewidth": 2.4, "markersize": 7.5, "markeredgecolor": "white", "zorder": 4, "clip_on": False}
        left.plot(NUM_RANKS, list(line.speed_up.values()), gid=f"speed-up {line.name}", **look)
        right.plot(NUM_RANKS, line.efficiency, gid=f"efficiency {line.name}", **look)
    _draw_claims(left, right, claims)
    _label(left, right, lines, claims)
    last = [line.efficiency[-1] for line in lines]
    names = [f"{percent(end)}  {line.name}" for end, line in zip(last, lines, strict=True)]
    wrapped = [textwrap.fill(name, NAME_CHARACTERS) for name in names]
    plot.name_line_ends(right, last, wrapped, [line_look(index)["color"] for index in range(len(lines))])
    title, *said = _say(lines)
    plot.put_title(figure, title, "Speed-up over one rank; every rank has the same batch, whatever their number.")
    for words, (count, low, high) in claims.items():
        for name, step_of in step_of_n.items():
            speed = step_of(count).samples_per_s / step_of(1).samples_per_s
            verdict = "holds" if low - 0.05 <= speed <= high + 0.05 else "is too low" if speed > high else "is too high"
            said.append(f"'{words}' on {name}: {verdict}: {speed:.2f}x.")
    return Picture(figure, "\n".join([f"{title}.", *said]))


def _say(lines: Sequence[Scaling]) -> Iterator[str]:
    """Say how much faster the most ranks are, each line's speed-up, and how efficient the most ranks are."""
    most, speeds = NUM_RANKS[-1], [line.speed_up[NUM_RANKS[-1]] for line in lines]
    yield f"{most} ranks are {min(speeds):.3g} to {max(speeds):.3g} times as fast as one"
    for line in lines:
        points = ", ".join(f"{count}: {speed:.3g}x" for count, speed in line.speed_up.items())
        last = f"{percent(line.efficiency[-1])} efficient at {most}, where {percent(line.exposed)} of the step"
        yield f"{line.name}: speed-up {points}; {last} waits for communication."


def _draw_claims(left: Axes, right: Axes, claims: Mapping[str, Claim]) -> None:
    look: dict[str, Any] = {"solid_capstyle": "butt", "zorder": 3, "alpha": 0.35, "linewidth": 13}
    words: dict[str, Any] = {"fontsize": SMALL_PT, "weight": "bold", "ha": "center", "va": "top"}
    for number, (count, low, high) in enumerate(claims.values()):
        least = 0.035 * count if high - low < 0.07 * count else 0.0
        for axes, share in ((left, 1.0), (right, 1.0 / count)):
            ends = ((low - least) * share, (high + least) * share)
            axes.plot([count, count], ends, color=CLAIM, **look)
            axes.text(count, ends[0], chr(97 + number), color=CLAIM, **words)


def _label(left: Axes, right: Axes, lines: Sequence[Scaling], claims: Mapping[str, Claim]) -> None:
    counts = sorted({*NUM_RANKS, *(count for count, _, _ in claims.values())})
    for axes, words in ((left, "speed-up"), (right, "efficiency: speed-up / ranks")):
        plot.count_axis(axes, NUM_RANKS, "ranks")
        axes.set_xlim(counts[0] / 1.12, counts[-1] * 1.12)
        plot.put_heading(axes, words)
    left.set_yscale("log", base=2)
    slowest = min(min(line.speed_up.values()) for line in lines)
    left.set_ylim(min(1.0, slowest) / 1.25, counts[-1] * 1.25)
    powers = range(min(0, int(np.floor(np.log2(slowest)))), 1 + int(np.log2(counts[-1])))
    plot.mark_ticks(left.yaxis, [2.0**power for power in powers], lambda value: f"{value:.2g}x")
    right.set_ylim(0.0 if min(min(line.efficiency) for line in lines) < 0.55 else 0.5, 1.04)
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    for number, claim in enumerate(claims):
        text, y = f"{chr(97 + number)}  claim: {claim}", 0.97 - 0.075 * number
        left.text(0.03, y, text, transform=left.transAxes, fontsize=SMALL_PT, color=CLAIM, va="top")
