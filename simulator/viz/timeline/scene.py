"""A scene: what a timeline draws, whether as a figure or on a canvas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.viz.drawing.lanes import Placement, Side
from simulator.viz.drawing.style import KindStyle, kind_styles


class Heading(NamedTuple):
    """Words between rows: where their middle is, in the placement's units, and what they say."""

    at: float
    text: str


class Scene(NamedTuple):
    """What is drawn, whatever the view.

    Attributes:
        sides: the traces, with their clocks at zero.
        placement: where each span stands.
        styles: of each kind that occurs.
        limit_s: the right end of the widest view.
        headings: words over groups of rows.
    """

    sides: tuple[Side, ...]
    placement: Placement
    styles: dict[str, KindStyle]
    limit_s: float
    headings: tuple[Heading, ...] = ()


def styles_of(sides: Sequence[Side]) -> dict[str, KindStyle]:
    """Return the style of each kind that occurs."""
    return kind_styles(
        [side.trace.words[code] for side in sides for code in np.flatnonzero(np.bincount(side.trace.kind))]
    )


def limit_of(sides: Sequence[Side]) -> float:
    """Return the right end of the widest view: a little after the last span."""
    end_s = max(side.trace.duration_s for side in sides)
    return end_s * 1.012 if end_s else 1e-6
