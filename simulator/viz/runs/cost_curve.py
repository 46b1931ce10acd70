"""Draw what a run takes on each number of devices: its days and its price, which do not have their minimum together."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from simulator.runs.money import Bill, Curve
from simulator.units import counted, format_span
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import count_axis, frame, mark_ticks, new_figure, put_heading, put_title
from simulator.viz.drawing.style import INK, LINE_COLOURS, SMALL_PT, line_look, text_on_white

HEIGHT_IN, TOP_IN, BOTTOM_IN = 5.6, 1.45, 0.85
DAYS, PRICE = LINE_COLOURS[0], LINE_COLOURS[1]
NAMES = ("shortest", "cheapest", "sweet spot")


def draw_cost_curve(costs: Curve) -> Picture:
    """Draw days and price against the number of devices, with the three that stand out.

    Args:
        costs: what `curve` returned.
    """
    bills = sorted(costs.bills, key=lambda each: each.num_devices)
    figure = new_figure(HEIGHT_IN)
    left = frame(figure, left=1.05, right=6.9, top=TOP_IN, bottom=BOTTOM_IN)
    right = frame(figure, left=7.3, right=0.6, top=TOP_IN, bottom=BOTTOM_IN)
    _draw_line(left, bills, [each.days for each in bills], DAYS, "days")
    _draw_line(right, bills, [each.price for each in bills], PRICE, price_unit(costs))
    _mark(left, costs, is_price=False)
    _mark(right, costs, is_price=True)
    put_heading(left, "days")
    put_heading(right, price_unit(costs))
    put_title(figure, _takeaway(costs), _setting(costs))
    return Picture(figure, _say(costs))


def _say(costs: Curve) -> str:
    """Say the days and the price on each number of devices in a line."""
    lines = [f"{_takeaway(costs)}. {_setting(costs)}"]
    for each in sorted(costs.bills, key=lambda bill: bill.num_devices):
        names = [name for name, own in zip(NAMES, _three(costs), strict=True) if own is each]
        mark = f": {' and '.join(names)}" if names else ""
        where = f" of {each.step.cluster.name}" if len({one.step.cluster.name for one in costs.bills}) > 1 else ""
        lines.append(
            f"{counted(each.num_devices, 'device')}{where}: {format_span(86_400 * each.days)}, {_price(each)}{mark}."
        )
    return "\n".join(lines)


def price_unit(costs: Curve) -> str:
    """Return what a price is counted in."""
    return "device-hours" if costs.cheapest.dollars is None else "dollars"


def _three(costs: Curve) -> tuple[Bill, Bill, Bill]:
    return costs.shortest, costs.cheapest, costs.sweet


def _price(each: Bill) -> str:
    return f"{each.price:,.0f} {'device-hours' if each.dollars is None else 'dollars'}"


def _draw_line(axes: Axes, bills: list[Bill], values: list[float], colour: str, gid: str) -> None:
    counts = sorted({each.num_devices for each in bills})
    count_axis(axes, counts[:: -(-len(counts) // 8)], "devices")
    axes.set_yscale("log")
    clusters = list(dict.fromkeys(each.step.cluster.name for each in bills))
    for place, cluster in enumerate(clusters):
        own = [
            (each.num_devices, y) for each, y in zip(bills, values, strict=True) if each.step.cluster.name == cluster
        ]
        look: dict[str, Any] = {"marker": "o", "color": colour} if len(clusters) == 1 else line_look(place)
        look |= {"markersize": 7.5, "markeredgecolor": "white", "linewidth": 2.4, "zorder": 4, "label": cluster}
        axes.plot(*zip(*own, strict=True), gid=gid if len(clusters) == 1 else f"{gid} {cluster}", **look)
    if len(clusters) > 1:
        axes.legend(frameon=False, fontsize=SMALL_PT, loc="upper right" if gid == "days" else "upper left")
    low, high = min(values), max(values)
    axes.set_ylim(low / 1.6, high * 1.6)
    room = max(1.3, (counts[-1] / counts[0]) ** 0.2) if gid == "days" else 1.3  # names stand right of their points
    axes.set_xlim(counts[0] / 1.3, counts[-1] * room)
    ticks = [low, (low * high) ** 0.5, high] if high > 1.25 * low else [low, high] if high > 1.05 * low else [low]
    mark_ticks(axes.yaxis, ticks, _short)


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g} million"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _mark(axes: Axes, costs: Curve, *, is_price: bool) -> None:
    """Ring the bills that stand out, each with its names over it."""
    names: dict[int, list[str]] = {}
    for name, each in zip(NAMES, _three(costs), strict=True):
        names.setdefault(id(each), []).append(name)
    for name, each in zip(NAMES, _three(costs), strict=True):
        own = names.pop(id(each), None)
        if own is None:
            continue
        ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgewidth": 2.2}
        value = each.price if is_price else each.days
        axes.plot(each.num_devices, value, markeredgecolor=INK, zorder=5, gid=name, linestyle="none", **ring)
        words: dict[str, Any] = {"fontsize": SMALL_PT, "weight": "bold", "color": text_on_white(INK)}
        left, right = axes.get_xlim()
        rises = is_price and each.num_devices**2 > left * right  # then the line is on the right of its point
        away = -9 if rises else 9
        place: dict[str, Any] = {"xytext": (away, 8), "textcoords": "offset points", "va": "bottom"}
        place["ha"] = "right" if rises else "left"
        axes.annotate("\n".join(own), (each.num_devices, value), zorder=6, **place, **words)


def _takeaway(costs: Curve) -> str:
    short, cheap, sweet = (each.num_devices for each in _three(costs))
    if short == cheap:
        return f"{counted(short, 'device')} are both fastest and cheapest"
    return f"Fastest on {short:,} devices, cheapest on {cheap:,}, sweet spot {sweet:,}"


def _setting(costs: Curve) -> str:
    run, step = costs.shortest.run, costs.shortest.step
    clusters = {each.step.cluster.name for each in costs.bills}
    where = next(iter(clusters)) if len(clusters) == 1 else f"{len(clusters)} clusters"
    price = "" if run.price is None else f", {run.price:g} dollars for a device and an hour"
    fails = ", with failures" if run.failures else ", without failures"
    return f"{step.workload.name}, {run.num_tokens:.3g} tokens on {where}{price}{fails}."
