"""A simulated step as a Trace, in the form in which a measured one is recorded, so that the two can be overlaid.

The compute lane of a rank holds whole passes ("forward", "backward"; in a pipeline "2F0"), "synchronize" (kind "wait":
from the end of the last backward until the gradients are averaged) and "optimizer". The communication lane holds one
"all_reduce" for each bucket, with its bytes, or what compression sends in its place. In detail (`layer_trace`) the
compute lane shows each bucket's "encode" and "decode" too. With sharding, gathers and scatters have lanes of their own,
"gather" and "scatter", and copies to and from the host share the lane "host" with its update. Messages between stages
have a lane for each direction. Ranks that share layers send inside of passes, on the lanes "tensor", "context" and
"expert". What of all that nothing hides is found here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Span, Trace
from simulator.gradients.buckets import BucketCost
from simulator.pipeline.schedule_arrays import LETTERS, B, F, I, ScheduleArrays
from simulator.pipeline.simulate_schedule import spans_of_actions
from simulator.stage.parallel_passes import INSIDE, CallInPass
from simulator.stage.stage import Stage
from simulator.stage.step_times import BucketTimes, Pair, Timing, part_of

Ints = NDArray[np.int64]
PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def step_trace(stages: Sequence[Stage], timing: Timing, ranks: Ints) -> Trace:
    """Return the spans of all ranks; `ranks` has a row of numbers for each rank of the pipeline [P, R]."""
    closing = _closing(stages, timing) + [span for span in _sharding_calls(timing) if span.lane != "compute"]
    order, alone = timing.order, timing.order.num_ranks == 1 and not timing.order.stage.any()
    names = [PASSES[LETTERS[kind]] for kind in order.kind.tolist()] if alone else []
    passes = spans_of_actions(order, timing.start_ns, timing.end_ns, names)
    return _on_all_ranks([passes, Trace.from_spans(closing)], stages, timing, ranks)


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
    return _on_all_ranks([Trace.from_spans(kept)], stages, timing, ranks)


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
            names = [f"{number}{kind.upper()}_{letter}{index}" for number, index in pairs]
            what = {"lane": f"{kind} {'backward' if is_backward else 'forward'}", "name": names, "kind": kind}
            where = {"rank": home[owner], "stage": owner, "microbatch": microbatch}
            parts.append(Trace.from_columns(**what, **where, **times, num_bytes=sizes[stage, is_backward]))
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


def _on_all_ranks(parts: list[Trace], stages: Sequence[Stage], timing: Timing, ranks: Ints) -> Trace:
    """Add messages and the calls inside of passes, and give all ranks that run a stage that stage's spans."""
    parts = [*parts, _messages(stages, timing)]
    parts += [calls_trace(stages, timing)] if any(stage.calls for stage in stages) else []
    trace, num_ranks = Trace.concatenate(parts), ranks.shape[1]
    if num_ranks == 1:
        return trace
    columns = {
        field: np.tile(getattr(trace, field), num_ranks)
        for field in ("lane", "name", "kind", "start_ns", "end_ns", "num_bytes", "stage", "microbatch")
    }
    numbers = ranks.astype(np.int32)[trace.rank].T.reshape(-1)
    return Trace(rank=numbers, **columns, words=trace.words)


KINDS = len(LETTERS)


def calls_trace(stages: Sequence[Stage], timing: Timing) -> Trace:
    """Return the spans of all calls inside of passes, on the ranks of one replica.

    A layer's pass that takes longer than costed (contention) is stretched with what is in it.

    Args:
        stages: with their calls inside of passes.
        timing: of the step, with its layers.
    """
    order, rows, width, parts = timing.order, timing.rows, max(len(stage.layers) for stage in stages), []
    place = (order.stage[rows[:, 0]].astype(np.int64) * KINDS + order.kind[rows[:, 0]]) * width + rows[:, 1]
    sorted_rows = np.argsort(place, kind="stable")
    places, first = np.unique(place[sorted_rows], return_index=True)
    for at, mine in zip(places.tolist(), np.split(rows[sorted_rows], first[1:]), strict=True):
        number, kind, layer = at // width // KINDS, at // width % KINDS, at % width
        stage, begin, length = stages[number], mine[:, 2], mine[:, 3] - mine[:, 2]
        for call in stage.calls[kind][layer] if stage.calls else ():
            start, end = (_part_of(length, ns, max(stage.passes_ns[kind][layer], 1)) for ns in call[3:5])
            what = {"lane": call.axis, "name": f"{call.name} of {stage.layers[layer].name}", "kind": call.kind}
            where = {"rank": stage.rank, "stage": number, "microbatch": order.microbatch[mine[:, 0]]}
            times = {"start_ns": begin + start, "end_ns": begin + end}
            parts.append(Trace.from_columns(**what, **where, **times, num_bytes=call.num_bytes))
    return Trace.concatenate(parts)


