"""A simulated step as a Trace, in the form in which a measured one is recorded, so that the two can be overlaid.

The compute lane of a rank holds whole passes ("forward", "backward"; in a pipeline "2F0"), "synchronize" (kind "wait":
from the end of the last backward until the gradients are averaged) and "optimizer". The communication lane holds one
"all_reduce" for each bucket, with its bytes, or what compression sends in its place. In detail (`layer_trace`) the
compute lane shows each bucket's "encode" and "decode" too. With sharding, gathers and scatters have lanes of their own,
"gather" and "scatter", and copies to and from the host share the lane "host" with its update. Messages between stages
have a lane for each direction. Ranks that share layers send inside of passes, on the lanes "tensor", "context" and
"expert".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Span, Trace
from simulator.gradients.buckets import BucketCost
from simulator.pipeline.schedule_arrays import LETTERS, F
from simulator.pipeline.simulate_schedule import spans_of_actions
from simulator.stage.stage import Stage
from simulator.stage.step_times import BucketTimes, Timing, part_of
from simulator.step.exposed import calls_trace, waits_within

Ints = NDArray[np.int64]
PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def step_trace(stages: Sequence[Stage], timing: Timing, ranks: Ints) -> Trace:
    """Return the spans of all ranks; `ranks` has a row of numbers for each rank of the pipeline [P, R]."""
    closing = _closing(stages, timing) + [span for span in _sharding_calls(timing) if span.lane != "compute"]
    parts = [_passes(timing), _messages(stages, timing), Trace.from_spans(closing)]
    if any(stage.calls for stage in stages):
        parts.append(calls_trace(stages, timing))
    return _on_all_ranks(Trace.concatenate(parts), ranks)


def layer_trace(stages: Sequence[Stage], timing: Timing, ranks: Ints) -> Trace:
    """Return the spans of all ranks, each pass cut into its layers, each all-reduce with its copies.

    `timing` has its layers. A layer's pass is cut where it waits for a call inside of it ("wait for ...", of kind
    "wait"), so that what the compute lane shows as work is work.
    """
    order, spans = timing.order, []
    for action, layer, start, end in timing.rows.tolist():
        number, kind = int(order.stage[action]), LETTERS[order.kind[action]]
        name = f"{PASSES[kind]} {stages[number].layers[layer].name}"
        microbatch = int(order.microbatch[action])
        for begin, stop, wait in waits_within(stages[number], int(order.kind[action]), layer, (start, end)):
            what = (f"wait for {wait}", "wait") if wait else (name, kind)
            spans.append(Span(stages[number].rank, "compute", *what, begin, stop, 0, number, microbatch))
    for number, (stage, buckets) in enumerate(zip(stages, timing.buckets, strict=True)):
        for bucket, times in zip(stage.buckets, buckets, strict=True):
            spans += _copies(stage.rank, bucket, times, number) + exchanges(stage.rank, bucket, times, number)
    spans += [_update(rank, timing) for rank in range(order.num_ranks)]
    spans += _sharding_calls(timing)
    kept = [span for span in spans if span.end_ns > span.start_ns]
    parts = [Trace.from_spans(kept), _messages(stages, timing)]
    if any(stage.calls for stage in stages):
        parts.append(calls_trace(stages, timing))
    return _on_all_ranks(Trace.concatenate(parts), ranks)


def _passes(timing: Timing) -> Trace:
    order, alone = timing.order, timing.order.num_ranks == 1 and not timing.order.stage.any()
    names = [PASSES[LETTERS[kind]] for kind in order.kind.tolist()] if alone else []
    return spans_of_actions(order, timing.start_ns, timing.end_ns, names)


def _messages(stages: Sequence[Stage], timing: Timing) -> Trace:
    """Return a send on the sender's rank and the receive of the same message on the receiver's."""
    order = timing.order
    sizes = np.array([[stage.send_forward_bytes, stage.send_backward_bytes] for stage in stages], np.int64)
    home = np.array([stage.rank for stage in stages], np.int64)
    backward = (order.kind != F).astype(np.int64)
    sent = np.flatnonzero(timing.send_end_ns > timing.send_start_ns)
    parts = []
    for is_backward, letter in ((0, "F"), (1, "B")):
        rows = sent[backward[sent] == is_backward]
        stage, microbatch = order.stage[rows], order.microbatch[rows]
        times = {"start_ns": timing.send_start_ns[rows], "end_ns": timing.send_end_ns[rows]}
        for kind, shift in (("send", 0), ("recv", -1 if is_backward else 1)):
            owner = stage + shift
            pairs = zip(owner.tolist(), microbatch.tolist(), strict=True)
            parts.append(
                Trace.from_columns(
                    rank=home[owner],
                    lane=f"{kind} {'backward' if is_backward else 'forward'}",
                    name=[f"{number}{kind.upper()}_{letter}{index}" for number, index in pairs],
                    kind=kind,
                    num_bytes=sizes[stage, is_backward],
                    stage=owner,
                    microbatch=microbatch,
                    **times,
                )
            )
    return Trace.concatenate(parts)


def _closing(stages: Sequence[Stage], timing: Timing) -> list[Span]:
    """Return each rank's all-reduces, its wait for them and its update."""
    spans = []
    for rank, own in enumerate(timing.finishing):
        for number in own:
            for bucket, times in zip(stages[number].buckets, timing.buckets[number], strict=True):
                spans += exchanges(rank, bucket, times, number)
        end = int(timing.end_ns[timing.order.offsets[rank + 1] - 1])
        begin, _ = timing.optimizer[rank]
        if any(stages[number].buckets or stages[number].units for number in own):
            spans.append(Span(rank, "compute", "synchronize", "wait", end, begin, 0, own[-1]))
        spans.append(_update(rank, timing))
    return spans


