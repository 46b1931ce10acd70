"""Read a data-parallel step out of a trace: cut it out, and find when each bucket's gradients are made, sent and there.

A trace knows when passes and all-reduces begin and end. When a gradient is there is read from it where it says so (the
copy into a bucket, or an all-reduce that starts while backward runs). Else it is put in proportion: the share of a
step's gradients that exists is the share of backward that is done. Of several micro-batches each adds its part to the
gradients, and only the last one's backward sends them. With compression a mean is there when it has been decoded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from distlab.trace import Span, Trace
from simulator.viz.data_parallel.step_state import BucketSum, RankStep, TrainStep, passes
from simulator.viz.timeline.facts import Interval, computes, split, union

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
