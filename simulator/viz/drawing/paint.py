"""Paint figures: one after the other quickly, or light on dark.

What a slider draws differs little from what it drew before, and laying out and rendering text takes most of a small
figure's time. A Painter keeps the sizes and the images of the texts that it has drawn. A text that comes again, at
whatever place, is stamped.

Light on dark every colour keeps its hue, and light and dark change places: white paper turns black, ink white, a pale
box dim. Letters are drawn in a colour that can be read on what is under them.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from simulator.viz.drawing.style import LEAST_CONTRAST, contrast

MAX_STAMPS = 4096
PARTS = 4  # of a pixel, to which a stamp's place across is rounded; up and down it stands on whole pixels
MARGIN = 3
Stamp = tuple[NDArray[np.uint8], int, int]


class Painter:
    """Renders figures to PNG and reuses the texts of those before; the same figure gives the same bytes."""

    def __init__(self) -> None:
        self._renderer: _Renderer | None = None
        self._made_for: tuple[int, int, float] | None = None

    def png(self, figure: Figure) -> bytes:
        """Return the figure as PNG bytes, packed lightly."""
        canvas = _Canvas(figure, self)
        canvas.draw()  # type: ignore[no-untyped-call]
        return pack_png(np.asarray(canvas.buffer_rgba()))  # type: ignore[no-untyped-call]

    def renderer_for(self, width: int, height: int, dpi: float) -> _Renderer:
        """Return the last figure's renderer if the size is the same, else a new one that takes over its stamps."""
        if self._renderer is None or self._made_for != (width, height, dpi):
            old, same_dpi = self._renderer, self._made_for is not None and self._made_for[2] == dpi
            self._renderer, self._made_for = _Renderer(width, height, dpi), (width, height, dpi)
            if old is not None and same_dpi:
                self._renderer.stamps, self._renderer.sizes = old.stamps, old.sizes
        return self._renderer


def pack_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return opaque pixels as PNG bytes.

    Each row is kept as its difference from the row above (filter 2 of the standard). That is zero nearly everywhere in
    a picture of boxes, so the fastest packing is small too. Trying every filter on every row takes twice as long.

    Shapes: pixels [height, width, 3 or more], red, green, blue; what follows is left out
    Source: Portable Network Graphics (PNG) Specification, third edition, W3C 2025: 5.3, 9.2, 11.2.
    """
    height, width = pixels.shape[:2]
    flat = np.ascontiguousarray(pixels[:, :, :3]).reshape(height, 3 * width)
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = 2
    rows[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.data, 1)), (b"IEND", b""))
    packed = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + packed


class _Canvas(FigureCanvasAgg):
    """A figure's canvas that draws with its painter's renderer."""

    def __init__(self, figure: Figure, painter: Painter) -> None:
        self._painter = painter
        super().__init__(figure)

    def get_renderer(self) -> _Renderer:
        """Return the painter's renderer for this figure's size."""
        width, height = self.get_width_height(physical=True)
        return self._painter.renderer_for(width, height, self.figure.dpi)


class _Renderer(RendererAgg):
    """Agg's renderer, with plain level text stamped from images of it."""

    def __init__(self, width: int, height: int, dpi: float) -> None:
        super().__init__(width, height, dpi)  # type: ignore[no-untyped-call]
        self.stamps: dict[tuple[Any, ...], Stamp] = {}
        self.sizes: dict[tuple[Any, ...], tuple[float, float, float]] = {}

    def draw_text(self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, *more: Any, **named: Any) -> None:
        """Stamp level text; draw turned text and mathematics as ever (`more` and `named`: ismath, mtext)."""
        if angle or (more[0] if more else named.get("ismath")):
            super().draw_text(gc, x, y, s, prop, angle, *more, **named)  # type: ignore[no-untyped-call]
            return
        whole, part = divmod(round(x * PARTS), PARTS)
        key = (s, *_font(prop), gc.get_rgb(), part)
        if key not in self.stamps:
            if len(self.stamps) >= MAX_STAMPS:
                self.stamps.clear()
            self.stamps[key] = self._stamp(gc, part / PARTS, s, prop)
        image, left, below = self.stamps[key]
        self.draw_image(gc, whole - left, int(self.height) - round(y) - below, image)

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        """Return the size of a text, from memory where it is known."""
        key = (s, *_font(prop), ismath)
        if key not in self.sizes:
            if len(self.sizes) >= MAX_STAMPS:
                self.sizes.clear()
            self.sizes[key] = super().get_text_width_height_descent(s, prop, ismath)  # type: ignore[no-untyped-call]
        return self.sizes[key]

    def _stamp(self, gc: Any, part: float, s: str, prop: Any) -> Stamp:
        """Draw the text alone: its pixels from the bottom up, and how far left of and below its origin they are."""
        width, height, descent = self.get_text_width_height_descent(s, prop, False)
        below = math.ceil(descent) + MARGIN
        size = math.ceil(width) + 2 * MARGIN + 1, math.ceil(height) + 2 * MARGIN + 1
        small = RendererAgg(*size, self.dpi)  # type: ignore[no-untyped-call]
        pen = small.new_gc()
        pen.set_foreground(gc.get_rgb()[:3], isRGBA=False)
        pen.set_antialiased(gc.get_antialiased())
        small.draw_text(pen, MARGIN + part, size[1] - below, s, prop, 0)  # type: ignore[no-untyped-call]
        return np.asarray(small.buffer_rgba())[::-1].copy(), MARGIN, below  # type: ignore[no-untyped-call]


def _font(prop: Any) -> tuple[Any, ...]:
    return tuple(prop.get_family()), prop.get_size_in_points(), prop.get_weight(), prop.get_style()


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
