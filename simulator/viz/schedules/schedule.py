"""Draw a pipeline's schedule, its bubbles, and the bubble that a textbook's closed form gives where it holds.

A row is a rank, a numbered box a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distlab.plan import Schedule, gpipe, interleaved, looped_bfs, naive, one_f_one_b
from distlab.trace import Trace
from simulator.units import capitalised, counted, format_s, percent
from simulator.viz.drawing.lanes import Side, stages_of_ranks
from simulator.viz.drawing.picture import Picture
from simulator.viz.timeline.draw_rows import Caption
from simulator.viz.timeline.facts import facts_of
from simulator.viz.timeline.timeline import draw_rows, ends_text

_PIPELINE_KINDS = ("F", "B", "I", "W")


def draw_schedule(
    trace: Trace, predicted: Trace | None = None, *, time_range_s: tuple[float, float] | None = None
) -> Picture:
    """Draw the forward and backward boxes of a pipeline, with its bubble in the title.

    The bubble fraction is idle time over total time, from the first box to the last.

    Raises:
        ValueError: a trace has no compute span of kind F, B, I or W.
    """
    work = _pipeline(trace)
    facts, known = facts_of(work), _textbook(work)
    sides = [Side(work.from_zero(), False)]
    ends = f"ends at {format_s(facts.duration_s)}"
    microbatches = len(np.unique(work.microbatch[work.microbatch >= 0]))
    bubble = percent(facts.bubble_fraction, 1)
    said = [
        f"Pipeline schedule of {counted(facts.num_ranks, 'rank')} and {counted(microbatches, 'micro-batch')} over "
        f"{format_s(facts.duration_s)}. The bubble is {bubble} of the ranks' time.",
        *([f"{known}."] if known else []),
    ]
    if predicted is not None:
        sides.append(Side(_pipeline(predicted).from_zero(), True))
        expected = facts_of(sides[1].trace)
        ends = ends_text(facts, expected)
        said.append(f"Predicted: {format_s(expected.duration_s)}, bubble {percent(expected.bubble_fraction, 1)}.")
    words = Caption(f"The bubble leaves {bubble} of {facts.num_ranks} ranks' time idle", known, ends)
    return Picture(draw_rows(sides, words, time_range_s=time_range_s), " ".join(said))


def _pipeline(trace: Trace) -> Trace:
    """Keep the forward and backward spans."""
    work = trace.select(trace.is_word("lane", "compute") & trace.is_word("kind", *_PIPELINE_KINDS))
    if not len(work):
        raise ValueError(
            f"the trace has {len(trace)} spans but no compute span of kind F, B, I or W; simulate a pipeline"
        )
    return work


def _textbook(work: Trace) -> str:
    """Return the closed form of the order that the trace follows, to compare with; empty where it has none."""
    found = textbook_of(work)
    if found is None:
        return ""
    share = percent(found.bubble_fraction, 1)
    return f"{capitalised(found.name)} with equal stages and free communication would leave {found.formula} = {share}"


MAX_SPANS = 20_000
_CODES = {"F": 0, "B": 1, "I": 2, "W": 3}


class Textbook(NamedTuple):
    """A schedule with a closed form for p ranks, m micro-batches and v stages per rank.

    Attributes:
        name: what people call it.
        formula: the bubble over the total time, with equal stages and free communication.
        bubble_fraction: its value.
    """

    name: str
    formula: str
    bubble_fraction: float


def textbook_of(trace: Trace) -> Textbook | None:
    """Return the textbook schedule whose order the trace follows, or None.

    Source: bubbles of GPipe and 1F1B from Huang et al. 2019 (arXiv:1811.06965, section 2.3), of interleaved 1F1B from
        Narayanan et al. 2021 (arXiv:2104.04473, section 2.2.2), as shares of the total time, not of the ideal one.
    """
    order = order_in(trace)
    if order is None or order.num_ranks < 2:
        return None
    p, m, v = order.num_ranks, order.num_microbatches, order.num_stages // order.num_ranks
    looped = (p - 1) / (v * m + p - 1)
    known: list[tuple[str, str, float, Callable[[], Schedule]]] = []
    if v == 1:
        known.append(("naive model parallelism", "(p-1)/p", (p - 1) / p, lambda: naive(p, m)))
        known.append(("GPipe", "(p-1)/(m+p-1)", looped, lambda: gpipe(p, m)))
        known.append(("1F1B", "(p-1)/(m+p-1)", looped, lambda: one_f_one_b(p, m)))
    elif m % p == 0:
        formula = "(p-1)/(vm+p-1)"
        known.append(("interleaved 1F1B", formula, looped, lambda: interleaved(p, m, stages_per_rank=v)))
        known.append(("looped BFS", formula, looped, lambda: looped_bfs(p, m, stages_per_rank=v)))
    found = next((row for row in known if row[3]() == order), None)
    return None if found is None else Textbook(*found[:3])


def order_in(trace: Trace) -> Schedule | None:
    """Return the order in which a trace's ranks ran their passes, of replicas the first; None where there is none."""
    if not 0 < len(trace) <= MAX_SPANS or trace.stage.min() < 0 or trace.microbatch.min() < 0:
        return None
    stages = stages_of_ranks(trace.rank, trace.stage)
    if not (stages.sum(axis=1) == stages.sum(axis=1).max()).all() or stages.shape[1] % max(1, stages.sum(axis=1)[0]):
        return None
    first = [rank for rank in trace.ranks if not any((stages[rank] & stages[other]).any() for other in range(rank))]
    first.sort(key=lambda rank: int(np.argmax(stages[rank])))
    place = np.full(stages.shape[0], len(first))
    place[first] = np.arange(len(first))
    where = place[trace.rank]
    rows = np.lexsort((trace.start_ns, where))[: int((where < len(first)).sum())]
    codes = np.array([_CODES.get(word, 0) for word in trace.words])
    return Schedule.from_columns(
        stage=trace.stage[rows],
        kind=codes[trace.kind[rows]],
        microbatch=trace.microbatch[rows],
        lengths=np.bincount(where[rows], minlength=len(first)),
    )
