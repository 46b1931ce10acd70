"""How a scene is packed for the canvas: typed arrays, no text per box.

Up to MAX_BOXES spans are sent as boxes, nine numbers each, with tables of the names and labels that occur. More are
summed to pixel columns first: one byte per pixel, whatever the number of spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_hex
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.viz.drawing.boxes import View, fill_of, filled_columns, heights_of, in_view, kinds_at, labels_of
from simulator.viz.drawing.lanes import Side, lanes_of, place, shaded
from simulator.viz.drawing.style import KindStyle, is_first_shade, pale, text_colour
from simulator.viz.timeline.draw_rows import Scene, limit_of, styles_of
from simulator.viz.timeline.timeline import MAX_BOXES, MAX_RANKS, all_ranks, chosen_ranks

MAX_LINES = 12  # of a row of pixel columns
AROUND_PX = 66  # of the height: the words over the rows and the axis under them
FIELDS = ("start", "end", "top", "height", "kind", "row", "bytes", "name", "label", "stage", "microbatch")  # of a box
MARGIN = 0.25  # of the view, sent on either side, so that a drag finds something there


def make_scene(first: Trace, second: Trace | None, bands: Sequence[View] = ()) -> Scene:
    """Place every span once, so that rows stay where they are while the view moves."""
    sides = [Side(shaded(first.from_zero()), False)]
    if second is not None:
        sides.append(Side(shaded(second.from_zero()), True))
    ranks = chosen_ranks(sides, MAX_RANKS[len(sides) - 1])
    seen = [np.isin(side.trace.rank, ranks) for side in sides]
    placement = place(sides, ranks, lanes_of(sides), seen=seen, levels=True)
    return Scene(tuple(sides), placement, styles_of(sides), limit_of(sides, bands))


def note_of(scene: Scene) -> str:
    """Return what the reader must know: that not all ranks are drawn."""
    total = len(all_ranks(scene.sides))
    drawn = len({row.rank for row in scene.placement.rows})
    return f"{drawn} of {total} ranks" if drawn < total else ""


def kinds_of(styles: dict[str, KindStyle]) -> list[dict[str, Any]]:
    """Return what the canvas needs of each kind: its colours, measured and predicted, and what reads well on them."""
    return [
        {
            "fill": style.colour,
            "ink": text_colour(style.colour),
            "pale": to_hex(pale(style.colour)),
            "pale_ink": text_colour(fill_of(style, True)),
            "letter": style.letter,
            "words": style.words,
            "explained": is_first_shade(kind),
        }
        for kind, style in styles.items()
    ]


def pack(scene: Scene, view: View, columns: int, height_px: int) -> tuple[dict[str, Any], bytes]:
    """Pack the boxes of a view with some room on both sides; where they are too many, pixel columns."""
    room = MARGIN * (view[1] - view[0])
    span = max(0.0, view[0] - room), min(scene.limit_s, view[1] + room)
    total = sum(len(side.trace) for side in scene.sides)
    everything = total <= MAX_BOXES
    if everything:
        span = (0.0, scene.limit_s)
    seen = _seen(scene, span)
    if sum(len(rows) for rows in seen) > MAX_BOXES:
        inside = _seen(scene, view)
        if sum(len(rows) for rows in inside) <= MAX_BOXES:
            span, seen = view, inside
    if sum(len(rows) for rows in seen) <= MAX_BOXES:
        packed, packet = _boxes(scene, seen)
    else:
        share = (span[1] - span[0]) / (view[1] - view[0])
        packed, packet = _pixels(scene, span, round(columns * share), height_px)
    return packed | {"everything": everything, "span": span, "view": view}, packet


def _seen(scene: Scene, span: View) -> list[NDArray[np.int64]]:
    """Return which spans of each side have a row and touch the range of seconds."""
    if span[0] <= 0.0 and span[1] >= scene.limit_s:
        return [np.flatnonzero(row >= 0) for row in scene.placement.row_of]
    return [
        np.flatnonzero((row >= 0) & in_view(side.trace, span))
        for side, row in zip(scene.sides, scene.placement.row_of, strict=True)
    ]


def _boxes(scene: Scene, seen: list[NDArray[np.int64]]) -> tuple[dict[str, Any], bytes]:
    """Pack spans as boxes, by start, one float64 for each of FIELDS.

    A label is the texts that may stand in a box, longest first, each with the characters to leave room for.
    """
    kinds = {kind: place for place, kind in enumerate(scene.styles)}
    names: dict[str, int] = {}
    labels: dict[tuple[tuple[str, int], ...], int] = {}
    parts = []
    for which, (side, shown) in enumerate(zip(scene.sides, seen, strict=True)):
        trace, num_words = side.trace, len(side.trace.words)
        top, height = heights_of(scene.placement, which, shown)
        microbatch = trace.microbatch[shown].astype(np.int64)
        largest = int(trace.microbatch.max(initial=0))
        keys = ((microbatch + 1) * num_words + trace.name[shown]) * num_words + trace.kind[shown]
        different, which_key = np.unique(keys, return_inverse=True)
        codes = np.empty((len(different), 2))
        for index, key in enumerate(different.tolist()):
            rest, kind_code = divmod(key, num_words)
            number, name_code = divmod(rest, num_words)
            name, letter = trace.words[name_code], scene.styles[trace.words[kind_code]].letter
            label = labels_of(name, letter, number - 1, largest)
            codes[index] = names.setdefault(name, len(names)), labels.setdefault(label, len(labels))
        kind = np.array([kinds.get(word, 0) for word in trace.words])[trace.kind[shown]]
        columns = [trace.start_ns[shown] / 1e9, trace.end_ns[shown] / 1e9, top, height, kind]
        columns += [scene.placement.row_of[which][shown], trace.num_bytes[shown], *codes[which_key.reshape(-1)].T]
        parts.append(np.stack([*columns, trace.stage[shown], microbatch], axis=1))
    table = np.concatenate(parts)
    table = table[np.argsort(table[:, 0], kind="stable")]
    packed = {"form": "boxes", "names": list(names), "labels": list(labels), "count": len(table)}
    return packed, table.astype("<f8", copy=False).tobytes()


def _pixels(scene: Scene, span: View, num_columns: int, height_px: int) -> tuple[dict[str, Any], bytes]:
    """Pack a range of seconds as lines of kinds, one byte per pixel, the rows one under the other."""
    kinds = list(scene.styles)
    filled = filled_columns(scene.sides, scene.placement, kinds, num_columns=num_columns, view=span)
    unit = max(1, height_px - AROUND_PX) / scene.placement.total_height
    lines = [min(max(round(row.height * unit), 1), MAX_LINES) for row in scene.placement.rows]
    parts = [kinds_at(part, count).astype(np.uint8) for part, count in zip(filled, lines, strict=True)]
    count = sum(len(side.trace) for side in scene.sides)
    return {"form": "pixels", "lines": lines, "columns": num_columns, "count": count}, np.concatenate(parts).tobytes()
