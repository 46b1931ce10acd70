"""The calls inside of passes over a whole step: their spans in a trace, their exposed time, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.pipeline.schedule_arrays import LETTERS, B, F, I, ScheduleArrays
from simulator.stage.parallel_passes import INSIDE, CallInPass
from simulator.stage.stage import Stage
from simulator.stage.step_times import Pair, Timing, part_of

Ints = NDArray[np.int64]
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
            parts.append(
                Trace.from_columns(
                    rank=np.full(len(mine), stage.rank),
                    lane=call.axis,
                    name=f"{call.name} of {stage.layers[layer].name}",
                    kind=call.kind,
                    start_ns=begin + start,
                    end_ns=begin + end,
                    num_bytes=np.full(len(mine), call.num_bytes),
                    stage=np.full(len(mine), number),
                    microbatch=order.microbatch[mine[:, 0]],
                )
            )
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
