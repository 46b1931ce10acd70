"""Read a data-parallel step from its trace: what each rank holds, sends and does at any moment.

A trace knows when passes and all-reduces begin and end. When a gradient is there is read from it where it says so (the
copy into a bucket, or an all-reduce that starts while backward runs). Else it is put in proportion: the share of a
step's gradients that exists is the share of backward that is done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distlab.trace.span import Span, Trace
from simulator.viz.facts import Interval, computes, split, union
from simulator.viz.style import name_ranks

ABSENT, FILLING, OWN, SENT, MEAN = "absent", "filling", "own", "sent", "mean"
_TOUCH_S = 2e-6  # an all-reduce that starts this soon after another one's end may have waited for the wire


class Reduction(NamedTuple):
    """One all-reduce of gradients as one rank sees it; times in seconds since the step began.

    Attributes:
        name: what it carries.
        num_bytes: payload.
        fill_s: when backward begins to make its gradients.
        ready_s: when the last of them is there.
        start_s: when the all-reduce began on this rank.
        end_s: when the mean was there.
        came_s: when each rank began it; before the last has come nothing can be averaged.
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


class RankStep(NamedTuple):
    """What one rank did in the step; intervals in seconds since the step began, in order.

    Attributes:
        rank: who.
        spans: its compute lane, waits too.
        reductions: its all-reduces in the order in which they were sent.
        hidden: communication while the rank computes.
        exposed: communication while it does not.
    """

    rank: int
    spans: tuple[Span, ...]
    reductions: tuple[Reduction, ...]
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

    @property
    def exposed_share(self) -> float:
        """Exposed over all communication, 0 where there is none."""
        total = self.hidden_s + self.exposed_s
        return self.exposed_s / total if total else 0.0


class Held(NamedTuple):
    """What a rank holds and does at one moment.

    Attributes:
        doing: in words, such as "backward 62 %".
        activations: share of the forward pass's activations that is kept.
        updated: whether the weights are the new ones.
        gradients: state of each all-reduce's gradients (ABSENT, FILLING, OWN, SENT or MEAN), and how far it is (0-1).
    """

    doing: str
    activations: float
    updated: bool
    gradients: tuple[tuple[str, float], ...]


class TrainStep(NamedTuple):
    """A data-parallel step, rank by rank."""

    ranks: tuple[RankStep, ...]
    duration_s: float


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


def read_step(trace: Trace, buckets: Sequence[str] | None = None) -> TrainStep:
    """Read a step of data parallelism from a predicted or measured trace; `buckets` names what all-reduces carry.

    Raises:
        ValueError: no backward span, several pipeline stages, several steps, or ranks that sent different numbers of
            all-reduces, or not as many as there are names.
    """
    if not len(trace) or not trace.is_word("kind", "B").any():
        raise ValueError(
            "the trace has no backward span (kind 'B' on the compute lane); pass a step that was simulated, or one "
            "that was measured with a SpanWriter"
        )
    if (trace.stage > 0).any():
        raise ValueError("the trace has several pipeline stages; draw it with draw_timeline or draw_schedule")
    trace = trace.from_zero()
    ranks = tuple(_rank_step(trace.select(trace.rank == rank), rank, buckets) for rank in trace.ranks)
    counts = {own.rank: len(own.reductions) for own in ranks}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the ranks made different numbers of all-reduces: {counts} (rank: number); pass one step")
    columns = [
        tuple((own.rank, own.reductions[index].start_s) for own in ranks) for index in range(counts[ranks[0].rank])
    ]
    met = tuple(
        own._replace(reductions=tuple(r._replace(came_s=c) for r, c in zip(own.reductions, columns, strict=True)))
        for own in ranks
    )
    return TrainStep(met, trace.duration_s)


def held_at(own: RankStep, at_s: float) -> Held:
    """Return what the rank holds and does at a moment."""
    forward, backward = (_done(own.spans, kind, at_s) for kind in ("F", "B"))
    update = [span for span in own.spans if span.kind == "optimizer"]
    updated = bool(update) and at_s >= max(span.end_ns for span in update) / 1e9
    gradients = tuple(_state(reduction, at_s) for reduction in own.reductions)
    return Held(_doing(own, at_s), max(0.0, forward - backward), updated, gradients)


def best_moment(step: TrainStep) -> float:
    """Return a moment worth a picture: an all-reduce under way while backward still runs, if there is one."""
    own = step.ranks[0]
    for interval in (*sorted(own.hidden, key=lambda i: i[0] - i[1])[:1], *own.exposed[:1]):
        return interval[0] + 0.55 * (interval[1] - interval[0])
    return step.duration_s / 2


def _state(reduction: Reduction, at_s: float) -> tuple[str, float]:
    if at_s >= reduction.end_s:
        return MEAN, 1.0
    if at_s >= reduction.start_s:
        lasts = reduction.end_s - reduction.met_s
        return SENT, max(0.0, at_s - reduction.met_s) / lasts if lasts > 0 else 0.0
    if at_s >= reduction.ready_s:
        return OWN, 1.0
    if at_s <= reduction.fill_s:
        return ABSENT, 0.0
    return FILLING, (at_s - reduction.fill_s) / (reduction.ready_s - reduction.fill_s)


