"""Step graph: a step spelled out, operation by operation, for the event engine.

It is exact always: with contention between computing and communicating, where ranks share cores, and where messages
queue for a link.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distlab.plan import Contention
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, GraphBuilder
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.jitter import Floats
from simulator.pipeline.schedule_arrays import F, W
from simulator.stage.stage import Stage
from simulator.stage.step_times import Pair, SyncTimes, Timing, last_actions, layer_times

SEND_FORWARD, SEND_BACKWARD = COMMUNICATION + 1, COMMUNICATION + 2


class _StepGraph:
    """Builds the graph of a step and remembers which operation is which."""

    def __init__(self, compiled: CompiledSchedule, stages: Sequence[Stage], sync: str, factors: Floats | None) -> None:
        self.order, self.compiled, self.stages, self.sync = compiled.order, compiled, stages, sync
        self.factors = factors
        self.last = last_actions(compiled.order).tolist()
        self.builder = GraphBuilder()
        self.bounds: dict[int, Pair] = {}  # first and last operation of an action
        self.sends: dict[int, int] = {}
        self.layers: list[tuple[int, int, int]] = []  # action, layer, operation
        self.syncs: list[list[tuple[int, ...]]] = [[] for _ in stages]  # fields of SyncTimes
        self.updates = [0] * compiled.order.num_ranks
        self.finished: list[list[int]] = [[] for _ in self.updates]  # stages of each rank whose gradients are complete

    def build(self) -> None:
        """Add all actions, then what follows a rank's last one."""
        # Actions in the order of their levels: what an action needs has been added before it.
        for action in np.argsort(self.compiled.level, kind="stable").tolist():
            self._action(action)
            rank = int(self.compiled.rank[action])
            if action == self.order.offsets[rank + 1] - 1:
                self._finish(rank)

    def _action(self, action: int) -> None:
        number, kind = int(self.order.stage[action]), int(self.order.kind[action])
        stage, rank, completes = self.stages[number], int(self.compiled.rank[action]), action == self.last[number]
        need = int(self.compiled.needed[action])
        needs = [] if need < 0 else [self.bounds[need][1]]
        if self.compiled.remote[action]:
            needs = [self.sends.get(need, needs[0])]
        durations = layer_times(stage.passes_ns[kind], None if self.factors is None else float(self.factors[action]))
        numbers = range(len(stage.layers)) if kind == F else range(len(stage.layers) - 1, -1, -1)
        first, bucket = len(self.builder), 0
        last = first
        for layer in numbers:
            last = self.builder.add(rank, COMPUTE, durations[layer], needs=needs)
            self.layers.append((action, layer, last))
            needs = []
            while completes and self.sync == "overlapped" and self._is_ready(stage, bucket, layer):
                last = self._start_sync(number, bucket)
                bucket += 1
        self.bounds[action] = (first, last)
        if completes:
            self.finished[rank].append(number)
        if kind != W:
            self._send(action, number, forward=kind == F, after=last)

    def _is_ready(self, stage: Stage, bucket: int, layer: int) -> bool:
        return bucket < len(stage.syncs) and stage.syncs[bucket].layer >= layer

    def _send(self, action: int, number: int, *, forward: bool, after: int) -> None:
        stage = self.stages[number]
        lane = SEND_FORWARD if forward else SEND_BACKWARD
        duration = stage.send_forward_ns if forward else stage.send_backward_ns
        if duration:
            peer = self.stages[number + (1 if forward else -1)].rank
            self.sends[action] = self.builder.add(stage.rank, lane, duration, needs=[after], peer=peer)

    def _start_sync(self, number: int, bucket: int) -> int:
        sync, rank = self.stages[number].syncs[bucket], self.stages[number].rank
        pack = self.builder.add(rank, COMPUTE, sync.pack_ns)
        wire = self.builder.add(rank, COMMUNICATION, sync.duration_ns, needs=[pack])
        self.syncs[number].append((pack, wire))
        return pack

    def _finish(self, rank: int) -> None:
        buckets = [
            (number, bucket) for number in self.finished[rank] for bucket in range(len(self.stages[number].syncs))
        ]
        if self.sync != "overlapped":
            for bucket in buckets:
                self._start_sync(*bucket)
                if self.sync == "per_parameter":
                    self._receive(rank, [bucket])
        if self.sync != "per_parameter":
            self._receive(rank, buckets)
        update = sum(self.stages[number].optimizer_ns for number in self.finished[rank])
        self.updates[rank] = self.builder.add(rank, COMPUTE, update)

    def _receive(self, rank: int, buckets: Sequence[tuple[int, int]]) -> None:
        """Add what `closed_form._receive` times: the second sending of all buckets, then unpacking."""
        add = self.builder.add
        wires = [self.syncs[number][bucket][1] for number, bucket in buckets]
        again: dict[tuple[int, int], tuple[int, int, int]] = {}
        for number, bucket in buckets:
            if (later := self.stages[number].syncs[bucket].later) is not None:
                between = add(rank, COMPUTE, later.between_ns, needs=wires)
                wire = add(rank, COMMUNICATION, later.duration_ns, needs=[between])
                again[number, bucket] = (between, wire, add(rank, COMPUTE, later.after_ns))
        for number, bucket in buckets:
            pack, first = self.syncs[number][bucket]
            more = again.get((number, bucket), ())
            unpack_ns = self.stages[number].syncs[bucket].unpack_ns
            unpack = add(rank, COMPUTE, unpack_ns, needs=[more[1] if more else first])
            self.syncs[number][bucket] = (pack, first, unpack, *more)


def time_by_graph(
    compiled: CompiledSchedule,
    stages: Sequence[Stage],
    *,
    sync: str,
    contention: Contention | None = None,
    factors: Floats | None = None,
    cores: engine.SharedCores | None = None,
) -> Timing:
    """Time a step on the event engine."""
    step = _StepGraph(compiled, stages, sync, factors)
    step.build()
    start, end = engine.run(step.builder.graph(), contention, cores)
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
        syncs=tuple(tuple(SyncTimes(*(pair(part) for part in parts)) for parts in each) for each in step.syncs),
        optimizer=tuple(pair(operation) for operation in step.updates),
        layers=np.stack([rows[:, 0], rows[:, 1], start[rows[:, 2]], end[rows[:, 2]]], axis=1),
        factors=factors,
    )
