"""Paint one figure after the other quickly: what a slider draws differs little from what it drew before.

Laying out and rendering text takes most of a small figure's time. A Painter keeps the sizes and the images of the texts
that it has drawn. A text that comes again, at whatever place, is stamped.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

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
