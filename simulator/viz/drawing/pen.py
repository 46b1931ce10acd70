"""Draw many small boxes, words and arrows quickly: each kind ends as one collection, so that a slider does not stutter.

A Rectangle or Text each costs matplotlib about a millisecond; a frame of a ring has two hundred. Words are drawn as the
outlines of their letters, which are laid out once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from simulator.viz.drawing.light_axes import LightAxes
from simulator.viz.drawing.style import DPI, INK, SMALL_PT, TEXT_PT, WIDTH_IN, LegendBox, new_figure, text_colour

Colour = str | tuple[float, float, float]
Point = tuple[float, float] | NDArray[np.float64]
_UNIT = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
_SIDES = {"left": 0.0, "center": 0.5, "right": 1.0}


class Pen:
    """Collects shapes on axes whose limits are inches or data; `flush()` draws them, boxes below arrows below words.

    Attributes:
        axes: what is drawn on.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._corners: list[NDArray[np.float64]] = []
        self._looks: list[tuple[Any, Any, float]] = []
        self._frames: list[tuple[NDArray[np.float64], Any, float]] = []
        self._lines: list[tuple[NDArray[np.float64], Any, float]] = []
        self._heads: list[tuple[NDArray[np.float64], Any]] = []
        self._words: list[tuple[str, Point, Path, Any]] = []

    def box(
        self, corner: Point, wide: float, tall: float, fill: Colour, *, edge: Colour = "white", line: float = 0.8
    ) -> None:
        """Fill a rectangle from its lower left corner; later ones lie on top."""
        self._corners.append(np.asarray(corner) + _UNIT * (wide, tall))
        self._looks.append((to_rgba(fill), to_rgba(edge) if line else (0.0, 0.0, 0.0, 0.0), line))

    def outline(self, corner: Point, wide: float, tall: float, edge: Colour, *, line: float = 2.6) -> None:
        """Frame a rectangle, above all boxes."""
        self._frames.append((np.asarray(corner) + _UNIT * (wide, tall), to_rgba(edge), line))

    def arrow(self, start: Point, end: Point, colour: Colour, *, bend: float = 0.0, line: float = 3.0) -> None:
        """Draw an arrow; `bend` lifts its middle to the left of its way, as a share of its length."""
        curve, control = _bent(start, end, bend)
        last = curve[-1].copy()
        ahead = last - control
        ahead = ahead / max(float(np.hypot(*ahead)), 1e-12)
        aside = np.array([-ahead[1], ahead[0]])
        long, half = 0.075 * line, 0.034 * line
        head = np.stack([last, last - long * ahead + half * aside, last - long * ahead - half * aside])
        curve[-1] -= 0.6 * long * ahead
        self._lines.append((curve, to_rgba(colour), line))
        self._heads.append((head, to_rgba(colour)))

    def line(self, start: Point, end: Point, colour: Colour, *, bend: float = 0.0, line: float = 2.0) -> None:
        """Draw a line without a head; `bend` as of an arrow."""
        self._lines.append((_bent(start, end, bend)[0], to_rgba(colour), line))

    def words(
        self,
        spot: Point,
        text: str,
        *,
        size: float = SMALL_PT,
        colour: Colour = INK,
        bold: bool = False,
        side: str = "center",
    ) -> None:
        """Write a line of text, its middle (or left or right end, by `side`) at the spot."""
        if text:
            self._words.append((text, spot, outline_of(text, size, bold, side), to_rgba(colour)))

    def legend(self, boxes: Sequence[LegendBox], *, left: float = 0.16, low: float = 0.14, right: float = 12.6) -> None:
        """Write a legend along the bottom, in inches: as many entries a line as fit, the last line lowest."""
        size, box, gap = TEXT_PT - 1, 0.31, 0.3
        widths = [box + 0.09 + width_in(entry.words, size) + gap for entry in boxes]
        lines: list[list[int]] = [[]]
        for index, width in enumerate(widths):
            if lines[-1] and left + sum(widths[at] for at in lines[-1]) + width - gap > right:
                lines.append([])
            lines[-1].append(index)
        for row, line in enumerate(reversed(lines)):
            x, y = left, low + 0.28 * row
            for index in line:
                entry = boxes[index]
                self.box((x, y), box, 0.19, entry.fill, edge=entry.edge, line=1.2)
                self.words((x + box / 2, y + 0.095), entry.letter, size=10, colour=text_colour(entry.fill))
                self.words((x + box + 0.09, y + 0.095), entry.words, size=size, side="left")
                x += widths[index]

    def written(self) -> list[str]:
        """Return the texts, in the order in which they were written."""
        return [text for text, *_ in self._words]

    def flush(self) -> None:
        """Draw what was collected."""
        axes, own = self.axes, {"autolim": False}
        if self._corners:
            fills, edges, lines = zip(*self._looks, strict=True)
            look: dict[str, Any] = {"facecolors": fills, "edgecolors": edges, "linewidths": lines, "zorder": 3}
            axes.add_collection(PolyCollection(self._corners, gid="boxes", **look), **own)
        if self._lines:
            curves, colours, widths = zip(*self._lines, strict=True)
            lines_of = LineCollection(curves, colors=colours, linewidths=widths, zorder=2.5, gid="lines")
            axes.add_collection(lines_of, **own)
        if self._heads:
            heads, fills = zip(*self._heads, strict=True)
            look = {"facecolors": fills, "linewidths": 0, "zorder": 2.6}
            axes.add_collection(PolyCollection(heads, gid="arrows", **look), **own)
        if self._frames:
            corners, edges, lines = zip(*self._frames, strict=True)
            look = {"facecolors": "none", "edgecolors": edges, "linewidths": lines, "zorder": 4}
            axes.add_collection(PolyCollection(corners, gid="outlines", **look), **own)
        if self._words:
            texts, spots, paths, fills = zip(*self._words, strict=True)
            look = {"facecolors": fills, "linewidths": 0, "zorder": 6, "offset_transform": axes.transData}
            letters = PathCollection(paths, offsets=np.array(spots, dtype=float), **look)
            letters.set_transform(Affine2D().scale(DPI / 72))
            letters.set_gid("words")
            letters.set_label("\n".join(texts))
            axes.add_collection(letters, **own)


