"""What a pen drew, read from its figure: words, shapes, and words that lie on each other or leave the sheet."""

import picture_facts

from simulator.viz.drawing.words import Words


def words_of(axes):
    """Return the texts that a Pen or the boxes of spans have on axes, in the order of drawing."""
    return [word.text for artist in axes.get_children() if isinstance(artist, Words) for word in artist.words]


def words(figure):
    """Return every text of a figure: its own, those of its axes and those of its pens."""
    own = [text.get_text() for holder in (figure, *figure.axes) for text in holder.texts]
    return own + [word for axes in figure.axes for word in words_of(axes)]


def shapes(figure, gid):
    """Return how many shapes the collections of this name have."""
    return sum(len(artist.get_paths()) for artist in picture_facts.with_gid(figure, gid))


def legend_of(figure):
    """Return the words of a figure's legend, in order."""
    (legend,) = (artist for artist in figure.get_children() if isinstance(artist, Words))
    return [word.text for word in legend.words if word.side == "left"]


def clashes(figure):
    """Return which words overlap when the figure is drawn, and which are not wholly on the sheet."""
    return picture_facts.clashes(picture_facts.look_at(figure))
