"""What a notebook gets of a picture: PNG with its alt text, and the text that says the same."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from simulator.viz.drawing.style import DPI, LEAST_PT

Bundle = tuple[dict[str, Any], dict[str, Any]]
LEAST_SHOWN_PT = 6.8  # 9 pixels; so the widest picture fits a notebook of 800 pixels, and on a narrower page it scrolls
SCROLLS = "distlab-scrolls"  # its bar is always seen, since a picture that is cut between two words looks complete
BAR = f".{SCROLLS}::-webkit-scrollbar {{ height: 9px }}\n"
BAR += f".{SCROLLS}::-webkit-scrollbar-thumb {{ background: #9A9FA8; border-radius: 4px }}\n"
NAMES = Path(__file__).with_name("name_controls.js")  # begins each widget's script: names for a screen reader
DARK_PAGES = 'body[data-jp-theme-light="false"]', "body.vscode-dark", "body.vscode-high-contrast"


def with_picture(bundle: Any, png: bytes, *, title: str, text: str) -> Bundle:
    """Add a picture and its text to a MIME bundle, for viewers that cannot show what else it holds."""
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
    data, metadata = {**(data or {}), "text/plain": text}, dict(metadata or {})
    if png:
        data["image/png"] = base64.b64encode(png).decode("ascii")
        metadata["image/png"] = {"alt": title}
    return data, metadata


def picture_html(light: bytes, dark: bytes, *, title: str, text: str = "", dpi: float = DPI) -> str:
    """Return a picture (two PNGs of one size) as HTML that follows the theme of JupyterLab or VS Code.

    The dark picture is the background behind the light one, which a dark page hides. A page that drops styles shows
    the light one. The picture is scaled down on a narrow page, but not below what can be read: there it scrolls.

    Args:
        light: dark on white.
        dark: light on dark, or empty: the light one is shown on every page.
        title: the alt text.
        text: a paragraph under the picture.
        dpi: pixels per inch at which the PNGs were drawn.
    """
    least_scale = LEAST_SHOWN_PT * 96 / (LEAST_PT * dpi)  # a page has 96 pixels per inch
    wide = int.from_bytes(light[16:20], "big")  # a PNG's header begins with its width in pixels
    size = f"width:100%;min-width:{least_scale * wide:.0f}px;max-width:{wide}px"
    name = f"distlab-{hashlib.sha256(light).hexdigest()[:12]}"
    image = f'<img style="display:block;width:100%" alt="{html.escape(title)}" src="{_address(light)}">'
    style = BAR
    if dark:
        paper = ", ".join(f"{page} .{name}" for page in DARK_PAGES)
        style += f"{paper} {{ background: url({_address(dark)}) 0 0 / 100% 100% no-repeat }}\n"
        style += ", ".join(f"{page} .{name} img" for page in DARK_PAGES) + " { opacity: 0 }"
    below = f'<p style="white-space:pre-wrap">{html.escape(text)}</p>' if text else ""
    picture = f'<div class="{name}" style="{size}">{image}</div>'
    return f'<style>{style}</style><div class="{SCROLLS}" style="overflow-x:auto">{picture}</div>{below}'


def _address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def title_of(figure: Figure) -> str:
    """Return the figure's title: its first text, or the first title over its axes."""
    texts = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    texts += [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center", "right")]
    return next((" ".join(text.split()) for text in texts if text.strip()), "")
