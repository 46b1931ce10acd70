"""Draw a pipeline's schedule: one row per rank, one numbered box per micro-batch, and the bubbles between them."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from distlab.trace import Trace
from simulator.units import counted, format_s
from simulator.viz.drawing.lanes import Side
from simulator.viz.drawing.wording import capitalised, percent
from simulator.viz.schedules.textbook import textbook_of
from simulator.viz.timeline.draw_rows import Words
from simulator.viz.timeline.facts import Facts, facts_of
from simulator.viz.timeline.timeline import draw_rows, ends_text

_PIPELINE_KINDS = ("F", "B", "I", "W")


def draw_schedule(
    trace: Trace,
    predicted: Trace | None = None,
    *,
    title: str | None = None,
    time_range_s: tuple[float, float] | None = None,
    max_ranks: int | None = None,
) -> Figure:
    """Draw the forward and backward boxes of a pipeline, with its bubble in the title.

    The bubble fraction is idle time over total time, from the first box to the last.

    Raises:
        ValueError: a trace has no compute span of kind F, B, I or W.
    """
    work = _pipeline(trace)
    facts = facts_of(work)
    sides = [Side(work.from_zero(), False)]
    ends = f"ends at {format_s(facts.duration_s)}"
    if predicted is not None:
        sides.append(Side(_pipeline(predicted).from_zero(), True))
        ends = ends_text(facts, facts_of(sides[1].trace))
    words = Words(title or _bubble_title(facts), _textbook(work), ends)
    return draw_rows(sides, words, time_range_s=time_range_s, max_ranks=max_ranks)


def describe_schedule(trace: Trace, predicted: Trace | None = None) -> str:
    """Say in one paragraph what `draw_schedule` shows."""
    work = _pipeline(trace)
    facts = facts_of(work)
    text = f"Pipeline schedule of {counted(facts.num_ranks, 'rank')}"
    text += f" and {counted(_num_microbatches(work), 'micro-batch')} over {format_s(facts.duration_s)}."
    text += f" The bubble is {percent(facts.bubble_fraction, 1)} of the ranks' time."
    if _textbook(work):
        text += f" {_textbook(work)}."
    if predicted is not None:
        expected = facts_of(_pipeline(predicted))
        text += f" Predicted: {format_s(expected.duration_s)}, bubble {percent(expected.bubble_fraction, 1)}."
    return text


def _pipeline(trace: Trace) -> Trace:
    """Keep the forward and backward spans."""
    work = trace.select(trace.is_word("lane", "compute") & trace.is_word("kind", *_PIPELINE_KINDS))
    if not len(work):
        raise ValueError(
            f"the trace has {len(trace)} spans but no compute span of kind F, B, I or W; simulate a pipeline"
        )
    return work


def _num_microbatches(work: Trace) -> int:
    return len(np.unique(work.microbatch[work.microbatch >= 0]))


def _bubble_title(facts: Facts) -> str:
    return f"The bubble leaves {percent(facts.bubble_fraction, 1)} of {facts.num_ranks} ranks' time idle"


def _textbook(work: Trace) -> str:
    """Return the closed form of the order that the trace follows, to compare with; empty where it has none."""
    found = textbook_of(work)
    if found is None:
        return ""
    share = percent(found.bubble_fraction, 1)
    return f"{capitalised(found.name)} with equal stages and free communication would leave {found.formula} = {share}"