def _done(spans: Sequence[Span], kind: str, at_s: float) -> float:
    """Return the share of a kind's time that has passed."""
    own = [span for span in spans if span.kind == kind]
    total = sum(span.duration_s for span in own)
    past = sum(min(max(at_s - span.start_ns / 1e9, 0.0), span.duration_s) for span in own)
    return past / total if total else 0.0


def _doing(own: RankStep, at_s: float) -> str:
    now = [span for span in own.spans if span.start_ns / 1e9 <= at_s < span.end_ns / 1e9]
    for span in now:
        if span.kind in ("F", "B"):
            words = "forward" if span.kind == "F" else "backward"
            return f"{words} {_done(own.spans, span.kind, at_s) * 100:.0f} %"
        if span.kind == "optimizer":
            return "updates weights"
        if span.kind != "wait":
            return span.name if span.kind == "copy" else span.kind
    if own.spans and at_s >= max(span.end_ns for span in own.spans) / 1e9:
        return "step done"
    sent = [reduction for reduction in own.reductions if reduction.start_s <= at_s < reduction.end_s]
    if not sent:
        return "waits"
    late = sent[0].missing(at_s)
    return f"waits for {name_ranks(late)}" if late else f"waits for {sent[0].name}"


def _rank_step(trace: Trace, rank: int, buckets: Sequence[str] | None) -> RankStep:
    spans = tuple(sorted(trace.select(trace.is_word("lane", "compute")), key=lambda span: span.start_ns))
    if not any(span.kind == "B" for span in spans):
        raise ValueError(f"rank {rank}: the trace has no backward span on the compute lane; mark it with kind 'B'")
    if sum(span.kind == "optimizer" for span in spans) > 1:
        raise ValueError(f"rank {rank}: the trace holds several steps; cut one out with step_of(trace)")
    moves = ~trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait")
    busy = union(trace.select(computes(trace)))
    hidden, exposed = split(union(trace.select(moves)), busy)
    sent = sorted(trace.select(moves & trace.is_word("kind", "all_reduce")), key=lambda s: (s.start_ns, s.end_ns))
    if buckets is not None and len(buckets) != len(sent):
        raise ValueError(
            f"rank {rank}: buckets has {len(buckets)} names for {len(sent)} all-reduces; pass one for each"
        )
    return RankStep(rank, spans, _reductions(sent, spans, buckets), hidden, exposed)


def _reductions(sent: Sequence[Span], spans: Sequence[Span], buckets: Sequence[str] | None) -> tuple[Reduction, ...]:
    names = [name_of(span, index) for index, span in enumerate(sent)] if buckets is None else list(buckets)
    ready = _ready(sent, spans)
    begin = min(span.start_ns for span in spans if span.kind == "B") / 1e9
    by_time = sorted(range(len(sent)), key=ready.__getitem__)
    fill = dict(zip(by_time, [begin, *(ready[index] for index in by_time)], strict=False))
    return tuple(
        Reduction(name, span.num_bytes, fill[index], ready[index], span.start_ns / 1e9, span.end_ns / 1e9)
        for index, (name, span) in enumerate(zip(names, sent, strict=True))
    )


def _ready(sent: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Return when the gradients of each all-reduce are all there."""
    backward = [span for span in spans if span.kind == "B"]
    begin, end = min(span.start_ns for span in backward) / 1e9, max(span.end_ns for span in backward) / 1e9
    packs = [span.start_ns / 1e9 for span in spans if span.kind == "copy" and span.name.startswith("pack")]
    if len(packs) == len(sent) and packs and packs[0] < end:
        return [min(at, end) for at in packs]
    last_first = bool(sent) and all(_is_parameter(span) for span in sent)  # sent first to last, made last to first
    sizes = np.array([max(1, span.num_bytes) for span in (reversed(sent) if last_first else sent)], dtype=float)
    shares = (np.cumsum(sizes) / sizes.sum()).tolist() if len(sent) else []
    if last_first:
        shares.reverse()
    ready = [begin + share * (end - begin) for share in shares]
    for index, span in enumerate(sent):
        start = span.start_ns / 1e9
        queued = index > 0 and abs(start - sent[index - 1].end_ns / 1e9) < _TOUCH_S
        if start < end:
            ready[index] = min(start, ready[index]) if queued else start
        elif index and not last_first:
            ready[index] = min(end, max(ready[index], ready[index - 1]))
    return ready


def _is_parameter(span: Span) -> bool:
    """Tell whether an all-reduce carries one parameter: it is numbered as one, or a recorder found its name."""
    return re.search(r"parameter \d+|#\d+ \S", span.name) is not None


def name_of(span: Span, index: int) -> str:
    """Return what an all-reduce carries: the end of its name, or its number."""
    words = re.sub(r"^all_reduce\s*(#\d+)?\s*", "", span.name)
    return words or f"all-reduce {index}"
