"""A Timeline: the picture of timeline.py on a canvas, to drag, zoom and point at.

Rows, colours, letters and words are those of the figure. Up to MAX_BOXES spans are sent as boxes; more are summed to
pixel columns here, and a view that holds few enough of them has its boxes sent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from matplotlib.figure import Figure

from distlab.trace import Trace
from simulator.units import format_s
from simulator.viz.drawing.boxes import View
from simulator.viz.drawing.paint import to_png
from simulator.viz.drawing.picture import NAMES, Picture, with_picture
from simulator.viz.timeline.draw_rows import Caption, Scene
from simulator.viz.timeline.overlay import Overlay
from simulator.viz.timeline.packet import kinds_of, make_scene, note_of, pack
from simulator.viz.timeline.timeline import draw_timeline, say_timeline, traces_of, words_of

HERE = Path(__file__)  # one module of three: each uses what those before it define
SCRIPTS = (NAMES, HERE.with_name("timeline_draw.js"), HERE.with_name("timeline_widget.js"))
COLUMNS, MAX_COLUMNS = 1000, 4000
SHORTEST_VIEW_S = 1e-8
MOST_TIMES_LONGER = 3.0  # one trace than the other, in the view that is shown first


def readable_s(scene: Scene) -> float:
    """Return where the first view ends: at the end, or earlier where one trace is much longer than the other."""
    shorter_s = min(side.trace.duration_s for side in scene.sides)
    return min(scene.limit_s, MOST_TIMES_LONGER * shorter_s) if shorter_s else scene.limit_s


class Timeline(anywidget.AnyWidget):
    """A timeline to look into: measured spans, and what was predicted for them in a pale row under each.

    Drag or use the arrow keys to move, the wheel (after a click) or + and - to zoom, 0 for everything, Home and End for
    the two ends; point at a box, or press n and p, to read it. Set `view` to move in code.

    Attributes:
        view: (start, end) in seconds from the first span; a view beyond the spans is moved onto them.
        summary: the text that says what the timeline shows.
        until_s: show only what had happened by then, with a line where the clock stands; None for everything.
        problem: why what was asked for cannot be shown; it stands under the picture, which stays as it was.

    Raises:
        ValueError: there is no trace, or a trace is empty.
    """

    _esm = "\n".join(path.read_text("utf-8") for path in SCRIPTS)
    _css = Path(__file__).with_name("timeline_widget.css")
    view = traitlets.Tuple(traitlets.Float(), traitlets.Float(), default_value=(0.0, 1.0)).tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    summary = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int(460).tag(sync=True)
    columns = traitlets.Int(COLUMNS).tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    total_height = traitlets.Float(1.0).tag(sync=True)
    kinds: traitlets.List[Any] = traitlets.List().tag(sync=True)
    ends = traitlets.Dict().tag(sync=True)
    limit_s = traitlets.Float(1.0).tag(sync=True)
    packet = traitlets.Bytes().tag(sync=True)
    packed = traitlets.Dict().tag(sync=True)
    headings: traitlets.List[Any] = traitlets.List().tag(sync=True)
    until_s = traitlets.Float(None, allow_none=True).tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        measured: Trace | Overlay | None = None,
        predicted: Trace | None = None,
        title: str = "",
        height: int = 460,
    ) -> None:
        self._scene: Scene | None = None
        super().__init__(height=height)
        self.show(measured, predicted, title=title)

    def show(self, measured: Trace | Overlay | None = None, predicted: Trace | None = None, *, title: str = "") -> None:
        """Show other traces, or an overlay of two, as far as both can be read.

        Raises:
            ValueError: there is no trace, or a trace is empty.
        """
        first = predicted if measured is None else measured
        if first is None:
            raise ValueError("Timeline got no trace; pass Timeline(measured), Timeline(predicted=...) or both")
        second = None if measured is None else predicted
        words = words_of(first, second, title=title)
        scene = make_scene(*traces_of(first, second), words.bands)
        words = words._replace(note="; ".join(filter(None, [words.note, note_of(scene)])))
        summary = say_timeline(first, second)

        def picture(view: View | None) -> Picture:
            return draw_timeline(first, second, title=title or None, time_range_s=view)

        self.put(scene, words, summary, picture)

    def put(self, scene: Scene, words: Caption, summary: str, picture: Callable[[View | None], Picture]) -> None:
        """Show a scene that is made already, as far as both of its traces can be read.

        `picture` draws a view of it for readers without a kernel.
        """
        self._picture = picture
        with self.hold_sync():
            self._scene = None  # no packet for the old scene while the parts change
            self.title, self.note, self.summary = words.title, words.note, summary
            self.rows = [row._asdict() for row in scene.placement.rows]
            self.headings = [heading._asdict() for heading in scene.headings]
            self.total_height = scene.placement.total_height
            self.kinds = kinds_of(scene.styles)
            self.limit_s = scene.limit_s
            ends = {"at_s": [side.trace.duration_s for side in scene.sides], "text": words.ends}
            self.ends = ends | {"bands_s": words.bands, "dim": words.dim}
            self.until_s, self.problem = None, ""
            self.view = (0.0, readable_s(scene))
            if self.view[1] < scene.limit_s:
                rest = f"shown up to {format_s(self.view[1])} of {format_s(scene.limit_s)}: press 0 for everything"
                self.note = "; ".join(filter(None, [words.note, rest]))
            self._scene = scene
            self._pack(force=True)

    @traitlets.validate("view")
    def _onto_the_spans(self, proposal: Any) -> View:
        """Keep a view's length where that is possible, and move it to where spans are."""
        low, high = (float(edge) for edge in proposal["value"])
        if not low < high:
            raise traitlets.TraitError(f"view is {(low, high)}; pass (start, end) in seconds with start before end")
        if self._scene is None or (low >= 0 and high <= self.limit_s and high - low >= SHORTEST_VIEW_S):
            return low, high  # as it is: a value that comes back changed would jerk a drag
        length = min(max(high - low, SHORTEST_VIEW_S), self.limit_s)
        low = min(max(low, 0.0), self.limit_s - length)
        return low, low + length

    @traitlets.validate("columns")
    def _some_columns(self, proposal: Any) -> int:
        return min(max(int(proposal["value"]), 50), MAX_COLUMNS)

    @traitlets.observe("view", "columns")
    def _moved(self, _change: object) -> None:
        self._pack()

    def _pack(self, force: bool = False) -> None:
        """Send the boxes of this view, unless all boxes were sent before."""
        scene = self._scene
        if scene is None or (self.packed.get("everything") and not force):
            return
        packed, packet = pack(scene, self.view, self.columns, self.height)
        with self.hold_sync():
            self.packed, self.packet = packed, packet

    @property
    def figure(self) -> Figure:
        """The view as a figure, drawn anew, for readers without a kernel."""
        whole = self._scene is None or self.view == (0.0, self._scene.limit_s)
        return self._picture(None if whole else self.view).figure

    def _repr_mimebundle_(self, **_options: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget, and also the figure and its text for readers without a kernel."""
        words = f"{self.title}. {self.summary}"
        return with_picture(super()._repr_mimebundle_(), to_png(self.figure), title=self.title, words=words)
