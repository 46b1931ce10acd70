"""Draw how long one message takes on several links: which of them a training step can afford to wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from distlab.plan import Link, Protocol
from simulator.hardware.cost import message_s
from simulator.hardware.presets import link as preset
from simulator.units import format_bytes, format_bytes_per_s, format_s
from simulator.viz.drawing.plot import GRID, frame, mark_ticks, name_axes, new_figure, put_title
from simulator.viz.drawing.style import FAINT, INK, SMALL_PT, TEXT_PT, pale, text_on_white
from simulator.viz.drawing.wording import percent

BYTES_COLOUR, LATENCY_COLOUR, LIMIT = "#0072B2", "#CC79A7", "#D55E00"
ROW_IN = 0.62


def draw_link_times(num_bytes: float, links: Sequence[Link | str], *, compute_s: float | None = None) -> Figure:
    """Draw one bar per link, fastest first, on a logarithmic axis: the seconds that one message of num_bytes takes.

    A bar is pink where latency is more than half of the time, blue where the bytes are.

    Args:
        num_bytes: size of the message.
        links: links or names of presets, with measured figures where they were published.
        compute_s: the compute of a step, drawn as an upright line, and compared with.

    Raises:
        ValueError: no links, an unknown preset, or a size or a compute time that is not above zero.
    """
    rows = _rows(num_bytes, links, compute_s)
    figure = new_figure(1.95 + ROW_IN * len(rows))
    axes = frame(figure, left=2.0, right=3.1, top=1.05, bottom=0.8)
    times = [seconds for _, seconds in rows]
    low, high = min(times) / 4, max([*times, *([compute_s] if compute_s else [])]) * 1.3
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    late = [link for link, seconds in rows if _protocol(link, num_bytes).latency_s > seconds / 2]
    for place, (link, seconds) in enumerate(rows):
        colour = LATENCY_COLOUR if link in late else BYTES_COLOUR
        axes.barh(place, seconds - low, left=low, height=0.62, color=pale(colour, 0.75), edgecolor=colour)
        note = format_s(seconds) if compute_s is None else f"{format_s(seconds)}, {_share(seconds, compute_s)} the step"
        where: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": TEXT_PT, "color": INK}
        axes.text(1.015, place, note, transform=axes.get_yaxis_transform(), **where)
    if compute_s is not None:
        axes.axvline(compute_s, color=LIMIT, linewidth=2.2, linestyle=(0, (5, 3)))
        words = f"compute of a step: {format_s(compute_s)} "
        look: dict[str, Any] = {"fontsize": SMALL_PT, "color": text_on_white(LIMIT), "weight": "bold"}
        axes.text(compute_s, -0.5, words, ha="right", va="bottom", **look)
    axes.set_yticks(
        range(len(rows)),
        [f"{link.name}\n{_rate(link, num_bytes)}" for link, _ in rows],
    )
    axes.tick_params(axis="y", length=0, labelsize=SMALL_PT)
    mark_ticks(axes.xaxis, LogLocator(10, numticks=15), format_s)
    name_axes(axes, "time of one message, latency + size / bandwidth")
    axes.grid(axis="x", color=GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    slow = "Pink: more than half of the time is latency" if late else "Nearly all of the time is bandwidth"
    put_title(figure, _fastest_and_slowest(num_bytes, rows, compute_s), f"{slow}. Speeds are one way.")
    axes.spines["left"].set_color(FAINT)
    return figure


def describe_link_times(num_bytes: float, links: Sequence[Link | str], *, compute_s: float | None = None) -> str:
    """Say in words what `draw_link_times` shows; arguments and errors as there."""
    rows = _rows(num_bytes, links, compute_s)
    lines = [f"{_fastest_and_slowest(num_bytes, rows, compute_s)}."]
    for link, seconds in rows:
        share = "" if compute_s is None else f" ({_share(seconds, compute_s)} the step's compute)"
        lines.append(f"{link.name}, {_rate(link, num_bytes)}: {format_s(seconds)}{share}")
    return "\n".join(lines)


def _rows(num_bytes: float, links: Sequence[Link | str], compute_s: float | None) -> list[tuple[Link, float]]:
    if not links:
        raise ValueError("no links; pass at least one Link or the name of a preset")
    if not (num_bytes > 0 and math.isfinite(num_bytes)):
        raise ValueError(f"a message has {num_bytes!r} bytes; pass a finite number above 0")
    if compute_s is not None and not (compute_s > 0 and math.isfinite(compute_s)):
        raise ValueError(f"compute_s is {compute_s!r}; pass a time above 0, or None")
    found = [preset(link) if isinstance(link, str) else link for link in links]
    return sorted(((link, message_s(num_bytes, link)) for link in found), key=lambda row: row[1])


def _fastest_and_slowest(num_bytes: float, rows: Sequence[tuple[Link, float]], compute_s: float | None) -> str:
    (fast, least), (slow, most) = rows[0], rows[-1]
    text = f"{format_bytes(num_bytes)} takes {format_s(least)} on {fast.name}"
    text += f" and {format_s(most)} on {slow.name}" if len(rows) > 1 else ""
    if compute_s is not None and most > compute_s:
        over = sum(seconds > compute_s for _, seconds in rows)
        text += f"; on {over} of {len(rows)} links longer than the compute"
    return text


def _share(seconds: float, compute_s: float) -> str:
    share = seconds / compute_s
    if share >= 2:
        return f"{share:.1f} times"
    if share < 0.001:
        return "under 0.1 % of"
    return f"{percent(share, 0 if share >= 0.1 else 1)} of"


def _rate(link: Link, num_bytes: float) -> str:
    return format_bytes_per_s(_protocol(link, num_bytes).bytes_per_s)


def _protocol(link: Link, num_bytes: float) -> Protocol:
    return min(link.protocols, key=lambda protocol: protocol.latency_s + num_bytes / protocol.bytes_per_s)
