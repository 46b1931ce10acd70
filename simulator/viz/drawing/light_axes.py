"""Axes for pictures that a slider redraws: ticks are one path and some texts, not an object each.

matplotlib makes two ticks an axis before anything is known, and later one a label: three lines and two texts each, laid
out and drawn apart. Here an axis asks its locator where ticks are and its formatter what they say, and draws just that.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.transforms import IdentityTransform
from numpy.typing import NDArray

from simulator.viz.drawing.letters import TALLEST

PAD_PT, LINE_PT, LABEL_GAP_PT = 3.5, 0.8, 4.0  # from a tick to its text, how wide a tick is, from texts to the label


class _Ticks:
    """What both axes share: the look of ticks, where they are, and how they are drawn."""

    _look: dict[str, Any]

    def grid(self, visible: bool | None = None, which: str = "major", **look: Any) -> None:
        """Have no grid.

        Raises:
            ValueError: one is asked for.
        """
        if visible or look:
            raise ValueError("light axes draw no grid; pass light=False to frame()")

    def set_tick_params(self, which: str = "major", reset: bool = False, **look: Any) -> None:
        """Keep length and size in points and the colour of ticks and texts; nothing else can be set."""
        kept = {} if reset else getattr(self, "_look", {})
        self._look = {"length": 3.5, "labelsize": 10.0, "colors": "black"} | kept | look

    def set_clip_path(self, *_clip: Any, **_more: Any) -> None:
        """Clip nothing: ticks stand outside."""

    def shown(self: Any) -> tuple[NDArray[np.float64], list[str]]:
        """Return where ticks are within the view, in pixels along the axis, and what they say."""
        values = np.asarray(self.get_majorticklocs(), dtype=float)
        texts = self.major.formatter.format_ticks(values)
        along = self.get_transform().transform(values) if len(values) else values
        low, high = sorted(self.get_transform().transform(np.asarray(self.get_view_interval())).tolist())
        slack = 1e-9 * (high - low)
        inside = np.flatnonzero((along >= low - slack) & (along <= high + slack))
        box, across = self.axes.bbox, self.axis_name == "x"
        first, length = (box.x0, box.width) if across else (box.y0, box.height)
        start, stop = self.get_transform().transform(np.asarray(self.get_view_interval()))
        return first + (along[inside] - start) / (stop - start) * length, [texts[index] for index in inside.tolist()]

    def draw(self: Any, renderer: Any) -> None:
        """Draw ticks and their texts below (or left of) the axes, and the axis' label beyond them."""
        if not self.get_visible():
            return
        places, texts = self.shown()
        point = self.get_figure(root=True).dpi / 72
        length = self._look["length"] * point
        pen = renderer.new_gc()
        pen.set_foreground(self._look["colors"])
        if length and len(places):
            pen.set_linewidth(max(1.0, np.floor(LINE_PT * point)))  # whole pixels: a sharp line
            pen.set_snap(True)
            renderer.draw_path(pen, self.marks(places, length), IdentityTransform())
        font = FontProperties(size=self._look["labelsize"])
        beyond = self.write(renderer, pen, places, texts, font=font, away=length + PAD_PT * point)
        pen.restore()
        if self.label.get_text():
            self.put_label(beyond + LABEL_GAP_PT * point)
            self.label.draw(renderer)
        self.stale = False


class LightXAxis(_Ticks, XAxis):
    """A horizontal axis along the bottom."""

    def get_ticks_position(self) -> Literal["bottom"]:
        """Return where ticks are."""
        return "bottom"

    def marks(self, places: NDArray[np.float64], length: float) -> Path:
        """Return the ticks as one path."""
        edge = self.axes.bbox.y0
        ends = np.stack([np.repeat(places, 2), np.tile([edge, edge - length], len(places))], axis=1)
        return Path(ends, np.tile([Path.MOVETO, Path.LINETO], len(places)).astype(np.uint8))

    def write(
        self, renderer: Any, pen: Any, places: Any, texts: list[str], *, font: FontProperties, away: float
    ) -> float:
        """Write each text centred under its tick; return how far below the axes they reach."""
        _, height, descent = renderer.get_text_width_height_descent(TALLEST, font, False)
        up = self.axes.bbox.y0 - away - (height - descent)
        low = renderer.get_canvas_width_height()[1] - up if renderer.flipy() else up
        for place, text in zip(places.tolist(), texts, strict=True):
            wide = renderer.get_text_width_height_descent(text, font, False)[0]
            renderer.draw_text(pen, place - wide / 2, low, text, font, 0)
        return float(away + height)

    def put_label(self, away: float) -> None:
        """Put the axis' label so far below the axes, in pixels."""
        box = self.axes.bbox
        self.label.set_transform(IdentityTransform())
        self.label.set_position(((box.x0 + box.x1) / 2, box.y0 - away))


class LightYAxis(_Ticks, YAxis):
    """An upright axis along the left."""

    def get_ticks_position(self) -> Literal["left"]:
        """Return where ticks are."""
        return "left"

    def marks(self, places: NDArray[np.float64], length: float) -> Path:
        """Return the ticks as one path."""
        edge = self.axes.bbox.x0
        ends = np.stack([np.tile([edge, edge - length], len(places)), np.repeat(places, 2)], axis=1)
        return Path(ends, np.tile([Path.MOVETO, Path.LINETO], len(places)).astype(np.uint8))

    def write(
        self, renderer: Any, pen: Any, places: Any, texts: list[str], *, font: FontProperties, away: float
    ) -> float:
        """Write each text left of its tick; return how far left of the axes they reach."""
        _, height, descent = renderer.get_text_width_height_descent(TALLEST, font, False)
        tall = renderer.get_canvas_width_height()[1]
        right, widest = self.axes.bbox.x0 - away, 0.0
        for place, text in zip(places.tolist(), texts, strict=True):
            wide = renderer.get_text_width_height_descent(text, font, False)[0]
            up = place - (height - descent) / 2
            renderer.draw_text(pen, right - wide, tall - up if renderer.flipy() else up, text, font, 0)
            widest = max(widest, wide)
        return away + widest

    def put_label(self, away: float) -> None:
        """Put the axis' label so far left of the axes, in pixels."""
        box = self.axes.bbox
        self.label.set_transform(IdentityTransform())
        self.label.set_position((box.x0 - away, (box.y0 + box.y1) / 2))


class LightAxes(Axes):
    """Axes whose two axes draw their ticks at once: below and on the left, without a grid and without minor ticks."""

    def _init_axis(self) -> None:
        """Make the two axes: the place that matplotlib leaves for axes of one's own."""
        self.xaxis, self.yaxis = LightXAxis(self, clear=False), LightYAxis(self, clear=False)
        for side, axis in (("bottom", self.xaxis), ("top", self.xaxis), ("left", self.yaxis), ("right", self.yaxis)):
            self.spines[side].register_axis(axis)

    def clear(self) -> None:
        """Empty the axes, and put the frame's lines at their edges: else only a tick would."""
        super().clear()
        for spine in self.spines.values():
            spine.set_position(("outward", 0.0))
