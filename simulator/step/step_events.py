"""When everything in a step happens: its passes, messages, buckets and updates.

Gradients of a stage are complete after its last B or W. Overlapped, its buckets leave during that pass, whatever the
rank's other stages still have to do; otherwise a rank exchanges all its gradients after its last pass. The update waits
for all of them. Sharding stage 2 does not keep whole gradients: every backward exchanges what it made.

Two ways lead to the same times:

    apart       No pass waits for gradients. So passes and messages are timed first, then how each rank ends: its last
                passes layer by layer, with buckets. Ranks that end alike are timed once.
    together    One graph for the event engine, each pass layer by layer: where computing and communicating slow each
                other down, ranks share cores, or every backward exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distlab.plan import Contention
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, NONE, Graph
from simulator.gradients.buckets import BucketCost
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.jitter import stretched
from simulator.pipeline.schedule_arrays import B, F, Floats, I, Ints, last_actions
from simulator.stage.stage import Stage
from simulator.stage.step_times import NO_BUCKETS, BucketParts, Timing, finishing, layer_times
from simulator.step.zero_events import calls_of_earlier

# How a rank ends its step: the operations of its stages' buckets, and the times of all; the last one is the update.
_Ending = tuple[list[list[tuple[int, ...]]], engine.Times]
SEND_FORWARD, SEND_BACKWARD = COMMUNICATION + 1, COMMUNICATION + 2


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
    if cores is None and not each_pass and not (contention and engine.slows_down(contention)):
        return _time_apart(compiled, stages, sync, factors)
    step = _StepGraph(compiled, stages, sync=sync, factors=factors, each_pass=each_pass)
    step.build()
    return step.timing(engine.run(step.graph, contention, cores))


def _sends_ns(stages: Sequence[Stage]) -> Ints:
    """Return the time of the message after each kind of pass of each stage [S, 4]; 0: there is none."""
    sends = np.zeros((len(stages), 4), np.int64)
    sends[:, F] = [stage.send_forward_ns for stage in stages]
    sends[:, B] = sends[:, I] = [stage.send_backward_ns for stage in stages]
    return sends


def _time_apart(compiled: CompiledSchedule, stages: Sequence[Stage], sync: str, factors: Floats | None) -> Timing:
    order, last = compiled.order, last_actions(compiled.order)
    totals = np.array([[sum(layers) for layers in stage.passes_ns] for stage in stages], np.int64)
    pass_ns = stretched(totals[order.stage, order.kind], factors)
    if sync == "overlapped":  # what is packed during a pass is a part of it
        pass_ns[last] += [sum([bucket.pack_ns for bucket in stage.buckets]) for stage in stages]
    send_ns = _sends_ns(stages)[order.stage, order.kind]
    end_ns, sent_ns = map(engine.whole_ns, compiled.run_with_wires(pass_ns, send_ns))
    start_ns = end_ns - pass_ns
    kinds, starts, ends = (column[last].tolist() for column in (order.kind, start_ns, end_ns))
    stretches = [None] * len(stages) if factors is None else factors[last].tolist()
    parts, updates = [NO_BUCKETS] * len(stages), []
    known: dict[object, _Ending] = {}
    for rank, own in enumerate(finishing(order)):
        begin = starts[own[0]] if own else 0
        passes = [_LastPass(n, kinds[n], stretches[n], starts[n] - begin, ends[n] - begin) for n in own]
        costs = [(stages[n].passes_ns[kinds[n]], id(stages[n].buckets), stages[n].optimizer_ns) for n in own]
        alike = (*(each[1:] for each in passes), *costs)
        if alike not in known:
            known[alike] = _end_of_rank(rank, passes, _Exchanges(stages, sync))
        buckets, times = known[alike]
        for number, operations in zip(own, buckets, strict=True):
            parts[number] = BucketParts(operations, times.start_ns + begin, times.end_ns + begin)
        updates.append((begin + int(times.start_ns[-1]), begin + int(times.end_ns[-1])))
    return Timing(order, start_ns, end_ns, sent_ns - send_ns, sent_ns, tuple(parts), tuple(updates), factors=factors)


class _LastPass(NamedTuple):
    """The pass that completes a stage's gradients, counted from the first such pass of its rank."""

    stage: int
    kind: int
    factor: float | None
    start_ns: int
    end_ns: int


