"""A picture: a figure with the words that say the same, and what a notebook gets of it."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from simulator.viz.drawing.theme import LEAST_PT

Bundle = tuple[dict[str, Any], dict[str, Any]]
SHOWN_DPI = 110  # a little more than a screen's, so that a wide page shows a sharp picture
LEAST_SHOWN_PT = 6.8  # 9 pixels; so the widest picture fits a notebook of 800 pixels, and on a narrower page it scrolls
SCROLLS = "distlab-scrolls"  # its bar is always seen, since a picture that is cut between two words looks complete
BAR = f".{SCROLLS}::-webkit-scrollbar {{ height: 9px }}\n"
BAR += f".{SCROLLS}::-webkit-scrollbar-thumb {{ background: #9A9FA8; border-radius: 4px }}"
NAMES = Path(__file__).with_name("name_controls.js")  # begins each widget's script: names for a screen reader


class Picture(NamedTuple):
    """A figure, and the words that say what it shows: for screen readers, terminals and diffs.

    A notebook shows the picture with its title as alt text, and the words below it. It is a white card, which can be
    read on a light page and on a dark one.

    Attributes:
        figure: what is seen.
        words: what is read.
    """

    figure: Figure
    words: str

    def __repr__(self) -> str:
        return self.words

    @property
    def title(self) -> str:
        """The figure's title, or the words where it has none."""
        return title_of(self.figure) or self.words

    def png(self) -> bytes:
        """Return the whole page as PNG, and more of it where something stands outside."""
        self.figure.draw_without_rendering()
        page = Bbox.union([Bbox.from_bounds(0, 0, *self.figure.get_size_inches()), self.figure.get_tightbbox()])
        out = io.BytesIO()
        self.figure.savefig(out, format="png", dpi=SHOWN_DPI, bbox_inches=page)
        return out.getvalue()

    def _repr_mimebundle_(self, **_options: object) -> Bundle:
        """Return the picture as PNG, and as HTML: its title is the alt text, and its words stand below.

        It is scaled down on a narrow page, but not below what can be read: there it scrolls.
        """
        png, title = self.png(), html.escape(self.title)
        least_scale = LEAST_SHOWN_PT * 96 / (LEAST_PT * SHOWN_DPI)  # a page has 96 pixels per inch
        wide = int.from_bytes(png[16:20], "big")  # a PNG's header begins with its width in pixels
        size = f"display:block;width:100%;min-width:{least_scale * wide:.0f}px;max-width:{wide}px;border-radius:6px"
        address = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
        image = f'<img style="{size}" alt="{title}" src="{address}">'
        below = f'<p style="white-space:pre-wrap">{html.escape(self.words)}</p>'
        page = f'<style>{BAR}</style><div class="{SCROLLS}" style="overflow-x:auto">{image}</div>{below}'
        return with_picture({"text/html": page}, png, title=self.title, words=self.words)


def with_picture(bundle: Any, png: bytes, *, title: str, words: str) -> Bundle:
    """Add a picture and its words to a MIME bundle, for viewers that cannot show what else it holds."""
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
    data, metadata = {**(data or {}), "text/plain": words}, dict(metadata or {})
    if png:
        data["image/png"] = base64.b64encode(png).decode("ascii")
        metadata["image/png"] = {"alt": title}
    return data, metadata


def title_of(figure: Figure) -> str:
    """Return the figure's title: its first text, or the first title over its axes."""
    texts = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    texts += [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center", "right")]
    return next((" ".join(text.split()) for text in texts if text.strip()), "")
