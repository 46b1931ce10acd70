"""When everything in a step happens: its passes, messages, buckets and updates as one graph for the event engine.

The ranks of one replica run in the graph, each operation in the order in which a rank's program asks for it. A pass is
one operation, or one per layer where something can happen between its layers: a bucket leaves, or contention changes
how fast they run.

Gradients of a stage are complete after its last B or W. Overlapped, its buckets leave during that pass, whatever the
rank's other stages still have to do; otherwise a rank exchanges all its gradients after its last pass. The update waits
for all of them. Sharding stage 2 does not keep whole gradients: every backward exchanges what it made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from distlab.plan import Contention
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, NONE, Graph
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.jitter import stretched
from simulator.pipeline.schedule_arrays import B, Bools, F, Floats, I, Ints, last_actions
from simulator.stage.stage import Stage
from simulator.stage.step_times import BucketParts, BucketTimes, ShardCall, Timing, call_of, layer_times
from simulator.step.trace import exchanges

SEND_FORWARD, SEND_BACKWARD = COMMUNICATION + 1, COMMUNICATION + 2
FEW = 16  # passes that are added one by one: columns of arrays do not pay for fewer


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
        self.pass_ns = stretched(totals[order.stage, order.kind], factors)
        self.factors = None if factors is None else factors.tolist()
        self.send_ns = np.zeros((4, len(stages)), np.int64)  # of the message after each kind of pass
        self.send_ns[F] = [stage.send_forward_ns for stage in stages]
        self.send_ns[[B, I]] = [stage.send_backward_ns for stage in stages]
        self.rank_of_stage = np.array([stage.rank for stage in stages], np.int64)
        self.graph = Graph()
        self.first = np.zeros(len(order.kind), np.int64)  # operation of each action: the first, the last one
        self.done = np.zeros(len(order.kind), np.int64)
        self.sent = np.full(len(order.kind), -1, np.int64)  # its message
        self.layers: list[tuple[int, int, int]] = []  # action, layer, operation
        self.packs: list[list[int]] = [[] for _ in stages]  # of each bucket sent; its wire is the operation behind
        self.buckets: list[list[tuple[int, ...]]] = [[] for _ in stages]  # of those received, fields of BucketTimes
        # Stage and micro-batch before the last one, and its buckets (sharding stage 2).
        self.earlier: list[tuple[int, int, list[tuple[int, ...]]]] = []
        self.updates = [0] * compiled.order.num_ranks
        self.finished: list[list[int]] = [[] for _ in self.updates]  # stages of each rank whose gradients are complete

    def build(self) -> None:
        """Add all actions, then what follows a rank's last one."""
        # Actions in the order of their levels: what an action needs has been added before it.
        order = np.argsort(self.compiled.level, kind="stable")
        ends = set((self.order.offsets[1:] - 1).tolist())
        alone = np.full(len(order), self.in_layers or self.each_pass)  # more than a pass and its message
        alone[[*self.last, *ends]] = True
        early = self._before_all(alone)[order]
        self._passes(order[early])
        order, so_far = order[~early], 0
        for place in np.flatnonzero(alone[order]).tolist():
            self._passes(order[so_far:place])
            so_far, action = place + 1, int(order[place])
            self._action(action)
            if action in ends:
                rank = int(self.compiled.rank[action])
                self._exchange(rank, self.finished[rank])
                update = sum(self.stages[number].optimizer_ns for number in self.finished[rank])
                self.updates[rank] = self.graph.add(rank, COMPUTE, update)

    def _before_all(self, alone: Bools) -> Bools:
        """Return which actions come before the first of these on their rank; none, where some of them need another."""
        so_far, first, needed = np.cumsum(alone), self.order.offsets[:-1], self.compiled.needed
        early = so_far == np.repeat(so_far[first] - alone[first], np.diff(self.order.offsets))
        is_closed = not (early & (needed >= 0) & ~early[needed]).any()
        return np.asarray(early & is_closed, np.bool_)

    def _passes(self, actions: Ints) -> None:
        """Add actions that are one operation each, and the messages after them, at once."""
        if len(actions) < FEW:
            for action in actions.tolist():
                self._action(action)
            return
        stage, kind, needed = self.order.stage[actions], self.order.kind[actions], self.compiled.needed[actions]
        send_ns = self.send_ns[kind, stage]
        sends = np.flatnonzero(send_ns)
        place = np.arange(len(actions))
        place[1:] += np.cumsum(send_ns > 0)[:-1]
        message, so_far = place[sends] + 1, len(self.graph)
        self.first[actions] = self.done[actions] = so_far + place
        self.sent[actions[sends]] = so_far + message
        forward = kind[sends] == F
        rank = np.repeat(self.compiled.rank[actions], 1 + (send_ns > 0))
        lane, peer = np.full(len(rank), COMPUTE), np.full(len(rank), -1)
        lane[message] = np.where(forward, SEND_FORWARD, SEND_BACKWARD)
        peer[message] = self.rank_of_stage[stage[sends] + np.where(forward, 1, -1)]
        duration, needs = np.empty(len(rank), np.int64), np.empty(len(rank), np.int64)
        duration[place], duration[message] = self.pass_ns[actions], send_ns[sends]
        by_message = self.compiled.remote[actions] & (self.sent[needed] >= 0)
        arrival = np.where(by_message, self.sent[needed], self.done[needed])
        needs[place], needs[message] = np.where(needed < 0, -1, arrival), so_far + place[sends]
        self.graph.extend(rank.tolist(), lane.tolist(), duration.tolist(), needs.tolist(), peer.tolist())

    def _action(self, action: int) -> None:
        number, kind, rank, needed = (
            int(column[action])
            for column in (self.order.stage, self.order.kind, self.compiled.rank, self.compiled.needed)
        )
        need = NONE if needed < 0 else int(self.done[needed])
        if self.compiled.remote[action] and self.sent[needed] >= 0:
            need = int(self.sent[needed])
        completes = action == self.last[number] or (self.each_pass and kind != F)
        first = len(self.graph)
        if self.in_layers or (completes and self.sync == "overlapped" and self.stages[number].buckets):
            last = self._layers(action, number, need, completes=completes)
        else:
            last = len(self.graph)
            self.graph.extend([rank], [COMPUTE], [int(self.pass_ns[action])], [need], [-1])
        self.first[action], self.done[action] = first, last
        if action == self.last[number]:
            self.finished[rank].append(number)
        elif completes:
            self._exchange(rank, [number])
            self.earlier.append((number, int(self.order.microbatch[action]), self.buckets[number]))
            self.packs[number], self.buckets[number] = [], []
        if duration := int(self.send_ns[kind, number]):
            lane, there = (SEND_FORWARD, number + 1) if kind == F else (SEND_BACKWARD, number - 1)
            peer = int(self.rank_of_stage[there])
            self.sent[action] = self.graph.add(rank, lane, duration, needs=[last], peer=peer)

    def _layers(self, action: int, number: int, need: int, *, completes: bool) -> int:
        """Add a pass layer by layer, with the buckets that leave during it; return its last operation."""
        stage, kind = self.stages[number], int(self.order.kind[action])
        durations = layer_times(stage.passes_ns[kind], None if self.factors is None else self.factors[action])
        waiting = stage.buckets if completes and self.sync == "overlapped" else ()
        so_far, sent = len(self.graph), 0
        lane: list[int] = []
        duration: list[int] = []
        waits: list[int] = []
        for layer in range(len(stage.layers)) if kind == F else range(len(stage.layers) - 1, -1, -1):
            last = so_far + len(lane)
            lane.append(COMPUTE)
            duration.append(durations[layer])
            waits.append(NONE if waits else need)
            if self.in_layers:
                self.layers.append((action, layer, last))
            while sent < len(waiting) and waiting[sent].layer >= layer:
                last = so_far + len(lane)
                lane += (COMPUTE, COMMUNICATION)
                duration += (waiting[sent].pack_ns, waiting[sent].duration_ns)
                waits += (NONE, last)
                self.packs[number].append(last)
                sent += 1
        self.graph.extend([stage.rank] * len(lane), lane, duration, waits, [-1] * len(lane))
        return last

    def _start(self, number: int, index: int) -> None:
        """Pack a bucket and send it."""
        bucket, rank = self.stages[number].buckets[index], self.stages[number].rank
        pack = self.graph.add(rank, COMPUTE, bucket.pack_ns)
        self.graph.add(rank, COMMUNICATION, bucket.duration_ns, needs=[pack])
        self.packs[number].append(pack)

    def _exchange(self, rank: int, numbers: Sequence[int]) -> None:
        """Exchange the complete gradients of a rank's stages: send those not sent yet, then receive."""
        if self.sync != "overlapped":
            for number in numbers:
                for index in range(len(self.stages[number].buckets)):
                    self._start(number, index)
                    if self.sync == "per_parameter":
                        self._receive(rank, [number])
        if self.sync != "per_parameter":
            self._receive(rank, numbers)

    def _receive(self, rank: int, numbers: Sequence[int]) -> None:
        """Unpack each bucket of these stages that was sent, once it has come.

        Buckets that send a second time do so one after the other, once all have come the first time.
        """
        add = self.graph.add
        packs = [pack for number in numbers for pack in self.packs[number][len(self.buckets[number]) :]]
        wires = [pack + 1 for pack in packs]
        buckets = [
            bucket
            for number in numbers
            for bucket in self.stages[number].buckets[len(self.buckets[number]) : len(self.packs[number])]
        ]
        again: dict[int, tuple[int, ...]] = {}
        for place, bucket in enumerate(buckets):
            if (later := bucket.later) is not None:
                between = add(rank, COMPUTE, later.between_ns, needs=wires)
                wire = add(rank, COMMUNICATION, later.duration_ns, needs=[between])
                again[place] = (between, wire, add(rank, COMPUTE, later.after_ns))
        waits = [again[place][1] if place in again else wire for place, wire in enumerate(wires)] if again else wires
        first, count = len(self.graph), len(packs)
        unpacks = [bucket.unpack_ns for bucket in buckets]
        self.graph.extend([rank] * count, [COMPUTE] * count, unpacks, waits, [-1] * count)
        done = zip(packs, wires, range(first, first + count), strict=True)
        rows: Iterator[tuple[int, ...]] = done
        if again:
            rows = ((*row, *again.get(place, ())) for place, row in enumerate(done))
        for number in numbers:
            self.buckets[number] += islice(rows, len(self.packs[number]) - len(self.buckets[number]))


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
    action_end = end[step.done]
    sent = step.sent >= 0
    send_start, send_end = np.where(sent, start[step.sent], action_end), np.where(sent, end[step.sent], action_end)
    rows = np.array(step.layers, np.int64).reshape(-1, 3)

    earlier = [
        (stages[number], microbatch, BucketParts(buckets, start, end).times())
        for number, microbatch, buckets in step.earlier
    ]
    calls, copies = _calls_of_earlier(earlier, compiled.order.num_ranks) if earlier else ((), ())
    return Timing(
        order=compiled.order,
        start_ns=start[step.first],
        end_ns=action_end,
        send_start_ns=send_start,
        send_end_ns=send_end,
        parts=tuple(BucketParts(buckets, start, end) for buckets in step.buckets),
        optimizer=tuple((int(start[update]), int(end[update])) for update in step.updates),
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
