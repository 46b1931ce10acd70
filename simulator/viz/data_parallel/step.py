"""What each rank of a data-parallel step holds, sends and does at any moment, read out of a trace.

A trace knows when passes and all-reduces begin and end. When a gradient is there is read from it where it says so (the
copy into a bucket, or an all-reduce that starts while backward runs). Else it is put in proportion: the share of a
step's gradients that exists is the share of backward that is done. Of several micro-batches each adds its part to the
gradients, and only the last one's backward sends them. With compression a mean is there when it has been decoded.
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


class BucketSum(NamedTuple):
    """One all-reduce of gradients as one rank sees it; times in seconds since the step began.

    Attributes:
        name: what it carries.
        num_bytes: payload.
        fill_s: when backward begins to make its gradients.
        ready_s: when the last of them is there.
        start_s: when the all-reduce, or what compression sends in its place, began on this rank.
        end_s: when the mean was there.
        came_s: when each rank began it; before the last has come nothing can be averaged.
        arrived_s: when it had come, but was not decoded yet.
        earlier: when the backward passes of earlier micro-batches make their part of its gradients.
    """

    name: str
    num_bytes: int
    fill_s: float
    ready_s: float
    start_s: float
    end_s: float
    came_s: tuple[tuple[int, float], ...] = ()
    arrived_s: float = float("inf")
    earlier: tuple[Interval, ...] = ()

    @property
    def made(self) -> tuple[Interval, ...]:
        """When each micro-batch's backward makes its part of the gradients."""
        return (*self.earlier, (self.fill_s, self.ready_s))

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
    reductions: tuple[BucketSum, ...]
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


class RankMoment(NamedTuple):
    """What a rank holds and does at one moment.

    Attributes:
        doing: in words, such as "backward 62 %".
        activations: share of the step's most activations that is kept.
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


def held_at(own: RankStep, at_s: float) -> RankMoment:
    """Return what the rank holds and does at a moment."""
    update = [span for span in own.spans if span.kind == "optimizer"]
    updated = bool(update) and at_s >= max(span.end_ns for span in update) / 1e9
    gradients = tuple(_state(reduction, at_s) for reduction in own.reductions)
    most = max([_kept(own.spans, end) for _, end in passes(own.spans, "F")], default=0.0)
    kept = max(0.0, _kept(own.spans, at_s)) / most if most > 0 else 0.0
    return RankMoment(_doing(own, at_s), kept, updated, gradients)


def passes(spans: Sequence[Span], kind: str) -> tuple[Interval, ...]:
    """Return the whole forward ("F") or backward ("B") passes, one per micro-batch, in seconds, in order."""
    found: list[Interval] = []
    before: tuple[str, int] | None = None
    for span in spans:
        if span.kind not in ("F", "B"):
            continue
        if span.kind == kind:
            begin = found.pop()[0] if before == (kind, span.microbatch) else span.start_ns / 1e9
            found.append((begin, span.end_ns / 1e9))
        before = (span.kind, span.microbatch)
    return tuple(found)


def best_moment(step: TrainStep) -> float:
    """Return a moment worth a picture: an all-reduce under way while backward still runs, if there is one."""
    own = step.ranks[0]
    for interval in (*sorted(own.hidden, key=lambda i: i[0] - i[1])[:1], *own.exposed[:1]):
        return interval[0] + 0.55 * (interval[1] - interval[0])
    return step.duration_s / 2


def _state(reduction: BucketSum, at_s: float) -> tuple[str, float]:
    if at_s >= reduction.end_s:
        return MEAN, 1.0
    if at_s >= reduction.start_s:
        lasts = min(reduction.arrived_s, reduction.end_s) - reduction.met_s
        return SENT, min(max(0.0, at_s - reduction.met_s) / lasts, 1.0) if lasts > 0 else 0.0
    if at_s >= reduction.ready_s:
        return OWN, 1.0
    made = reduction.made
    if at_s <= made[0][0]:
        return ABSENT, 0.0
    return FILLING, sum(_share(interval, at_s) for interval in made) / len(made)


def _share(interval: Interval, at_s: float) -> float:
    """Return how much of an interval has passed."""
    start, end = interval
    return min(max((at_s - start) / (end - start), 0.0), 1.0) if end > start else float(at_s >= end)


def _kept(spans: Sequence[Span], at_s: float) -> float:
    """Return the activations that are kept, as a share of those of all micro-batches."""
    return _done(spans, "F", at_s) - _done(spans, "B", at_s)


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
            return _doing_pass(own.spans, span, at_s)
        if span.kind == "optimizer":
            return "updates weights"
        if span.kind != "wait":
            return span.name if span.kind in ("copy", "encode", "decode") else span.kind
    if own.spans and at_s >= max(span.end_ns for span in own.spans) / 1e9:
        return "step done"
    sent = [reduction for reduction in own.reductions if reduction.start_s <= at_s < reduction.end_s]
    if not sent:
        return "waits"
    late = sent[0].missing(at_s)
    return f"waits for {name_ranks(late)}" if late else f"waits for {sent[0].name}"


def _doing_pass(spans: Sequence[Span], now: Span, at_s: float) -> str:
    """Return how far a pass is, and of which micro-batch where there are several."""
    words = "forward" if now.kind == "F" else "backward"
    whole = passes(spans, now.kind)
    number = next(index for index, (_, end) in enumerate(whole) if at_s < end)
    start, end = whole[number]
    inside = [span for span in spans if start <= span.start_ns / 1e9 and span.end_ns / 1e9 <= end]
    text = f"{words} {_done(inside, now.kind, at_s) * 100:.0f} %"
    return text if len(whole) == 1 else f"{text} of micro-batch {number + 1}"


SECOND = ", second factor"  # how the second call of a bucket is named
_TOUCH_S = 2e-6  # an all-reduce that starts this soon after the end of the one before may have waited for the wire


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
        ValueError: no backward span, several pipeline stages, several steps, or ranks that sent different numbers of
            all-reduces.
    """
    if not len(trace) or not trace.is_word("kind", "B").any():
        raise ValueError(
            "the trace has no backward span (kind 'B' on the compute lane); pass a step that was simulated, or one "
            "that was measured with a SpanWriter"
        )
    if (trace.stage > 0).any():
        raise ValueError("the trace has several pipeline stages; draw it with draw_timeline or draw_schedule")
    trace = trace.from_zero()
    ranks = tuple(_rank_step(trace.select(trace.rank == rank), rank) for rank in trace.ranks)
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


