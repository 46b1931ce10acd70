"""How every picture looks: one colour and one letter a kind of span, fonts for a projector, units, the frame.

Colours are told apart by readers with any colour vision, and the letters carry the meaning alone in greyscale.
Figures are made with matplotlib's objects; nothing here touches pyplot's global state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from simulator.viz.drawing.light_axes import LightAxes

DPI = 100
WIDTH_IN = 12.8
TITLE_PT, TEXT_PT, SMALL_PT = 18.0, 13.0, 11.0
INK, FAINT, IDLE = "#1A1A1A", "#666666", "#F1F1F1"
# What belongs to one rank, from Paul Tol's muted colours: none of them is a pass's or an update's. And what is the same
# on all ranks: a sum, a mean.
RANK_COLOURS = ("#44AA99", "#CC6677", "#DDCC77", "#AA4499", "#117733", "#999933", "#88CCEE", "#882255")
SHARED = "#44546A"


class KindStyle(NamedTuple):
    """Colour, letters and words of one kind of span."""

    colour: str
    letter: str
    words: str


# Okabe and Ito's colours first, Paul Tol's muted ones after them.
KINDS: Mapping[str, KindStyle] = MappingProxyType(
    {
        "F": KindStyle("#56B4E9", "F", "forward"),
        "B": KindStyle("#E69F00", "B", "backward"),
        "I": KindStyle("#F0E442", "I", "input gradient"),
        "W": KindStyle("#009E73", "W", "weight gradient"),
        "optimizer": KindStyle("#CC79A7", "O", "optimizer"),
        "loss": KindStyle("#DDCC77", "L", "loss"),
        "data": KindStyle("#D9D2C5", "D", "data"),
        "copy": KindStyle("#C9B79C", "C", "copy"),
        "encode": KindStyle("#8C564B", "En", "encode"),
        "decode": KindStyle("#C49C94", "De", "decode"),
        "recompute": KindStyle("#A6CEE3", "Re", "recompute"),
        "all_reduce": KindStyle("#0072B2", "A", "all-reduce"),
        "reduce_scatter": KindStyle("#D55E00", "RS", "reduce-scatter"),
        "all_gather": KindStyle("#332288", "AG", "all-gather"),
        "broadcast": KindStyle("#882255", "Bc", "broadcast"),
        "reduce": KindStyle("#AA4499", "Rd", "reduce"),
        "all_to_all": KindStyle("#661100", "AA", "all-to-all"),
        "gather": KindStyle("#6699CC", "G", "gather"),
        "scatter": KindStyle("#888800", "Sc", "scatter"),
        "barrier": KindStyle("#4D4D4D", "|", "barrier"),
        "send": KindStyle("#117733", "S", "send"),
        "recv": KindStyle("#44AA99", "R", "receive"),
        "wait": KindStyle("#BDBDBD", "w", "wait"),
    }
)
# The axes of a mesh, by what its ranks split.
AXIS_STYLES: Mapping[str, KindStyle] = MappingProxyType(
    {
        "tensor": KindStyle("#D55E00", "T", "tensor"),
        "context": KindStyle("#009E73", "C", "context"),
        "expert": KindStyle("#CC79A7", "E", "expert"),
        "data": KindStyle("#0072B2", "D", "data"),
        "pipeline": KindStyle("#E69F00", "P", "pipeline"),
    }
)
_ALIASES = {"SEND_F": "send", "SEND_B": "send", "RECV_F": "recv", "RECV_B": "recv"}
_SPARE = ("#CC6677", "#88CCEE", "#999933", "#6A3D9A", "#B2DF8A", "#44546A")


SHADE = "~"  # "F~1": a forward pass of its rank's second stage


def is_first_shade(kind: str) -> bool:
    """Tell whether the kind stands for itself in a legend: its lighter shades need no entry of their own."""
    return SHADE not in kind


def kind_styles(kinds: Sequence[str]) -> dict[str, KindStyle]:
    """Return the style of each kind; in the palette's order.

    A kind that has none of its own gets a spare colour and its first letters. A shade of a kind is lighter than the
    one before: see `shades.py`.
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


def lighter(colour: str, shade: int) -> tuple[float, float, float]:
    """Return a colour of the same hue for a rank's stage number `shade`: each is lighter than the one before."""
    return pale(colour, max(0.2, 0.6**shade))


def pale(colour: str, share: float = 0.38) -> tuple[float, float, float]:
    """Return the colour mixed with white, keeping `share` of it: how a prediction is drawn."""
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def text_colour(background: str | tuple[float, float, float]) -> str:
    """Return black or white, whichever reads better on the background."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(background)]
    luminance = float(np.dot([0.2126, 0.7152, 0.0722], linear))
    return INK if luminance > 0.22 else "white"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return what to multiply seconds by, and the unit, so that the number is easy to read."""
    if seconds >= 2.0:
        return 1.0, "s"
    if seconds >= 1e-3 or seconds == 0:
        return 1e3, "ms"
    return 1e6, "µs"


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """Return what to divide bytes by, and the unit (GB is 1e9), so that the number is easy to read."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return size, unit
    return 1.0, "B"


def percent(share: float, digits: int = 0, sign: str = "") -> str:
    """Write a share as a percentage: 0.051 is '5 %'; `sign` '+' shows the plus too."""
    return f"{share * 100:{sign}.{digits}f} %"


def name_ranks(ranks: Sequence[int]) -> str:
    """Write ranks in words: 'rank 1', 'ranks 1 and 3', 'ranks 0, 1 and 3'."""
    *most, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def new_figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    """Make an empty white figure that belongs to no window and no global state."""
    return Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")


def frame(figure: Figure, *, left: float, right: float, top: float, bottom: float, light: bool = False) -> Axes:
    """Add axes whose margins are given in inches, so that they keep their place whatever the figure's size.

    Light axes are for what a slider redraws: they look the same, but have neither a grid nor minor ticks.
    """
    width, height = figure.get_size_inches()
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    axes = figure.add_axes(LightAxes(figure, place) if light else Axes(figure, place))
    axes.tick_params(labelsize=TEXT_PT - 1, colors=INK, length=4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def put_title(figure: Figure, title: str, subtitle: str = "") -> None:
    """Write the takeaway large at the top left, and one line of figures under it."""
    width, height = figure.get_size_inches()
    longest = width * 72 * 0.97
    size = min(TITLE_PT, longest / max(1.0, 0.66 * len(title)))
    figure.text(0.16 / width, 1 - 0.13 / height, title, fontsize=size, weight="bold", color=INK, ha="left", va="top")
    if subtitle:
        size = min(TEXT_PT, longest / max(1.0, 0.6 * len(subtitle)))
        figure.text(0.16 / width, 1 - 0.52 / height, subtitle, fontsize=size, color=FAINT, ha="left", va="top")


class LegendBox(NamedTuple):
    """One entry of a legend: a filled box with letters in it, and words beside it."""

    fill: str | tuple[float, float, float]
    edge: str
    letter: str
    words: str


def to_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes; the same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
