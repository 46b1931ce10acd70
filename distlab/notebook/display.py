"""Show a picture with its words."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture:
    """A figure as PNG, with the text that says what it shows: for screen readers, terminals and diffs."""

    def __init__(self, png: bytes, text: str) -> None:
        self.png, self.text = png, text

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        data = base64.b64encode(self.png).decode()
        words = html.escape(self.text, quote=True)
        image = f'<img style="max-width:100%" alt="{words}" src="data:image/png;base64,{data}">'
        return {"text/plain": self.text, "text/html": f'{image}<p style="white-space:pre-wrap">{words}</p>'}


def show(figure: Figure | bytes, text: str) -> None:
    """Display a figure (or PNG bytes) in the notebook, with its alt text and the same text below it.

    Raises:
        ValueError: the text is empty: a picture without words says nothing to those who cannot see it.
    """
    from IPython.display import display

    if not text.strip():
        raise ValueError("show(figure, text) needs the text that says what the figure shows")
    picture = Picture(figure if isinstance(figure, bytes) else png_of(figure), text)
    display(picture)  # type: ignore[no-untyped-call]


def png_of(figure: Any, dpi: int = 110) -> bytes:
    """Return a figure as PNG and close it, so that the notebook does not show it once more."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight")
    manager = getattr(figure.canvas, "manager", None)
    if manager is not None:
        import matplotlib.pyplot as plt

        plt.close(figure)
    return buffer.getvalue()
