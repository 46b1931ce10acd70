"""Timing: when each part of a step happens on one replica's ranks, by two roads that agree to the nanosecond.

`time_directly` runs the pipeline as vectors and closes each rank's step (packing, all-reduces, update) with a
recursion of a few lines. It is exact where nothing contends. `time_by_graph` (in `simulator.step.event_graph`) spells
every operation out for the event engine, and is exact always: with contention, and where a link is the bottleneck so
that messages queue.

Gradients of a stage are complete after its last B or W. Overlapped, its buckets leave during that pass, whatever the
rank's other stages still have to do; else a rank exchanges all its gradients after its last pass. The update waits for
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.gradients.buckets import Sync
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.jitter import stretched
from simulator.pipeline.schedule_arrays import F, Floats, ScheduleArrays
from simulator.stage.stage import Stage
from simulator.stage.step_times import Pair, SyncTimes, Timing, finishing, last_actions, layer_times


def queues(timing: Timing) -> bool:
    """Return whether a rank has a message to send while its last one in that direction is still on the wire."""
    order = timing.order
    sends = np.flatnonzero(timing.send_end_ns > timing.send_start_ns)
    for forward in (True, False):
        rows = sends[(order.kind[sends] == F) == forward]
        waits = timing.send_start_ns[rows[1:]] < timing.send_end_ns[rows[:-1]]
        rank = np.searchsorted(order.offsets, rows, side="right")
        if (waits & (rank[1:] == rank[:-1])).any():
            return True
    return False


def time_directly(
    compiled: CompiledSchedule, stages: Sequence[Stage], *, sync: str, factors: Floats | None = None
) -> Timing:
    """Time a step without contention whose messages never queue (see `queues`)."""
    order = compiled.order
    table = np.array([[sum(layers) for layers in stage.passes_ns] for stage in stages], np.int64)
    sends = np.array([[stage.send_forward_ns, *[stage.send_backward_ns] * 2, 0] for stage in stages], np.int64)
    duration = stretched(table[order.stage, order.kind], factors)
    last = last_actions(order)
    if sync == "overlapped":
        duration[last] += [sum(sync.pack_ns for sync in stage.syncs) for stage in stages]
    send = sends[order.stage, order.kind]
    end = compiled.run(duration, send.take(compiled.needed, mode="clip"))
    start = end - duration
    syncs: list[tuple[SyncTimes, ...]] = [()] * len(stages)
    updates = []
    for rank, own in enumerate(finishing(order)):
        ready = int(end[order.offsets[rank + 1] - 1])
        begins = [
            _Backward(stages[stage], int(start[last[stage]]), _layers(order, stages, int(last[stage]), factors))
            for stage in own
        ]
        times, ready = _close(begins, ready, sync)
        for stage in own:
            count = len(stages[stage].syncs)
            syncs[stage], times = tuple(times[:count]), times[count:]
        updates.append((ready, ready + sum(stages[stage].optimizer_ns for stage in own)))
    return Timing(order, start, end, end, end + send, tuple(syncs), tuple(updates), factors=factors)


def _layers(order: ScheduleArrays, stages: Sequence[Stage], action: int, factors: Floats | None) -> tuple[int, ...]:
    """Return the times of an action's layers."""
    layers = stages[int(order.stage[action])].passes_ns[int(order.kind[action])]
    return layer_times(layers, None if factors is None else float(factors[action]))


class _Backward(NamedTuple):
    """The pass that completes a stage's gradients."""

    stage: Stage
    start_ns: int
    layers_ns: tuple[int, ...]


def _close(backwards: Sequence[_Backward], end: int, how: str) -> tuple[list[SyncTimes], int]:
    """Time a rank's all-reduces, given its stages' last backwards; return when the update can start too."""
    syncs = [sync for backward in backwards for sync in backward.stage.syncs]
    if not syncs:
        return [], end
    if how == "per_parameter":  # one after the other: divide, send, wait
        times, now = [], end
        for sync in syncs:
            sent, done = now + sync.pack_ns, now + sync.pack_ns + sync.duration_ns
            times += _receive([sync], [((now, sent), (sent, done))], sent)
            now = times[-1].unpack[1]
        return times, now
    pairs = _during_backward(backwards) if how == "overlapped" else _after_backward(syncs, end)
    times = _receive(syncs, pairs, max(end, pairs[-1][0][1]))
    return times, times[-1].unpack[1]


def _receive(syncs: Sequence[Sync], pairs: Sequence[tuple[Pair, Pair]], now: int) -> list[SyncTimes]:
    """Unpack each bucket once it has come, given when it was packed and sent.

    Buckets that send a second time do so one after the other, once all have come the first time.
    """
    wire_free = pairs[-1][1][1]
    again: list[tuple[Pair, Pair, Pair] | None] = []
    if any(sync.later for sync in syncs):
        now = max(now, wire_free)
    for sync in syncs:
        if sync.later is None:
            again.append(None)
            continue
        between = (now, now + sync.later.between_ns)
        begin = max(between[1], wire_free)
        wire_free = begin + sync.later.duration_ns
        now = between[1] + sync.later.after_ns
        again.append((between, (begin, wire_free), (between[1], now)))
    times = []
    for sync, (pack, wire), more in zip(syncs, pairs, again, strict=True):
        begin = max(now, more[1][1] if more else wire[1])
        now = begin + sync.unpack_ns
        times.append(SyncTimes(pack, wire, (begin, now), *(more or ())))
    return times


def _after_backward(syncs: Sequence[Sync], end: int) -> list[tuple[Pair, Pair]]:
    """Pack one bucket while the one before it travels."""
    pairs, now, wire_free = [], end, 0
    for sync in syncs:
        pack = (now, now + sync.pack_ns)
        now = pack[1]
        begin = max(now, wire_free)
        wire_free = begin + sync.duration_ns
        pairs.append((pack, (begin, wire_free)))
    return pairs


def _during_backward(backwards: Sequence[_Backward]) -> list[tuple[Pair, Pair]]:
    """Send each bucket once its last gradient is there; the wire takes one at a time."""
    pairs: list[tuple[Pair, Pair]] = []
    wire_free = 0
    for stage, now, layers_ns in backwards:
        waiting = list(stage.syncs)
        for layer in reversed(range(len(stage.layers))):
            now += layers_ns[layer]
            while waiting and waiting[0].layer >= layer:
                sync = waiting.pop(0)
                pack = (now, now + sync.pack_ns)
                now = pack[1]
                begin = max(now, wire_free)
                wire_free = begin + sync.duration_ns
                pairs.append((pack, (begin, wire_free)))
    return pairs
