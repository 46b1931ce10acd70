"""Draw what a run takes: days and price, where its time goes, and which strategy is fastest where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from simulator.advisor.reasons import STRATEGIES, MapCell, words_of
from simulator.runs.failures import Failures, Goodput, best_s, daly_s, goodput, goodput_by_trial, young_s
from simulator.runs.money import Bill, Curve
from simulator.units import capitalised, counted, format_s, format_span, in_words, percent
from simulator.viz.drawing import plot, theme
from simulator.viz.drawing.pen import LEGEND_LINE_IN, Picture, finished, legend_lines, sheet

NAMES = ("shortest", "cheapest", "sweet spot")


def draw_cost_curve(costs: Curve) -> Picture:
    """Draw days and price against the number of devices, with the three that stand out.

    Args:
        costs: what `curve` returned.
    """
    bills = sorted(costs.bills, key=lambda each: each.num_devices)
    figure = plot.new_figure(5.6)
    unit = "device-hours" if costs.cheapest.dollars is None else "dollars"
    for which, (left, right, heading) in enumerate(((1.05, 6.9, "days"), (7.3, 0.6, unit))):
        axes = plot.frame(figure, left=left, right=right, top=1.45, bottom=0.85)
        values = [each.price if which else each.days for each in bills]
        _draw_line(axes, bills, values, theme.LINE_COLOURS[which], heading)
        _mark(axes, costs, is_price=bool(which))
        plot.put_heading(axes, heading)
    short, cheap, sweet = (each.num_devices for each in costs[1:])
    title = f"Fastest on {short:,} devices, cheapest on {cheap:,}, sweet spot {sweet:,}"
    if short == cheap:
        title = f"{counted(short, 'device')} are both fastest and cheapest"
    run, workload = costs.shortest.run, costs.shortest.step.workload.name
    clusters = {each.step.cluster.name for each in bills}
    where = next(iter(clusters)) if len(clusters) == 1 else f"{len(clusters)} clusters"
    price = "" if run.price is None else f", {run.price:g} dollars for a device and an hour"
    fails = ", with failures" if run.failures else ", without failures"
    note = f"{workload}, {in_words(run.num_tokens)} tokens on {where}{price}{fails}."
    lines = []
    for each in bills:
        names = [name for name, own in zip(NAMES, costs[1:], strict=True) if own is each]
        mark = f": {' and '.join(names)}" if names else ""
        of = f" of {each.step.cluster.name}" if len(clusters) > 1 else ""
        paid = f"{each.price:,.0f} {'device-hours' if each.dollars is None else 'dollars'}"
        days = format_span(86_400 * each.days)
        lines.append(f"{counted(each.num_devices, 'device')}{of}: {days}, {paid}{mark}.")
    return finished(figure, title, note, *lines)


def _draw_line(axes: Axes, bills: list[Bill], values: list[float], colour: str, gid: str) -> None:
    counts = sorted({each.num_devices for each in bills})
    plot.count_axis(axes, counts[:: -(-len(counts) // 8)], "devices")
    clusters = list(dict.fromkeys(each.step.cluster.name for each in bills))
    for place, cluster in enumerate(clusters):
        own = [
            (each.num_devices, y) for each, y in zip(bills, values, strict=True) if each.step.cluster.name == cluster
        ]
        look: dict[str, Any] = {"marker": "o", "color": colour} if len(clusters) == 1 else theme.line_look(place)
        look |= {"markersize": 7.5, "markeredgecolor": "white", "linewidth": 2.4, "zorder": 4, "label": cluster}
        axes.plot(*zip(*own, strict=True), gid=gid if len(clusters) == 1 else f"{gid} {cluster}", **look)
    if len(clusters) > 1:
        axes.legend(frameon=False, fontsize=theme.SMALL_PT, loc="upper right" if gid == "days" else "upper left")
    low, high = min(values), max(values)
    room = max(1.3, (counts[-1] / counts[0]) ** 0.2) if gid == "days" else 1.3  # names stand right of their points
    axes.set_xlim(counts[0] / 1.3, counts[-1] * room)
    is_flat = high < 1.5 * low  # then from 0: what hardly differs looks like it
    axes.set(yscale="linear" if is_flat else "log", ylim=(0 if is_flat else low / 1.6, high * 1.6))
    ticks = [*MaxNLocator(4).tick_values(0, high)] if is_flat else [low, (low * high) ** 0.5, high]
    plot.mark_ticks(axes.yaxis, ticks, lambda value: in_words(value) if value >= 100 else f"{value:.3g}")


def _mark(axes: Axes, costs: Curve, *, is_price: bool) -> None:
    """Ring the bills that stand out, each with its names over it."""
    names: dict[int, list[str]] = {}
    bills = {id(each): each for each in costs[1:]}
    for name, each in zip(NAMES, costs[1:], strict=True):
        names.setdefault(id(each), []).append(name)
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgewidth": 2.2}
    words: dict[str, Any] = {"fontsize": theme.SMALL_PT, "weight": "bold", "color": theme.text_on_white(theme.INK)}
    words |= {"textcoords": "offset points", "va": "bottom", "zorder": 6}
    left, right = axes.get_xlim()
    for key, own in names.items():
        count, value = bills[key].num_devices, bills[key].price if is_price else bills[key].days
        axes.plot(count, value, markeredgecolor=theme.INK, zorder=5, gid=own[0], linestyle="none", **ring)
        rises = is_price and count**2 > left * right  # then the line is on the right of its point
        side: dict[str, Any] = {"xytext": (-9 if rises else 9, 8), "ha": "right" if rises else "left"}
        axes.annotate("\n".join(own), (count, value), **words, **side)


PARTS = ("useful", "saving", "lost", "restarting")
COLOURS = ("#56B4E9", "#009E73", "#D55E00", "#882255")
AROUND = (0.05, 20.0)  # of the best interval
POINTS, TRIALS = 60, 13
Floats = NDArray[np.float64]


def draw_goodput(failures: Failures, num_devices: int, save_s: float) -> Picture:
    """Draw the goodput against the interval between checkpoints, drawn and computed, and the parts against devices.

    Args:
        failures: what interrupts the run.
        num_devices: of the run.
        save_s: training waits so long for a checkpoint.

    Raises:
        ValueError: nothing fails, or failures leave almost no time.
    """
    good = failures.goodput(num_devices, save_s)
    if math.isinf(good.mtbf_s):
        raise ValueError('nothing fails in this run; pass failures, such as Failures("llama-3")')
    figure = plot.new_figure(5.6)
    left = plot.frame(figure, left=0.95, right=7.0, top=1.45, bottom=0.85)
    right = plot.frame(figure, left=7.0, right=1.75, top=1.45, bottom=0.85)
    _draw_intervals(left, good, failures.restart_s)
    _draw_devices(right, failures, num_devices, save_s)
    both = (good.save_s, good.mtbf_s)
    parts = ", ".join(f"{name} {percent(getattr(good, name), 1)}" for name in PARTS if getattr(good, name) > 0)
    best, young, daly = (format_span(rule(*both)) for rule in (best_s, young_s, daly_s))
    mtbf, interval = format_span(good.mtbf_s), format_span(good.interval_s)
    save, restart = format_span(save_s), format_span(failures.restart_s)
    lines = [f"Parts of the time: {parts}.", f"Best interval: {best}; by Young {young}, by Daly {daly}."]
    for count, each in _by_devices(failures, num_devices, save_s):
        lines.append(f"{counted(count, 'device')}: {percent(each.useful, 1)} useful.")
    title = f"{percent(good.useful, 1)} of the time counts: a failure every {mtbf}, a save every {interval}"
    note = f"{counted(num_devices, 'device')}; {save} to save, {restart} to restart; {failures.published.source}."
    return finished(figure, title, note, *lines)


def _useful(good: Goodput, restart_s: float, intervals: Floats) -> Floats:
    found = []
    for interval in intervals.tolist():
        try:
            found.append(goodput(good.save_s, good.mtbf_s, restart_s=restart_s, interval_s=interval).useful)
        except ValueError:
            found.append(0.0)
    return np.array(found)


def _draw_intervals(axes: Axes, good: Goodput, restart_s: float) -> None:
    best = best_s(good.save_s, good.mtbf_s)
    low, high = (min(AROUND[0] * best, good.interval_s), max(AROUND[1] * best, good.interval_s))
    intervals = np.geomspace(low, high, POINTS)
    useful = _useful(good, restart_s, intervals)
    tried = np.geomspace(low, high, TRIALS)
    drawn = goodput_by_trial(good.save_s, good.mtbf_s, tried, restart_s=restart_s)
    axes.set_xscale("log")
    axes.plot(intervals, useful, color=theme.LINE_COLOURS[0], linewidth=2.4, gid="computed", label="computed", zorder=3)
    dots: dict[str, Any] = {"marker": "o", "markersize": 7, "linestyle": "none", "color": theme.LINE_COLOURS[1]}
    axes.plot(tried, drawn, gid="drawn", label="failures drawn", zorder=4, **dots)
    axes.axvline(good.interval_s, color=theme.INK, linewidth=1.4, linestyle=(0, (4, 3)), gid="chosen")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(low, high)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    plot.mark_ticks(axes.xaxis, [good.interval_s / 10, good.interval_s, good.interval_s * 10], format_span)
    plot.name_axes(axes, "training between checkpoints")
    axes.grid(color=plot.GRID, linewidth=0.6, zorder=0)
    axes.legend(loc="lower left", frameon=False, fontsize=theme.SMALL_PT)
    plot.put_heading(axes, "goodput")


def _by_devices(failures: Failures, num_devices: int, save_s: float) -> list[tuple[int, Goodput]]:
    """Return the goodput of other numbers of devices with the same checkpoints, as far as the run gets on."""
    found = []
    for power in range(-6, 7):
        count = round(num_devices * 2.0**power)
        try:
            found += [(count, failures.goodput(count, save_s))] if count >= 1 else []
        except ValueError:
            break
    return found


def _draw_devices(axes: Axes, failures: Failures, num_devices: int, save_s: float) -> None:
    rows = _by_devices(failures, num_devices, save_s)
    counts = [count for count, _ in rows]
    parts = np.array([[getattr(each, name) for each in (good for _, good in rows)] for name in PARTS])
    tops = parts.cumsum(axis=0)
    plot.count_axis(axes, counts[:: -(-len(counts) // 5)], "devices", grid=False)
    shown = []
    for name, colour, part, top in zip(PARTS, COLOURS, parts, tops, strict=True):
        axes.fill_between(counts, top - part, top, color=colour, gid=name, linewidth=0, zorder=3)
        if part.max() > 0:
            shown.append((float(top[-1] - part[-1] / 2), name, theme.text_on_white(colour)))
    axes.axvline(num_devices, color=theme.INK, linewidth=1.4, linestyle=(0, (4, 3)), zorder=5)
    axes.set_xlim(counts[0], max(counts[-1], counts[0] * 2))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    ends, names, colours = zip(*shown, strict=True)
    plot.name_line_ends(axes, ends, names, colours)
    plot.put_heading(axes, "where the time goes, with these checkpoints")


STYLES = theme.styles("strategies")
NOTHING = theme.LegendBox(theme.IDLE, theme.FAINT, "", "does not fit, or does not divide")
TOP_IN, ROW_IN, LEFT_IN, RIGHT_IN, AXIS_IN = 1.05, 0.66, 1.75, 0.3, 0.75
assert tuple(STYLES) == STRATEGIES


def draw_strategy_map(cells: Sequence[MapCell]) -> Picture:
    """Draw a field for each model and number of devices: the strategy's letter, its degrees and its MFU.

    Args:
        cells: what `strategy_map` returned.
    """
    models, counts = list(dict.fromkeys(cell.model for cell in cells)), sorted({cell.num_devices for cell in cells})
    used = [name for name in STRATEGIES if any(cell.strategy == name for cell in cells)]
    boxes = [theme.LegendBox(STYLES[name].colour, "white", STYLES[name].letter, STYLES[name].words) for name in used]
    boxes += [NOTHING] if any(not cell.strategy for cell in cells) else []
    low = AXIS_IN + LEGEND_LINE_IN * len(legend_lines(boxes))
    _, pen = sheet(TOP_IN + ROW_IN * len(models) + low)
    wide = (theme.WIDTH_IN - LEFT_IN - RIGHT_IN) / len(counts)
    for row, model in enumerate(models):
        pen.words((LEFT_IN - 0.12, low + ROW_IN * (row + 0.5)), model, size=theme.SMALL_PT, side="right")
    for column, count in enumerate(counts):
        pen.words((LEFT_IN + wide * (column + 0.5), low - 0.18), f"{count:,}", size=theme.SMALL_PT)
    pen.words((LEFT_IN + wide * len(counts) / 2, low - 0.45), "GPUs", size=theme.TEXT_PT)
    for cell in cells:
        x, y = LEFT_IN + wide * counts.index(cell.num_devices), low + ROW_IN * models.index(cell.model)
        fill = STYLES[cell.strategy].colour if cell.strategy else theme.IDLE
        pen.box((x, y), wide, ROW_IN, fill, line=2.0)
        if cell.choice is not None:
            ink, plan = theme.text_colour(fill), cell.choice.plan
            letter = f"{STYLES[cell.strategy].letter}  {percent(cell.choice.step.mfu)}"
            degrees = {axis[0]: getattr(plan, axis) for axis in ("data", "tensor", "pipeline")}
            large = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
            pen.words((x + wide / 2, y + 0.43), letter, size=theme.TEXT_PT, bold=True, colour=ink)
            pen.words((x + wide / 2, y + 0.18), large, size=theme.SMALL_PT - 0.5, colour=ink)
    pen.legend(boxes)
    found = [cell.strategy for cell in cells if cell.choice]
    title, note, lines = "No plan fits any of these", "", list[str]()
    if found:
        most = max(STRATEGIES, key=found.count)
        title = f"{capitalised(STYLES[most].words)} is fastest in {found.count(most)} of {len(found)} fields; "
        title += f"{len(set(found))} strategies win somewhere"
    for cell in cells:
        where = f"{cell.model} on {counted(cell.num_devices, 'GPU')}: "
        if cell.choice is None:
            lines.append(f"{where}{NOTHING.words}.")
            continue
        step, words, question = cell.choice.step, STYLES[cell.strategy].words, cell.choice.question
        how = words_of(cell.choice.plan, cell.choice.microbatch)
        lines.append(f"{where}{words} ({how}), {format_s(step.steady_s)} a step, MFU {percent(step.mfu)}.")
        note = f"{question.batch_size} samples per step, {question.cluster.name}, {question.cluster.inter_node.name} "
        note += "between nodes; MFU and degrees of the fastest plan."
    return pen.finish(title, note, *lines)
