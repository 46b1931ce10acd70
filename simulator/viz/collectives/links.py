"""Draw what a message costs: on several links, and measured against the line of one latency and one bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from distlab.plan import Link, Protocol
from distlab.plan.require import require_positive
from simulator.hardware.cost import message_s
from simulator.hardware.presets import link as preset
from simulator.units import format_bytes, format_bytes_per_s, format_s, percent
from simulator.viz.drawing.pen import Picture
from simulator.viz.drawing.plot import GRID, frame, mark_ticks, name_axes, new_figure, put_title
from simulator.viz.drawing.theme import FAINT, INK, SMALL_PT, TEXT_PT, pale, text_on_white

BYTES_COLOUR, LATENCY_COLOUR, LIMIT = "#0072B2", "#CC79A7", "#D55E00"
ROW_IN = 0.62


def draw_link_times(num_bytes: float, links: Sequence[str], *, compute_s: float) -> Picture:
    """Draw one bar per link, fastest first, on a logarithmic axis: the seconds that one message of num_bytes takes.

    A bar is pink where latency is more than half of the time, blue where the bytes are.

    Args:
        num_bytes: size of the message.
        links: names of presets, with measured figures where they were published.
        compute_s: the compute of a step, drawn as an upright line, and compared with.

    Raises:
        ValueError: no links, an unknown preset, or a size or a compute time that is not above zero.
    """
    require_positive("links", num_bytes=num_bytes, compute_s=compute_s, links=len(links))
    rows = sorted(((link, message_s(num_bytes, link)) for link in map(preset, links)), key=lambda row: row[1])
    speeds = {link.name: format_bytes_per_s(_protocol(link, num_bytes).bytes_per_s) for link, _ in rows}
    figure = new_figure(1.95 + ROW_IN * len(rows))
    axes = frame(figure, left=2.0, right=3.1, top=1.05, bottom=0.8)
    times = [seconds for _, seconds in rows]
    low, high = min(times) / 4, max([*times, compute_s]) * 1.3
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    late = [link for link, seconds in rows if _protocol(link, num_bytes).latency_s > seconds / 2]
    for place, (link, seconds) in enumerate(rows):
        colour = LATENCY_COLOUR if link in late else BYTES_COLOUR
        axes.barh(place, seconds - low, left=low, height=0.62, color=pale(colour, 0.75), edgecolor=colour)
        note = f"{format_s(seconds)}, {_share(seconds, compute_s)} the step"
        where: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": TEXT_PT, "color": INK}
        axes.text(1.015, place, note, transform=axes.get_yaxis_transform(), **where)
    axes.axvline(compute_s, color=LIMIT, linewidth=2.2, linestyle=(0, (5, 3)))
    look: dict[str, Any] = {"fontsize": SMALL_PT, "color": text_on_white(LIMIT), "weight": "bold"}
    axes.text(compute_s, -0.5, f"compute of a step: {format_s(compute_s)} ", ha="right", va="bottom", **look)
    axes.set_yticks(range(len(rows)), [f"{name}\n{speed}" for name, speed in speeds.items()])
    axes.tick_params(axis="y", length=0, labelsize=SMALL_PT)
    mark_ticks(axes.xaxis, LogLocator(10, numticks=15), format_s)
    name_axes(axes, "time of one message, latency + size / bandwidth")
    axes.grid(axis="x", color=GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    slow = "Pink: more than half of the time is latency" if late else "Nearly all of the time is bandwidth"
    axes.spines["left"].set_color(FAINT)
    (fast, least), (last, most) = rows[0], rows[-1]
    takeaway = f"{format_bytes(num_bytes)} takes {format_s(least)} on {fast.name}"
    takeaway += f" and {format_s(most)} on {last.name}" if len(rows) > 1 else ""
    over = sum(seconds > compute_s for seconds in times)
    takeaway += f"; on {over} of {len(rows)} links longer than the compute" if over else ""
    put_title(figure, takeaway, f"{slow}. Speeds are one way.")
    lines = [
        f"{link.name}, {speeds[link.name]}: {format_s(seconds)} ({_share(seconds, compute_s)} the step's compute)"
        for link, seconds in rows
    ]
    return Picture(figure, "\n".join([f"{takeaway}.", *lines]))


def _share(seconds: float, compute_s: float) -> str:
    share = seconds / compute_s
    if share >= 2:
        return f"{share:.1f} times"
    if share < 0.001:
        return "under 0.1 % of"
    return f"{percent(share, 0 if share >= 0.1 else 1)} of"


def _protocol(link: Link, num_bytes: float) -> Protocol:
    return min(link.protocols, key=lambda protocol: protocol.latency_s + num_bytes / protocol.bytes_per_s)


POINT, LINE, LATENCY, BANDWIDTH = "#D55E00", "#0072B2", "#CC79A7", "#009E73"
Floats = NDArray[np.float64]


def draw_fit(sizes_bytes: Sequence[float], times_s: Sequence[float], alpha_s: float, bytes_per_s: float) -> Picture:
    """Draw measured messages as points, and over them the line alpha + size / bandwidth, both axes logarithmic.

    The two parts of the sum are drawn dashed. They cross at the size alpha x bandwidth, where half of the time is
    latency: a message of that size reaches half of the bandwidth.

    Args:
        sizes_bytes: sizes of the messages.
        times_s: seconds of each, one way.
        alpha_s: the latency in seconds that was fitted.
        bytes_per_s: the bandwidth that was fitted, in bytes per second.

    Raises:
        ValueError: no points, sizes and times of different number, or a number that is not above zero.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_s, dtype=float)
    if sizes.ndim != 1 or sizes.shape != times.shape or not sizes.size:
        raise ValueError(f"{sizes.size} sizes and {times.size} times; give one time for each size, at least one")
    least = {"sizes_bytes": float(sizes.min()), "times_s": float(times.min()), "bytes_per_s": bytes_per_s}
    require_positive("fit", **least, alpha_s=alpha_s)
    order = np.argsort(sizes, kind="stable")
    sizes, times = sizes[order], times[order]
    figure = new_figure(5.6)
    axes = frame(figure, left=1.15, right=0.45, top=1.0, bottom=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    half = alpha_s * bytes_per_s
    low, high = min(sizes.min(), half) / 2, max(sizes.max(), half) * 2
    axes.set_xlim(low, high)
    grid = np.logspace(math.log10(low), math.log10(high), 200)
    line = alpha_s + grid / bytes_per_s
    axes.set_ylim(min(times.min(), line.min()) / 3.5, max(times.max(), line.max()) * 1.6)
    dashed: dict[str, Any] = {"linestyle": (0, (5, 4)), "linewidth": 1.6, "zorder": 2}
    axes.axhline(alpha_s, color=LATENCY, **dashed)
    axes.plot([half, half], [axes.get_ylim()[0], 2 * alpha_s], color=FAINT, linewidth=1.2, linestyle=":", zorder=2)
    axes.plot(grid, grid / bytes_per_s, color=BANDWIDTH, **dashed)
    axes.plot(grid, line, color=LINE, linewidth=2.6, zorder=3, gid="line")
    axes.scatter(sizes, times, s=60, c=POINT, edgecolors="white", linewidths=0.9, zorder=4, gid="points")
    _write(figure, alpha_s, bytes_per_s)
    for axis, ends, write in ((axes.xaxis, axes.get_xlim(), format_bytes), (axes.yaxis, axes.get_ylim(), format_s)):
        steps = (1.0, 2.0, 5.0) if ends[1] < 150 * ends[0] else (1.0,)
        mark_ticks(axis, LogLocator(10, subs=steps, numticks=15), write)
    axes.grid(color=GRID, linewidth=0.6, zorder=0)
    name_axes(axes, "size of the message", "time of one message")
    errors = (alpha_s + sizes / bytes_per_s) / times - 1
    takeaway = f"A message costs {format_s(alpha_s)} and {format_s(1e6 / bytes_per_s)} for each MB"
    note = f"Half of the time is latency at {format_bytes(half)}; the line is "
    note += f"{percent(float(np.median(np.abs(errors))))} off the points (median of {len(sizes)})."
    put_title(figure, takeaway, note)
    worst = int(np.abs(errors).argmax())
    furthest = f"Furthest off at {format_bytes(float(sizes[worst]))}: measured {format_s(float(times[worst]))}"
    return Picture(figure, f"{takeaway}. {note} {furthest}, the line says {percent(float(errors[worst]), 0, '+')}.")


def _write(figure: Figure, alpha_s: float, bytes_per_s: float) -> None:
    """Name the line, its two parts and the size where they are equal, each next to what it names."""
    axes = figure.axes[0]
    (left, right), low = axes.get_xlim(), axes.get_ylim()[0]
    wide = math.log(right / left)
    half = alpha_s * bytes_per_s
    bold: dict[str, Any] = {"fontsize": SMALL_PT, "weight": "bold", "va": "top"}
    words = f"latency alone: {format_s(alpha_s)}"
    axes.text(right / 1.05, alpha_s / 1.1, words, ha="right", color=text_on_white(LATENCY), **bold)
    look: dict[str, Any] = {"fontsize": SMALL_PT, "color": FAINT, "va": "bottom", "ha": "right"}
    axes.text(half / 1.08, 2.35 * alpha_s, f"{format_bytes(half)}: half of the time is latency", **look)
    axes.scatter([half], [2 * alpha_s], s=46, facecolors="white", edgecolors=LINE, linewidths=1.8, zorder=3.5)
    at = low * math.exp(0.62 * math.log(alpha_s / low)) * bytes_per_s
    words = f"bandwidth alone: {format_bytes_per_s(bytes_per_s)} "
    side, x = ("right", at / 1.2) if at > left * math.exp(0.25 * wide) else ("left", at * 1.15)
    axes.text(x, at / bytes_per_s, words, ha=side, color=text_on_white(BANDWIDTH), **bold)
    words = f"{format_s(alpha_s)} + size / ({format_bytes_per_s(bytes_per_s)})"
    axes.text(0.02, 0.95, words, fontsize=TEXT_PT, color=LINE, weight="bold", transform=axes.transAxes, va="top")
