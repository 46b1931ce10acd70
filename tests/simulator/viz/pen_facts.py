"""What a pen drew, read from its figure: words, shapes, and words that lie on each other or leave the sheet."""

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from simulator.viz.drawing.words import HALF_CAPITAL, SIDES, Words, width_in

MARGIN_IN = 0.005


def drawn(figure, gid):
    return [artist for artist in figure.axes[0].collections if artist.get_gid() == gid]


def words_of(axes):
    """Return the texts that a Pen or the boxes of spans have on axes, in the order of drawing."""
    return [word.text for artist in axes.get_children() if isinstance(artist, Words) for word in artist.words]


def words(figure):
    return words_of(figure.axes[0])


def shapes(figure, gid):
    return sum(len(artist.get_paths()) for artist in drawn(figure, gid))


def legend_of(figure):
    """Return the words of a figure's legend, in order."""
    (legend,) = (artist for artist in figure.get_children() if isinstance(artist, Words))
    return [word.text for word in legend.words if word.side == "left"]


def word_boxes(figure):
    """Return the inches that each word takes: left, low, right, high."""
    boxes = []
    artists = [artist for artist in figure.axes[0].get_children() if isinstance(artist, Words)]
    for word in (word for artist in artists for word in artist.words):
        font = FontProperties(size=word.size, weight="bold" if word.bold else "normal")
        ink = TextPath((0, 0), word.text, prop=font).get_extents()
        left = word.x - SIDES[word.side] * width_in(word.text, word.size, word.bold)
        low = word.y - HALF_CAPITAL * word.size / 72
        boxes.append((left + ink.x0 / 72, low + ink.y0 / 72, left + ink.x1 / 72, low + ink.y1 / 72))
    return np.array(boxes)


def clashes(figure):
    """Return pairs of words that overlap, and words that are not wholly on the sheet."""
    boxes, names = word_boxes(figure), words(figure)
    left, low, right, high = (boxes[:, side] for side in range(4))
    across = np.minimum(right[:, None], right) - np.maximum(left[:, None], left) > MARGIN_IN
    upright = np.minimum(high[:, None], high) - np.maximum(low[:, None], low) > MARGIN_IN
    first, second = np.nonzero(np.triu(across & upright, 1))
    wide, tall = figure.get_size_inches()
    outside = np.flatnonzero((left < 0) | (low < 0) | (right > wide) | (high > tall))
    found = [(names[one], names[other]) for one, other in zip(first.tolist(), second.tolist(), strict=True)]
    return found + [(names[one], "outside") for one in outside.tolist()]
