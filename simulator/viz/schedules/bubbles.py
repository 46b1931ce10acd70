"""Draw the bubble against micro-batches (when do more stop helping?), and against the memory that it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from simulator.units import counted, percent
from simulator.viz.drawing.plot import count_axis, frame, name_axes, new_figure, put_title
from simulator.viz.drawing.style import FAINT, INK, SMALL_PT, TEXT_PT
from simulator.viz.schedules.compare import count_of
from simulator.viz.schedules.run import ScheduleRun

# Okabe and Ito's colours; a marker and a dash of its own each, to be told apart without colour.
LOOKS = (
    ("#1A1A1A", "o", "-"),
    ("#E69F00", "s", "-"),
    ("#0072B2", "^", "--"),
    ("#009E73", "D", "-."),
    ("#CC79A7", "v", ":"),
    ("#D55E00", "P", (0, (5, 1, 1, 1))),
    ("#56B4E9", "X", (0, (1, 1))),
    ("#44546A", "*", "-"),
)
GOOD = 0.1  # a bubble that few would work hard to make smaller
POINT = "#B04A00"
HEIGHT_IN, TOP_IN, BOTTOM_IN = 5.6, 1.2, 0.95


def draw_bubbles(sweep: Mapping[str, Sequence[ScheduleRun]]) -> Figure:
    """Draw the idle share against the number of micro-batches, one line per schedule; equal lines share one.

    Idle is a share of the whole step, which ends for all ranks when the last one ends: `ScheduleRun.bubble_fraction`.

    Args:
        sweep: what `sweep_microbatches` returned.

    Raises:
        ValueError: the sweep is empty.
    """
    lines = _lines(sweep)
    figure = new_figure(HEIGHT_IN)
    axes = frame(figure, left=0.95, right=3.4, top=TOP_IN, bottom=BOTTOM_IN)
    counts = sorted({count for points in lines.values() for count, _ in points})
    for (name, points), (colour, marker, dash) in zip(lines.items(), cycle(LOOKS), strict=False):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, marker=marker, linestyle=dash, linewidth=2.2, markersize=8, label=name)
    axes.axhline(GOOD, color=FAINT, linewidth=1, linestyle=(0, (2, 3)))
    axes.text(counts[0], GOOD, f" {percent(GOOD)} idle", va="bottom", color=FAINT, fontsize=SMALL_PT)
    axes.set_ylim(0, max(max(y for _, y in points) for points in lines.values()) * 1.06 + 0.01)
    count_axis(axes, counts, "micro-batches of a step", grid=False)
    _label_idle(axes, "of the step")
    look: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "frameon": False}
    axes.legend(fontsize=TEXT_PT - 1, handlelength=3.4, **look)
    put_title(figure, _microbatches_needed(lines), _gain_of_last_doubling(lines))
    return figure


def describe_bubbles(sweep: Mapping[str, Sequence[ScheduleRun]]) -> str:
    """Say in words what `draw_bubbles` shows."""
    lines = _lines(sweep)
    told = [f"{_microbatches_needed(lines)}. {_gain_of_last_doubling(lines)}"]
    for name, points in lines.items():
        told.append(f"{name}: " + ", ".join(f"{percent(idle, 1)} with {count:,}" for count, idle in points) + ".")
    return "\n".join(told)


def draw_memory_against_bubble(schedules: Mapping[str, ScheduleRun], automatic: Sequence[ScheduleRun] = ()) -> Figure:
    """Draw one point per schedule: what its fullest rank holds, against its bubble; and the automatic schedules' curve.

    A step may follow before the last rank has ended: the bubble is `ScheduleRun.idle_of_span`.

    Args:
        schedules: by name, and
        automatic: within rising memory limits: what `sweep_memory` returned.

    Raises:
        ValueError: there is no schedule.
    """
    points = _points(schedules)
    figure = new_figure(HEIGHT_IN)
    axes = frame(figure, left=0.95, right=5.3, top=TOP_IN, bottom=BOTTOM_IN)
    curve = [(one.peak, one.idle_of_span) for one in automatic]
    if curve:
        x, y = zip(*curve, strict=True)
        look: dict[str, Any] = {"color": "#0072B2", "linewidth": 2, "marker": ".", "markersize": 9, "zorder": 2}
        axes.plot(x, y, gid="automatic", label="automatic, within rising memory limits", **look)
        axes.legend(loc="upper right", frameon=False, fontsize=TEXT_PT - 1)
    places = [*points, *curve]
    axes.set_xlim(0, max(peak for peak, _ in places) * 1.06)
    top = max(idle for _, idle in places) * 1.14 + 0.01
    axes.set_ylim(-0.04 * top, top)
    _name_points(axes, points)
    name_axes(axes, "micro-batches of activations that a rank holds at its peak")
    _label_idle(axes, "of a rank's first to last action")
    put_title(figure, _trade(schedules), _sizes(schedules))
    return figure


def describe_memory_against_bubble(schedules: Mapping[str, ScheduleRun], automatic: Sequence[ScheduleRun] = ()) -> str:
    """Say in words what `draw_memory_against_bubble` shows."""
    told = [f"{_trade(schedules)}. {_sizes(schedules)}"]
    for (peak, idle), names in _points(schedules).items():
        told.append(f"{' and '.join(names)}: {count_of(peak)}, {percent(idle, 1)} idle.")
    for one in automatic:
        told.append(f"Automatic: {count_of(one.peak)}, {percent(one.idle_of_span, 1)} idle.")
    return "\n".join(told)


def _lines(sweep: Mapping[str, Sequence[ScheduleRun]]) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return the lines by their title; schedules whose points are all equal share one."""
    lines: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for runs in sweep.values():
        points = tuple((one.schedule.num_microbatches, round(one.bubble_fraction, 6)) for one in runs)
        lines.setdefault(points, []).append(runs[0].name)
    if not lines:
        raise ValueError("the sweep is empty; pass what sweep_microbatches returns")
    return {" and ".join(names): points for points, names in lines.items()}


