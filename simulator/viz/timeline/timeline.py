"""Draw who did what and when: one row for each lane of each rank, the prediction right under the measurement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from distlab.trace import Trace
from simulator.units import format_s, percent
from simulator.viz.drawing.boxes import View, in_view
from simulator.viz.drawing.lanes import Side, lanes_of, place, shaded
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import spread_evenly
from simulator.viz.timeline.draw_rows import Caption, Scene, draw_scene, limit_of, styles_of
from simulator.viz.timeline.facts import Facts, facts_of
from simulator.viz.timeline.overlay import Overlay

MAX_BOXES = 4_000
MAX_RANKS = (64, 16)  # one trace; two


def draw_timeline(
    measured: Trace | Overlay,
    predicted: Trace | None = None,
    *,
    title: str | None = None,
    time_range_s: View | None = None,
) -> Picture:
    """Draw a trace as one row for each lane of each rank, and a second trace right under it for comparison.

    Each trace starts at zero, whatever its clock. Up to MAX_BOXES spans are exact boxes; more become pixel columns, and
    a narrow `time_range_s` (seconds from the start) brings the boxes back. `title` replaces the takeaway, and begins
    the words. Of more than 64 ranks (16 with a prediction) some are drawn, spread evenly.

    Of an Overlay both traces are drawn, and the bands in which their ends lie. Its measured boxes are pale where the
    machine was not calm.

    Raises:
        ValueError: a trace is empty, the range holds no time.
    """
    first, second = traces_of(measured, predicted)
    sides = [Side(first.from_zero(), False)]
    if second is not None:
        sides.append(Side(second.from_zero(), True))
    figure = draw_rows(sides, words_of(measured, predicted, title=title), time_range_s=time_range_s)
    return Picture(figure, (f"{title}. " if title else "") + say_timeline(measured, predicted))


def draw_rows(sides: Sequence[Side], words: Caption, *, time_range_s: View | None = None) -> Figure:
    """Draw the rows of one or two traces that start at zero, with the words around them.

    Raises:
        ValueError: the range holds no time.
    """
    view = view_of(time_range_s, limit_of(sides, words.bands))
    sides = tuple(Side(shaded(side.trace), side.predicted) for side in sides)
    ranks = chosen_ranks(sides, MAX_RANKS[len(sides) - 1])
    seen = [in_view(side.trace, view) & np.isin(side.trace.rank, ranks) for side in sides]
    exact = sum(int(mask.sum()) for mask in seen) <= MAX_BOXES
    placement = place(sides, ranks, lanes_of(sides), seen=seen, levels=exact)
    scene = Scene(sides, placement, styles_of(sides), view[1])
    note = "; ".join(part for part in (words.note, _drawn(sides, ranks, exact)) if part)
    return draw_scene(scene, words._replace(note=note), view, exact=exact)


def traces_of(measured: Trace | Overlay, predicted: Trace | None) -> tuple[Trace, Trace | None]:
    """Return the trace to draw and the one to lay under it."""
    return (measured.measured, measured.predicted) if isinstance(measured, Overlay) else (measured, predicted)


def words_of(measured: Trace | Overlay, predicted: Trace | None, *, title: str | None = None) -> Caption:
    """Return title and texts around the rows: an overlay's verdict, or how far apart two traces end."""
    if isinstance(measured, Overlay):
        dim = bool(measured.trouble)
        return Caption(title or measured.title, measured.advice, measured.verdict, measured.bands_s, dim)
    facts, expected = facts_of(measured), None if predicted is None else facts_of(predicted)
    return Caption(title or takeaway(facts, expected), "", ends_text(facts, expected))


def say_timeline(measured: Trace | Overlay, predicted: Trace | None = None) -> str:
    """Say in one paragraph what `draw_timeline` shows: the picture's text for readers who cannot see it."""
    if isinstance(measured, Overlay):
        return f"{say_timeline(measured.measured)} {measured}"
    facts = facts_of(measured)
    ranks = "1 rank" if facts.num_ranks == 1 else f"{facts.num_ranks} ranks"
    text = f"Timeline of {ranks} over {format_s(facts.duration_s)}, {len(measured):,} spans."
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
    if predicted is not None:
        expected = facts_of(predicted)
        error = percent(_error(facts, expected), 1, "+")
        text += f" The prediction is {format_s(expected.duration_s)}, an error of {error}"
        both = f", with compute at {percent(expected.compute_share)} and {format_s(expected.exposed_s)} exposed"
        text += f"{both if expected.compute_share else ''}."
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
    """Return the ranks to draw: all, or `max_ranks` of them spread evenly from the first to the last."""
    ranks = all_ranks(sides)
    return tuple(ranks[index] for index in spread_evenly(len(ranks), max_ranks))


def all_ranks(sides: Sequence[Side]) -> list[int]:
    """Return the ranks of all traces, in order."""
    found: list[int] = np.unique(np.concatenate([side.trace.rank for side in sides])).tolist()
    return found


def _error(facts: Facts, expected: Facts) -> float:
    return expected.duration_s / facts.duration_s - 1 if facts.duration_s else 0.0


def view_of(time_range_s: View | None, limit_s: float) -> View:
    """Return the seconds to show: the range asked for, or everything.

    Raises:
        ValueError: the range holds no time.
    """
    if time_range_s is None:
        return 0.0, limit_s
    low, high = time_range_s
    if not low < high:
        raise ValueError(f"time_range_s is {time_range_s}; pass (start, end) in seconds with start before end")
    return float(low), float(high)


def _drawn(sides: Sequence[Side], ranks: Sequence[int], exact: bool) -> str:
    """Return what the reader must know about the drawing: how many of the ranks, and whether boxes are exact."""
    total = len(all_ranks(sides))
    notes = [f"{len(ranks)} of {total} ranks"] if len(ranks) < total else []
    if not exact:
        spans = sum(len(side.trace) for side in sides)
        notes.append(f"{spans:,} spans drawn in pixel columns")
    return "; ".join(notes)
