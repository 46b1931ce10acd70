"""A Timeline: the picture of timeline.py on a canvas, to drag, zoom and point at.

Rows, colours, letters and words are those of the figure. Up to MAX_BOXES spans are sent as boxes; more are summed to
pixel columns here, and a view that holds few enough of them has its boxes sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import anywidget
import numpy as np
import traitlets
from matplotlib.colors import to_hex
from numpy.typing import NDArray

from distlab.trace.span import Trace
from simulator.viz.boxes import View, fill_of, filled_columns, heights_of, in_view, kinds_at, labels_of
from simulator.viz.facts import facts_of
from simulator.viz.panel import with_fallback
from simulator.viz.rows import Placement, Row, Side, lanes_of, place
from simulator.viz.style import KindStyle, kind_styles, pale, text_colour, to_png
from simulator.viz.timeline import (
    MAX_BOXES,
    MAX_RANKS,
    chosen_ranks,
    describe_timeline,
    draw_timeline,
    ends_text,
    takeaway,
)

MARGIN = 0.25  # of the view, sent on either side, so that a drag finds something there
MAX_LINES = 12  # of a row of pixel columns
SCRIPTS = ("timeline_draw.js", "timeline_widget.js")  # one module: the second uses what the first defines
COLUMNS, MAX_COLUMNS = 1000, 4000
SHORTEST_VIEW_S = 1e-8
AROUND_PX = 66  # of the height: the words over the rows and the axis under them


class _Scene(NamedTuple):
    """What is drawn, whatever the view."""

    sides: tuple[Side, ...]
    placement: Placement
    styles: dict[str, KindStyle]
    limit_s: float


class Timeline(anywidget.AnyWidget):
    """A timeline to look into: measured spans, and what was predicted for them in a pale row under each.

    Drag or use the arrow keys to move, the wheel (after a click) or + and - to zoom, 0 for everything, Home and End for
    the two ends; point at a box, or press n and p, to read it. Set `view` to move in code.

    Attributes:
        view: (start, end) in seconds from the first span; a view beyond the spans is moved onto them.
        summary: the text that says what the timeline shows.

    Raises:
        ValueError: there is no trace, or a trace is empty.
    """

    _esm = "\n".join(Path(__file__).with_name(name).read_text("utf-8") for name in SCRIPTS)
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

    def __init__(
        self, measured: Trace | None = None, predicted: Trace | None = None, title: str = "", height: int = 460
    ) -> None:
        self._scene: _Scene | None = None
        super().__init__(height=height)
        self.show(measured, predicted, title=title)

    def show(self, measured: Trace | None = None, predicted: Trace | None = None, *, title: str = "") -> None:
        """Show other traces, all of them in view.

        Raises:
            ValueError: there is no trace, or a trace is empty.
        """
        first = predicted if measured is None else measured
        if first is None:
            raise ValueError("Timeline got no trace; pass Timeline(measured), Timeline(predicted=...) or both")
        second = None if measured is None else predicted
        facts, expected = facts_of(first), None if second is None else facts_of(second)
        scene = _scene(first, second)
        self._traces = first, second
        self._title = title
        with self.hold_sync():
            self._scene = None  # no packet for the old scene while the parts change
            self.title = title or takeaway(facts, expected)
            self.summary = describe_timeline(first, second)
            self.note = _note(scene)
            self.rows = _rows_of(scene.placement.rows)
            self.total_height = scene.placement.total_height
            self.kinds = _kinds_of(scene.styles)
            self.limit_s = scene.limit_s
            self.ends = {"at_s": [side.trace.duration_s for side in scene.sides], "text": ends_text(facts, expected)}
            self.view = (0.0, scene.limit_s)
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
        """Send what the view needs, unless what was sent before holds it all."""
        scene = self._scene
        if scene is None or (self.packed.get("everything") and not force):
            return
        view: View = self.view
        room = MARGIN * (view[1] - view[0])
        span = max(0.0, view[0] - room), min(scene.limit_s, view[1] + room)
        total = sum(len(side.trace) for side in scene.sides)
        seen = _seen(scene, span)
        if sum(len(rows) for rows in seen) > MAX_BOXES:
            inside = _seen(scene, view)
            if sum(len(rows) for rows in inside) <= MAX_BOXES:
                span, seen = view, inside
        if total <= MAX_BOXES:
            span = (0.0, scene.limit_s)
            packed, packet = _boxes(scene, _seen(scene, span))
        elif sum(len(rows) for rows in seen) <= MAX_BOXES:
            packed, packet = _boxes(scene, seen)
        else:
            share = (span[1] - span[0]) / (view[1] - view[0])
            packed, packet = _pixels(scene, span, round(self.columns * share), self.height)
        packed |= {"everything": total <= MAX_BOXES, "span": span, "view": view}
        with self.hold_sync():
            self.packed, self.packet = packed, packet

    def png(self) -> bytes:
        """Draw the view as a figure, for readers without a kernel."""
        first, second = self._traces
        whole = self._scene is None or self.view == (0.0, self._scene.limit_s)
        view = None if whole else self.view
        return to_png(draw_timeline(first, second, title=self._title or None, time_range_s=view))

    def _repr_mimebundle_(self, **_options: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget, and beside it the figure and its text for readers without a kernel."""
        text = f"{self.title}. {self.summary}"
        return with_fallback(super()._repr_mimebundle_(), self.png(), title=self.title, text=text)


