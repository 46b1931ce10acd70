"""A picture: a figure with the words that say the same; and a pen, with which most are drawn.

The pen draws many small boxes, words and arrows quickly: each kind ends as one artist, so that a slider does not
stutter. A Rectangle or a Text costs matplotlib about a millisecond each; a frame of a ring has two hundred.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from simulator.viz.drawing.plot import Word, Words, new_figure, put_title, width_in
from simulator.viz.drawing.theme import INK, LEAST_PT, SMALL_PT, TEXT_PT, WIDTH_IN, Colour, LegendBox, text_colour

Point = tuple[float, float] | NDArray[np.float64]
_UNIT = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
LEGEND_PT, LEGEND_LEFT, LEGEND_RIGHT, LEGEND_LOW, LEGEND_LINE_IN = TEXT_PT - 1, 0.16, 12.6, 0.14, 0.28

Bundle = tuple[dict[str, Any], dict[str, Any]]
SHOWN_DPI = 110  # a little more than a screen's, so that a wide page shows a sharp picture
NAMES = Path(__file__).with_name("name_controls.js")  # begins each widget's script: names for a screen reader


class Picture(NamedTuple):
    """A figure, and the words that say what it shows: for screen readers, terminals and diffs.

    A notebook shows the picture with its title as alt text, and the words below it. It is a white card, which can be
    read on a light page and on a dark one.

    Attributes:
        figure: what is seen.
        words: what is read.
    """

    figure: Figure
    words: str

    def __repr__(self) -> str:
        return self.words

    @property
    def title(self) -> str:
        """The figure's title, or the words where it has none."""
        return title_of(self.figure) or self.words

    def png(self) -> bytes:
        """Return the whole page as PNG, and more of it where something stands outside."""
        self.figure.draw_without_rendering()
        page = Bbox.union([Bbox.from_bounds(0, 0, *self.figure.get_size_inches()), self.figure.get_tightbbox()])
        out = io.BytesIO()
        self.figure.savefig(out, format="png", dpi=SHOWN_DPI, bbox_inches=page)
        return out.getvalue()

    def _repr_mimebundle_(self, **_options: object) -> Bundle:
        """Return the picture as PNG, and as HTML: its title is the alt text, and its words stand below.

        It is as wide as its page at most: a picture that is cut at its right edge can say what is not so.
        """
        png, title = self.png(), html.escape(self.title)
        wide = int.from_bytes(png[16:20], "big")  # a PNG's header begins with its width in pixels
        size = f"display:block;width:100%;max-width:{wide}px;border-radius:6px"
        address = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
        image = f'<img style="{size}" alt="{title}" src="{address}">'
        below = f'<p style="white-space:pre-wrap">{html.escape(self.words)}</p>'
        return with_picture({"text/html": image + below}, png, title=self.title, words=self.words)


def with_picture(bundle: Any, png: bytes, *, title: str, words: str) -> Bundle:
    """Add a picture and its words to a MIME bundle, for viewers that cannot show what else it holds."""
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
    data, metadata = {**(data or {}), "text/plain": words}, dict(metadata or {})
    if png:
        data["image/png"] = base64.b64encode(png).decode("ascii")
        metadata["image/png"] = {"alt": title}
    return data, metadata