def _end_of_rank(rank: int, passes: Sequence[_LastPass], exchanging: _Exchanges) -> _Ending:
    """Time a rank from its first pass that completes gradients on; other passes are the time that they take."""
    graph, now, own = exchanging.graph, 0, [each.stage for each in passes]
    for each in passes:
        graph.add(rank, COMPUTE, each.start_ns - now)
        exchanging.layers(each.stage, each.kind, each.factor, NONE, completes=True)
        now = each.end_ns
    exchanging.exchange(rank, own)
    graph.add(rank, COMPUTE, sum(exchanging.stages[number].optimizer_ns for number in own))
    return [exchanging.buckets[number] for number in own], engine.run(graph)


class _Exchanges:
    """Adds passes and exchanges of gradients to a graph, in the order in which each rank's program asks for them.

    Attributes:
        graph: the operations so far.
        buckets: of each stage, and of each of its buckets that has been received, the operations that are the fields of
            `BucketTimes`.
    """

    def __init__(self, stages: Sequence[Stage], sync: str) -> None:
        """`sync` says when gradients are exchanged (see `Plan.gradient_sync`)."""
        self.graph, self.stages, self.sync = Graph(), stages, sync
        self.buckets: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        # Of those sent, which pack each; its wire is the operation behind.
        self._sent: defaultdict[int, list[tuple[BucketCost, int]]] = defaultdict(list)

    def layers(self, number: int, kind: int, factor: float | None, need: int, *, completes: bool) -> list[int]:
        """Add a pass of a stage layer by layer; where it completes gradients, buckets leave during it.

        Return the operation of each layer in the order in which they run, and the last operation of the pass.
        """
        stage = self.stages[number]
        durations = layer_times(stage.passes_ns[kind], factor)
        waiting = stage.buckets if completes and self.sync == "overlapped" else ()
        so_far, sent, last = len(self.graph), 0, NONE
        lane: list[int] = []
        duration: list[int] = []
        waits: list[int] = []
        found: list[int] = []
        for layer in range(len(durations)) if kind == F else range(len(durations) - 1, -1, -1):
            last = so_far + len(lane)
            found.append(last)
            lane.append(COMPUTE)
            duration.append(durations[layer])
            waits.append(NONE if waits else need)
            while sent < len(waiting) and waiting[sent].layer >= layer:
                last = so_far + len(lane)
                lane += (COMPUTE, COMMUNICATION)
                duration += (waiting[sent].pack_ns, waiting[sent].duration_ns)
                waits += (NONE, last)
                self._sent[number].append((waiting[sent], last))
                sent += 1
        self.graph.extend(stage.rank, lane, duration, waits)
        return [*found, last]

    def exchange(self, rank: int, numbers: Sequence[int]) -> None:
        """Exchange the complete gradients of a rank's stages: send those not sent yet, then receive."""
        if self.sync != "overlapped":
            for number in numbers:
                for bucket in self.stages[number].buckets:
                    self._start(number, bucket)
                    if self.sync == "per_parameter":
                        self._receive(rank, [number])
        if self.sync != "per_parameter":
            self._receive(rank, numbers)

    def _start(self, number: int, bucket: BucketCost) -> None:
        """Pack a bucket and send it."""
        rank = self.stages[number].rank
        pack = self.graph.add(rank, COMPUTE, bucket.pack_ns)
        self.graph.add(rank, COMMUNICATION, bucket.duration_ns, needs=[pack])
        self._sent[number].append((bucket, pack))

    def _receive(self, rank: int, numbers: Sequence[int]) -> None:
        """Unpack each bucket of these stages that was sent, once it has come.

        Buckets that send a second time do so one after the other, once all have come the first time.
        """
        add, again = self.graph.add, dict[int, tuple[int, ...]]()
        sent = [(number, *each) for number in numbers for each in self._sent.pop(number, ())]
        waits = [pack + 1 for _, _, pack in sent]
        wires = waits.copy()
        for place, (_, bucket, _) in enumerate(sent):
            if (later := bucket.later) is not None:
                between = add(rank, COMPUTE, later.between_ns, needs=wires)
                waits[place] = add(rank, COMMUNICATION, later.duration_ns, needs=[between])
                again[place] = (between, waits[place], add(rank, COMPUTE, later.after_ns))
        first = len(self.graph)
        self.graph.extend(rank, [COMPUTE] * len(sent), [bucket.unpack_ns for _, bucket, _ in sent], waits)
        for place, (number, _, pack) in enumerate(sent):
            self.buckets[number].append((pack, pack + 1, first + place, *again.get(place, ())))


