"""Spans of time in rows: where each lane of each rank stands, and its boxes.

A row belongs to one rank, one lane and one side (measured or predicted). Spans of one row that overlap in time, such as
gradient buckets that wait their turn on the wire, stand on levels within the row. If a rank has several stages, the
actions of its second stage are a lighter shade of the same colours, and so on.

Exact boxes with letters are one PolyCollection. Where there are too many, columns of pixels are one image: each column
of each row is filled from the bottom with the kinds that were active there, in proportion to their time. So a busy lane
looks full and a bubble stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.viz.drawing.plot import Word, Words, axes_pixels, spread_evenly
from simulator.viz.drawing.theme import DPI, IDLE, LEAST_PT, SHADE, TEXT_PT, KindStyle, kind_styles, pale, text_colour

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
View = tuple[float, float]

MAX_LEVELS = 6
PASSES = ("F", "B", "I", "W")
PREDICTED_HEIGHT = 0.62
LANE_GAP, RANK_GAP = 0.14, 0.5
CLOSE_RANKS, CLOSE_GAP = 16, 0.18  # from this many ranks on, those with a single row move together
MAX_BOXES = 4_000
MAX_RANKS = (64, 16)  # one trace; two


class Side(NamedTuple):
    """One of the two traces in a picture, with its clock at zero."""

    trace: Trace
    predicted: bool


class LaneRow(NamedTuple):
    """One lane of one rank in one trace; y grows downwards, in units of a measured lane's height."""

    rank: int
    lane: str
    predicted: bool
    top: float
    height: float
    num_levels: int


class Heading(NamedTuple):
    """Caption between rows: where their middle is, in the rows' units, and what they say."""

    at: float
    text: str


class Scene(NamedTuple):
    """What is drawn, whatever the view: as a figure or on a canvas.

    `sides` are the traces, with their clocks at zero; `rows` stand from top to bottom, `total_height` with their gaps.
    For each side, `row_of` is the index of each span's row, or -1 where it is not shown, and `level_of` its level
    within the row. `styles` are of each kind that occurs, `limit_s` is the right end of the widest view, and
    `headings` stand over groups of rows.
    """

    sides: tuple[Side, ...]
    rows: tuple[LaneRow, ...]
    total_height: float
    row_of: tuple[Ints, ...]
    level_of: tuple[Ints, ...]
    styles: dict[str, KindStyle]
    limit_s: float
    headings: tuple[Heading, ...] = ()

    def seen(self, view: View) -> list[Ints]:
        """Return which spans of each side have a row and touch the range of seconds."""
        return [
            np.flatnonzero((row >= 0) & (side.trace.end_ns >= view[0] * 1e9) & (side.trace.start_ns <= view[1] * 1e9))
            for side, row in zip(self.sides, self.row_of, strict=True)
        ]

    def is_exact(self, view: View) -> bool:
        """Tell whether the spans in view are few enough for a box each."""
        return sum(map(len, self.seen(view))) <= MAX_BOXES


