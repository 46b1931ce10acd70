"""Timing: when each part of a step happens on one replica's ranks, by two roads that agree to the nanosecond.

`time_directly` runs the pipeline as vectors and closes each rank's step (packing, all-reduces, update) with a
recursion of a few lines. It is exact where nothing contends. `time_by_graph` spells every operation out for the event
engine, and is exact always: with contention, and where a link is the bottleneck so that messages queue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distlab.plan.records import Contention
from simulator import engine
from simulator.graph import COMMUNICATION, COMPUTE, GraphBuilder
from simulator.pipeline import CompiledOrder, F
from simulator.stages import Stage
from simulator.syncs import Sync
from simulator.times import Pair, SyncTimes, Timing

SEND_FORWARD, SEND_BACKWARD = COMMUNICATION + 1, COMMUNICATION + 2


def queues(stages: Sequence[Stage]) -> bool:
    """Return whether a message may still be on the wire when the next one is ready (communication-bound)."""
    return any(
        stage.send_forward_ns > sum(stage.forward_ns) or stage.send_backward_ns > sum(stage.backward_ns)
        for stage in stages
    )


def time_directly(compiled: CompiledOrder, stages: Sequence[Stage], *, sync: str) -> Timing:
    """Time a step without contention whose messages never queue. Stage r runs on rank r."""
    order = compiled.order
    table = np.array([[sum(stage.forward_ns), sum(stage.backward_ns)] for stage in stages], np.int64)
    sends = np.array([[stage.send_forward_ns, stage.send_backward_ns] for stage in stages], np.int64)
    backward = (order.kind != F).astype(np.int64)
    duration = table[order.stage, backward]
    last = order.offsets[1:] - 1  # the last action of a rank is a backward
    if sync == "overlapped":
        duration[last] += [sum(sync.pack_ns for sync in stage.syncs) for stage in stages]
    send = sends[order.stage, backward]
    latency = np.where(compiled.remote, send[compiled.need], 0)
    end = compiled.run(duration, latency)
    closes = [
        _close(stage, int(end[action] - duration[action]), int(end[action]), sync)
        for stage, action in zip(stages, last.tolist(), strict=True)
    ]
    updates = []
    for stage, (_, ready) in zip(stages, closes, strict=True):
        updates.append((ready, ready + stage.optimizer_ns))
    return Timing(order, end - duration, end, end, end + send, tuple(syncs for syncs, _ in closes), tuple(updates))


def _close(stage: Stage, start: int, end: int, how: str) -> tuple[tuple[SyncTimes, ...], int]:
    """Time a rank's all-reduces, given its last backward; return when the update can start too."""
    if not stage.syncs:
        return (), end
    if how == "per_parameter":  # one after the other: divide, send, wait
        times, now = [], end
        for sync in stage.syncs:
            sent, done = now + sync.pack_ns, now + sync.pack_ns + sync.duration_ns
            times += _receive([sync], [((now, sent), (sent, done))], sent)
            now = times[-1].unpack[1]
        return tuple(times), now
    pairs = _during_backward(stage, start) if how == "overlapped" else _after_backward(stage, end)
    times = _receive(stage.syncs, pairs, max(end, pairs[-1][0][1]))
    return tuple(times), times[-1].unpack[1]


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


def _after_backward(stage: Stage, end: int) -> list[tuple[Pair, Pair]]:
    """Pack one bucket while the one before it travels."""
    pairs, now, wire_free = [], end, 0
    for sync in stage.syncs:
        pack = (now, now + sync.pack_ns)
        now = pack[1]
        begin = max(now, wire_free)
        wire_free = begin + sync.duration_ns
        pairs.append((pack, (begin, wire_free)))
    return pairs


def _during_backward(stage: Stage, start: int) -> list[tuple[Pair, Pair]]:
    """Send each bucket once its last gradient is there; the wire takes one at a time."""
    pairs: list[tuple[Pair, Pair]] = []
    now, wire_free = start, 0
    for layer in reversed(range(len(stage.layers))):
        now += stage.backward_ns[layer]
        while len(pairs) < len(stage.syncs) and stage.syncs[len(pairs)].layer >= layer:
            sync = stage.syncs[len(pairs)]
            pack = (now, now + sync.pack_ns)
            now = pack[1]
            begin = max(now, wire_free)
            wire_free = begin + sync.duration_ns
            pairs.append((pack, (begin, wire_free)))
    return pairs