class _StepGraph(_Exchanges):
    """Builds the graph of a step, each pass layer by layer, and remembers which operation is which."""

    def __init__(
        self,
        compiled: CompiledSchedule,
        stages: Sequence[Stage],
        *,
        sync: str,
        factors: Floats | None,
        each_pass: bool,
    ) -> None:
        super().__init__(stages, sync)
        self.order, self.compiled, self.factors, self.each_pass = compiled.order, compiled, factors, each_pass
        self.last = last_actions(compiled.order).tolist()
        self.send_ns = _sends_ns(stages).tolist()
        num_actions = len(compiled.order.kind)
        self.first = np.zeros(num_actions, np.int64)  # operation of each action: the first, the last one
        self.done = np.zeros(num_actions, np.int64)
        self.sent = np.full(num_actions, -1, np.int64)  # its message
        self.rows: list[tuple[int, int, int]] = []  # action, layer, operation
        # Stage and micro-batch before the last one, and the operations of its buckets (sharding stage 2).
        self.earlier: list[tuple[int, int, list[tuple[int, ...]]]] = []
        self.updates = [0] * compiled.order.num_ranks

    def build(self) -> None:
        """Add all actions, then what follows a rank's last one."""
        # Actions in the order of their levels: what an action needs has been added before it.
        ends, own = set((self.order.offsets[1:] - 1).tolist()), finishing(self.order)
        for action in np.argsort(self.compiled.level, kind="stable").tolist():
            self._action(action)
            if action in ends:
                rank = int(self.compiled.rank[action])
                self.exchange(rank, own[rank])
                update = sum(self.stages[number].optimizer_ns for number in own[rank])
                self.updates[rank] = self.graph.add(rank, COMPUTE, update)

    def _action(self, action: int) -> None:
        number, kind, rank, needed = (
            int(column[action])
            for column in (self.order.stage, self.order.kind, self.compiled.rank, self.compiled.needed)
        )
        need = NONE if needed < 0 else int(self.done[needed])
        if self.compiled.remote[action] and self.sent[needed] >= 0:
            need = int(self.sent[needed])
        is_last = action == self.last[number]
        is_earlier = self.each_pass and kind != F and not is_last  # gradients that do not wait for the last ones
        factor = None if self.factors is None else float(self.factors[action])
        *layers, last = self.layers(number, kind, factor, need, completes=is_last or is_earlier)
        numbers = range(len(layers)) if kind == F else range(len(layers) - 1, -1, -1)
        self.rows += zip([action] * len(layers), numbers, layers, strict=True)
        self.first[action], self.done[action] = layers[0], last
        if is_earlier:
            self.exchange(rank, [number])
            self.earlier.append((number, int(self.order.microbatch[action]), self.buckets.pop(number, [])))
        if duration := self.send_ns[number][kind]:
            lane, there = (SEND_FORWARD, number + 1) if kind == F else (SEND_BACKWARD, number - 1)
            self.sent[action] = self.graph.add(rank, lane, duration, needs=[last], peer=self.stages[there].rank)

    def timing(self, times: engine.Times) -> Timing:
        """Return when everything happens, from the times of the operations."""
        start, end = times
        action_end, is_sent = end[self.done], self.sent >= 0
        rows = np.array(self.rows, np.int64).reshape(-1, 3)
        earlier = [
            (self.stages[number], microbatch, BucketParts(buckets, start, end).times())
            for number, microbatch, buckets in self.earlier
        ]
        calls, copies = calls_of_earlier(earlier, self.order.num_ranks) if earlier else ((), ())
        return Timing(
            order=self.order,
            start_ns=start[self.first],
            end_ns=action_end,
            send_start_ns=np.where(is_sent, start[self.sent], action_end),
            send_end_ns=np.where(is_sent, end[self.sent], action_end),
            parts=tuple(BucketParts(self.buckets[n], start, end) for n in range(len(self.stages))),
            optimizer=tuple((int(start[update]), int(end[update])) for update in self.updates),
            layers=np.stack([rows[:, 0], rows[:, 1], start[rows[:, 2]], end[rows[:, 2]]], axis=1),
            calls=calls,
            copies=copies,
            factors=self.factors,
        )