def _update(rank: int, timing: Timing) -> Span:
    """Return the update: the host's where gradients are copied there."""
    lane = "host" if any(call.lane == "host" for call in timing.calls[rank]) else "compute"
    return Span(rank, lane, "optimizer", "optimizer", *timing.optimizer[rank], 0, timing.finishing[rank][-1])


def _sharding_calls(timing: Timing) -> list[Span]:
    """Return the gathers, scatters and copies that sharding adds."""
    return [Span(rank, *call[:6], rank, call.microbatch) for rank, calls in enumerate(timing.calls) for call in calls]


def exchanges(rank: int, bucket: BucketCost, times: BucketTimes, stage: int = 0) -> list[Span]:
    """Return what a bucket sends: one call, or a second one after it.

    Calls that follow one another at once share the bucket's time as they would without contention.
    """
    if bucket.parts:
        so_far, spans = 0, []
        for part in bucket.parts:
            pair = part_of(times.all_reduce, (so_far, so_far + part.duration_ns), bucket.duration_ns)
            name = bucket.name.replace(bucket.kind, part.kind, 1)
            spans.append(Span(rank, "scatter", name, part.kind, *pair, part.num_bytes, stage))
            so_far += part.duration_ns
        return spans
    spans = [Span(rank, "communication", bucket.name, bucket.kind, *times.all_reduce, bucket.num_bytes, stage)]
    if bucket.later is not None and times.later is not None:
        name = f"{bucket.name}, second factor"
        spans.append(Span(rank, "communication", name, bucket.later.kind, *times.later, bucket.later.num_bytes, stage))
    return spans


def _copies(rank: int, bucket: BucketCost, times: BucketTimes, stage: int) -> list[Span]:
    """Return what is done to a bucket before and after it travels: packing, or encoding and decoding."""
    if not bucket.compressed:
        pairs = [("pack", "copy", times.pack), ("unpack", "copy", times.unpack)]
    else:
        pairs = [("encode", "encode", times.pack), ("decode", "decode", times.unpack)]
    if times.between is not None:
        pairs.insert(1, ("encode second factor of", "encode", times.between))
    if times.after is not None:
        pairs.insert(2, ("encode remainder of", "encode", times.after))
    return [
        Span(rank, "compute", f"{verb} {bucket.what}", kind, *pair, bucket.gradient_bytes, stage)
        for verb, kind, pair in pairs
    ]


def _on_all_ranks(trace: Trace, ranks: Ints) -> Trace:
    """Give all ranks that run a stage that stage's spans."""
    num_ranks = ranks.shape[1]
    if num_ranks == 1:
        return trace
    columns = {
        field: np.tile(getattr(trace, field), num_ranks)
        for field in ("lane", "name", "kind", "start_ns", "end_ns", "num_bytes", "stage", "microbatch")
    }
    numbers = ranks.astype(np.int32)[trace.rank].T.reshape(-1)
    return Trace(rank=numbers, **columns, words=trace.words)
