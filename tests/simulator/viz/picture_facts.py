"""What a reader sees of a picture: its texts, and which of them lie on each other, are cut, small or pale.

Every text is noted at the moment at which it would be drawn, whatever artist draws it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from PIL import Image

from simulator.viz.drawing.plot import Words
from simulator.viz.drawing.theme import LEAST_PT

TOUCH_PX = 1.5  # two texts may touch by this much: the edges of letters are blurred
LEAST_CONTRAST = 4.5  # Web Content Accessibility Guidelines 2.2, 1.4.3
COVERED = 0.35  # of the pixels behind a text: a thin line may pass there


def with_gid(figure, gid):
    """Return what a figure's axes have of this name."""
    return [artist for axes in figure.axes for artist in axes.get_children() if artist.get_gid() == gid]


def words(figure):
    """Return every text of a figure: its own, those of its axes, and those of its pens and its legend."""
    own = [text.get_text() for holder in (figure, *figure.axes) for text in holder.texts]
    artists = [artist for holder in (*figure.axes, figure) for artist in holder.get_children()]
    return own + [word.text for artist in artists if isinstance(artist, Words) for word in artist.words]


class Written(NamedTuple):
    """A line of text as it was drawn; pixels from the left and from the top."""

    text: str
    size_pt: float
    colour: np.ndarray
    left: float
    top: float
    right: float
    bottom: float
    clip: tuple[float, float, float, float] | None

    def within(self, left: float, top: float, right: float, bottom: float) -> bool:
        """Tell whether the text stands in a rectangle."""
        across = left - TOUCH_PX <= self.left and self.right <= right + TOUCH_PX
        return across and top - TOUCH_PX <= self.top and self.bottom <= bottom + TOUCH_PX


class Look(NamedTuple):
    """A picture's texts and the picture without them: pixels [height, width, 3], 0 to 1."""

    written: list[Written]
    pixels: np.ndarray


def colours(png):
    """Return a PNG's pixels [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def plain(figure: Figure, **options: float) -> bytes:
    """Return the figure as PNG, as matplotlib alone makes it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", **options)
    return out.getvalue()


def look_at(figure: Figure, render: Callable[[Figure], bytes] = plain) -> Look:
    """Let `render` make the PNG, and note its texts in place of drawing them."""
    written: list[Written] = []

    def note(renderer, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        """Note a text: its baseline begins at (x, y), y from the top, and it is turned by `angle` degrees."""
        if not s.strip():
            return
        wide, tall, descent = renderer.get_text_width_height_descent(s, prop, ismath)
        turn = np.deg2rad(angle)
        along, up = np.array([np.cos(turn), -np.sin(turn)]), np.array([-np.sin(turn), -np.cos(turn)])
        corners = np.array([[x, y] + a * along + b * up for a in (0, wide) for b in (-descent, tall - descent)])
        clip = gc.get_clip_rectangle()
        bounds = clip and (clip.x0, renderer.height - clip.y1, clip.x1, renderer.height - clip.y0)
        sides = *corners.min(axis=0).tolist(), *corners.max(axis=0).tolist()
        written.append(Written(s, prop.get_size_in_points(), np.array(gc.get_rgb()[:3]), *sides, bounds))

    def clear(renderer):
        """Begin again: what was drawn to lay the figure out is not what is seen."""
        cleared(renderer)
        written.clear()

    cleared = RendererAgg.clear
    FigureCanvasAgg(figure)  # in place of one that stamps the texts that it drew before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RendererAgg, "draw_text", note)
        patch.setattr(RendererAgg, "clear", clear)
        png = render(figure)
    return Look(written, colours(png) / 255)


def faults(figure: Figure, render: Callable[[Figure], bytes] = plain) -> list[str]:
    """Return what cannot be read in a picture."""
    look = look_at(figure, render)
    return [*clashes(look), *pale_texts(look), *small_texts(look)]


def clashes(look: Look) -> list[str]:
    """Return which texts lie on each other, and which the edge of the picture or of their axes cuts."""
    found = []
    for number, one in enumerate(look.written):
        for other in look.written[number + 1 :]:
            across, down = min(one.right, other.right) - max(one.left, other.left), min(one.bottom, other.bottom)
            if across > TOUCH_PX and down - max(one.top, other.top) > TOUCH_PX:
                found.append(f"{one.text!r} over {other.text!r}")
        height, width = look.pixels.shape[:2]
        if not one.within(0, 0, width, height) or (one.clip and not one.within(*one.clip)):
            found.append(f"{one.text!r} is cut")
    return found


def pale_texts(look: Look) -> list[str]:
    """Return the texts that stand out too little from what is behind them."""
    found = []
    for one in look.written:
        rows = slice(max(0, int(one.top)), max(0, int(one.bottom)) + 1)
        behind = look.pixels[rows, max(0, int(one.left)) : max(0, int(one.right)) + 1].reshape(-1, 3)
        light, dark = (pick(_luminance(one.colour), _luminance(behind)) for pick in (np.maximum, np.minimum))
        ratio = (light + 0.05) / (dark + 0.05)
        if ratio.size and np.quantile(ratio, COVERED) < LEAST_CONTRAST:
            found.append(f"{one.text!r} has {np.quantile(ratio, COVERED):.2f}:1")
    return found


def _luminance(colour: np.ndarray) -> np.ndarray:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def small_texts(look: Look) -> list[str]:
    """Return the texts whose letters are too small on a usual page."""
    return [f"{one.text!r} has {one.size_pt:.1f} points" for one in look.written if one.size_pt < LEAST_PT - 0.05]