def _scene(first: Trace, second: Trace | None) -> _Scene:
    """Place every span once, so that rows stay where they are while the view moves."""
    sides = [Side(first.from_zero(), False)] + ([] if second is None else [Side(second.from_zero(), True)])
    ranks = chosen_ranks(sides, MAX_RANKS[len(sides) - 1])
    seen = [np.isin(side.trace.rank, ranks) for side in sides]
    placement = place(sides, ranks, lanes_of(sides), seen=seen, levels=True)
    words = [side.trace.words[code] for side in sides for code in np.unique(side.trace.kind)]
    end_s = max(side.trace.duration_s for side in sides)
    return _Scene(tuple(sides), placement, kind_styles(words), end_s * 1.012 if end_s else 1e-6)


def _note(scene: _Scene) -> str:
    """Return what the reader must know: that not all ranks are drawn."""
    total = len(np.unique(np.concatenate([side.trace.rank for side in scene.sides])))
    drawn = len({row.rank for row in scene.placement.rows})
    return f"{drawn} of {total} ranks" if drawn < total else ""


def _rows_of(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    return [row._asdict() for row in rows]


def _kinds_of(styles: dict[str, KindStyle]) -> list[dict[str, str]]:
    """Return what the canvas needs of each kind: its colours, measured and predicted, and what reads well on them."""
    return [
        {
            "fill": style.colour,
            "ink": text_colour(style.colour),
            "pale": to_hex(pale(style.colour)),
            "pale_ink": text_colour(fill_of(style, True)),
            "letter": style.letter,
            "words": style.words,
        }
        for style in styles.values()
    ]


def _seen(scene: _Scene, span: View) -> list[NDArray[np.int64]]:
    """Return which spans of each side have a row and touch the range of seconds."""
    return [
        np.flatnonzero((row >= 0) & in_view(side.trace, span))
        for side, row in zip(scene.sides, scene.placement.row_of, strict=True)
    ]


def _boxes(scene: _Scene, seen: list[NDArray[np.int64]]) -> tuple[dict[str, Any], bytes]:
    """Pack spans as boxes, by start: start, end, top, height, kind, row, bytes, name and label, one float64 each.

    A label is the texts that may stand in a box, longest first, each with the characters to leave room for.
    """
    kinds = {kind: place for place, kind in enumerate(scene.styles)}
    names: dict[str, int] = {}
    labels: dict[tuple[tuple[str, int], ...], int] = {}
    parts = []
    for which, (side, shown) in enumerate(zip(scene.sides, seen, strict=True)):
        trace = side.trace
        top, height = heights_of(scene.placement, which, shown)
        largest = int(trace.microbatch.max(initial=0))
        keys = np.stack([trace.name[shown], trace.kind[shown], trace.microbatch[shown]])
        different, which_key = np.unique(keys, axis=1, return_inverse=True)
        codes = np.empty((different.shape[1], 2))
        for index, (name_code, kind_code, microbatch) in enumerate(different.T.tolist()):
            name, style = trace.words[name_code], scene.styles[trace.words[kind_code]]
            label = labels_of(name, style.letter, microbatch, largest)
            codes[index] = names.setdefault(name, len(names)), labels.setdefault(label, len(labels))
        kind = np.array([kinds.get(word, 0) for word in trace.words])[trace.kind[shown]]
        columns = [trace.start_ns[shown] / 1e9, trace.end_ns[shown] / 1e9, top, height, kind]
        columns += [scene.placement.row_of[which][shown], trace.num_bytes[shown], *codes[which_key.reshape(-1)].T]
        parts.append(np.stack(columns, axis=1))
    table = np.concatenate(parts)
    table = table[np.argsort(table[:, 0], kind="stable")]
    packed = {"form": "boxes", "names": list(names), "labels": list(labels), "count": len(table)}
    return packed, table.astype("<f8").tobytes()


def _pixels(scene: _Scene, span: View, num_columns: int, height_px: int) -> tuple[dict[str, Any], bytes]:
    """Pack a range of seconds as lines of kinds, a byte a pixel, the rows one under the other."""
    kinds = list(scene.styles)
    filled = filled_columns(scene.sides, scene.placement, kinds, num_columns=num_columns, view=span)
    unit = max(1, height_px - AROUND_PX) / scene.placement.total_height
    lines = [min(max(round(row.height * unit), 1), MAX_LINES) for row in scene.placement.rows]
    parts = [kinds_at(part, count).astype(np.uint8) for part, count in zip(filled, lines, strict=True)]
    count = sum(len(side.trace) for side in scene.sides)
    return {"form": "pixels", "lines": lines, "columns": num_columns, "count": count}, np.concatenate(parts).tobytes()
