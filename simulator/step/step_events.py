"""When everything in a step happens: its passes, messages, buckets and updates as one graph for the event engine.

The ranks of one replica run in the graph, each operation in the order in which a rank's program asks for it. A pass is
one operation, or one per layer where something can happen between its layers: a bucket leaves, or contention changes
how fast they run.

Gradients of a stage are complete after its last B or W. Overlapped, its buckets leave during that pass, whatever the
rank's other stages still have to do; otherwise a rank exchanges all its gradients after its last pass. The update waits
for all of them. Sharding stage 2 does not keep whole gradients: every backward exchanges what it made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distlab.plan import Contention
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.jitter import stretched
from simulator.pipeline.schedule_arrays import F, Floats, W, last_actions
from simulator.stage.stage import Stage
from simulator.stage.step_times import BucketTimes, Pair, ShardCall, Timing, call_of, layer_times
from simulator.step.trace import exchanges

SEND_FORWARD, SEND_BACKWARD = COMMUNICATION + 1, COMMUNICATION + 2


class _StepGraph:
    """Builds the graph of a step and remembers which operation is which."""

    def __init__(
        self,
        compiled: CompiledSchedule,
        stages: Sequence[Stage],
        *,
        sync: str,
        factors: Floats | None,
        in_layers: bool,
        each_pass: bool,
    ) -> None:
        self.order, self.compiled, self.stages, self.sync = compiled.order, compiled, stages, sync
        self.in_layers, self.each_pass = in_layers, each_pass
        self.last = last_actions(compiled.order).tolist()
        order = compiled.order
        totals = np.array([[sum(layers) for layers in stage.passes_ns] for stage in stages], np.int64)
        self.pass_ns = stretched(totals[order.stage, order.kind], factors).tolist()
        self.factors = None if factors is None else factors.tolist()
        self.kind, self.stage, self.rank = order.kind.tolist(), order.stage.tolist(), compiled.rank.tolist()
        self.needed, self.remote = compiled.needed.tolist(), compiled.remote.tolist()
        self.graph = Graph()
        self.bounds: dict[int, Pair] = {}  # first and last operation of an action
        self.sends: dict[int, int] = {}
        self.layers: list[tuple[int, int, int]] = []  # action, layer, operation
        self.buckets: list[list[tuple[int, ...]]] = [[] for _ in stages]  # fields of BucketTimes
        # Stage and micro-batch before the last one, and its buckets (sharding stage 2).
        self.earlier: list[tuple[int, int, list[tuple[int, ...]]]] = []
        self.updates = [0] * compiled.order.num_ranks
        self.finished: list[list[int]] = [[] for _ in self.updates]  # stages of each rank whose gradients are complete

    def build(self) -> None:
        """Add all actions, then what follows a rank's last one."""
        # Actions in the order of their levels: what an action needs has been added before it.
        last_of_rank = set((self.order.offsets[1:] - 1).tolist())
        for action in np.argsort(self.compiled.level, kind="stable").tolist():
            self._action(action)
            if action in last_of_rank:
                rank = self.rank[action]
                self._exchange(rank, self.finished[rank])
                update = sum(self.stages[number].optimizer_ns for number in self.finished[rank])
                self.updates[rank] = self.graph.add(rank, COMPUTE, update)

    def _action(self, action: int) -> None:
        number, kind, rank, needed = self.stage[action], self.kind[action], self.rank[action], self.needed[action]
        needs = [] if needed < 0 else [self.bounds[needed][1]]
        if self.remote[action]:
            needs = [self.sends.get(needed, needs[0])]
        completes = action == self.last[number] or (self.each_pass and kind != F)
        first = len(self.graph)
        if self.in_layers or (completes and self.sync == "overlapped" and self.stages[number].buckets):
            last = self._layers(action, number, needs, completes=completes)
        else:
            last = self.graph.add(rank, COMPUTE, self.pass_ns[action], needs=needs)
        self.bounds[action] = (first, last)
        if action == self.last[number]:
            self.finished[rank].append(number)
        elif completes:
            self._exchange(rank, [number])
            self.earlier.append((number, int(self.order.microbatch[action]), self.buckets[number]))
            self.buckets[number] = []
        if kind != W:
            self._send(action, number, forward=kind == F, after=last)

    def _layers(self, action: int, number: int, needs: Sequence[int], *, completes: bool) -> int:
        """Add a pass layer by layer, with the buckets that leave during it; return its last operation."""
        stage, kind = self.stages[number], self.kind[action]
        durations = layer_times(stage.passes_ns[kind], None if self.factors is None else self.factors[action])
        waiting = list(range(len(stage.buckets))) if completes and self.sync == "overlapped" else []
        last = -1
        for layer in range(len(stage.layers)) if kind == F else range(len(stage.layers) - 1, -1, -1):
            last = self.graph.add(stage.rank, COMPUTE, durations[layer], needs=needs)
            needs = []
            if self.in_layers:
                self.layers.append((action, layer, last))
            while waiting and stage.buckets[waiting[0]].layer >= layer:
                last = self._start(number, waiting.pop(0))
        return last

    def _send(self, action: int, number: int, *, forward: bool, after: int) -> None:
        stage = self.stages[number]
        lane = SEND_FORWARD if forward else SEND_BACKWARD
        duration = stage.send_forward_ns if forward else stage.send_backward_ns
        if duration:
            peer = self.stages[number + (1 if forward else -1)].rank
            self.sends[action] = self.graph.add(stage.rank, lane, duration, needs=[after], peer=peer)

    def _start(self, number: int, index: int) -> int:
        """Pack a bucket and send it; return the packing."""
        bucket, rank = self.stages[number].buckets[index], self.stages[number].rank
        pack = self.graph.add(rank, COMPUTE, bucket.pack_ns)
        wire = self.graph.add(rank, COMMUNICATION, bucket.duration_ns, needs=[pack])
        self.buckets[number].append((pack, wire))
        return pack

    def _exchange(self, rank: int, numbers: Sequence[int]) -> None:
        """Exchange the complete gradients of stages of a rank: what has not been sent yet, then what arrives."""
        buckets = [(number, index) for number in numbers for index in range(len(self.stages[number].buckets))]
        if self.sync != "overlapped":
            for bucket in buckets:
                self._start(*bucket)
                if self.sync == "per_parameter":
                    self._receive(rank, [bucket])
        if self.sync != "per_parameter":
            self._receive(rank, buckets)

    def _receive(self, rank: int, buckets: Sequence[tuple[int, int]]) -> None:
        """Unpack each bucket once it has come.

        Buckets that send a second time do so one after the other, once all have come the first time.
        """
        add = self.graph.add
        wires = [self.buckets[number][index][1] for number, index in buckets]
        again: dict[tuple[int, int], tuple[int, int, int]] = {}
        for number, index in buckets:
            if (later := self.stages[number].buckets[index].later) is not None:
                between = add(rank, COMPUTE, later.between_ns, needs=wires)
                wire = add(rank, COMMUNICATION, later.duration_ns, needs=[between])
                again[number, index] = (between, wire, add(rank, COMPUTE, later.after_ns))
        for number, index in buckets:
            pack, first = self.buckets[number][index]
            more = again.get((number, index), ())
            unpack_ns = self.stages[number].buckets[index].unpack_ns
            unpack = add(rank, COMPUTE, unpack_ns, needs=[more[1] if more else first])
            self.buckets[number][index] = (pack, first, unpack, *more)