def _part_of(length: Ints, at: int, nominal: int) -> Ints:
    """Return length x at / nominal; the product of two times of some seconds each is too large for 64 bits."""
    if int(length.max(initial=0)) * at < 2**63:
        return length * at // nominal
    return (length.astype(object) * at // nominal).astype(np.int64)


def waits_within(stage: Stage, kind: int, layer: int, span_ns: Pair) -> Iterator[tuple[int, int, str]]:
    """Cut one layer's pass into work and waits: start, end, and the name of the call that it waits for ("": work)."""
    now, finish = span_ns
    begin, nominal = now, stage.passes_ns[kind][layer]
    for call in stage.calls[kind][layer] if stage.calls else ():
        if call.exposed_ns:
            start, end = part_of((begin, finish), (call.end_ns - call.exposed_ns, call.end_ns), nominal)
            if start > now:
                yield now, start, ""
            yield start, end, call.name
            now = end
    if finish > now:
        yield now, finish, ""


def exposed_inside_s(stages: Sequence[Stage], timing: Timing, rank: int) -> dict[str, float]:
    """Return the seconds in which a rank of the pipeline waits for calls inside of its passes, by axis."""
    total = dict.fromkeys(INSIDE, 0.0)  # nanoseconds
    actions = np.arange(*timing.order.offsets[rank : rank + 2].tolist())
    for _, call, often in _calls_made(stages, timing.order, actions, timing.layers):
        total[call.axis] += call.exposed_ns * often
    return {axis: waited / 1e9 for axis, waited in total.items()}


def sent_inside(stages: Sequence[Stage], order: ScheduleArrays) -> list[dict[str, float]]:
    """Return the bytes that each rank of the pipeline sends inside of its passes, by axis."""
    sent = [dict.fromkeys(INSIDE, 0.0) for _ in range(order.num_ranks)]
    for stage, call, often in _calls_made(stages, order, np.arange(len(order.kind))):
        sent[stage.rank][call.axis] += call.sent_bytes * often
    return sent


def _calls_made(
    stages: Sequence[Stage], order: ScheduleArrays, actions: Ints, layers: Ints | None = None
) -> Iterator[tuple[Stage, CallInPass, float]]:
    """Return each call inside of the passes of some actions, and how often it was made.

    Where `layers` says how long each layer's pass took, a longer one counts more. Equal layers share their calls.
    """
    if not any(stage.calls for stage in stages):
        return
    code = order.stage[actions] * KINDS + order.kind[actions]
    for each in np.unique(code).tolist():
        stage, kind, mine = stages[each // KINDS], each % KINDS, actions[code == each]
        if layers is None:
            times = np.full(len(stage.layers), float(len(mine)))
        else:
            rows = layers[np.isin(layers[:, 0], mine)]
            costed = np.maximum(stage.passes_ns[kind], 1)
            times = np.bincount(rows[:, 1], (rows[:, 3] - rows[:, 2]) / costed[rows[:, 1]], len(stage.layers))
        found: dict[int, tuple[tuple[CallInPass, ...], float]] = {}
        for calls, often in zip(stage.calls[kind], times.tolist(), strict=bool(stage.calls[kind])):
            found[id(calls)] = (calls, found.get(id(calls), (calls, 0.0))[1] + often)
        for calls, often in found.values():
            yield from ((stage, call, often) for call in calls)


def data_wait_s(stages: Sequence[Stage], timing: Timing, rank: int) -> float:
    """Return the seconds in which a rank of the pipeline computes nothing while its gradients or shards travel."""
    own = [number for number, stage in enumerate(stages) if stage.rank == rank]
    buckets = [times for number in own for times in timing.buckets[number]]
    rows = timing.rows[np.isin(timing.order.stage[timing.rows[:, 0]], own)]
    busy = [timing.optimizer[rank], *(pair for times in buckets for pair in times.computing)]
    busy += [(start, end) for start, end in rows[:, 2:].tolist()]
    travels: list[Pair] = []
    for call in timing.calls[rank]:
        (busy if call.lane == "compute" else travels).append((call.start_ns, call.end_ns))
    travels += [pair for times in buckets for pair in (times.all_reduce, times.later) if pair is not None]
    return (_covered(busy + travels) - _covered(busy)) / 1e9


def _covered(pairs: Sequence[Pair]) -> int:
    """Return how many nanoseconds lie in at least one of the pairs (start, end)."""
    total, reached = 0, 0
    for start, end in sorted(pairs):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def message_wait_s(timing: Timing, rank: int) -> float:
    """Return the seconds in which a rank of the pipeline waits for a message that has been sent but has not arrived."""
    order = timing.order
    first, stop = order.offsets[rank : rank + 2].tolist()
    size = (int(order.stage.max()) + 3, int(order.microbatch.max()) + 1)
    sender = np.full((2, *size), -1, np.int64)  # forward, backward; stages counted from 1
    passes = np.flatnonzero((order.kind == F) | (order.kind == B) | (order.kind == I))
    backward = (order.kind[passes] != F).astype(np.int64)
    sender[backward, order.stage[passes] + 1, order.microbatch[passes]] = passes
    mine = passes[(passes >= first) & (passes < stop)]
    backward = (order.kind[mine] != F).astype(np.int64)
    source = sender[backward, order.stage[mine] + np.where(backward, 2, 0), order.microbatch[mine]]
    mine, source = mine[source >= 0], source[source >= 0]
    before = np.where(mine > first, timing.end_ns[mine - 1], 0)
    waits = np.minimum(timing.start_ns[mine], timing.send_end_ns[source])
    waits -= np.maximum(before, timing.send_start_ns[source])
    return float(np.maximum(waits, 0).sum()) / 1e9