def _microbatches_needed(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Say which schedules fall under GOOD, and from how many micro-batches on."""
    first = {name: next((count for count, idle in points if idle <= GOOD), None) for name, points in lines.items()}
    good = sorted((count, name) for name, count in first.items() if count is not None)
    if not good:
        return f"No schedule here gets below {percent(GOOD)} idle"
    count, name = good[0]
    title = f"{_needs(name)} {counted(count, 'micro-batch')} to be at most {percent(GOOD)} idle"
    return f"{title}; {_needs(good[-1][1])} {good[-1][0]:,}" if len(good) > 1 and good[-1][0] > count else title


def _needs(names: str) -> str:
    return f"{names} need{'' if ' and ' in names else 's'}"


def _gain_of_last_doubling(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Say what the last doubling of micro-batches wins."""
    wins = []
    for name, points in lines.items():
        if len(points) > 1:
            (before, had), (after, has) = points[-2:]
            wins.append(f"{name} {100 * (had - has):.1f}")
    return f"From {before:,} to {counted(after, 'micro-batch')} win, in points: {', '.join(wins)}" if wins else ""


def _points(schedules: Mapping[str, ScheduleRun]) -> dict[tuple[float, float], list[str]]:
    """Return the names of the schedules at each place."""
    if not schedules:
        raise ValueError("there is no schedule; pass what sweep_memory returns")
    points: dict[tuple[float, float], list[str]] = {}
    for one in schedules.values():
        points.setdefault((one.peak, round(one.idle_of_span, 6)), []).append(one.name)
    return points


def _name_points(axes: Axes, points: Mapping[tuple[float, float], Sequence[str]]) -> None:
    """Number the points, and say next to the picture what each number stands for, the least idle first."""
    order = sorted(points.items(), key=lambda point: (point[0][1], point[0][0]))
    x, y = zip(*(place for place, _ in order), strict=True)
    axes.plot(x, y, "o", color=POINT, markersize=17, markeredgecolor="white", zorder=4, gid="schedules", clip_on=False)
    middle: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": SMALL_PT - 1, "weight": "bold"}
    beside: dict[str, Any] = {"transform": axes.transAxes, "va": "center", "fontsize": TEXT_PT - 1.5, "color": INK}
    step = min(0.085, 1.0 / len(order))
    for number, ((peak, idle), names) in enumerate(order, start=1):
        axes.text(peak, idle, str(number), color="white", zorder=5, **middle)
        at = 1 - step * (number - 0.5)
        axes.text(1.05, at, f"{number}", ha="right", weight="bold", **beside)
        axes.text(1.065, at, f"{' and '.join(names)}: {peak:.4g} held, {percent(idle, 1)} idle", ha="left", **beside)


def _trade(schedules: Mapping[str, ScheduleRun]) -> str:
    """Say what the least idle schedule holds and what the leanest one leaves idle."""
    best = min(schedules.values(), key=lambda one: (one.idle_of_span, one.peak))
    lean = min(schedules.values(), key=lambda one: (one.peak, one.idle_of_span))
    held = count_of(best.peak).removesuffix(" of activations")
    text = f"{best.name} is {percent(best.idle_of_span, 1)} idle and holds {held}"
    if lean is best:
        return text
    return f"{text}; {lean.name} holds {lean.peak:.4g} and is {percent(lean.idle_of_span, 1)} idle"


def _sizes(schedules: Mapping[str, ScheduleRun]) -> str:
    counts = sorted({one.schedule.num_microbatches for one in schedules.values()})
    return f"{' or '.join([*map(str, counts[:-1]), counted(counts[-1], 'micro-batch')])} per step"


def _label_idle(axes: Axes, which: str) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel(f"idle share {which}", fontsize=TEXT_PT, color=INK)