class _StepGraph:
    """Builds the graph of a step, operation by operation, and remembers which is which."""

    def __init__(self, compiled: CompiledOrder, stages: Sequence[Stage], sync: str) -> None:
        self.order, self.compiled, self.stages, self.sync = compiled.order, compiled, stages, sync
        self.builder = GraphBuilder()
        self.bounds: dict[int, Pair] = {}  # first and last operation of an action
        self.sends: dict[int, int] = {}
        self.layers: list[tuple[int, int, int]] = []  # action, layer, operation
        self.syncs: list[list[tuple[int, ...]]] = [[] for _ in stages]  # fields of SyncTimes
        self.updates = [0] * len(stages)

    def build(self) -> None:
        offsets = self.order.offsets
        # Actions in the order of their levels: what an action needs has been added before it.
        for action in np.argsort(self.compiled.level, kind="stable").tolist():
            rank = int(self.compiled.rank[action])
            is_last = action == offsets[rank + 1] - 1
            self._action(action, rank, is_last=is_last)
            if is_last:
                self._finish(rank)

    def _action(self, action: int, rank: int, *, is_last: bool) -> None:
        stage = self.stages[int(self.order.stage[action])]
        forward = self.order.kind[action] == F
        need = int(self.compiled.need[action])
        needs = [self.sends.get(need, self.bounds[need][1])] if need >= 0 else []
        numbers = range(len(stage.layers)) if forward else range(len(stage.layers) - 1, -1, -1)
        first, bucket = len(self.builder), 0
        last = first
        for layer in numbers:
            duration = (stage.forward_ns if forward else stage.backward_ns)[layer]
            last = self.builder.add(rank, COMPUTE, duration, needs=needs)
            self.layers.append((action, layer, last))
            needs = []
            while is_last and self.sync == "overlapped" and self._is_ready(stage, bucket, layer):
                last = self._start_sync(rank, bucket)
                bucket += 1
        self.bounds[action] = (first, last)
        self._send(action, rank, stage, forward=bool(forward), after=last)

    def _is_ready(self, stage: Stage, bucket: int, layer: int) -> bool:
        return bucket < len(stage.syncs) and stage.syncs[bucket].layer >= layer

    def _send(self, action: int, rank: int, stage: Stage, *, forward: bool, after: int) -> None:
        lane = SEND_FORWARD if forward else SEND_BACKWARD
        duration = stage.send_forward_ns if forward else stage.send_backward_ns
        if duration:
            peer = rank + (1 if forward else -1)
            self.sends[action] = self.builder.add(rank, lane, duration, needs=[after], peer=peer)

    def _start_sync(self, rank: int, bucket: int) -> int:
        sync = self.stages[rank].syncs[bucket]
        pack = self.builder.add(rank, COMPUTE, sync.pack_ns)
        wire = self.builder.add(rank, COMMUNICATION, sync.duration_ns, needs=[pack])
        self.syncs[rank].append((pack, wire))
        return pack

    def _finish(self, rank: int) -> None:
        syncs = self.stages[rank].syncs
        if self.sync != "overlapped":
            for bucket in range(len(syncs)):
                self._start_sync(rank, bucket)
                if self.sync == "per_parameter":
                    self._receive(rank, [bucket])
        if self.sync != "per_parameter":
            self._receive(rank, range(len(syncs)))
        self.updates[rank] = self.builder.add(rank, COMPUTE, self.stages[rank].optimizer_ns)

    def _receive(self, rank: int, buckets: Sequence[int]) -> None:
        """Add what `_receive` of this module times: the second sending of all buckets, then unpacking."""
        syncs, add = self.stages[rank].syncs, self.builder.add
        wires = [self.syncs[rank][bucket][1] for bucket in buckets]
        again: dict[int, tuple[int, int, int]] = {}
        for bucket in buckets:
            if (later := syncs[bucket].later) is not None:
                between = add(rank, COMPUTE, later.between_ns, needs=wires)
                wire = add(rank, COMMUNICATION, later.duration_ns, needs=[between])
                again[bucket] = (between, wire, add(rank, COMPUTE, later.after_ns))
        for bucket in buckets:
            pack, first = self.syncs[rank][bucket]
            more = again.get(bucket, ())
            unpack = add(rank, COMPUTE, syncs[bucket].unpack_ns, needs=[more[1] if more else first])
            self.syncs[rank][bucket] = (pack, first, unpack, *more)


def time_by_graph(
    compiled: CompiledOrder, stages: Sequence[Stage], *, sync: str, contention: Contention | None = None
) -> Timing:
    """Time a step on the event engine. Stage r runs on rank r."""
    step = _StepGraph(compiled, stages, sync)
    step.build()
    start, end = engine.run(step.builder.graph(), contention)
    order = compiled.order
    bounds = np.array([step.bounds[action] for action in range(len(order.kind))], np.int64).reshape(-1, 2)
    action_end = end[bounds[:, 1]]
    send_start, send_end = action_end.copy(), action_end.copy()
    sent = list(step.sends)
    send_start[sent] = start[list(step.sends.values())]
    send_end[sent] = end[list(step.sends.values())]
    rows = np.array(step.layers, np.int64).reshape(-1, 3)

    def pair(operation: int) -> Pair:
        return int(start[operation]), int(end[operation])

    return Timing(
        order=order,
        start_ns=start[bounds[:, 0]],
        end_ns=action_end,
        send_start_ns=send_start,
        send_end_ns=send_end,
        syncs=tuple(tuple(SyncTimes(*(pair(part) for part in parts)) for parts in rank) for rank in step.syncs),
        optimizer=tuple(pair(operation) for operation in step.updates),
        layers=np.stack([rows[:, 0], rows[:, 1], start[rows[:, 2]], end[rows[:, 2]]], axis=1),
    )