def scene_of(first: Trace, second: Trace | None = None, bands: Sequence[View] = ()) -> Scene:
    """Place each lane of each rank in a row, the second trace's right under the first one's.

    Traces start at zero. Of many ranks some are placed, spread evenly. `bands`, in seconds, are in the widest view too.
    """
    both = [(first, False)] + ([(second, True)] if second is not None else [])
    sides = tuple(Side(shaded(trace), predicted) for trace, predicted in both)
    all_ranks = np.unique(np.concatenate([side.trace.rank for side in sides]))
    ranks = all_ranks[spread_evenly(len(all_ranks), MAX_RANKS[len(sides) - 1])]
    present = {side.trace.words[code] for side in sides for code in np.unique(side.trace.lane)}
    first_lanes = ("compute", "communication")
    lanes, cells = [*(lane for lane in first_lanes if lane in present), *sorted(present - set(first_lanes))], []
    for side in sides:
        trace = side.trace
        lane = np.array([lanes.index(word) if word in lanes else -1 for word in trace.words])[trace.lane]
        cell = np.searchsorted(ranks, trace.rank) * len(lanes) + lane
        cells.append(np.where(np.isin(trace.rank, ranks), cell, -1))
    shown_cells = [np.unique(cell[cell >= 0]).tolist() for cell in cells]
    keys = sorted((cell, side.predicted) for side, found in zip(sides, shown_cells, strict=True) for cell in found)
    row_of, level_of, depth = [], [], np.ones(len(keys), np.int64)
    for side, cell in zip(sides, cells, strict=True):
        table = np.full(len(ranks) * len(lanes) + 1, -1)  # cell -1 picks the last entry: not shown
        for number, (at, predicted) in enumerate(keys):
            table[at] = number if predicted == side.predicted else table[at]
        row = table[cell]
        level, shown = np.zeros_like(row), np.flatnonzero(row >= 0)
        level[shown] = pack(row[shown], side.trace.start_ns[shown], side.trace.end_ns[shown])
        np.maximum.at(depth, row[shown], level[shown] + 1)
        row_of.append(row)
        level_of.append(level)
    named = [(int(ranks[at // len(lanes)]), lanes[at % len(lanes)], predicted) for at, predicted in keys]
    rows, height = _stack(named, depth.tolist())
    return Scene(sides, rows, height, tuple(row_of), tuple(level_of), styles_of(sides), limit_of(sides, bands))


def styles_of(sides: Sequence[Side]) -> dict[str, KindStyle]:
    """Return the style of each kind that occurs."""
    return kind_styles(
        [side.trace.words[code] for side in sides for code in np.flatnonzero(np.bincount(side.trace.kind))]
    )


def limit_of(sides: Sequence[Side], bands: Sequence[View] = ()) -> float:
    """Return the right end of the widest view: a little after the last span or the last band."""
    end_s = max([*(side.trace.duration_s for side in sides), *(end for _, end in bands)])
    return end_s * 1.012 if end_s else 1e-6


def pack(row: Ints, start_ns: Ints, end_ns: Ints) -> Ints:
    """Give overlapping spans of a row different levels: each takes the lowest that is free when it starts.

    Beyond MAX_LEVELS spans share the last level.
    """
    level = np.zeros(len(row), dtype=np.int64)
    busy_until: dict[int, list[int]] = {}
    order = np.lexsort((-end_ns, start_ns, row))
    meets = (np.diff(row[order]) == 0) & (start_ns[order][1:] < end_ns[order][:-1])
    order = order[np.isin(row[order], row[order][1:][meets])]  # rows where nothing overlaps need no walk
    spans = zip(order.tolist(), row[order].tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True)
    for index, which, start, end in spans:
        ends = busy_until.setdefault(which, [])
        free = next((at for at, until in enumerate(ends) if until <= start), len(ends))
        if free == len(ends) and free < MAX_LEVELS:
            ends.append(end)
        free = min(free, MAX_LEVELS - 1)
        ends[free] = max(ends[free], end)
        level[index] = free
    return level


def _stack(keys: Sequence[tuple[int, str, bool]], depth: Sequence[int]) -> tuple[tuple[LaneRow, ...], float]:
    """Stack the rows from the top, with a gap between lanes and a wider one between ranks."""
    rows: list[LaneRow] = []
    top = 0.0
    num_ranks = len({rank for rank, _, _ in keys})
    rank_gap = CLOSE_GAP if num_ranks == len(keys) and num_ranks >= CLOSE_RANKS else RANK_GAP
    for (rank, lane, predicted), num_levels in zip(keys, depth, strict=True):
        if rows and rows[-1].rank != rank:
            top += rank_gap
        elif rows and rows[-1].lane != lane:
            top += LANE_GAP
        height = (PREDICTED_HEIGHT if predicted else 1.0) * (1 + 0.55 * (num_levels - 1))
        rows.append(LaneRow(rank, lane, predicted, top, height, num_levels))
        top += height
    return tuple(rows), top


def shaded(trace: Trace) -> Trace:
    """Give the passes of each rank's stages kinds of their own: F for its first stage, F~1 for its second, and so on.

    A trace of one stage per rank, or of none, comes back as it is.
    """
    words, num_words = list(trace.words), len(trace.words)
    if not len(trace) or trace.stage.max() < 1:
        return trace
    is_pass = np.isin(words, PASSES)
    rows = is_pass[trace.kind] & (trace.stage >= 0)
    present = stages_of_ranks(trace.rank[rows], trace.stage[rows])
    if (present.sum(axis=1) < 2).all():
        return trace
    which = np.cumsum(present, axis=1) - 1  # a stage's place among those of its rank
    shade = np.zeros(len(trace), np.int32)
    shade[rows] = which[trace.rank[rows], trace.stage[rows]]
    for number in range(1, int(shade.max()) + 1):
        words += [f"{word}{SHADE}{number}" for word in trace.words]
    return replace(trace, kind=trace.kind + shade * np.int32(num_words), words=tuple(words))


def stages_of_ranks(rank: NDArray[np.int32], stage: NDArray[np.int32]) -> Mask:
    """Return which stages each rank has: [ranks, stages]."""
    shape = int(rank.max(initial=-1)) + 1, int(stage.max(initial=-1)) + 1
    present = np.zeros(shape, bool)
    present[rank, stage] = True
    return present


MAX_LABELS = 500
CHARACTER_WIDTH = 0.66  # of the font size; the widest digits and letters of the default font
BARE_PT = LEAST_PT  # of a number that stands without its letter, so that it looks no larger than its neighbours
WIDE = 0.5  # what a W takes beyond that


def fill_of(style: KindStyle, predicted: bool) -> tuple[float, float, float]:
    """Return the colour of a box: full when measured, pale when predicted."""
    return pale(style.colour) if predicted else to_rgb(style.colour)


def heights_of(scene: Scene, which: int, shown: Ints) -> tuple[Floats, Floats]:
    """Return where the boxes of one side's spans begin and how high they are, in the rows' units."""
    row = scene.row_of[which][shown]
    height = np.array([r.height / r.num_levels for r in scene.rows])[row]
    return np.array([r.top for r in scene.rows])[row] + scene.level_of[which][shown] * height, height


def add_boxes(axes: Axes, scene: Scene, *, dim: bool = False) -> None:
    """Draw one exact box per span in view, with the longest label that fits; `dim` makes measured boxes pale."""
    for which, shown in enumerate(scene.seen(axes.get_xlim())):
        if shown.size:
            _add_side(axes, scene, which, shown, dim=dim)


def _add_side(axes: Axes, scene: Scene, which: int, shown: Ints, *, dim: bool) -> None:
    side, styles = scene.sides[which], scene.styles
    trace = side.trace
    shown = shown[np.argsort(trace.start_ns[shown], kind="stable")]  # later boxes lie on top
    low, high = axes.get_xlim()
    scale = axes_pixels(axes)[0] / (high - low)
    row, level = scene.row_of[which][shown], scene.level_of[which][shown]
    top, height = heights_of(scene, which, shown)
    start, end = trace.start_ns[shown] / 1e9, trace.end_ns[shown] / 1e9
    seen_end = np.maximum(end, start + 1 / scale)  # an instant is still one pixel wide
    corners = np.empty((len(shown), 4, 2))
    corners[:, (0, 3), 0], corners[:, (1, 2), 0] = start[:, None], seen_end[:, None]
    corners[:, (0, 1), 1], corners[:, (2, 3), 1] = (top + 0.03)[:, None], (top + height - 0.03)[:, None]
    words = [trace.words[code] for code in trace.kind[shown].tolist()]
    fills = np.array([fill_of(styles[word], side.predicted or dim) for word in words])
    edges = np.array([to_rgb(styles[word].colour) if side.predicted else (1.0, 1.0, 1.0) for word in words])
    narrow = (seen_end - start) * scale < 3
    edges[narrow] = fills[narrow]
    colours: dict[str, Any] = {"facecolors": fills, "edgecolors": edges}
    axes.add_collection(
        PolyCollection(corners, gid="boxes", linewidths=np.where(narrow, 0.0, 0.8), **colours),  # type: ignore[arg-type]
        autolim=False,
    )
    free_end = np.minimum(seen_end, _next_start(row, level, start))
    spots = np.stack([np.maximum(start, low), np.minimum(free_end, high), top, height], axis=1)
    _add_labels(axes, trace, shown, spots, fills, styles)


def _next_start(row: Ints, level: Ints, start: Floats) -> Floats:
    """Return where the next box on the same level begins, which may cover this one; boxes are in order of start."""
    after = np.full(len(start), np.inf)
    order = np.lexsort((level, row))  # stable: within a level still by start
    same = (np.diff(row[order]) == 0) & (np.diff(level[order]) == 0)
    after[order[:-1][same]] = start[order[1:][same]]
    return after


def _add_labels(
    axes: Axes, trace: Trace, shown: Ints, spots: Floats, fills: Floats, styles: Mapping[str, KindStyle]
) -> None:
    """Write the longest label that fits into each box, the widest boxes first, at most MAX_LABELS."""
    low, high = axes.get_xlim()
    wide, tall = axes_pixels(axes)
    x_scale, y_scale = wide / (high - low), tall / abs(axes.get_ylim()[0] - axes.get_ylim()[1])
    widths = (spots[:, 1] - spots[:, 0]) * x_scale
    sizes = np.minimum(TEXT_PT, spots[:, 3] * y_scale * 0.78 * 72 / DPI)
    order = np.argsort(-widths, kind="stable")
    largest = int(trace.microbatch.max(initial=0))
    words: list[Word] = []
    for index in order.tolist():
        size, width = float(sizes[index]), float(widths[index])
        if len(words) >= MAX_LABELS or width < CHARACTER_WIDTH * LEAST_PT * DPI / 72:
            break
        span = trace[int(shown[index])]
        texts = labels_of(span.name, styles[span.kind].letter, span.microbatch, largest)
        label, size = _fitting(texts, (width - 3) * 72 / DPI / CHARACTER_WIDTH, size)
        if not label:
            continue
        x, y = (spots[index, 0] + spots[index, 1]) / 2, spots[index, 2] + spots[index, 3] / 2
        red, green, blue = fills[index].tolist()
        words.append(Word(x, y, label, size, text_colour((red, green, blue))))
    axes.add_artist(Words(words))


def _fitting(texts: Sequence[tuple[str, int]], room: float, size: float) -> tuple[str, float]:
    """Return the first text that fits into the room (characters x points) and its size; a short one may shrink."""
    for text, length in texts:
        fits = min(size, room / (length + WIDE * text.count("W")), BARE_PT if text.isdigit() else size)
        if fits >= (LEAST_PT if length <= 4 else max(LEAST_PT, 0.9 * size)):
            return text, fits
    return "", size


def labels_of(name: str, letter: str, microbatch: int, largest: int) -> tuple[tuple[str, int], ...]:
    """Return what may stand in a box and the room to leave for it: the name, the letter and number, one of both.

    In a trace of several micro-batches the number is the micro-batch's, and all leave room for the digits of the
    largest, so that equal boxes look alike. Else it is the number at the end of the name.
    """
    if microbatch >= 0 and largest > 0:
        digits = len(str(largest))
        return ((f"{letter}{microbatch}", len(letter) + digits), (str(microbatch), digits))
    number = re.search(r"(\d+)$", name)
    texts = (name.replace("_", "-"), *((f"{letter}{number.group()}",) if number else ()), letter)
    return tuple((text, len(text)) for text in texts if text)


def pixel_columns(cell: Ints, start_s: Floats, end_s: Floats, num_cells: int, num_columns: int, view: View) -> Floats:
    """Return the seconds that the spans of each cell spend in each column of the view: [num_cells, num_columns].

    Spans outside the view add nothing; inside it no time is lost: a cell's columns sum to its spans' time.
    """
    width = (view[1] - view[0]) / num_columns
    start = np.clip((start_s - view[0]) / width, 0, num_columns)
    end = np.clip((end_s - view[0]) / width, 0, num_columns)
    first = np.minimum(start.astype(np.int64), num_columns - 1)
    last = np.minimum(end.astype(np.int64), num_columns - 1)
    stride = num_columns + 1

    def total(column: Ints, weight: Floats) -> Floats:
        sums = np.bincount(cell * stride + column, weights=weight, minlength=num_cells * stride).astype(np.float64)
        return sums.reshape(num_cells, stride)

    # Every column from first on counts as full, from last on no more; then the two ends are put right.
    steps = total(first, np.ones(len(cell))) - total(last, np.ones(len(cell)))
    full = np.cumsum(steps, axis=1)
    return ((full - total(first, start - first) + total(last, end - last))[:, :num_columns]) * width


def filled_columns(scene: Scene, num_columns: int, view: View) -> Floats:
    """Return how far each column of each row is filled up to and with each kind: [rows, kinds, num_columns], 0 to 1."""
    kinds = list(scene.styles)
    seconds = np.zeros((len(scene.rows), len(kinds), num_columns))
    for side, row in zip(scene.sides, scene.row_of, strict=True):
        trace, keep = side.trace, np.flatnonzero(row >= 0)
        codes = np.array([kinds.index(word) if word in kinds else 0 for word in trace.words], dtype=np.int64)
        cell = row[keep] * len(kinds) + codes[trace.kind[keep]]
        start, end = trace.start_ns[keep] / 1e9, trace.end_ns[keep] / 1e9
        part = pixel_columns(cell, start, end, len(scene.rows) * len(kinds), num_columns, view)
        seconds += part.reshape(seconds.shape)
    busy = seconds.sum(axis=1, keepdims=True)
    share = seconds / np.maximum(busy, (view[1] - view[0]) / num_columns)  # spans that overlap share the column
    filled: Floats = np.cumsum(share, axis=1)
    return filled


def add_pixels(axes: Axes, scene: Scene, *, dim: bool = False) -> None:
    """Draw all sides as one image of pixel columns over the axes; `dim` makes what was measured pale."""
    view = axes.get_xlim()
    wide, tall = (int(size) for size in axes_pixels(axes))
    filled = filled_columns(scene, wide, view)
    picture = np.ones((tall, wide, 3))
    y_scale = tall / scene.total_height
    for row, part in zip(scene.rows, filled, strict=True):
        low = round(row.top * y_scale)
        high = max(low + 1, min(tall, round((row.top + row.height) * y_scale) - (row.height * y_scale > 3)))
        fills = [fill_of(style, row.predicted or dim) for style in scene.styles.values()]
        picture[low:high] = np.array([*fills, to_rgb(IDLE)])[kinds_at(part, high - low)]
    image = (picture * 255).astype(np.uint8)
    extent = (view[0], view[1], scene.total_height, 0.0)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest", origin="upper", gid="pixels")


def kinds_at(filled: Floats, num_lines: int) -> Ints:
    """Return which kind each pixel of a row shows, from the top: [num_lines, columns]; the number of kinds is idle."""
    level = 1 - (np.arange(num_lines) + 0.5) / num_lines  # the top pixel needs the fullest column
    shown: Ints = (filled[:, None, :] <= level[None, :, None]).sum(axis=0)
    return shown
