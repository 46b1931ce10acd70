"""How every picture looks: one colour and one letter per kind of span, and fonts for a projector.

Readers with any colour vision can tell the colours apart. In greyscale the letters carry the meaning alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import to_hex, to_rgb

DPI = 100
WIDTH_IN = 12.8
TITLE_PT, TEXT_PT, SMALL_PT = 18.0, 13.0, 11.0
LEAST_PT = 10.5  # a notebook scales a picture down by a third, and these letters can still be read
INK, FAINT, IDLE = "#1A1A1A", "#666666", "#F1F1F1"
# What belongs to one rank, from Paul Tol's muted colours: none of them is a pass's or an update's. And what is the same
# on all ranks: a sum, a mean.
RANK_COLOURS = ("#44AA99", "#CC6677", "#DDCC77", "#AA4499", "#117733", "#999933", "#88CCEE", "#882255")
SHARED = "#44546A"
# Lines of a plot, each with a marker of its own.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#44AA99")
LINE_MARKERS = "osD^vPX*"

Colour = str | tuple[float, float, float]


class KindStyle(NamedTuple):
    """Colour, letters and words of one kind of span."""

    colour: str
    letter: str
    words: str


_TABLES = tomllib.loads(Path(__file__).with_name("styles.toml").read_text("utf-8"))


def styles(table: str) -> Mapping[str, KindStyle]:
    """Return a table of styles.toml: the colour, the letters and the words of each kind."""
    return MappingProxyType({kind: KindStyle(*row) for kind, row in _TABLES[table].items()})


KINDS = styles("kinds")
AXIS_STYLES = styles("axes")
_ALIASES = {"forward": "F", "backward": "B", "SEND_F": "send", "SEND_B": "send", "RECV_F": "recv", "RECV_B": "recv"}
_SPARE = ("#CC6677", "#88CCEE", "#999933", "#6A3D9A", "#B2DF8A", "#44546A")

SHADE = "~"  # "F~1": a forward pass of its rank's second stage; a legend explains the first shade alone


def kind_styles(kinds: Sequence[str]) -> dict[str, KindStyle]:
    """Return the style of each kind; in the palette's order.

    A kind that has none of its own gets a spare colour and its first letters. A shade of a kind is lighter than the
    one before: see `lanes.shaded`.
    """
    styles: dict[str, KindStyle] = {}
    known_order = {kind: place for place, kind in enumerate(KINDS)}
    for kind in sorted(set(kinds), key=lambda kind: (known_order.get(kind.partition(SHADE)[0], len(KINDS)), kind)):
        base, _, shade = kind.partition(SHADE)
        known = KINDS.get(_ALIASES.get(base, base))
        if known is None:
            letters = "".join(word[0] for word in re.findall(r"[^\W_]+", kind))[:2] or "?"
            known = KindStyle(_SPARE[sum(kind.encode()) % len(_SPARE)], letters.upper(), kind.replace("_", " "))
        styles[kind] = known._replace(colour=to_hex(lighter(known.colour, int(shade)))) if shade else known
    return styles


def line_look(index: int) -> dict[str, Any]:
    """Return the colour and the marker of a plot's line, as matplotlib takes them."""
    which = index % len(LINE_COLOURS)
    return {"color": LINE_COLOURS[which], "marker": LINE_MARKERS[which]}


def lighter(colour: str, shade: int) -> tuple[float, float, float]:
    """Return a colour of the same hue for a rank's stage number `shade`: each is lighter than the one before."""
    return pale(colour, max(0.2, 0.6**shade))


def pale(colour: str, share: float = 0.38) -> tuple[float, float, float]:
    """Return the colour mixed with white, keeping `share` of it: how a prediction is drawn."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def text_colour(background: Colour) -> str:
    """Return black or white, whichever reads better on the background: one of them has a contrast of 4.5 at least."""
    return "black" if _luminance(background) > 0.179 else "white"


def text_on_white(colour: str) -> str:
    """Return the colour for letters on white: as dark as a contrast of 4.5 needs.

    Source: Web Content Accessibility Guidelines 2.2, 1.4.3
    """
    while 1.05 / (_luminance(colour) + 0.05) < 4.5:
        red, green, blue = to_rgb(colour)
        colour = to_hex((0.95 * red, 0.95 * green, 0.95 * blue))
    return colour


def _luminance(colour: Colour) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


class LegendBox(NamedTuple):
    """One entry of a legend: a filled box with letters in it, and the words to its right."""

    fill: Colour
    edge: str
    letter: str
    words: str
