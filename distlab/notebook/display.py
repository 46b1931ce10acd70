"""Show a picture with its words."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110  # a little more than a screen's, so that a wide page shows a sharp picture


class Picture:
    """A figure as PNG, with the text that says what it shows: for screen readers, terminals and diffs."""

    def __init__(self, png: bytes, text: str, dark: bytes = b"") -> None:
        self.png, self.text, self.dark = png, text, dark

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from simulator.viz import picture_html

        page = picture_html(self.png, self.dark, title=self.text, text=self.text, dpi=DPI)
        return {"text/plain": self.text, "text/html": page}


def show(figure: Figure | bytes, text: str) -> None:
    """Display a figure (or PNG bytes) in the notebook, with its alt text and the same text below it.

    A figure follows a dark theme; PNG bytes stay as they are.

    Raises:
        ValueError: the text is empty: a picture without words says nothing to those who cannot see it.
    """
    from IPython.display import display

    if not text.strip():
        raise ValueError("show(figure, text) needs the text that says what the figure shows")
    light, dark = (figure, b"") if isinstance(figure, bytes) else (png_of(figure), png_of(figure, dark=True))
    display(Picture(light, text, dark))  # type: ignore[no-untyped-call]


def png_of(figure: Any, *, dark: bool = False) -> bytes:
    """Return a figure as PNG: the whole page, and more of it where something stands outside."""
    from matplotlib.transforms import Bbox

    from simulator.viz import darkened

    buffer = io.BytesIO()
    with darkened(figure) if dark else nullcontext():
        figure.draw_without_rendering()
        page = Bbox.union([Bbox.from_bounds(0, 0, *figure.get_size_inches()), figure.get_tightbbox()])
        figure.savefig(buffer, format="png", dpi=DPI, bbox_inches=page)
    return buffer.getvalue()
