"""Draw who did what and when: one row for each lane of each rank, the prediction right under the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from distlab.trace import CriticalPath, Trace
from simulator.units import counted, format_s, percent
from simulator.viz.drawing import theme
from simulator.viz.drawing.lanes import LaneRow, Scene, Side, View, add_boxes, add_pixels, fill_of, heights_of, scene_of
from simulator.viz.drawing.pen import LEGEND_LINE_IN, Picture, legend_lines, put_legend
from simulator.viz.drawing.plot import axes_pixels, draw_time_scale, frame, new_figure, put_title
from simulator.viz.timeline.facts import Facts, Overlay, facts_of

UNIT_IN = 0.36  # height of one lane where there is room
MAX_ROWS_IN = 7.0  # a slide's height
BAND_ALPHA = 0.14, 0.05  # of the bands in which the measured and the predicted end may lie; the second has dashed edges
CRITICAL = "#D6007A"  # no kind has it; it is seen on light and on dark paper
LEFT_IN, SHORT_LEFT_IN, RIGHT_IN = 2.15, 1.15, 0.35


class Caption(NamedTuple):
    """What stands around the rows: the takeaway, a line of notes, the text over the lines at the ends, and their bands.

    `bands` are (start, end) in seconds in which the measured and the predicted end may lie, and `ends_s` where the
    lines stand; without them at the traces' ends. `dim` makes measured boxes pale: the machine was not calm.
    """

    title: str
    note: str
    ends: str
    bands: tuple[View, ...] = ()
    ends_s: tuple[float, ...] = ()
    dim: bool = False


def draw_scene(
    scene: Scene, words: Caption, time_range_s: View | None = None, paths: Sequence[CriticalPath] = ()
) -> Figure:
    """Draw a view of a scene with the words around it: exact boxes, or pixel columns where there are too many.

    Raises:
        ValueError: the range holds no time.
    """
    view = (0.0, scene.limit_s) if time_range_s is None else time_range_s
    if not view[0] < view[1]:
        raise ValueError(f"time_range_s is {view}; pass (start, end) in seconds with start before end")
    spans = sum(len(side.trace) for side in scene.sides)
    notes = [words.note, note_of(scene), "" if scene.is_exact(view) else f"{spans:,} spans drawn in pixel columns"]
    note = "; ".join(filter(None, notes))
    boxes = legend_boxes(scene.styles, any(side.predicted for side in scene.sides))
    lanes = len({(row.lane, row.predicted) for row in scene.rows})
    left = LEFT_IN if lanes > 1 else SHORT_LEFT_IN
    above = 1.22 if note else 0.95
    below = 0.87 + LEGEND_LINE_IN * len(legend_lines(boxes))
    figure = new_figure(min(max(scene.total_height * UNIT_IN, 0.8), MAX_ROWS_IN) + above + below)
    axes = frame(figure, left=left, right=RIGHT_IN, top=above, bottom=below, bare=True)
    draw_rows(axes, scene, view, dim=words.dim)
    look: dict[str, Any] = {"fontsize": theme.TEXT_PT, "weight": "bold", "color": theme.INK, "va": "center"}
    for heading in scene.headings:
        axes.text(view[0], heading.at, heading.text, **look)
    _mark_ends(axes, scene.sides, words)
    _outline(axes, path_boxes(scene, paths))
    put_title(figure, words.title, note)
    put_legend(figure, boxes)
    return figure


def _outline(axes: Axes, paths: Sequence[Sequence[Sequence[float]]]) -> None:
    """Draw an outline around the boxes of each path, and a line from each box to the next."""
    for boxes in paths:
        edges = [[(x, y), (end, y), (end, y + height), (x, y + height)] for x, end, y, height in boxes]
        edges += [[(a[1], a[2] + a[3] / 2), (b[0], b[2] + b[3] / 2)] for a, b in pairwise(boxes)]
        look: dict[str, Any] = {"facecolors": "none", "edgecolors": CRITICAL, "linewidths": 1.8, "gid": "critical"}
        axes.add_collection(PolyCollection(edges, zorder=3, **look), autolim=False)


def draw_rows(axes: Axes, scene: Scene, view: View, *, dim: bool = False) -> None:
    """Draw the rows of a scene, their names and the time axis on bare axes: exact boxes, or else pixel columns."""
    fill_rows(axes, scene, view, dim=dim)
    _label_rows(axes, scene.rows, scene.total_height)
    draw_time_scale(axes)


def fill_rows(axes: Axes, scene: Scene, view: View, *, dim: bool = False) -> None:
    """Draw what fills the rows of a scene; measured rows are tinted, so that idle time is seen as something."""
    axes.set_xlim(view)
    axes.set_ylim(scene.total_height, 0)
    if not scene.is_exact(view):
        add_pixels(axes, scene, dim=dim)
        return
    edges = [(row.top + 0.03, row.top + row.height - 0.03) for row in scene.rows if not row.predicted]
    corners = [[(0, low), (1, low), (1, high), (0, high)] for low, high in edges]
    look: dict[str, Any] = {"linewidths": 0, "zorder": 0, "transform": axes.get_yaxis_transform()}
    axes.add_collection(PolyCollection(corners, facecolors=theme.IDLE, **look), autolim=False)
    add_boxes(axes, scene, dim=dim)


def legend_boxes(styles: dict[str, theme.KindStyle], both: bool) -> list[theme.LegendBox]:
    """Return the legend's entries: each kind with its letter, what a lighter shade is, measured and predicted."""
    boxes = {
        style.words: theme.LegendBox(fill_of(style, False), "white", style.letter, style.words)
        for kind, style in styles.items()
        if theme.SHADE not in kind
    }
    if any(theme.SHADE in kind for kind in styles):
        boxes["lighter"] = theme.LegendBox(
            theme.lighter(theme.FAINT, 1), "white", "", "lighter: a later stage of the rank"
        )
    if both:
        boxes["measured"] = theme.LegendBox(theme.FAINT, "white", "", "measured")
        boxes["predicted"] = theme.LegendBox(theme.pale(theme.FAINT), theme.FAINT, "", "predicted")
    return list(boxes.values())


