"""More ranks and larger batches: how much faster a step is, and what the larger batch does to what is learned."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from simulator.step.simulate import Step
from simulator.units import percent
from simulator.viz.drawing import plot
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.theme import FAINT, SMALL_PT, line_look

Results = Mapping[str, Mapping[int, Sequence[float]]]


Run = tuple[int, float, float, float]  # a batch, and the mean, the worst and the best accuracy of its runs


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
    lines = {name: [_run(batch, runs) for batch, runs in sorted(line.items())] for name, line in results.items()}
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
    takeaway = _best_and_worst(lines)
    plot.put_title(figure, takeaway, subtitle)
    said = [
        f"{name}: {', '.join(f'{batch:,}: {mean:.1%} ({low:.1%} to {high:.1%})' for batch, mean, low, high in line)}."
        for name, line in lines.items()
    ]
    return Picture(figure, "\n".join([f"{takeaway}.", *said]))


def _run(batch: int, runs: Sequence[float]) -> Run:
    return batch, float(np.mean(runs)), min(runs), max(runs)


def _best_and_worst(lines: Mapping[str, Sequence[Run]]) -> str:
    """Return the title: who is best and worst with the largest batch."""
    batch = max(line[-1][0] for line in lines.values())
    ends = {name: line[-1][1] for name, line in lines.items() if line[-1][0] == batch}
    best, worst = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
    if best == worst:
        return f"{best}: {ends[best]:.1%} with {batch:,} samples per batch"
    left, least = percent(ends[best], 1), percent(ends[worst], 1)
    return f"With {batch:,} samples per batch {best} is left with {left}, {worst} with {least}"


StepOf = Callable[[int], Step]
Claim = tuple[int, float, float]
Floats = NDArray[np.float64]

NUM_RANKS = (1, 2, 4, 8, 16, 32, 64)
CLAIM = "#882255"
NAME_CHARACTERS = 26


class Scaling(NamedTuple):
    """The speed-up of one line.

    Attributes:
        name: of the line, or "".
        num_ranks: numbers of ranks, rising.
        speed_up: samples per second over those of one rank.
        exposed: share of each step that waits for communication.
    """

    name: str
    num_ranks: tuple[int, ...]
    speed_up: Floats
    exposed: Floats

    @property
    def efficiency(self) -> Floats:
        """Speed-up over the number of ranks."""
        return np.asarray(self.speed_up / np.array(self.num_ranks))


def draw_scaling(step_of_n: StepOf | Mapping[str, StepOf], *, claims: Mapping[str, Claim] | None = None) -> Picture:
    """Draw the speed-up against the number of ranks, with the ideal, and the efficiency, with claims as bars.

    Args:
        step_of_n: the simulated step on n ranks; a mapping from names to such functions draws several lines.
        claims: claims by their words, each (number of ranks, lowest speed-up, highest speed-up).
    """
    named = dict(step_of_n) if isinstance(step_of_n, Mapping) else {"": step_of_n}
    lines, claims = tuple(_line(name, step_of, NUM_RANKS) for name, step_of in named.items()), claims or {}
    figure = plot.new_figure(5.9)
    left = plot.frame(figure, left=0.95, right=7.55, top=1.45, bottom=0.8)
    right = plot.frame(figure, left=6.55, right=2.75, top=1.45, bottom=0.8)
    counts = lines[0].num_ranks
    ends = (counts[0], counts[-1])
    left.plot(ends, ends, color=FAINT, linewidth=1.6, linestyle=(0, (5, 4)), zorder=2)
    right.plot(ends, (1, 1), color=FAINT, linewidth=1.6, linestyle=(0, (5, 4)), zorder=2)
    left.text(0.98, 0.985, "ideal", transform=left.transAxes, ha="right", va="bottom", color=FAINT, size=SMALL_PT)
    for index, line in enumerate(lines):
        look = line_look(index)
        look |= {"linewidth": 2.4, "markersize": 7.5, "markeredgecolor": "white", "zorder": 4, "clip_on": False}
        left.plot(counts, line.speed_up, gid=f"speed-up {line.name}", **look)
        right.plot(counts, line.efficiency, gid=f"efficiency {line.name}", **look)
    _draw_claims(left, right, claims)
    _label(left, right, lines, claims)
    last = [float(line.efficiency[-1]) for line in lines]
    names = [f"{percent(end)}  {line.name}".strip() for end, line in zip(last, lines, strict=True)]
    wrapped = [textwrap.fill(name, NAME_CHARACTERS) for name in names]
    plot.name_line_ends(right, last, wrapped, [line_look(index)["color"] for index in range(len(lines))])
    plot.put_title(
        figure,
        _speed_up_of_most_ranks(lines),
        "Speed-up over one rank; every rank has the same batch, whatever their number.",
    )
    return Picture(figure, "\n".join([*_say(lines), *_judge(named, claims)]))


def _say(lines: Sequence[Scaling]) -> Iterator[str]:
    """Say each line's speed-up, and how efficient the most ranks are."""
    yield f"{_speed_up_of_most_ranks(lines)}."
    for line in lines:
        points = ", ".join(
            f"{count}: {speed:.3g}x" for count, speed in zip(line.num_ranks, line.speed_up.tolist(), strict=True)
        )
        name = f"{line.name}: " if line.name else ""
        last = f"{percent(float(line.efficiency[-1]))} efficient at {line.num_ranks[-1]}, where "
        last += f"{percent(float(line.exposed[-1]))} of the step waits for communication"
        yield f"{name}speed-up {points}; {last}."