def sheet(height_in: float) -> tuple[Figure, Pen]:
    """Make an empty figure, and a pen on axes that cover it and whose unit is the inch."""
    figure = new_figure(height_in)
    axes = figure.add_axes(LightAxes(figure, (0, 0, 1, 1)))
    axes.set_xlim(0, WIDTH_IN)
    axes.set_ylim(0, height_in)
    axes.set_axis_off()
    return figure, Pen(axes)


def _bent(start: Point, end: Point, bend: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a straight or bent line, and the point that it bends towards: its middle, where it is straight."""
    first, last = np.asarray(start, dtype=float), np.asarray(end, dtype=float)
    along = last - first
    control = (first + last) / 2 + bend * np.array([-along[1], along[0]])
    share = np.linspace(0.0, 1.0, 21 if bend else 2)[:, None]
    return (1 - share) ** 2 * first + 2 * share * (1 - share) * control + share**2 * last, control


@lru_cache(maxsize=4096)
def outline_of(text: str, size: float, bold: bool, side: str) -> Path:
    """Return the outlines of a text's letters in points, around the point where it is to stand."""
    outline, left, wide = _laid_out(text, bold)
    middle = 0.36 * size  # half the height of a capital: lines of text stand level, whatever their letters
    shift = -(left + _SIDES[side] * wide) * size
    return Path(np.asarray(outline.vertices) * size + np.array([shift, -middle]), outline.codes)


def width_in(text: str, size: float, bold: bool = False) -> float:
    """Return how wide a text is, in inches."""
    return _laid_out(text, bold)[2] * size / 72 if text.strip() else 0.0


@lru_cache(maxsize=4096)
def _laid_out(text: str, bold: bool) -> tuple[Path, float, float]:
    """Return a text's outlines at a size of one point, where its ink begins, and how wide it is.

    The ink is measured by the corners of the curves. In this font they touch it, and looking for the curves' own ends
    takes longer than all the rest.
    """
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=1.0)
    path = TextPath((0, 0), text, prop=font)
    assert path.codes is not None
    across = np.asarray(path.vertices)[path.codes != Path.CLOSEPOLY, 0]  # the corner of a closing line is nowhere
    left, right = (float(across.min()), float(across.max())) if len(across) else (0.0, 0.0)
    return path, left, right - left