def _label_rows(axes: Axes, rows: Sequence[LaneRow], total_height: float) -> None:
    """Name ranks and, where there is room, lanes; with many ranks name only some."""
    wide, tall = axes_pixels(axes)
    unit = tall / total_height
    look: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    groups = [list(group) for _, group in groupby(rows, lambda row: row.rank)]
    lane_size = min(theme.SMALL_PT, unit * 0.75 * 72 / theme.DPI)
    named = lane_size >= 7.5 and len(rows) > len(groups)
    near, far = -0.1 * theme.DPI / wide, -(LEFT_IN - 0.16) * theme.DPI / wide
    size = theme.TEXT_PT if len(groups) <= 16 else theme.SMALL_PT
    every = max(1, int(np.ceil(len(groups) * size * 1.5 * theme.DPI / 72 / tall)))
    weight = "bold" if unit >= 20 else "normal"
    for group in groups[::every]:
        middle = (group[0].top + group[-1].top + group[-1].height) / 2
        x, side = (far, "left") if named else (near, "right")
        axes.text(x, middle, f"rank {group[0].rank}", ha=side, fontsize=size, weight=weight, color=theme.INK, **look)
    for row in rows if named else ():
        words = "predicted" if row.predicted else row.lane
        size = min(lane_size, theme.LEAST_PT) if row.predicted else lane_size
        axes.text(near, row.top + row.height / 2, words, ha="right", fontsize=size, color=theme.FAINT, **look)


def _mark_ends(axes: Axes, sides: Sequence[Side], words: Caption) -> None:
    """Draw a line where each step ends (dashed for the second) in its band, and write the text over the later one."""
    low, high = axes.get_xlim()
    up = axes.get_xaxis_transform()
    above = 1 + 3 / axes_pixels(axes)[1]
    ends = words.ends_s or tuple(side.trace.duration_s for side in sides)
    for which, end in enumerate(ends):
        if low <= end <= high:
            dashes = (0, (4, 3)) if which else "-"
            axes.plot(
                [end, end], [0, above], transform=up, color=theme.INK, linestyle=dashes, linewidth=1.4, clip_on=False
            )
    for (start, end), alpha in zip(words.bands, BAND_ALPHA, strict=False):
        if start >= high or end <= low:
            continue
        axes.axvspan(max(start, low), min(end, high), color=theme.INK, alpha=alpha, linewidth=0, gid="band")
    for edge in words.bands[1] if words.bands else ():
        if low <= edge <= high:
            axes.plot([edge, edge], [0, 1], transform=up, color=theme.FAINT, linestyle=(0, (2, 3)), linewidth=1.0)
    x = max(ends) if low <= max(ends) <= high else high
    text = axes.text(
        x, above, words.ends, transform=up, fontsize=theme.TEXT_PT, color=theme.INK, ha="right", va="bottom"
    )
    if text.get_window_extent().x0 < 0:  # a step that ends early leaves too little room before its line
        text.set(x=low, ha="left")


def find_paths(scene: Scene) -> tuple[CriticalPath, ...]:
    """Return the critical path of each side."""
    words = [tuple(word.partition(theme.SHADE)[0] for word in side.trace.words) for side in scene.sides]
    return tuple(replace(side.trace, words=own).critical_path() for side, own in zip(scene.sides, words, strict=True))


def path_boxes(scene: Scene, paths: Sequence[CriticalPath]) -> list[list[list[float]]]:
    """Return of each path the boxes that have a row: start and end in seconds, top and height [sides][N, 4]."""
    found = []
    for which, path in enumerate(paths):
        rows = np.array(path.rows, np.int64)
        shown = np.flatnonzero((rows >= 0) & (scene.row_of[which][rows] >= 0))
        times = np.array([span[4:6] for span in path.spans], np.float64).reshape(-1, 2)[shown] / 1e9
        found.append(np.column_stack([times, *heights_of(scene, which, rows[shown])]).tolist())
    return found


