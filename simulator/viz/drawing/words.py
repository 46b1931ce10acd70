"""Level words on a picture as one artist: hundreds of them, each placed by a subtraction.

matplotlib's Text makes some thirty objects per text and measures each one anew. These words are never turned and never
wrapped, so where they begin follows from their width alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from simulator.viz.drawing.style import INK, SMALL_PT, Colour

HALF_CAPITAL = 0.37  # of the size: lines of text stand level, whatever their letters
SIDES = {"left": 0.0, "center": 0.5, "right": 1.0}


class Word(NamedTuple):
    """A line of text and its place.

    Attributes:
        x: where its left end, its middle or its right end stands, by `side`, in the artist's units.
        y: where the middle of a capital letter stands, in the artist's units.
        text: what is written.
        size: in points.
        colour: of the letters.
        bold: whether they are bold.
        side: "left", "center" or "right".
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
