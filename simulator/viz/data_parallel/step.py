"""What each rank of a data-parallel step holds, sends and does at any moment, read out of a trace.

A trace knows when passes and all-reduces begin and end. When a gradient is there is read from it where it says so (the
copy into a bucket, or an all-reduce that starts while backward runs). Else it is put in proportion: the share of a
step's gradients that exists is the share of backward that is done. A step has one micro-batch and no compression.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distlab.trace import Span, Trace
from simulator.units import name_ranks
from simulator.viz.timeline.facts import Interval, computes, split, union

ABSENT, FILLING, OWN, SENT, MEAN = "absent", "filling", "own", "sent", "mean"
TOUCH_S = 2e-6  # an all-reduce that starts this soon after the end of the one before may have waited for the wire


class BucketSum(NamedTuple):
    """One all-reduce of gradients as one rank sees it; times in seconds since the step began.

    Backward begins to make its gradients at `fill_s`, and the last is there at `ready_s`. This rank began the all-
    reduce at `start_s` and had the mean at `end_s`; `came_s` says when each rank began it: before the last has come
    nothing can be averaged.
    """

    name: str
    num_bytes: int
    fill_s: float
    ready_s: float
    start_s: float
    end_s: float
    came_s: tuple[tuple[int, float], ...] = ()

    @property
    def met_s(self) -> float:
        """When the last rank had come."""
        return max([self.start_s, *(start for _, start in self.came_s)])

    def missing(self, at_s: float) -> tuple[int, ...]:
        """Return the ranks that have not come yet."""
        return tuple(rank for rank, start in self.came_s if start > at_s)

    def state(self, at_s: float) -> tuple[str, float]:
        """Return ABSENT, FILLING, OWN, SENT or MEAN, and how far that is (0 to 1)."""
        if at_s >= self.end_s:
            return MEAN, 1.0
        if at_s >= self.start_s:
            return SENT, _share((self.met_s, self.end_s), at_s)
        if at_s >= self.ready_s:
            return OWN, 1.0
        return (FILLING, _share((self.fill_s, self.ready_s), at_s)) if at_s > self.fill_s else (ABSENT, 0.0)


class RankStep(NamedTuple):
    """What one rank did in the step; intervals in seconds since the step began, in order.

    `spans` are its compute lane, waits too; `reductions` its all-reduces in the order in which they were sent. Its
    communication is `hidden` while it computes, and `exposed` while it does not.
    """

    rank: int
    spans: tuple[Span, ...]
    reductions: list[BucketSum]
    hidden: tuple[Interval, ...]
    exposed: tuple[Interval, ...]

    @property
    def hidden_s(self) -> float:
        """Seconds of communication under compute."""
        return sum(end - start for start, end in self.hidden)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication in which the rank computes nothing."""
        return sum(end - start for start, end in self.exposed)


class RankMoment(NamedTuple):
    """What a rank holds and does at one moment.

    `doing` is in words, such as "backward 62 %"; `activations` the share of the step's that is kept; `updated` whether
    weights are the new ones. `gradients` has each all-reduce's state (ABSENT to MEAN), and how far that is (0 to 1).
    """

    doing: str
    activations: float
    updated: bool
    gradients: tuple[tuple[str, float], ...]


class TrainStep(NamedTuple):
    """A data-parallel step, rank by rank."""

    ranks: tuple[RankStep, ...]
    duration_s: float


def held_at(own: RankStep, at_s: float) -> RankMoment:
    """Return what the rank holds and does at a moment."""
    update = [span for span in own.spans if span.kind == "optimizer"]
    updated = bool(update) and at_s >= max(span.end_ns for span in update) / 1e9
    kept = max(0.0, _done(own.spans, "F", at_s) - _done(own.spans, "B", at_s))
    return RankMoment(_doing(own, at_s), kept, updated, tuple(each.state(at_s) for each in own.reductions))


def best_moment(step: TrainStep) -> float:
    """Return a moment worth a picture: an all-reduce under way while backward still runs, if there is one."""
    own = step.ranks[0]
    for interval in (*sorted(own.hidden, key=lambda i: i[0] - i[1])[:1], *own.exposed[:1]):
        return interval[0] + 0.55 * (interval[1] - interval[0])
    return step.duration_s / 2


def _share(interval: Interval, at_s: float) -> float:
    """Return how much of an interval has passed."""
    start, end = interval
    return min(max((at_s - start) / (end - start), 0.0), 1.0) if end > start else 0.0


def _done(spans: Sequence[Span], kind: str, at_s: float) -> float:
    """Return the share of a kind's time that has passed."""
    own = [span for span in spans if span.kind == kind]
    total = sum(span.duration_s for span in own)
    past = sum(min(max(at_s - span.start_ns / 1e9, 0.0), span.duration_s) for span in own)
    return past / total if total else 0.0


def _doing(own: RankStep, at_s: float) -> str:
    for span in (span for span in own.spans if span.start_ns / 1e9 <= at_s < span.end_ns / 1e9):
        if span.kind in ("F", "B"):
            return f"{'forward' if span.kind == 'F' else 'backward'} {_done(own.spans, span.kind, at_s) * 100:.0f} %"
        if span.kind != "wait":
            return {"optimizer": "updates weights", "copy": span.name}.get(span.kind, span.kind)
    if own.spans and at_s >= max(span.end_ns for span in own.spans) / 1e9:
        return "step done"
    sent = [reduction for reduction in own.reductions if reduction.start_s <= at_s < reduction.end_s]
    if not sent:
        return "waits"
    late = sent[0].missing(at_s)
    return f"waits for {name_ranks(late) if late else sent[0].name}"