def _judge(named: Mapping[str, StepOf], claims: Mapping[str, Claim]) -> Iterator[str]:
    """Say for each claim whether it holds, on each line."""
    for words, (count, low, high) in claims.items():
        for name, step_of in named.items():
            speed = float(_line(name, step_of, (count,)).speed_up[0])
            where = f" on {name}" if name else ""
            verdict = "holds" if low - 0.05 <= speed <= high + 0.05 else "is too low" if speed > high else "is too high"
            yield f"'{words}'{where}: {verdict}: {speed:.2f}x."


def _line(name: str, step_of: StepOf, counts: tuple[int, ...]) -> Scaling:
    alone, steps = step_of(1).samples_per_s, [step_of(count) for count in counts]
    exposed = np.array([step.exposed_communication_s / step.duration_s for step in steps])
    return Scaling(name, counts, np.array([step.samples_per_s for step in steps]) / alone, exposed)


def _speed_up_of_most_ranks(lines: Sequence[Scaling]) -> str:
    """Return the title: how much faster the most ranks are."""
    count = lines[0].num_ranks[-1]
    speeds = [float(line.speed_up[-1]) for line in lines]
    if len(lines) == 1:
        efficiency = percent(float(lines[0].efficiency[-1]))
        return f"{count} ranks are {speeds[0]:.3g} times as fast as one: {efficiency} efficient"
    return f"{count} ranks are {min(speeds):.3g} to {max(speeds):.3g} times as fast as one"


def _draw_claims(left: Axes, right: Axes, claims: Mapping[str, Claim]) -> None:
    for number, (count, low, high) in enumerate(claims.values()):
        for axes, share in ((left, 1.0), (right, 1.0 / count)):
            least = 0.035 * count if high - low < 0.07 * count else 0.0
            ends = ((low - least) * share, (high + least) * share)
            look: dict[str, Any] = {"color": CLAIM, "solid_capstyle": "butt", "zorder": 3, "alpha": 0.35}
            axes.plot([count, count], ends, linewidth=13, **look)
            axes.text(
                count, ends[0], chr(97 + number), fontsize=SMALL_PT, color=CLAIM, weight="bold", ha="center", va="top"
            )


def _label(left: Axes, right: Axes, lines: Sequence[Scaling], claims: Mapping[str, Claim]) -> None:
    counts = sorted({*lines[0].num_ranks, *(count for count, _, _ in claims.values())})
    for axes in (left, right):
        plot.count_axis(axes, lines[0].num_ranks, "ranks")
        axes.set_xlim(counts[0] / 1.12, counts[-1] * 1.12)
    left.set_yscale("log", base=2)
    slowest = min(float(line.speed_up.min()) for line in lines)
    left.set_ylim(min(1.0, slowest) / 1.25, counts[-1] * 1.25)
    low = min(0, int(np.floor(np.log2(slowest))))
    powers = range(low, 1 + int(np.log2(counts[-1])))
    plot.mark_ticks(left.yaxis, [2.0**power for power in powers], lambda value: f"{value:.2g}x")
    lowest = min(float(line.efficiency.min()) for line in lines)
    floor = 0.0 if lowest < 0.55 else 0.5
    right.set_ylim(floor, 1.04)
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    for axes, words in ((left, "speed-up"), (right, "efficiency: speed-up / ranks")):
        plot.put_heading(axes, words)
    for number, words in enumerate(claims):
        text = f"{chr(97 + number)}  claim: {words}"
        left.text(0.03, 0.97 - 0.075 * number, text, transform=left.transAxes, fontsize=SMALL_PT, color=CLAIM, va="top")
