"""A Timeline: the picture of timeline.py on a canvas, to drag, zoom and point at.

Rows, colours, letters and words are those of the figure. Up to MAX_BOXES spans are sent as boxes, nine numbers each,
with tables of the names and labels that occur. More are summed to pixel columns first, one byte per pixel, and a view
that holds few enough of them has its boxes sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from distlab.trace import Trace
from simulator.units import format_s
from simulator.viz.drawing import lanes
from simulator.viz.drawing.lanes import MAX_BOXES, Ints, Scene, View
from simulator.viz.drawing.paint import to_png
from simulator.viz.drawing.pen import NAMES, with_picture
from simulator.viz.drawing.theme import SHADE, KindStyle, pale, text_colour
from simulator.viz.timeline import timeline
from simulator.viz.timeline.facts import Overlay

MAX_LINES = 12  # of a row of pixel columns
AROUND_PX = 66  # of the height: the words over the rows and the axis under them
FIELDS = ("start", "end", "top", "height", "kind", "row", "bytes", "name", "label", "stage", "microbatch")  # of a box
MARGIN = 0.25  # of the view, sent on either side, so that a drag finds something there


def kinds_of(styles: dict[str, KindStyle]) -> list[dict[str, Any]]:
    """Return what the canvas needs of each kind: its colours, measured and predicted, and what reads well on them."""
    return [
        {
            "fill": style.colour,
            "ink": text_colour(style.colour),
            "pale": to_hex(pale(style.colour)),
            "pale_ink": text_colour(lanes.fill_of(style, True)),
            "letter": style.letter,
            "words": style.words,
            "explained": SHADE not in kind,
        }
        for kind, style in styles.items()
    ]


def pack(scene: Scene, view: View, columns: int, height_px: int) -> tuple[dict[str, Any], bytes]:
    """Pack the boxes of a view with some room on both sides; where they are too many, pixel columns."""
    room, whole = MARGIN * (view[1] - view[0]), (0.0, scene.limit_s)
    everything = sum(len(side.trace) for side in scene.sides) <= MAX_BOXES
    span = whole if everything else (max(0.0, view[0] - room), min(scene.limit_s, view[1] + room))
    if not scene.is_exact(span) and scene.is_exact(view):
        span = view
    if scene.is_exact(span):
        packed, packet = _boxes(scene, scene.seen(span))
    else:
        share = (span[1] - span[0]) / (view[1] - view[0])
        packed, packet = _pixels(scene, span, round(columns * share), height_px)
    return packed | {"everything": everything, "span": span, "view": view}, packet


def _boxes(scene: Scene, seen: list[Ints]) -> tuple[dict[str, Any], bytes]:
    """Pack spans as boxes, by start, one float64 for each of FIELDS.

    A label is the texts that may stand in a box, longest first, each with the characters to leave room for.
    """
    kinds = {kind: place for place, kind in enumerate(scene.styles)}
    names: dict[str, int] = {}
    labels: dict[tuple[tuple[str, int], ...], int] = {}
    parts = []
    for which, (side, shown) in enumerate(zip(scene.sides, seen, strict=True)):
        trace, num_words = side.trace, len(side.trace.words)
        top, height = lanes.heights_of(scene, which, shown)
        microbatch = trace.microbatch[shown].astype(np.int64)
        largest = int(trace.microbatch.max(initial=0))
        keys = ((microbatch + 1) * num_words + trace.name[shown]) * num_words + trace.kind[shown]
        different, which_key = np.unique(keys, return_inverse=True)
        codes = np.empty((len(different), 2))
        for index, key in enumerate(different.tolist()):
            rest, kind_code = divmod(key, num_words)
            number, name_code = divmod(rest, num_words)
            name, letter = trace.words[name_code], scene.styles[trace.words[kind_code]].letter
            label = lanes.labels_of(name, letter, number - 1, largest)
            codes[index] = names.setdefault(name, len(names)), labels.setdefault(label, len(labels))
        kind = np.array([kinds.get(word, 0) for word in trace.words])[trace.kind[shown]]
        columns = [trace.start_ns[shown] / 1e9, trace.end_ns[shown] / 1e9, top, height, kind]
        columns += [scene.row_of[which][shown], trace.num_bytes[shown], *codes[which_key.reshape(-1)].T]
        parts.append(np.stack([*columns, trace.stage[shown], microbatch], axis=1))
    table = np.concatenate(parts)
    table = table[np.argsort(table[:, 0], kind="stable")]
    packed = {"form": "boxes", "names": list(names), "labels": list(labels), "count": len(table)}
    return packed, table.astype("<f8", copy=False).tobytes()


def _pixels(scene: Scene, span: View, num_columns: int, height_px: int) -> tuple[dict[str, Any], bytes]:
    """Pack a range of seconds as lines of kinds, one byte per pixel, the rows one under the other."""
    filled = lanes.filled_columns(scene, num_columns, span)
    unit = max(1, height_px - AROUND_PX) / scene.total_height
    lines = [min(max(round(row.height * unit), 1), MAX_LINES) for row in scene.rows]
    parts = [lanes.kinds_at(part, count).astype(np.uint8) for part, count in zip(filled, lines, strict=True)]
    count = sum(len(side.trace) for side in scene.sides)
    return {"form": "pixels", "lines": lines, "columns": num_columns, "count": count}, np.concatenate(parts).tobytes()


HERE = Path(__file__)  # one module of three: each uses what those before it define
SCRIPTS = (NAMES, HERE.with_name("timeline_draw.js"), HERE.with_name("timeline_widget.js"))
COLUMNS, MAX_COLUMNS = 1000, 4000
SHORTEST_VIEW_S = 1e-8
MOST_TIMES_LONGER = 3.0  # one trace than the other, in the view that is shown first


class Timeline(anywidget.AnyWidget):
    """A timeline to look into: measured spans, and what was predicted for them in a pale row under each.

    Drag or use the arrow keys to move, the wheel (after a click) or + and - to zoom, 0 for everything, Home and End for
    the two ends; point at a box, or press n and p, to read it. Set `view` to move in code.

    Attributes:
        view: (start, end) in seconds from the first span; a view beyond the spans is moved onto them.
        summary: the text that says what the timeline shows.
        until_s: show only what had happened by then, with a line where the clock stands; None for everything.

    Raises:
        ValueError: a trace is empty.
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

    def __init__(
        self, measured: Trace | Overlay, predicted: Trace | None = None, title: str = "", height: int = 460
    ) -> None:
        self._scene: Scene | None = None
        super().__init__(height=height)
        words, said = timeline.words_of(measured, predicted, title=title)
        scene = lanes.scene_of(*timeline.traces_of(measured, predicted), words.bands)
        self.put(scene, words, said)

    def put(self, scene: Scene, words: timeline.Caption, summary: str) -> None:
        """Show a scene that is made already, as far as both of its traces can be read."""
        ends_s = list(words.ends_s) or [side.trace.duration_s for side in scene.sides]
        end_s = min(scene.limit_s, MOST_TIMES_LONGER * min(ends_s) or scene.limit_s)
        rest = f"shown up to {format_s(end_s)} of {format_s(scene.limit_s)}: press 0 for everything"
        notes = [words.note, timeline.note_of(scene), rest if end_s < scene.limit_s else ""]
        self._words = words
        with self.hold_sync():
            self._scene = None  # no packet for the old scene while the parts change
            self.title, self.note, self.summary = words.title, "; ".join(filter(None, notes)), summary
            self.rows = [row._asdict() for row in scene.rows]
            self.headings = [heading._asdict() for heading in scene.headings]
            self.total_height = scene.total_height
            self.kinds = kinds_of(scene.styles)
            self.limit_s = scene.limit_s
            self.ends = {"at_s": ends_s, "text": words.ends, "bands_s": words.bands, "dim": words.dim}
            self.until_s = None
            self.view = (0.0, end_s)
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
        assert self._scene is not None, "put() made it"
        return timeline.draw_scene(self._scene, self._words, self.view)

    def _repr_mimebundle_(self, **_options: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget, and also the figure and its text for readers without a kernel."""
        words = f"{self.title}. {self.summary}"
        return with_picture(super()._repr_mimebundle_(), to_png(self.figure), title=self.title, words=words)
