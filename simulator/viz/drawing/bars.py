"""Draw numbers as bars: one per name, or one per name and series, such as predicted beside measured.

And where the time of a step goes: one bar per rank, cut into its sections; a prediction right under it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from simulator.units import counted, format_s, percent
from simulator.viz.drawing.pen import Pen, Picture, put_legend, sheet
from simulator.viz.drawing.plot import draw_scale, even_ticks, frame, new_figure, put_title, spread_evenly
from simulator.viz.drawing.theme import FAINT, INK, LINE_COLOURS, SMALL_PT, TEXT_PT, WIDTH_IN, LegendBox, pale, styles

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


Seconds = Mapping[int, Mapping[str, float]]
SECTION_STYLES = styles("sections")
MAX_BARS = 16
LEFT_IN, SECTIONS_RIGHT_IN, SECTIONS_TOP_IN, LOW_IN, ROW_IN = 1.15, 1.15, 1.05, 0.85, 0.46


def draw_sections(measured: Seconds, predicted: Seconds | None = None, *, title: str | None = None) -> Picture:
    """Draw the sections of each rank's step as one bar, from the mean over steps.

    Args:
        measured: seconds by rank and section: "data", "forward", "backward", "sync", "optimizer", "other", "idle".
        predicted: the same of a prediction: the rank's own, or the only one.
        title: replaces the takeaway, and begins the words.

    Raises:
        ValueError: no rank has any time.
    """
    both = [*measured.values(), *(() if predicted is None else predicted.values())]
    longest = max((sum(row.values()) for row in both), default=0.0)
    if not measured or longest <= 0:
        raise ValueError("no rank has any time in a section; profile at least one step")
    ranks = [list(measured)[index] for index in spread_evenly(len(measured), MAX_BARS)]
    row = ROW_IN * (1 if predicted is None else 1.75)
    height = SECTIONS_TOP_IN + row * len(ranks) + LOW_IN
    _, pen = sheet(height)
    scale = (WIDTH_IN - LEFT_IN - SECTIONS_RIGHT_IN) / longest
    for place, rank in enumerate(ranks):
        top = height - SECTIONS_TOP_IN - row * place
        pen.words((LEFT_IN - 0.12, top - 0.5 * ROW_IN), f"rank {rank}", size=TEXT_PT, bold=True, side="right")
        _draw_bar(pen, measured[rank], (LEFT_IN, top - 0.92 * ROW_IN), 0.84 * ROW_IN, scale, is_pale=False)
        if predicted is not None:
            pen.words((LEFT_IN - 0.12, top - 1.25 * ROW_IN), "predicted", colour=FAINT, side="right")
            _draw_bar(pen, _of_rank(predicted, rank), (LEFT_IN, top - 1.55 * ROW_IN), 0.6 * ROW_IN, scale, is_pale=True)
    styles = [SECTION_STYLES[name] for name in _used(both)]
    pen.legend([LegendBox(style.colour, "white", style.letter, style.words) for style in styles])
    shown = f"{len(ranks)} of {len(measured)} ranks; " if len(ranks) < len(measured) else ""
    takeaway = _takeaway(measured)
    picture = pen.finish(title or takeaway, f"{shown}mean over steps; a bar is one step of a rank")
    lines = [(f"{title}. " if title else "") + f"{takeaway}."]
    for rank, own in measured.items():
        lines.append(f"Rank {rank}: {_listed(own)}.")
        if predicted is not None:
            lines.append(f"Predicted for rank {rank}: {_listed(_of_rank(predicted, rank))}.")
    return picture._replace(words="\n".join(lines))


def _draw_bar(
    pen: Pen, row: Mapping[str, float], corner: tuple[float, float], tall: float, scale: float, *, is_pale: bool
) -> None:
    whole, pieces = sum(row.values()), []
    for name in _used([row]):
        style, share = SECTION_STYLES[name], percent(row[name] / whole)
        fill = pale(style.colour) if is_pale else style.colour
        pieces.append((row[name] * scale, fill, (f"{name} {share}", share, style.letter)))
    x, y = pen.bar(corner, tall, pieces), corner[1]
    pen.words((x + 0.08, y + tall / 2), format_s(whole), side="left", colour=FAINT)


def _takeaway(measured: Seconds) -> str:
    """Return the title: how long a step is, and how much of it is work."""
    whole_s = max(sum(row.values()) for row in measured.values())
    total = sum(sum(row.values()) for row in measured.values())
    share = {name: sum(row.get(name, 0.0) for row in measured.values()) / total for name in SECTION_STYLES}
    worked = share["forward"] + share["backward"] + share["optimizer"]
    lost = {name: share[name] for name in ("data", "sync", "other", "idle")}
    most = max(lost, key=lost.__getitem__)
    text = f"{counted(len(measured), 'rank')} work {percent(worked)} of a step of {format_s(whole_s)}"
    return text if lost[most] < 0.005 else f"{text}; most of the rest, {percent(lost[most])}, is {most}"


def _of_rank(predicted: Seconds, rank: int) -> Mapping[str, float]:
    return predicted[rank] if rank in predicted else next(iter(predicted.values()))


def _used(rows: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in SECTION_STYLES if any(row.get(name, 0.0) > 0 for row in rows)]


def _listed(row: Mapping[str, float]) -> str:
    parts = [f"{name} {format_s(row[name])}" for name in _used([row])]
    return f"{format_s(sum(row.values()))}: {', '.join(parts)}"
