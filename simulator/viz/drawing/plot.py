"""What plots share: a figure and its title, level words, axes with margins in inches, ticks and names.

Figures are made with matplotlib's objects; nothing here touches pyplot's global state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, MaxNLocator, NullLocator

from simulator.units import time_unit
from simulator.viz.drawing.theme import DPI, FAINT, INK, SMALL_PT, TEXT_PT, TITLE_PT, WIDTH_IN, Colour, text_on_white

HALF_CAPITAL = 0.37  # of the size: lines of text stand level, whatever their letters
SIDES = {"left": 0.0, "center": 0.5, "right": 1.0}


class Word(NamedTuple):
    """A line of text and its place, in the artist's units; its size in points.

    Its left end, its middle or its right end is at x, by `side`; the middle of a capital letter is at y.
    """

    x: float
    y: float
    text: str
    size: float = SMALL_PT
    colour: Colour = INK
    bold: bool = False
    side: str = "center"


class Words(Artist):
    """Draws level words over everything else.

    Attributes:
        words: what is drawn, in this order.
    """

    def __init__(self, words: Sequence[Word]) -> None:
        super().__init__()
        self.words = tuple(words)
        self.set_zorder(6)

    def draw(self, renderer: Any) -> None:
        """Write every word."""
        if not self.get_visible() or not self.words:
            return
        places = self.get_transform().transform([(word.x, word.y) for word in self.words])
        pen = renderer.new_gc()
        self._set_gc_clip(pen)  # type: ignore[attr-defined]
        canvas_height = renderer.get_canvas_width_height()[1]
        for word, (x, y) in zip(self.words, places.tolist(), strict=True):
            font = _font(word.size, word.bold)
            wide = renderer.get_text_width_height_descent(word.text, font, False)[0]
            low = y - renderer.points_to_pixels(HALF_CAPITAL * word.size)
            pen.set_foreground(word.colour)
            left = x - SIDES[word.side] * wide
            renderer.draw_text(pen, left, canvas_height - low if renderer.flipy() else low, word.text, font, 0)
        pen.restore()


@lru_cache(maxsize=4096)
def width_in(text: str, size: float, bold: bool = False) -> float:
    """Return how wide a text is, in inches."""
    wide: float = text_to_path.get_text_width_height_descent(text, _font(size, bold), False)[0]
    return wide / 72 if text.strip() else 0.0


@lru_cache(maxsize=256)
def _font(size: float, bold: bool) -> FontProperties:
    return FontProperties(size=size, weight="bold" if bold else "normal")


TICK_PT, PAD_PT, GRID = 4.0, 3.5, "#E4E4E4"


def new_figure(height_in: float) -> Figure:
    """Make an empty white figure that belongs to no window and no global state."""
    return Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")


def put_title(figure: Figure, title: str, subtitle: str = "") -> None:
    """Write the takeaway large at the top left, and one line of figures under it."""
    width, height = figure.get_size_inches()
    longest = width * 72 * 0.97
    size = min(TITLE_PT, longest / max(1.0, 0.66 * len(title)))
    figure.text(0.16 / width, 1 - 0.13 / height, title, fontsize=size, weight="bold", color=INK, ha="left", va="top")
    if subtitle:
        size = min(TEXT_PT, longest / max(1.0, 0.6 * len(subtitle)))
        figure.text(0.16 / width, 1 - 0.52 / height, subtitle, fontsize=size, color=FAINT, ha="left", va="top")


def frame(figure: Figure, *, left: float, right: float, top: float, bottom: float, bare: bool = False) -> Axes:
    """Add axes whose margins are given in inches, so that they keep their place whatever the figure's size.

    Bare axes have neither lines nor ticks: `draw_scale` draws those that are needed, in a third of the time that
    matplotlib's own ticks take.
    """
    width, height = figure.get_size_inches()
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))
    if bare:
        axes.set_axis_off()
        return axes
    axes.tick_params(labelsize=TEXT_PT - 1, colors=INK, length=TICK_PT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def axes_pixels(axes: Axes) -> tuple[float, float]:
    """Return the width and height of the axes in pixels."""
    width, height = axes.figure.get_size_inches()  # type: ignore[union-attr]
    place = axes.get_position()
    return float(width * place.width * DPI), float(height * place.height * DPI)


def put_heading(axes: Axes, text: str) -> None:
    """Write what one of several axes shows over its left end."""
    axes.set_title(text, fontsize=TEXT_PT, loc="left", color=FAINT, y=1.0, pad=10)


def name_axes(axes: Axes, x: str, y: str = "", *, size: float = TEXT_PT) -> None:
    """Write what each axis counts, and its unit."""
    axes.set_xlabel(x, fontsize=size, color=INK)
    if y:
        axes.set_ylabel(y, fontsize=size, color=INK)


def mark_ticks(axis: Axis, where: Locator | Sequence[float], write: Callable[[float], str]) -> None:
    """Put ticks at these values alone, and write each one's text."""
    axis.set_major_locator(where if isinstance(where, Locator) else FixedLocator(list(where)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


def count_axis(axes: Axes, counts: Sequence[float], words: str, *, grid: bool = True) -> None:
    """Make the x axis one of numbers that double, with ticks at these and what they count under it."""
    axes.set_xscale("log", base=2)
    mark_ticks(axes.xaxis, counts, lambda value: f"{value:,.0f}")
    name_axes(axes, words)
    if grid:
        axes.grid(color=GRID, linewidth=0.6, zorder=0)


def spread_apart(ends: Sequence[float], heights: Sequence[float], *, top: float = 1.0) -> list[float]:
    """Return places near `ends` for names of these heights, so that no two overlap and none is above `top`."""
    order = sorted(range(len(ends)), key=ends.__getitem__)
    places = [float(end) for end in ends]
    reached = -np.inf
    for index in order:
        places[index] = max(places[index], reached + heights[index] / 2)
        reached = places[index] + heights[index] / 2
    for index in reversed(order):
        places[index] = min(places[index], top - heights[index] / 2)
        top = places[index] - heights[index] / 2
    return places


def name_line_ends(axes: Axes, values: Sequence[float], names: Sequence[str], colours: Sequence[str]) -> None:
    """Write each line's name right of the axes, near the value at which it ends and apart from the other names."""
    shares = axes.transAxes.inverted().transform(axes.transData.transform([(axes.get_xlim()[1], y) for y in values]))
    ends = shares[:, 1].tolist()
    point = DPI / 72 / axes_pixels(axes)[1]
    heights = [(1.25 * name.count("\n") + 1.5) * SMALL_PT * point for name in names]
    look: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    for end, place, name, colour in zip(ends, spread_apart(ends, heights, top=1.06), names, colours, strict=True):
        axes.plot([0.99, 1.025], [end, place], color=colour, linewidth=1.2, **look)
        words: dict[str, Any] = {"fontsize": SMALL_PT, "weight": "bold", "color": text_on_white(colour)}
        axes.text(1.035, place, name, ha="left", va="center", **words, **look)


def draw_scale(
    axes: Axes, which: str, ticks: Mapping[float, str], label: str = "", *, line: bool = True, label_pt: float = TEXT_PT
) -> None:
    """Draw the "x" or the "y" axis of bare axes whose limits are set: ticks with their texts, and the axis' label."""
    across = which == "x"
    low, high = axes.get_xlim() if across else axes.get_ylim()
    point = DPI / 72 / axes_pixels(axes)[1 if across else 0]  # as a share of the axes
    transform = axes.get_xaxis_transform() if across else axes.get_yaxis_transform()
    size = TEXT_PT - 1
    if line:
        segments = [((low, 0.0), (high, 0.0)), *(((tick, 0.0), (tick, -TICK_PT * point)) for tick in ticks)]
        ends = [[end if across else end[::-1] for end in segment] for segment in segments]
        strokes = LineCollection(ends, colors=INK, linewidths=72 / DPI, transform=transform, clip_on=False)
        strokes.set_snap(True)  # on whole pixels: a sharp line
        axes.add_collection(strokes, autolim=False)
    away = -(TICK_PT + PAD_PT) * point
    if across:
        away -= 0.5 * size * point
        words = [Word(tick, away, text, size) for tick, text in ticks.items()]
        words += [Word((low + high) / 2, away - (size + 0.5 * label_pt) * point, label, label_pt)] if label else []
    else:
        words = [Word(away, tick, text, size, side="right") for tick, text in ticks.items()]
        widest = max((width_in(text, size) for text in ticks.values()), default=0.0)
        x = away - (72 * widest + 0.6 * label_pt) * point
        look: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center", "fontsize": label_pt, "color": INK}
        if label:
            axes.text(x, (low + high) / 2, label, transform=transform, **look)
    written = Words(words)
    written.set_transform(transform)
    written.set_clip_on(False)
    axes.add_artist(written)


def spread_evenly(count: int, most: int) -> list[int]:
    """Return some of the numbers below `count`, at most `most`, spread evenly from the first to the last."""
    return sorted({round(at) for at in np.linspace(0, count - 1, min(count, most)).tolist()})


def even_ticks(low: float, high: float, most: int, factor: float = 1.0) -> dict[float, str]:
    """Return about `most` round values between two ends, each with its text: the value times a factor."""
    slack = 1e-9 * (high - low)
    found = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    values = map(float, found)
    return {value: f"{value * factor:,.6g}" for value in values if low - slack <= value <= high + slack}


def draw_time_scale(axes: Axes, label: str = "time since the step began", *, label_pt: float = TEXT_PT) -> None:
    """Draw the axis of seconds under bare axes, in the unit that suits its end."""
    low, high = axes.get_xlim()
    factor, unit = time_unit(high)
    draw_scale(axes, "x", even_ticks(low, high, 9, factor), f"{label} ({unit})", label_pt=label_pt)
