"""Draw who did what and when: one row a lane of each rank, the prediction right under the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from distlab.trace.span import Trace
from simulator.units import format_s
from simulator.viz.boxes import View, add_boxes, add_pixels, axes_pixels, fill_of, in_view
from simulator.viz.facts import Facts, facts_of
from simulator.viz.rows import Placement, Row, Side, lanes_of, place
from simulator.viz.style import (
    DPI,
    FAINT,
    IDLE,
    INK,
    SMALL_PT,
    TEXT_PT,
    KindStyle,
    LegendBox,
    frame,
    kind_styles,
    new_figure,
    pale,
    percent,
    put_legend,
    put_title,
    time_unit,
)

MAX_BOXES = 4_000
MAX_RANKS = (64, 16)  # one trace; two
UNIT_IN = 0.36  # height of one lane where there is room
MAX_ROWS_IN = 7.0
LEFT_IN, SHORT_LEFT_IN, RIGHT_IN = 2.15, 1.15, 0.35
LEGEND_COLUMNS = 7


class Words(NamedTuple):
    """What stands around the rows: the takeaway, a line of notes, and the text over the lines at the ends."""

    title: str
    note: str
    ends: str


def draw_timeline(
    measured: Trace,
    predicted: Trace | None = None,
    *,
    title: str | None = None,
    time_range_s: View | None = None,
    max_ranks: int | None = None,
    lanes: Sequence[str] | None = None,
) -> Figure:
    """Draw a trace as one row a lane of each rank, and a second trace right under it for comparison.

    Each trace starts at zero, whatever its clock. Up to MAX_BOXES spans are exact boxes; more become pixel columns, and
    a narrow `time_range_s` (seconds from the start) brings the boxes back. `title` replaces the takeaway. Of more than
    `max_ranks` ranks (64, or 16 with a prediction) some are drawn, spread evenly.

    Raises:
        ValueError: a trace is empty, the range holds no time, max_ranks is below 1, or no span is in the lanes.
    """
    facts = facts_of(measured)
    expected = None if predicted is None else facts_of(predicted)
    sides = [Side(measured.from_zero(), False)]
    if predicted is not None:
        sides.append(Side(predicted.from_zero(), True))
    words = Words(title or takeaway(facts, expected), "", ends_text(facts, expected))
    return draw_rows(sides, words, time_range_s=time_range_s, max_ranks=max_ranks, lanes=lanes)


def draw_rows(
    sides: Sequence[Side],
    words: Words,
    *,
    time_range_s: View | None = None,
    max_ranks: int | None = None,
    lanes: Sequence[str] | None = None,
) -> Figure:
    """Draw the rows of one or two traces that start at zero, with the words around them.

    Raises:
        ValueError: the range holds no time, max_ranks is below 1, or no span is in the lanes.
    """
    view = _view(time_range_s, max(side.trace.duration_s for side in sides))
    most = MAX_RANKS[len(sides) - 1] if max_ranks is None else max_ranks
    ranks = chosen_ranks(sides, most)
    wanted = tuple(lane for lane in lanes_of(sides) if lanes is None or lane in lanes)
    if not wanted:
        raise ValueError(f"no span is in lanes {list(lanes or ())}; the trace has {list(lanes_of(sides))}")
    seen = [in_view(side.trace, view) & np.isin(side.trace.rank, ranks) for side in sides]
    exact = sum(int(mask.sum()) for mask in seen) <= MAX_BOXES
    placement = place(sides, ranks, wanted, seen=seen, levels=exact)
    styles = kind_styles([side.trace.words[code] for side in sides for code in np.unique(side.trace.kind)])
    boxes = legend_boxes(styles, len(sides) > 1)
    note = "; ".join(part for part in (words.note, _drawn(sides, ranks, exact)) if part)
    left = LEFT_IN if len(sides) * len(wanted) > 1 else SHORT_LEFT_IN
    figure, axes = _canvas(placement, left, 1.22 if note else 0.95, 0.85 + 0.3 * -(-len(boxes) // LEGEND_COLUMNS))
    axes.set_xlim(view)
    axes.set_ylim(placement.total_height, 0)
    if exact:
        _shade_idle(axes, placement)
        for which, side in enumerate(sides):
            add_boxes(axes, side, placement, which, styles)
    else:
        add_pixels(axes, sides, placement, styles, view)
    _label_rows(axes, placement)
    _label_time(axes, view)
    _mark_ends(axes, sides, words.ends)
    put_title(figure, words.title, note)
    put_legend(figure, boxes, max_columns=LEGEND_COLUMNS)
    return figure


def describe_timeline(measured: Trace, predicted: Trace | None = None) -> str:
    """Say in one paragraph what `draw_timeline` shows: the picture's text for readers who cannot see it."""
    facts = facts_of(measured)
    ranks = "1 rank" if facts.num_ranks == 1 else f"{facts.num_ranks} ranks"
    text = f"Timeline of {ranks} over {format_s(facts.duration_s)}, {len(measured):,} spans."
    text += f" Compute fills {percent(facts.compute_share)} of the ranks' time."
    if facts.communication_s > 0:
        text += f" A rank communicates for {format_s(facts.communication_s)} on average;"
        text += f" {format_s(facts.exposed_s)} of it is exposed: not hidden behind compute."
    else:
        text += " No rank communicates."
    if facts.num_ranks > 1:
        text += f" Rank {facts.last_rank} ends last."
    if predicted is not None:
        expected = facts_of(predicted)
        error = percent(_error(facts, expected), 1, "+")
        text += f" The prediction is {format_s(expected.duration_s)}, an error of {error},"
        text += f" with compute at {percent(expected.compute_share)} and {format_s(expected.exposed_s)} exposed."
    return text


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


