"""Paint a figure light on dark: every colour keeps its hue, and light and dark change places.

White paper turns black, ink white, a pale box dim. Letters are drawn in a colour that can be read
on what is under them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from simulator.viz.drawing.style import LEAST_CONTRAST, contrast

GREY = 0.05  # a colour of less chroma
Colours = NDArray[np.float64]


@contextmanager
def darkened(figure: Figure) -> Iterator[FigureCanvasAgg]:
    """Let whatever renders the figure in this context paint it light on dark, and hand out its canvas."""
    before = figure.canvas
    try:
        yield _DarkCanvas(figure)
    finally:
        figure.set_canvas(before)


def flip(colours: Colours) -> Colours:
    """Exchange light and dark and keep hue and chroma: greys change places, a full colour stays nearly as it is.

    Shapes: colours [..., 3], 0 to 1 -> [..., 3]
    """
    most, least = colours.max(axis=-1, keepdims=True), colours.min(axis=-1, keepdims=True)
    flipped: Colours = np.clip(colours + (1 - most - least) * np.sqrt(1 - (most - least)), 0, 1)
    return flipped


class _DarkCanvas(FigureCanvasAgg):
    """A figure's canvas whose pixels are flipped once all is drawn."""

    def get_renderer(self) -> Any:
        """Return a renderer of this figure's size, new for each drawing."""
        width, height = self.get_width_height(physical=True)
        self.renderer = _DarkLetters(width, height, self.figure.dpi)  # type: ignore[no-untyped-call]
        return self.renderer

    def buffer_rgba(self) -> Any:
        """Return the pixels, light on dark."""
        pixels = np.array(super().buffer_rgba())  # type: ignore[no-untyped-call]
        pixels[..., :3] = np.round(255 * flip(pixels[..., :3] / 255))
        return pixels


class _DarkLetters(RendererAgg):
    """Agg's renderer, with letters in a colour that can be read once the pixels are flipped."""

    def draw_text(self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, *more: Any, **named: Any) -> None:
        """Draw a text whose baseline begins at (x, y), y from the top."""
        wide, tall, descent = self.get_text_width_height_descent(s, prop, False)  # type: ignore[no-untyped-call]
        sides = (x, x + wide, y - tall + descent, y + descent)
        if 45 < angle % 180 < 135:  # upright
            sides = (x - tall + descent, x + descent, y - wide, y)
        left, right, top, bottom = (max(0, int(side)) for side in sides)
        pixels = np.asarray(self.buffer_rgba())  # type: ignore[no-untyped-call]
        behind = pixels[top : bottom + 1, left : right + 1, :3].reshape(-1, 3) / 255
        if behind.size:
            gc.set_foreground(tuple(_readable(np.array(gc.get_rgb()[:3]), np.median(behind, axis=0))))
        super().draw_text(gc, x, y, s, prop, angle, *more, **named)  # type: ignore[no-untyped-call]


def _readable(letters: Colours, behind: Colours) -> Colours:
    """Return the colour for letters that can be read once it and what is behind it are flipped: the nearest there is.

    Grey letters turn black or white at once.
    """
    ends, under = (np.zeros(3), np.ones(3)), flip(behind)
    shares = (0.0, 1.0) if np.ptp(letters) < GREY else np.linspace(0, 1, 11).tolist()
    mixed = [letters + share * (end - letters) for share in shares for end in ends]
    return next(colour for colour in mixed if contrast(flip(colour), under) >= LEAST_CONTRAST)
