"""Draw numbers as bars: one per name, or one per name and series, such as predicted beside measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from simulator.viz.drawing.pen import put_legend
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import draw_scale, even_ticks, frame, new_figure, put_title
from simulator.viz.drawing.theme import INK, LINE_COLOURS, SMALL_PT, WIDTH_IN, LegendBox, pale

Numbers = Mapping[str, float] | Mapping[str, Mapping[str, float]]
TOP_IN, RIGHT_IN, BAR_IN = 1.05, 1.3, 0.3
TALLEST_IN = 6.0  # of all bars together


def draw_bars(numbers: Numbers, *, unit: str, title: str, subtitle: str = "") -> Picture:
    """Draw one horizontal bar per number, from zero, with the number at its end.

    Args:
        numbers: a number by name, or by name and series: `{"flat": {"predicted": 61, "measured": 66}}`.
        unit: of the numbers, such as "ms".
        title: what the picture shows, in one sentence.
        subtitle: under what conditions.

    Raises:
        ValueError: there is no number, or one is below zero or not finite.
    """
    rows = _rows(numbers)
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    count = sum(map(len, rows.values()))
    tall = min(TALLEST_IN, BAR_IN * count + 0.16 * len(rows))
    bottom = 1.15 if series != [""] else 0.75
    figure = new_figure(TOP_IN + tall + bottom)
    left = min(0.45 + 0.095 * max(map(len, rows)), 0.45 * WIDTH_IN)
    axes = frame(figure, left=left, right=RIGHT_IN, top=TOP_IN, bottom=bottom, bare=True)
    limit = max(max(row.values()) for row in rows.values()) * 1.02 or 1.0
    axes.set_xlim(0.0, limit)
    each = 0.84 / max(map(len, rows.values()))
    look: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": SMALL_PT, "color": INK}
    for place, row in enumerate(rows.values()):
        for which, (name, number) in enumerate(row.items()):
            middle = place + (which - (len(row) - 1) / 2) * each
            colour = LINE_COLOURS[series.index(name) % len(LINE_COLOURS)]
            axes.barh(middle, number, height=0.9 * each, color=pale(colour, 0.75), edgecolor=colour)
            axes.text(number + 0.008 * limit, middle, f"{_short(number)} {unit}", **look)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    draw_scale(axes, "y", dict(enumerate(rows)), line=False)
    draw_scale(axes, "x", even_ticks(0.0, limit, 6), unit)
    if series != [""]:
        colours = LINE_COLOURS[: len(series)]
        put_legend(figure, [LegendBox(pale(c, 0.75), c, "", name) for c, name in zip(colours, series, strict=True)])
    put_title(figure, title, subtitle)
    said = [
        f"{name}: {', '.join(f'{which} {_short(number)} {unit}'.strip() for which, number in row.items())}"
        for name, row in rows.items()
    ]
    return Picture(figure, f"{title}. {'; '.join(said)}.")


def _rows(numbers: Numbers) -> dict[str, dict[str, float]]:
    """Return each name's numbers by series; one number without a series has the series ""."""
    rows = {name: dict(row) if isinstance(row, Mapping) else {"": float(row)} for name, row in numbers.items()}
    values = [number for row in rows.values() for number in row.values()]
    if not all(rows.values()) or not values or not all(math.isfinite(number) and number >= 0 for number in values):
        raise ValueError(
            f"bars cannot show {dict(numbers)!r}; pass a number of 0 or more, or such numbers, for each name"
        )
    return rows


def _short(number: float) -> str:
    """Write a whole number as it is, and any other with three digits that count: 0.0123, 1.23, 12.3, 12,300."""
    if number == round(number) or number >= 100:
        return f"{number:,.0f}"
    return f"{number:.{2 - math.floor(math.log10(number))}f}" if number >= 1e-4 else f"{number:.1e}"