def step_of(trace: Trace, number: int = -1) -> Trace:
    """Cut one step out of a trace of several: from the start of a forward pass to the end of the next update.

    Each rank is cut by its own marks, and the clock starts at zero. `number` counts steps from 0, or from the end.
    To put what a SpanWriter marked and what was recorded on one line, pass
    `Trace.concatenate([writer.trace(), records.to_trace()])`: both have the machine's clock.

    Raises:
        ValueError: a rank has no such step.
    """
    parts = []
    for rank in trace.ranks:
        own = trace.select(trace.rank == rank)
        ends = np.sort(own.end_ns[own.is_word("kind", "optimizer")])
        begins = np.sort(own.start_ns[own.is_word("kind", "F")])
        if not -len(ends) <= number < len(ends) or not len(begins):
            raise ValueError(f"rank {rank}: the trace has {len(ends)} steps (updates); there is no step {number}")
        end = int(ends[number])
        before = int(ends[number % len(ends) - 1]) if number % len(ends) else int(begins[0]) - 1
        inside = begins[(begins > before) & (begins < end)]
        if not len(inside):
            raise ValueError(f"rank {rank}: step {number} has no forward span; mark it with kind 'F'")
        parts.append(own.select((own.start_ns >= inside[0]) & (own.end_ns <= end)))
    return Trace.concatenate(parts).from_zero()


def read_step(trace: Trace) -> TrainStep:
    """Read a step of data parallelism from a predicted or measured trace.

    Raises:
        ValueError: it is not one forward, one backward and at most one update on each rank, in one stage and without
            compression; or ranks sent different numbers of all-reduces.
    """
    if (trace.stage > 0).any() or trace.is_word("kind", "encode", "decode").any():
        raise ValueError("the trace has several pipeline stages, or compression; draw it with draw_timeline")
    trace = trace.from_zero()
    ranks = tuple(_rank_step(trace.select(trace.rank == rank), rank) for rank in trace.ranks)
    counts = {own.rank: len(own.reductions) for own in ranks}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the ranks made different numbers of all-reduces: {counts} (rank: number); pass one step")
    came = [tuple((own.rank, own.reductions[index].start_s) for own in ranks) for index in range(max(counts.values()))]
    for own in ranks:
        own.reductions[:] = [each._replace(came_s=all_of) for each, all_of in zip(own.reductions, came, strict=True)]
    return TrainStep(ranks, trace.duration_s)


def _rank_step(trace: Trace, rank: int) -> RankStep:
    spans = tuple(sorted(trace.select(trace.is_word("lane", "compute")), key=lambda span: span.start_ns))
    passes = "".join(span.kind for span in spans if span.kind in ("F", "B"))
    updates = sum(span.kind == "optimizer" for span in spans)
    if "B" not in passes or "BF" in passes or updates > 1:
        raise ValueError(
            f"rank {rank}: the trace has passes {passes[:9]!r} and {updates} updates on its compute lane; pass one "
            "step of one micro-batch, marked with the kinds 'F', 'B' and 'optimizer': step_of(trace) cuts one out"
        )
    moves = ~trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait")
    hidden, exposed = split(union(trace.select(moves)), union(trace.select(computes(trace))))
    sent = sorted(trace.select(moves & trace.is_word("kind", "all_reduce")), key=lambda s: (s.start_ns, s.end_ns))
    backward = [span for span in spans if span.kind == "B"]
    begin, end = backward[0].start_ns / 1e9, max(span.end_ns for span in backward) / 1e9
    ready = _ready(sent, spans, (begin, end))
    by_time = sorted(range(len(sent)), key=ready.__getitem__)
    fill = dict(zip(by_time, [begin, *(ready[index] for index in by_time)], strict=False))
    reductions = [
        BucketSum(
            re.sub(r"^all_reduce\s*(#\d+)?\s*", "", span.name) or f"all-reduce {index}",
            span.num_bytes,
            *(fill[index], ready[index], span.start_ns / 1e9, span.end_ns / 1e9),
        )
        for index, span in enumerate(sent)
    ]
    return RankStep(rank, spans, reductions, hidden, exposed)


def _ready(sent: Sequence[Span], spans: Sequence[Span], backward: Interval) -> list[float]:
    """Return when the gradients of each all-reduce are all there."""
    begin, end = backward
    packs = [span.start_ns / 1e9 for span in spans if span.name.startswith("pack ") and span.kind == "copy"]
    if len(packs) == len(sent) and packs and packs[0] < end:
        return [min(at, end) for at in packs]
    # Where each carries one parameter (its number, or the name that a recorder found), the first sent is made last.
    last_first = bool(sent) and all(re.search(r"parameter \d+|#\d+ \S", span.name) for span in sent)
    sizes = np.array([max(1, span.num_bytes) for span in (reversed(sent) if last_first else sent)], dtype=float)
    shares = (np.cumsum(sizes) / sizes.sum()).tolist() if len(sent) else []
    ready = [begin + share * (end - begin) for share in (reversed(shares) if last_first else shares)]
    for index, span in enumerate(sent):
        start = span.start_ns / 1e9
        queued = index > 0 and abs(start - sent[index - 1].end_ns / 1e9) < TOUCH_S
        if start < end:
            ready[index] = min(start, ready[index]) if queued else start
        elif index and not last_first:
            ready[index] = min(end, max(ready[index], ready[index - 1]))
    return ready
