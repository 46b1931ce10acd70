"""The letters in boxes as one artist: hundreds of short level texts, each laid out by a subtraction.

matplotlib's Text makes some thirty objects a text and measures each one anew. These stand all in the middle of a box,
are never turned and never wrapped; where they begin follows from their size alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.font_manager import FontProperties

TALLEST = "lp"  # what matplotlib takes for the height of any line


class Letter(NamedTuple):
    """A text and where its middle stands, in the axes' own units; size in points."""

    x: float
    y: float
    text: str
    size: float
    colour: str


class Letters(Artist):
    """Draws level texts centred on their places, within the axes.

    Attributes:
        letters: what is drawn, in this order.
    """

    def __init__(self, letters: list[Letter]) -> None:
        super().__init__()
        self.letters = letters
        self.set_zorder(3)  # where Text stands: over the boxes

    def draw(self, renderer: Any) -> None:
        """Write every letter: the same places as Text's for ha "center" and va "center_baseline"."""
        if not self.get_visible() or not self.letters:
            return
        places = self.get_transform().transform([(letter.x, letter.y) for letter in self.letters])
        fonts: dict[float, tuple[FontProperties, float]] = {}
        pen = renderer.new_gc()
        pen.set_antialiased(True)
        self._set_gc_clip(pen)  # type: ignore[attr-defined]
        tall = renderer.get_canvas_width_height()[1] if renderer.flipy() else None
        for letter, (x, y) in zip(self.letters, places.tolist(), strict=True):
            if letter.size not in fonts:
                font = FontProperties(size=letter.size)
                _, height, descent = renderer.get_text_width_height_descent(TALLEST, font, False)
                fonts[letter.size] = font, (height - descent) / 2
            font, drop = fonts[letter.size]
            wide = renderer.get_text_width_height_descent(letter.text, font, False)[0]
            low = y - drop if tall is None else tall - (y - drop)
            pen.set_foreground(letter.colour)
            renderer.draw_text(pen, x - wide / 2, low, letter.text, font, 0)
        pen.restore()


def letters_of(axes: Any) -> list[str]:
    """Return the texts that stand in the boxes of axes, in the order of drawing."""
    return [letter.text for artist in axes.get_children() if isinstance(artist, Letters) for letter in artist.letters]
