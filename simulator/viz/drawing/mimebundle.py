"""What a notebook gets of a picture: PNG with its alt text, and the text that says the same."""

from __future__ import annotations

import base64
from typing import Any

from matplotlib.figure import Figure

Bundle = tuple[dict[str, Any], dict[str, Any]]


def with_picture(bundle: Any, png: bytes, *, title: str, text: str) -> Bundle:
    """Add a picture and its text to a MIME bundle, for viewers that cannot show what else it holds."""
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
    data, metadata = {**(data or {}), "text/plain": text}, dict(metadata or {})
    if png:
        data["image/png"] = base64.b64encode(png).decode("ascii")
        metadata["image/png"] = {"alt": title}
    return data, metadata


def title_of(figure: Figure) -> str:
    """Return the figure's title: its first text, or the first title over its axes."""
    texts = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    texts += [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center", "right")]
    return next((" ".join(text.split()) for text in texts if text.strip()), "")
