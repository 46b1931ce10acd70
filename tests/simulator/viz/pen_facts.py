"""What a pen drew, read from its figure: words, shapes, and words that lie on each other or leave the sheet."""

import numpy as np

MARGIN_IN = 0.005


def drawn(figure, gid):
    return [artist for artist in figure.axes[0].collections if artist.get_gid() == gid]


def words(figure):
    return [word for artist in drawn(figure, "words") for word in artist.get_label().splitlines()]


def shapes(figure, gid):
    return sum(len(artist.get_paths()) for artist in drawn(figure, gid))


def word_boxes(figure):
    """Return the inches that each word takes: left, low, right, high."""
    (letters,) = drawn(figure, "words")
    boxes = []
    for path, (x, y) in zip(letters.get_paths(), letters.get_offsets(), strict=True):
        ink = path.get_extents()
        boxes.append((x + ink.x0 / 72, y + ink.y0 / 72, x + ink.x1 / 72, y + ink.y1 / 72))
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
