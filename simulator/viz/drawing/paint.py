"""Paint a figure to PNG quickly: a text that was drawn before, at whatever place, is stamped.

What a slider draws differs little from what it drew before, and laying out and rendering text takes most of a small
figure's time. So the sizes and the images of texts are kept, for all figures together.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from numpy.typing import NDArray

MAX_STAMPS = 4096
PARTS = 4  # of a pixel, to which a stamp's place across is rounded; up and down it stands on whole pixels
MARGIN = 3


def to_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes; the same figure gives the same bytes."""
    canvas = _Canvas(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return pack_png(np.asarray(canvas.buffer_rgba(), np.uint8))  # type: ignore[no-untyped-call]


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
    """A figure's canvas that stamps its texts."""

    def get_renderer(self) -> Any:
        """Return a renderer of this figure's size."""
        width, height = self.get_width_height(physical=True)
        self.renderer = _Renderer(width, height, self.figure.dpi)  # type: ignore[no-untyped-call]
        return self.renderer


class _Renderer(RendererAgg):
    """Agg's renderer, with plain level text stamped from images of it."""

    def draw_text(self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, *more: Any, **named: Any) -> None:
        """Stamp level text; draw turned text and mathematics as ever (`more` and `named`: ismath, mtext)."""
        if angle or (more[0] if more else named.get("ismath")):
            super().draw_text(gc, x, y, s, prop, angle, *more, **named)  # type: ignore[no-untyped-call]
            return
        whole, part = divmod(round(x * PARTS), PARTS)
        image, below = _stamp(s, _Font.of(prop), gc.get_rgb()[:3], part / PARTS, self.dpi)
        self.draw_image(gc, whole - MARGIN, int(self.height) - round(y) - below, image)

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        """Return the size of a text, from memory where it is known."""
        return _size(s, _Font.of(prop), ismath, self.dpi)


class _Font(NamedTuple):
    """What tells fonts apart; matplotlib's own description of one can change, and so is no key."""

    family: tuple[str, ...]
    size: float
    weight: Any
    style: Any

    @classmethod
    def of(cls, prop: FontProperties) -> _Font:
        return cls(tuple(prop.get_family()), prop.get_size_in_points(), prop.get_weight(), prop.get_style())

    @property
    def properties(self) -> FontProperties:
        return FontProperties(family=list(self.family), style=self.style, size=self.size, weight=self.weight)


@lru_cache(MAX_STAMPS)
def _size(text: str, font: _Font, ismath: Any, dpi: float) -> tuple[float, float, float]:
    found = RendererAgg(1, 1, dpi).get_text_width_height_descent(text, font.properties, ismath)  # type: ignore[no-untyped-call]
    return float(found[0]), float(found[1]), float(found[2])


@lru_cache(MAX_STAMPS)
def _stamp(text: str, font: _Font, colour: Any, part: float, dpi: float) -> tuple[NDArray[np.uint8], int]:
    """Return the pixels of a text from the bottom up, and how many are below its baseline.

    It stands alone, its origin `part` of a pixel right of the margin.
    """
    width, height, descent = _size(text, font, False, dpi)
    below = math.ceil(descent) + MARGIN
    tall = math.ceil(height) + 2 * MARGIN + 1
    small = RendererAgg(math.ceil(width) + 2 * MARGIN + 1, tall, dpi)  # type: ignore[no-untyped-call]
    pen = small.new_gc()
    pen.set_foreground(colour, isRGBA=False)
    small.draw_text(pen, MARGIN + part, tall - below, text, font.properties, 0)  # type: ignore[no-untyped-call]
    return np.asarray(small.buffer_rgba())[::-1].copy(), below  # type: ignore[no-untyped-call]