def _rank_step(trace: Trace, rank: int) -> RankStep:
    spans = tuple(sorted(trace.select(trace.is_word("lane", "compute")), key=lambda span: span.start_ns))
    if not any(span.kind == "B" for span in spans):
        raise ValueError(f"rank {rank}: the trace has no backward span on the compute lane; mark it with kind 'B'")
    if sum(span.kind == "optimizer" for span in spans) > 1:
        raise ValueError(f"rank {rank}: the trace holds several steps; cut one out with step_of(trace)")
    moves = ~trace.is_word("lane", "compute") & ~trace.is_word("kind", "wait")
    busy = union(trace.select(computes(trace)))
    hidden, exposed = split(union(trace.select(moves)), busy)
    sent = _sent(trace.select(moves))
    return RankStep(rank, spans, _reductions(sent, spans), hidden, exposed)


def _sent(moves: Trace) -> list[Span]:
    """Return what carries gradients, in order; a bucket that sends twice counts once, from its first start on."""
    gathers = moves.is_word("kind", "all_gather")
    reduces = moves.is_word("kind", "all_reduce")
    named = np.array(["bucket" in moves.words[code] for code in moves.name.tolist()], bool)
    found = moves.select(reduces | (gathers & named) if reduces.any() else gathers)
    merged: dict[object, Span] = {}
    for index, span in enumerate(sorted(found, key=lambda s: (s.start_ns, s.end_ns))):
        name = span.name.removesuffix(SECOND)
        if name == span.name:
            merged[name if name not in merged else index] = span
        else:
            first = merged[name]
            merged[name] = first._replace(end_ns=span.end_ns, num_bytes=first.num_bytes + span.num_bytes)
    return list(merged.values())


def _reductions(sent: Sequence[Span], spans: Sequence[Span]) -> tuple[BucketSum, ...]:
    decoded = {span.name.removeprefix("decode "): span.end_ns / 1e9 for span in spans if span.kind == "decode"}
    ready = _ready(sent, spans)
    *before, (begin, end) = passes(spans, "B")
    by_time = sorted(range(len(sent)), key=ready.__getitem__)
    fill = dict(zip(by_time, [begin, *(ready[index] for index in by_time)], strict=False))

    def in_pass(pass_: Interval, at_s: float) -> float:
        share = (at_s - begin) / (end - begin) if end > begin else 1.0
        return pass_[0] + share * (pass_[1] - pass_[0])

    found = []
    for index, span in enumerate(sent):
        name = name_of(span, index)
        earlier = tuple((in_pass(each, fill[index]), in_pass(each, ready[index])) for each in before)
        arrived = span.end_ns / 1e9
        done = decoded.get(name, arrived)
        times = (fill[index], ready[index], span.start_ns / 1e9, done)
        found.append(BucketSum(name, span.num_bytes, *times, arrived_s=arrived, earlier=earlier))
    return tuple(found)


def _ready(sent: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Return when the gradients of each all-reduce are all there: in the last micro-batch's backward."""
    begin, end = passes(spans, "B")[-1]
    packs = [span.start_ns / 1e9 for span in spans if span.name.startswith(("pack ", "encode ")) and _packs(span)]
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


def _packs(span: Span) -> bool:
    """Tell a bucket's packing from what PowerSGD does to it later."""
    return span.kind in ("copy", "encode") and " of " not in span.name


def _is_parameter(span: Span) -> bool:
    """Tell whether an all-reduce carries one parameter: it is numbered as one, or a recorder found its name."""
    return re.search(r"parameter \d+|#\d+ \S", span.name) is not None


def name_of(span: Span, index: int) -> str:
    """Return what an all-reduce carries: the end of its name, or its number."""
    words = re.sub(r"^all_(?:reduce|gather)\s*(#\d+)?\s*", "", span.name)
    return words or f"all-reduce {index}"