def draw_timeline(
    measured: Trace | Overlay, predicted: Trace | None = None, *, title: str | None = None, critical: bool = False
) -> Picture:
    """Draw a trace as one row for each lane of each rank, and a second trace right under it for comparison.

    Each trace starts at zero, whatever its clock. Up to MAX_BOXES spans are exact boxes; more become pixel columns.
    `title` replaces the takeaway, and begins the words. Of more than 64 ranks (16 with a prediction) some are drawn,
    spread evenly.

    Of an Overlay both traces are drawn, on the step's clock, with a line at each median and the bands around it. Its
    measured boxes are pale where the machine was not calm.

    With `critical` the spans that decide when the last rank ends have an outline, and the words say what they are.

    Raises:
        ValueError: a trace is empty.
    """
    words, said = words_of(measured, predicted, title=title)
    scene = scene_of(*traces_of(measured, predicted), words.bands)
    paths = find_paths(scene) if critical else ()
    figure = draw_scene(scene, words, paths=paths)
    return Picture(figure, " ".join([*([f"{title}."] if title else []), said, *map(str, paths[:1])]))


def note_of(scene: Scene) -> str:
    """Return what the reader must know: that not all ranks are drawn."""
    drawn = len({row.rank for row in scene.rows})
    total = len(np.unique(np.concatenate([side.trace.rank for side in scene.sides])))
    return f"{drawn} of {total} ranks" if drawn < total else ""


def traces_of(measured: Trace | Overlay, predicted: Trace | None) -> tuple[Trace, Trace | None]:
    """Return the trace to draw and the one to lay under it, with their clocks at zero; an overlay's is the step's."""
    if isinstance(measured, Overlay):
        return measured.measured, measured.predicted.from_zero()
    return measured.from_zero(), None if predicted is None else predicted.from_zero()


def words_of(measured: Trace | Overlay, predicted: Trace | None, *, title: str | None = None) -> tuple[Caption, str]:
    """Return title and texts around the rows, and a paragraph that says the picture to readers who cannot see it."""
    if isinstance(measured, Overlay):
        caption = Caption(title or measured.title, measured.advice, measured.verdict, measured.bands_s)
        caption = caption._replace(ends_s=measured.middle_s, dim=bool(measured.trouble))
        return caption, f"{words_of(measured.measured, None)[1]} {measured}"
    facts, expected = facts_of(measured), None if predicted is None else facts_of(predicted)
    text = f"Timeline of {counted(facts.num_ranks, 'rank')} over {format_s(facts.duration_s)}, {len(measured):,} spans."
    if facts.compute_share:
        text += f" Compute fills {percent(facts.compute_share)} of the ranks' time."
    if facts.communication_s > 0:
        text += f" A rank communicates for {format_s(facts.communication_s)} on average"
        exposed = f"; {format_s(facts.exposed_s)} of it is exposed: not hidden behind compute"
        text += f"{exposed if facts.compute_share else ''}."
    else:
        text += " No rank communicates."
    if facts.num_ranks > 1:
        text += " All ranks end together." if facts.last_rank is None else f" Rank {facts.last_rank} ends last."
    if expected is not None:
        error = percent(_error(facts, expected), 1, "+")
        text += f" The prediction is {format_s(expected.duration_s)}, an error of {error}"
        both = f", with compute at {percent(expected.compute_share)} and {format_s(expected.exposed_s)} exposed"
        text += f"{both if expected.compute_share else ''}."
    return Caption(title or takeaway(facts, expected), "", ends_text(facts, expected)), text


def takeaway(facts: Facts, expected: Facts | None) -> str:
    """Return the title: the one sentence that the picture shows."""
    hidden = "no communication is exposed"
    if facts.exposed_s >= 0.005 * facts.duration_s:
        hidden = f"{format_s(facts.exposed_s)} of communication is exposed"
    if expected is None and not facts.compute_share:
        return f"A rank communicates for {format_s(facts.communication_s)} of {format_s(facts.duration_s)}"
    if expected is None:
        share = f"Compute fills {percent(facts.compute_share)} of a {format_s(facts.duration_s)} step"
        return f"{share}; {hidden}" if facts.communication_s > 0 else share
    error = _error(facts, expected)
    if abs(error) < 0.005:
        return f"The prediction is right to half a percent; {hidden}"
    return f"The prediction ends {percent(abs(error))} {'early' if error < 0 else 'late'}; {hidden}"


def ends_text(facts: Facts, expected: Facts | None) -> str:
    """Return what stands at the end of the step: when it is, and when it was predicted to be."""
    if expected is None:
        return f"step ends at {format_s(facts.duration_s)}"
    error = percent(_error(facts, expected), 1, "+")
    return f"measured {format_s(facts.duration_s)}, predicted {format_s(expected.duration_s)}: {error}"


def _error(facts: Facts, expected: Facts) -> float:
    return expected.duration_s / facts.duration_s - 1 if facts.duration_s else 0.0