def title_of(figure: Figure) -> str:
    """Return the figure's title: its first text, or the first title over its axes."""
    texts = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    texts += [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center", "right")]
    return next((" ".join(text.split()) for text in texts if text.strip()), "")


class Pen:
    """Collects shapes; `flush()` draws them, arrows below boxes below words.

    Attributes:
        surface: what is drawn on: axes, in the units of their limits, or a figure, in inches.
    """

    def __init__(self, surface: Axes | Figure) -> None:
        self.surface = surface
        self._boxes: list[tuple[NDArray[np.float64], Any, Any, float]] = []
        self._outlines: list[tuple[NDArray[np.float64], Any, Any, float]] = []
        self._lines: list[tuple[NDArray[np.float64], Any, float]] = []
        self._heads: list[tuple[NDArray[np.float64], Any, Any, float]] = []
        self._words: list[Word] = []

    def box(
        self, corner: Point, wide: float, tall: float, fill: Colour, *, edge: Colour = "white", line: float = 0.8
    ) -> None:
        """Fill a rectangle from its lower left corner; later ones lie on top."""
        self._boxes.append((np.asarray(corner) + _UNIT * (wide, tall), to_rgba(fill), to_rgba(edge), line))

    def outline(self, corner: Point, wide: float, tall: float, edge: Colour, *, line: float = 2.6) -> None:
        """Frame a rectangle, above all boxes."""
        self._outlines.append((np.asarray(corner) + _UNIT * (wide, tall), (0.0, 0.0, 0.0, 0.0), to_rgba(edge), line))

    def arrow(self, start: Point, end: Point, colour: Colour, *, bend: float = 0.0, line: float = 3.0) -> None:
        """Draw an arrow; `bend` lifts its middle to the left of its way, as a share of its length."""
        curve, control = _bent(start, end, bend)
        tip = curve[-1].copy()
        ahead = (tip - control) / max(float(np.hypot(*(tip - control))), 1e-12)
        aside = np.array([-ahead[1], ahead[0]])
        long, half = 0.075 * line, 0.034 * line
        head = np.stack([tip, tip - long * ahead + half * aside, tip - long * ahead - half * aside])
        curve[-1] -= 0.6 * long * ahead
        self._lines.append((curve, to_rgba(colour), line))
        self._heads.append((head, to_rgba(colour), to_rgba(colour), 0.0))

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
            self._words.append(Word(float(spot[0]), float(spot[1]), text, size, colour, bold, side))

    def heading(self, spot: Point, text: str) -> None:
        """Write a line of text large and bold, its left end at the spot."""
        self.words(spot, text, size=TEXT_PT, bold=True, side="left")

    def block(self, corner: Point, wide: float, tall: float, fill: Colour, text: str, **look: Any) -> None:
        """Fill a rectangle, and write a text that can be read on it in its middle; `look` as of words."""
        self.box(corner, wide, tall, fill)
        self.words((corner[0] + wide / 2, corner[1] + tall / 2), text, colour=text_colour(fill), **look)

    def bar(self, corner: Point, tall: float, pieces: Iterable[tuple[float, Colour, Sequence[str]]]) -> float:
        """Draw a bar of pieces, (width, colour, texts) in inches, and return where it ends.

        A piece has the first of its texts that fits into it.
        """
        x, y = float(corner[0]), float(corner[1])
        for wide, fill, texts in pieces:
            if wide > 0:
                text = next((text for text in texts if wide > width_in(text, SMALL_PT) + 0.1), "")
                self.block((x, y), wide, tall, fill, text)
                x += wide
        return x

    def legend(self, boxes: Sequence[LegendBox], *, low: float = LEGEND_LOW) -> None:
        """Write a legend along the bottom, in inches: as many entries per line as fit, the last line lowest."""
        for number, line in enumerate(reversed(legend_lines(boxes))):
            x, y = LEGEND_LEFT, low + LEGEND_LINE_IN * number
            for entry in line:
                self.box((x, y), 0.31, 0.19, entry.fill, edge=entry.edge, line=1.2)
                self.words((x + 0.155, y + 0.095), entry.letter, size=LEAST_PT, colour=text_colour(entry.fill))
                self.words((x + 0.4, y + 0.095), entry.words, size=LEGEND_PT, side="left")
                x += _legend_width(entry)

    def flush(self) -> None:
        """Draw what was collected."""
        for gid, shapes, zorder in (("boxes", self._boxes, 3.0), ("arrows", self._heads, 2.6)):
            self._add_shapes(gid, shapes, zorder)
        if self._lines:
            curves, colours, widths = zip(*self._lines, strict=True)
            lines = LineCollection(curves, colors=colours, linewidths=widths, zorder=2.5, gid="lines")
            self._add(lines)
        self._add_shapes("outlines", self._outlines, 4.0)
        if self._words:
            self._add(Words(self._words))

    def finish(self, title: str, note: str, *lines: str) -> Picture:
        """Draw what was collected, and return the whole figure as a picture.

        Its title and the note under it begin the words; the lines follow.
        """
        self.flush()
        figure = self.surface.get_figure(root=True)
        assert figure is not None, "a pen draws on a figure, or on axes of one"
        return finished(figure, title, note, *lines)

    def _add_shapes(
        self, gid: str, shapes: Sequence[tuple[NDArray[np.float64], Any, Any, float]], zorder: float
    ) -> None:
        if shapes:
            corners, fills, edges, widths = zip(*shapes, strict=True)
            look: dict[str, Any] = {"facecolors": fills, "edgecolors": edges, "linewidths": widths, "zorder": zorder}
            self._add(PolyCollection(corners, gid=gid, **look))

    def _add(self, artist: Artist) -> None:
        if isinstance(self.surface, Figure):
            artist.set_transform(self.surface.dpi_scale_trans)
        self.surface.add_artist(artist)


def sheet(height_in: float) -> tuple[Figure, Pen]:
    """Make an empty figure, and a pen on axes that cover it and whose unit is the inch."""
    figure = new_figure(height_in)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH_IN)
    axes.set_ylim(0, height_in)
    axes.set_axis_off()
    return figure, Pen(axes)


def finished(figure: Figure, title: str, note: str, *lines: str) -> Picture:
    """Write the takeaway over a figure and a note under it, and say both, then the lines."""
    put_title(figure, title, note)
    return Picture(figure, "\n".join([f"{title}. {note}", *lines]))


def put_legend(figure: Figure, boxes: Sequence[LegendBox]) -> None:
    """Put a legend of lettered boxes along the bottom of the figure."""
    pen = Pen(figure)
    pen.legend(boxes)
    pen.flush()


def legend_lines(boxes: Sequence[LegendBox]) -> list[list[LegendBox]]:
    """Break a legend's entries into lines that fit into a figure's width."""
    lines: list[list[LegendBox]] = [[]]
    x = LEGEND_LEFT
    for entry in boxes:
        if lines[-1] and x + _legend_width(entry) - 0.3 > LEGEND_RIGHT:
            lines.append([])
            x = LEGEND_LEFT
        lines[-1].append(entry)
        x += _legend_width(entry)
    return lines


def _legend_width(entry: LegendBox) -> float:
    return 0.7 + width_in(entry.words, LEGEND_PT)


def _bent(start: Point, end: Point, bend: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a straight or bent line, and the point that it bends towards: its middle, where it is straight."""
    first, last = np.asarray(start, dtype=float), np.asarray(end, dtype=float)
    along = last - first
    control = (first + last) / 2 + bend * np.array([-along[1], along[0]])
    share = np.linspace(0.0, 1.0, 21 if bend else 2)[:, None]
    return (1 - share) ** 2 * first + 2 * share * (1 - share) * control + share**2 * last, control