def time_step(
    compiled: CompiledSchedule,
    stages: Sequence[Stage],
    *,
    sync: str,
    each_pass: bool = False,
    contention: Contention | None = None,
    factors: Floats | None = None,
    cores: engine.SharedCores | None = None,
) -> Timing:
    """Time the passes, the exchange of gradients and the update of a step whose parameters are not sharded.

    Args:
        compiled: the schedule.
        stages: what each stage costs.
        sync: when gradients are exchanged (see `Plan.gradient_sync`).
        each_pass: every backward exchanges its gradients (see `sums_each_pass`).
        contention: how much computing and communicating slow each other down.
        factors: how much longer than costed each action takes (jitter).
        cores: cores that the ranks share.
    """
    in_layers = cores is not None or each_pass or (contention is not None and engine.slows_down(contention))
    step = _StepGraph(compiled, stages, sync=sync, factors=factors, in_layers=in_layers, each_pass=each_pass)
    step.build()
    start, end = engine.run(step.graph, contention, cores)
    starts, ends = start.tolist(), end.tolist()
    bounds = np.array([step.bounds[action] for action in range(len(compiled.rank))], np.int64).reshape(-1, 2)
    action_end = end[bounds[:, 1]]
    send_start, send_end = action_end.copy(), action_end.copy()
    sent = list(step.sends)
    send_start[sent] = start[list(step.sends.values())]
    send_end[sent] = end[list(step.sends.values())]
    rows = np.array(step.layers, np.int64).reshape(-1, 3)

    def times_of(buckets: Sequence[tuple[int, ...]]) -> tuple[BucketTimes, ...]:
        return tuple(BucketTimes(*((starts[part], ends[part]) for part in parts)) for parts in buckets)

    earlier = [(stages[number], microbatch, times_of(buckets)) for number, microbatch, buckets in step.earlier]
    calls, copies = _calls_of_earlier(earlier, compiled.order.num_ranks) if earlier else ((), ())
    return Timing(
        order=compiled.order,
        start_ns=start[bounds[:, 0]],
        end_ns=action_end,
        send_start_ns=send_start,
        send_end_ns=send_end,
        buckets=tuple(times_of(each) for each in step.buckets),
        optimizer=tuple((starts[update], ends[update]) for update in step.updates),
        layers=np.stack([rows[:, 0], rows[:, 1], start[rows[:, 2]], end[rows[:, 2]]], axis=1) if in_layers else None,
        calls=calls,
        copies=copies,
        factors=factors,
    )


def _calls_of_earlier(
    earlier: Sequence[tuple[Stage, int, Sequence[BucketTimes]]], num_ranks: int
) -> tuple[tuple[tuple[ShardCall, ...], ...], tuple[tuple[ShardCall, ...], ...]]:
    """Return each rank's scatters and copies of micro-batches before the last one, under sharding stage 2."""
    calls: list[list[ShardCall]] = [[] for _ in range(num_ranks)]
    copies: list[list[ShardCall]] = [[] for _ in range(num_ranks)]
    for stage, microbatch, buckets in earlier:
        for bucket, times in zip(stage.buckets, buckets, strict=True):
            for span, part in zip(exchanges(0, bucket, times), bucket.parts, strict=True):
                pair = (span.start_ns, span.end_ns)
                calls[stage.rank].append(call_of("scatter", span.name, part, pair, microbatch))
            name = f"copies of {bucket.name.removeprefix(f'{bucket.kind} ')}"
            copies[stage.rank] += [
                ShardCall("compute", name, "copy", *pair, bucket.num_bytes) for pair in times.computing
            ]
    return tuple(map(tuple, calls)), tuple(map(tuple, copies))