def chosen_ranks(sides: Sequence[Side], max_ranks: int) -> tuple[int, ...]:
    """Return the ranks to draw: all, or `max_ranks` of them spread evenly from the first to the last.

    Raises:
        ValueError: max_ranks is below 1.
    """
    if max_ranks < 1:
        raise ValueError(f"max_ranks is {max_ranks}; pass at least 1")
    ranks = np.unique(np.concatenate([side.trace.rank for side in sides]))
    if len(ranks) > max_ranks:
        ranks = ranks[np.linspace(0, len(ranks) - 1, max_ranks).round().astype(np.int64)]
    return tuple(ranks.tolist())


def legend_boxes(styles: dict[str, KindStyle], both: bool) -> list[LegendBox]:
    """Return the legend's entries: each kind with its letter, then measured and predicted where both are drawn."""
    boxes = {
        style.words: LegendBox(fill_of(style, False), "white", style.letter, style.words) for style in styles.values()
    }
    if both:
        boxes["measured"] = LegendBox(FAINT, "white", "", "measured")
        boxes["predicted"] = LegendBox(pale(FAINT), FAINT, "", "predicted")
    return list(boxes.values())


def _error(facts: Facts, expected: Facts) -> float:
    return expected.duration_s / facts.duration_s - 1 if facts.duration_s else 0.0


def _view(time_range_s: View | None, end_s: float) -> View:
    """Return the seconds to show: the range asked for, or everything with a little room after the end."""
    if time_range_s is None:
        return 0.0, (end_s * 1.012 if end_s else 1e-6)
    low, high = time_range_s
    if not low < high:
        raise ValueError(f"time_range_s is {time_range_s}; pass (start, end) in seconds with start before end")
    return float(low), float(high)


def _drawn(sides: Sequence[Side], ranks: Sequence[int], exact: bool) -> str:
    """Return what the reader must know about the drawing: how many of the ranks, and whether boxes are exact."""
    total = len(np.unique(np.concatenate([side.trace.rank for side in sides])))
    notes = [f"{len(ranks)} of {total} ranks"] if len(ranks) < total else []
    if not exact:
        spans = sum(len(side.trace) for side in sides)
        notes.append(f"{spans:,} spans drawn in pixel columns")
    return "; ".join(notes)


def _canvas(placement: Placement, left: float, top: float, bottom: float) -> tuple[Figure, Axes]:
    """Make a figure high enough for the rows, up to a slide's height; margins are in inches."""
    rows_in = min(max(placement.total_height * UNIT_IN, 0.8), MAX_ROWS_IN)
    figure = new_figure(rows_in + top + bottom)
    return figure, frame(figure, left=left, right=RIGHT_IN, top=top, bottom=bottom)


def _shade_idle(axes: Axes, placement: Placement) -> None:
    """Tint every row, so that idle time is seen as something and not as paper."""
    for row in placement.rows:
        if not row.predicted:
            axes.axhspan(row.top + 0.03, row.top + row.height - 0.03, color=IDLE, linewidth=0, zorder=0)


def _label_rows(axes: Axes, placement: Placement) -> None:
    """Name ranks and, where there is room, lanes; with many ranks name only some."""
    wide, tall = axes_pixels(axes)
    unit = tall / placement.total_height
    look: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    groups: dict[int, list[Row]] = {}
    for row in placement.rows:
        groups.setdefault(row.rank, []).append(row)
    lane_size = min(SMALL_PT, unit * 0.75 * 72 / DPI)
    named = lane_size >= 7.5 and len(placement.rows) > len(groups)
    near, far = -0.1 * DPI / wide, -(LEFT_IN - 0.16) * DPI / wide
    size = TEXT_PT if len(groups) <= 16 else SMALL_PT
    every = max(1, int(np.ceil(len(groups) * size * 1.5 * DPI / 72 / tall)))
    weight = "bold" if unit >= 20 else "normal"
    for rank, rows in list(groups.items())[::every]:
        middle = (rows[0].top + rows[-1].top + rows[-1].height) / 2
        x, side = (far, "left") if named else (near, "right")
        axes.text(x, middle, f"rank {rank}", ha=side, fontsize=size, weight=weight, color=INK, **look)
    for row in placement.rows if named else ():
        words = "predicted" if row.predicted else row.lane
        size = min(lane_size, 9.0) if row.predicted else lane_size
        axes.text(near, row.top + row.height / 2, words, ha="right", fontsize=size, color=FAINT, **look)


def _label_time(axes: Axes, view: View) -> None:
    scale, unit = time_unit(view[1])
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:,.6g}"))
    axes.set_xlabel(f"time since the step began ({unit})", fontsize=TEXT_PT, color=INK)


def _mark_ends(axes: Axes, sides: Sequence[Side], text: str) -> None:
    """Draw a line where each trace ends (dashed for the prediction), and write the text over the later one."""
    low, high = axes.get_xlim()
    up = axes.get_xaxis_transform()
    above = 1 + 3 / axes_pixels(axes)[1]
    ends = [side.trace.duration_s for side in sides]
    for side, end in zip(sides, ends, strict=True):
        if low <= end <= high:
            dashes = (0, (4, 3)) if side.predicted else "-"
            axes.plot([end, end], [0, above], transform=up, color=INK, linestyle=dashes, linewidth=1.4, clip_on=False)
    x = max(ends) if low <= max(ends) <= high else high
    axes.text(x, above, text, transform=up, fontsize=TEXT_PT, color=INK, ha="right", va="bottom")
