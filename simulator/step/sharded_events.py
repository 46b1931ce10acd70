"""When everything in a step of sharding stage 3 (FSDP) happens: units are gathered, computed with, and scattered.

Before a unit computes, its parameters are gathered, up to `prefetch` units ahead. After it they are freed, and gathered
again for backward. After its backward its gradients are scattered. Each rank updates its own part. In a pipeline every
pass of a stage gathers the stage's units, and the stage's last backward scatters: every one with `scatters_each`.

Gathers and scatters of a rank share one wire, in the order in which the program asks for them: at the start of a unit
for the next units' gathers, at the end of a unit's backward for its scatter. Copies to and from the host have a wire of
their own in each direction; they slow nothing else down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distlab.plan import Cluster, Sharding
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph
from simulator.gradients.buckets import Transfer
from simulator.gradients.fsdp_units import UnitTimes
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import F, last_actions
from simulator.stage.stage import Stage
from simulator.stage.step_times import NO_BUCKETS, Pair, ShardCall, Timing, call_of, finishing

SEND_FORWARD, SEND_BACKWARD = COMMUNICATION + 1, COMMUNICATION + 2


def time_fsdp_step(compiled: CompiledSchedule, stages: Sequence[Stage], sharding: Sharding, cluster: Cluster) -> Timing:
    """Time a step of stage 3 on the event engine."""
    step = _UnitGraph(compiled, stages, sharding, cluster)
    step.build()
    start, end = engine.run(step.graph, cluster.contention)

    def pair(operation: int) -> Pair:
        return int(start[operation]), int(end[operation])

    bounds = np.array([step.bounds[action] for action in range(len(compiled.rank))], np.int64).reshape(-1, 2)
    action_end = end[bounds[:, 1]]
    send_start, send_end = action_end.copy(), action_end.copy()
    for action, operation in step.sends.items():
        send_start[action], send_end[action] = pair(operation)
    rows = np.array(step.layers, np.int64).reshape(-1, 3)
    calls = [
        sorted(
            (call_of(lane, name, what, pair(number), m) for lane, name, what, number, m in one.calls),
            key=lambda call: (call.start_ns, call.end_ns),
        )
        for one in step.ranks
    ]
    return Timing(
        order=compiled.order,
        start_ns=start[bounds[:, 0]],
        end_ns=action_end,
        send_start_ns=send_start,
        send_end_ns=send_end,
        parts=(NO_BUCKETS,) * len(stages),
        optimizer=tuple(pair(one.update) for one in step.ranks),
        layers=np.stack([rows[:, 0], rows[:, 1], start[rows[:, 2]], end[rows[:, 2]]], axis=1),
        calls=tuple(map(tuple, calls)),
        copies=tuple(
            tuple(ShardCall("compute", name, "copy", *pair(operation), size) for name, operation, size in one.copies)
            for one in step.ranks
        ),
    )


@dataclass
class _Rank:
    """What is known of one rank's program while its operations are added.

    Attributes:
        number: of the rank in the pipeline.
        to_device: stands for the wire from the host as a rank of its own, so that it does not contend with the device.
        to_host: the wire to the host, likewise.
        computed: the last operation of the compute lane, if any.
        gathered: by stage and unit, the operation that gathered what is whole now.
        scattering: stage, unit, micro-batch and operation of the scatter that is on its way.
        crossing: the same of each sum that travels among replicas.
        arrived: what the update waits for.
        calls: lane, name, cost, operation and micro-batch.
        copies: name, operation and bytes.
        update: its operation.
    """

    number: int
    to_device: int
    to_host: int
    computed: list[int] = field(default_factory=list)
    gathered: dict[Pair, int] = field(default_factory=dict)
    scattering: tuple[int, int, int, int] | None = None
    crossing: list[tuple[int, int, int, int]] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    calls: list[tuple[str, str, Transfer, int, int]] = field(default_factory=list)
    copies: list[tuple[str, int, int]] = field(default_factory=list)
    update: int = 0


class _UnitGraph:
    """Builds the graph of a step of stage 3, in the order in which each rank's program asks for operations."""

    def __init__(
        self, compiled: CompiledSchedule, stages: Sequence[Stage], sharding: Sharding, cluster: Cluster
    ) -> None:
        self.compiled, self.order, self.stages, self.sharding = compiled, compiled.order, stages, sharding
        self.scatters_each = cluster.software.scatters_each
        self.graph = Graph()
        num = self.order.num_ranks
        self.ranks = [_Rank(rank, num + 2 * rank, num + 2 * rank + 1) for rank in range(num)]
        self.bounds: dict[int, Pair] = {}  # first and last operation of an action
        self.sends: dict[int, int] = {}
        self.layers: list[tuple[int, int, int]] = []
        self.last = last_actions(self.order).tolist()

    def build(self) -> None:
        """Add all actions, those that others need first; then the updates."""
        kinds, numbers, needed = self.order.kind.tolist(), self.order.stage.tolist(), self.compiled.needed.tolist()
        for action in np.argsort(self.compiled.level, kind="stable").tolist():
            number, before = numbers[action], needed[action]
            needs = [] if before < 0 else [self.sends.get(before, self.bounds[before][1])]
            if kinds[action] == F:
                self._forward(action, number, needs)
            else:
                self._backward(action, number, needs)
            self._send(action, number, forward=kinds[action] == F)
        for one, own in zip(self.ranks, finishing(self.order), strict=True):
            self._update(one, own)

    def _update(self, one: _Rank, own: Sequence[int]) -> None:
        """End a rank's program: wait for what travels, update, and bring new values to the device."""
        self._finish_scatter(one)
        for crossing in one.crossing:
            self._keep(one, *crossing)
        rank = one.to_host if self.sharding.offload != "none" else one.number
        duration_ns = sum(self.stages[number].optimizer_ns for number in own)
        one.update = self.graph.add(rank, COMPUTE, duration_ns, needs=one.arrived + one.computed)
        if self.sharding.offload == "optimizer":
            for unit in (unit for number in own for unit in self.stages[number].units):
                self._load(one, unit, [one.update], -1)

    def _send(self, action: int, number: int, *, forward: bool) -> None:
        stage = self.stages[number]
        duration = stage.send_forward_ns if forward else stage.send_backward_ns
        if duration:
            lane, peer = (SEND_FORWARD, number + 1) if forward else (SEND_BACKWARD, number - 1)
            after = [self.bounds[action][1]]
            self.sends[action] = self.graph.add(stage.rank, lane, duration, needs=after, peer=self.stages[peer].rank)

    def _forward(self, action: int, number: int, needs: list[int]) -> None:
        stage = self.stages[number]
        one = self.ranks[stage.rank]
        for unit, ends in self._pass(action, number, range(len(stage.layers)), needs):
            if ends and not stage.units[unit].unit.is_root and self.sharding.reshard_after_forward:
                del one.gathered[number, unit]
        if self.sharding.reshard_after_forward:
            for place in [place for place in one.gathered if place[0] == number]:
                del one.gathered[place]  # the root

    def _backward(self, action: int, number: int, needs: list[int]) -> None:
        stage = self.stages[number]
        one, microbatch = self.ranks[stage.rank], int(self.order.microbatch[action])
        scatters = microbatch if self.scatters_each or action == self.last[number] else None
        root = [index for index, unit in enumerate(stage.units) if unit.unit.is_root]
        for unit, ends in self._pass(action, number, range(len(stage.layers) - 1, -1, -1), needs):
            if ends and unit not in root:
                self._free(one, number, unit, scatters)
        for unit in root:  # its gradients are complete at the end of backward only
            self._free(one, number, unit, scatters)
        self.bounds[action] = (self.bounds[action][0], one.computed[0])

    def _pass(self, action: int, number: int, layers: Sequence[int], before: list[int]) -> Iterator[tuple[int, bool]]:
        """Add each layer's operation; yield the layer's unit, and whether it was its last layer in this pass."""
        stage, forward = self.stages[number], self.order.kind[action] == F
        one, units = self.ranks[stage.rank], stage.units
        durations = stage.forward_ns if forward else stage.backward_ns
        owner = {layer: index for index, unit in enumerate(units) for layer in unit.unit.layers}
        owners = [owner.get(layer, -1) for layer in layers]
        begins = {unit: place for place, unit in reversed(list(enumerate(owners)))}
        ends = {unit: place for place, unit in enumerate(owners)}
        turn = sorted(range(len(units)), reverse=not forward)
        if units and units[0].unit.is_root:
            turn = [0, *(unit for unit in turn if unit)]
        microbatch = int(self.order.microbatch[action])
        for place, (layer, unit) in enumerate(zip(layers, owners, strict=True)):
            needs = list(before)
            if place == 0 and units and units[0].unit.is_root:
                self._gather(one, number, turn[: self.sharding.prefetch + 1], microbatch, before)
                needs.append(one.gathered[number, 0])
            if unit >= 0:
                if begins[unit] == place:
                    ahead = turn[turn.index(unit) :][: self.sharding.prefetch + 1]
                    self._gather(one, number, ahead, microbatch, before)
                needs.append(one.gathered[number, unit])
                if forward and begins[unit] == place:
                    needs = [self._compute(one, "show", units[unit], units[unit].show_ns, needs)]
            operation = self.graph.add(one.number, COMPUTE, durations[layer], needs=needs)
            one.computed, before = [operation], []
            self.layers.append((action, layer, operation))
            self.bounds[action] = (self.bounds[action][0] if place else operation, operation)
            if unit >= 0:
                yield unit, ends[unit] == place

    def _gather(self, one: _Rank, number: int, units: Sequence[int], microbatch: int, before: Sequence[int]) -> None:
        """Ask for what is not gathered yet; the wire serves requests in their order."""
        for index in units:
            if (number, index) in one.gathered:
                continue
            unit = self.stages[number].units[index]
            needs = [*one.computed, *before]
            if self.sharding.offload == "all":
                needs = [self._load(one, unit, needs, microbatch)]
            if unit.start_ns:
                needs = [self._compute(one, "start", unit, unit.start_ns, needs)]
            operation = self.graph.add(one.number, COMMUNICATION, unit.gather.duration_ns, needs=needs)
            one.calls.append(("gather", f"all_gather {unit.unit.name}", unit.gather, operation, microbatch))
            one.gathered[number, index] = operation

    def _free(self, one: _Rank, number: int, index: int, microbatch: int | None) -> None:
        """End a unit's backward: free its parameters, and scatter its gradients; None: they stay for a later one."""
        del one.gathered[number, index]
        if microbatch is None:
            return
        self._finish_scatter(one)
        unit = self.stages[number].units[index]
        pack = self._compute(one, "pack", unit, unit.pack_ns, [])
        one.scattering = number, index, microbatch, self._scatter(one, unit, unit.scatter[0], [pack], microbatch)

    def _finish_scatter(self, one: _Rank) -> None:
        """Wait for the scatter that is on its way; with replicas, send the sum across."""
        if one.scattering is None:
            return
        number, index, microbatch, scatter = one.scattering
        unit, one.scattering = self.stages[number].units[index], None
        across = unit.scatter[1:]
        if across:
            sent = self._scatter(one, unit, across[0], [scatter, *one.computed], microbatch)
            one.crossing.append((number, index, microbatch, sent))
        else:
            self._keep(one, number, index, microbatch, scatter)

    def _keep(self, one: _Rank, number: int, index: int, microbatch: int, arrived: int) -> None:
        """Divide the sum by the number of ranks, and copy it to the host where the update is there."""
        unit = self.stages[number].units[index]
        kept = self._compute(one, "unpack", unit, unit.unpack_ns, [arrived])
        if unit.save is not None:
            kept = self.graph.add(one.to_host, COMPUTE, unit.save.duration_ns, needs=[kept])
            one.calls.append(("host", f"to host {unit.unit.name}", unit.save, kept, microbatch))
        one.arrived.append(kept)

    def _compute(self, one: _Rank, verb: str, unit: UnitTimes, duration_ns: int, needs: Sequence[int]) -> int:
        operation = self.graph.add(one.number, COMPUTE, duration_ns, needs=needs)
        one.copies.append((f"{verb} {unit.unit.name}", operation, unit.scatter[0].num_bytes))
        one.computed = [operation]
        return operation

    def _scatter(self, one: _Rank, unit: UnitTimes, transfer: Transfer, needs: Sequence[int], microbatch: int) -> int:
        operation = self.graph.add(one.number, COMMUNICATION, transfer.duration_ns, needs=needs)
        one.calls.append(("scatter", f"{transfer.kind} {unit.unit.name}", transfer, operation, microbatch))
        return operation

    def _load(self, one: _Rank, unit: UnitTimes, needs: Sequence[int], microbatch: int) -> int:
        assert unit.load is not None, "an offloaded unit has its copies costed"
        operation = self.graph.add(one.to_device, COMPUTE, unit.load.duration_ns, needs=needs)
        one.calls.append(("host", f"to device {unit.unit.name}", unit.load, operation, microbatch))
        return operation
