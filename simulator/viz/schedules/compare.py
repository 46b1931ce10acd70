"""One schedule, or two one under the other on one time axis: who is idle where, and which one ends first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.units import capitalised, counted, format_s, percent
from simulator.viz.drawing.boxes import View, in_view
from simulator.viz.drawing.lanes import CLOSE_GAP, CLOSE_RANKS, RANK_GAP, LaneRow, Placement, Side, shaded
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import spread_evenly
from simulator.viz.schedules.run import ScheduleRun
from simulator.viz.timeline.draw_rows import Caption, Heading, Scene, draw_scene, limit_of, styles_of
from simulator.viz.timeline.timeline import MAX_BOXES, view_of

MAX_RANKS = 64  # of each schedule
HEADING = 1.0  # the room for a heading, in heights of a row


def draw_schedules(runs: Sequence[ScheduleRun], *, time_range_s: View | None = None) -> Picture:
    """Draw schedules one under the other on one time axis; the title says what sets them apart.

    Raises:
        ValueError: there is no run, or the range holds no time.
    """
    scene = stack(runs)
    view = view_of(time_range_s, scene.limit_s)
    seen = [int(in_view(side.trace, view).sum()) for side in scene.sides]
    return Picture(draw_scene(scene, words_of(runs), view, exact=sum(seen) <= MAX_BOXES), say_schedules(runs))


def say_schedules(runs: Sequence[ScheduleRun]) -> str:
    """Say in plain sentences what `draw_schedules` shows: one sentence per schedule, then how the two compare."""
    text = " ".join(sentence(run) for run in runs)
    if len(runs) == 2:
        first, second = runs
        change = second.duration_s / first.duration_s - 1
        text += f" {capitalised(second.name)} takes {_more(change, 'time')}"
        change = second.peak / first.peak - 1 if first.peak else 0.0
        text += f" and {_more(change, 'memory for activations')} than {first.name}."
    return text


def sentence(run: ScheduleRun) -> str:
    """Say in one sentence how a schedule did."""
    plan = run.schedule
    ranks, microbatches = counted(plan.num_ranks, "rank"), counted(plan.num_microbatches, "micro-batch")
    size = f"{ranks} and {microbatches}"
    if plan.num_stages > plan.num_ranks:
        size += f", {plan.num_stages // plan.num_ranks} stages per rank,"
    idle = percent(run.bubble_fraction, 1)
    text = (
        f"{capitalised(run.name)} on {size} takes {format_s(run.duration_s)}: ranks are idle for {idle} of it, a rank"
    )
    text += f" holds {count_of(run.peak)} at its peak, and it is {run.speedup:.2f} times as fast as one rank alone."
    if run.ends_apart:
        text += (
            f" But no rank takes longer than {format_s(run.rank_span_s)} from its own first action to its last: where"
        )
        text += f" a rank may start its next step before the others end theirs, {percent(run.idle_of_span, 1)} is"
        text += " idle."
    return text


def count_of(peak: float) -> str:
    """Write a peak in micro-batches through all of a rank's stages."""
    return f"{peak:.4g} micro-batch{'' if peak == 1 else 'es'} of activations"


def words_of(runs: Sequence[ScheduleRun]) -> Caption:
    """Return the takeaway, the note under it and the words at the ends."""
    first = runs[0]
    if len(runs) == 1:
        title = f"{capitalised(first.name)} leaves {percent(first.bubble_fraction, 1)} of "
        title += f"{counted(first.schedule.num_ranks, 'rank')}' time idle"
        ends = f"ends at {format_s(first.duration_s)}"
        if first.ends_apart:
            title += f", and {percent(first.idle_of_span, 1)} where steps need not end together"
            ends += f", no rank works longer than {format_s(first.rank_span_s)}"
        return Caption(title, _notes(runs), ends)
    second = runs[1]
    change = second.duration_s / first.duration_s - 1
    title = f"{second.name} ends {percent(abs(change), 1)} {'earlier' if change < 0 else 'later'} than {first.name}"
    if abs(change) < 5e-4:
        title = f"{first.name} and {second.name} end together"
    held = [f"{run.peak:.4g}" for run in runs]
    title += f"; both hold {held[0]}" if held[0] == held[1] else f"; {second.name} holds {held[1]} instead of {held[0]}"
    title += " micro-batches" if held != ["1", "1"] else " micro-batch"
    ends = f"{first.name} {format_s(first.duration_s)}, {second.name} {format_s(second.duration_s)}"
    return Caption(capitalised(title), _notes(runs), ends)


def stack(runs: Sequence[ScheduleRun]) -> Scene:
    """Place the ranks of one schedule under those of the other.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("there is no schedule to draw; pass at least one run")
    rows: list[LaneRow] = []
    headings = []
    row_of = []
    top = 0.0
    for run in runs:
        num_ranks = run.schedule.num_ranks
        drawn = spread_evenly(num_ranks, MAX_RANKS)
        if len(runs) > 1:
            headings.append(Heading(top + HEADING / 2, heading(run)))
            top += HEADING
        place = np.full(num_ranks, -1, np.int64)
        place[drawn] = len(rows) + np.arange(len(drawn))
        gap = CLOSE_GAP if len(drawn) >= CLOSE_RANKS else RANK_GAP * 0.6
        for rank in drawn:
            rows.append(LaneRow(rank, "compute", False, top, 1.0, 1))
            top += 1.0 + gap
        row_of.append(place[run.trace.rank])
    levels = tuple(np.zeros_like(row) for row in row_of)
    placement = Placement(tuple(rows), top, tuple(row_of), levels)
    sides = tuple(Side(shaded(run.trace), False) for run in runs)
    return Scene(sides, placement, styles_of(sides), limit_of(sides), tuple(headings))


def heading(run: ScheduleRun) -> str:
    """Return what stands over a schedule's rows."""
    return f"{run.name}: {percent(run.bubble_fraction, 1)} idle, {count_of(run.peak)}"


def _more(change: float, what: str) -> str:
    if abs(change) < 5e-4:
        return f"the same {what}"
    return f"{percent(abs(change), 1)} {'less' if change < 0 else 'more'} {what}"


def _notes(runs: Sequence[ScheduleRun]) -> str:
    ranks = max(run.schedule.num_ranks for run in runs)
    notes = [f"{MAX_RANKS} of {ranks} ranks are drawn"] if ranks > MAX_RANKS else []
    spans = sum(len(run.trace) for run in runs)
    return "; ".join([*notes, *([f"{spans:,} actions in pixel columns"] if spans > MAX_BOXES else [])])
