"""The legend along the bottom of a figure, as one artist: lettered boxes with words beside them, in columns.

matplotlib's own legend packs every entry into boxes in boxes, and asks each for its size several times a drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.transforms import IdentityTransform

from simulator.viz.drawing.letters import TALLEST
from simulator.viz.drawing.style import INK, TEXT_PT, LegendBox, text_colour

SIZE_PT = TEXT_PT - 1
# In heights of the font: the margin to the left and below, a box, what is between boxes and words, columns and lines.
MARGIN, BOX_WIDE, BOX_TALL, PAD, COLUMN_GAP, LINE_GAP = 0.9, 1.9, 1.05, 0.5, 1.4, 0.5
MIDDLE = 0.35  # of a box, over the line on which the words stand
LETTER_SHARE, EDGE_PT = 0.85, 1.2


class Legend(Artist):
    """Draws a legend in the figure's lower left corner, column by column.

    Attributes:
        boxes: the entries.
        num_columns: how many columns there are at most.
    """

    def __init__(self, boxes: Sequence[LegendBox], num_columns: int) -> None:
        super().__init__()
        self.boxes, self.num_columns = tuple(boxes), num_columns
        self.set_zorder(5)

    def draw(self, renderer: Any) -> None:
        """Draw the entries; the first column's is the leftmost, and a short column ends early."""
        if not self.get_visible() or not self.boxes:
            return
        em = SIZE_PT * renderer.points_to_pixels(1.0)
        font = FontProperties(size=SIZE_PT)
        _, tall, descent = renderer.get_text_width_height_descent(TALLEST, font, False)
        columns = [part for part in np.array_split(np.arange(len(self.boxes)), self.num_columns) if len(part)]
        x, lines = MARGIN * em, max(len(part) for part in columns)
        for part in columns:
            widest = 0.0
            for line, index in enumerate(part.tolist()):
                words = self.boxes[index].words
                low = MARGIN * em + descent + (lines - 1 - line) * (tall + LINE_GAP * em)
                self._entry(renderer, self.boxes[index], font=font, x=x, low=low, em=em)
                widest = max(widest, renderer.get_text_width_height_descent(words, font, False)[0])
            x += (BOX_WIDE + PAD + COLUMN_GAP) * em + widest

    def _entry(self, renderer: Any, box: LegendBox, *, font: FontProperties, x: float, low: float, em: float) -> None:
        """Draw a box, the letter in it and the words beside it, which stand on the line `low`."""
        wide, half, middle = BOX_WIDE * em, BOX_TALL * em / 2, low + MIDDLE * em
        corners = [(x, middle - half), (x + wide, middle - half), (x + wide, middle + half), (x, middle + half)]
        pen = renderer.new_gc()
        pen.set_linewidth(EDGE_PT * renderer.points_to_pixels(1.0))
        pen.set_foreground(box.edge)
        pen.set_snap(True)
        renderer.draw_path(pen, Path([*corners, corners[0]], closed=True), IdentityTransform(), to_rgb(box.fill))
        small = FontProperties(size=SIZE_PT * LETTER_SHARE)
        _, tall, descent = renderer.get_text_width_height_descent(TALLEST, small, False)
        wide_letter = renderer.get_text_width_height_descent(box.letter, small, False)[0] if box.letter else 0.0
        for text, colour, face, left, up in (
            (box.letter, text_colour(box.fill), small, x + (wide - wide_letter) / 2, middle - (tall - descent) / 2),
            (box.words, INK, font, x + wide + PAD * em, low),
        ):
            if text:
                pen.set_foreground(colour)
                flipped = renderer.get_canvas_width_height()[1] - up if renderer.flipy() else up
                renderer.draw_text(pen, left, flipped, text, face, 0)
        pen.restore()


def put_legend(figure: Figure, boxes: Sequence[LegendBox], *, max_columns: int = 8) -> None:
    """Put a legend of lettered boxes along the bottom of the figure."""
    if boxes:
        figure.add_artist(Legend(boxes, min(max_columns, len(boxes))))


def legend_of(figure: Figure) -> list[str]:
    """Return the words of a figure's legend, in order."""
    return [box.words for artist in figure.get_children() if isinstance(artist, Legend) for box in artist.boxes]
