"""When the calls of sharding happen: what stages 1 and 2 (ZeRO) add to a step, and the whole step of stage 3 (FSDP).

Stages 1 and 2 change the end of a step. The ranks tell one another of faulty gradients, and each updates its own part
of the parameters; then each bucket's parameters are gathered.

Stage 3 changes all of it: units are gathered, computed with, and scattered.
Before a unit computes, its parameters are gathered, up to `prefetch` units ahead. After it they are freed, and gathered
again for backward. After its backward its gradients are scattered. Each rank updates its own part.

Gathers and scatters share one wire, in the order in which the program asks for them: at the start of a unit for the
next units' gathers, at the end of a unit's backward for its scatter. Copies to and from the host have a wire of their
own in each direction; they slow nothing else down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from distlab.plan import Contention, Sharding
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph
from simulator.gradients.buckets import Transfer
from simulator.gradients.fsdp_units import UnitTimes
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import F
from simulator.stage.stage import Stage
from simulator.stage.step_times import Pair, ShardCall, Timing, call_of

# The wires of the host stand as ranks of their own, so that they do not contend with the device.
DEVICE, TO_DEVICE, TO_HOST = 0, 1, 2


def add_zero_calls(timing: Timing, stages: Sequence[Stage]) -> Timing:
    """Add what follows the backward under stages 1 and 2: copies to the host, the update, gathers of parameters."""
    updates, calls = [], []
    for rank, own in enumerate(timing.finishing):
        begin, free, added = timing.optimizer[rank][0], 0, []
        for faults in (stages[stage].faults for stage in own):
            if faults is not None:
                added.append(call_of("scatter", "all_reduce faults", faults, (begin, begin + faults.duration_ns)))
                begin += faults.duration_ns
        buckets = [bucket for stage in own for bucket in stages[stage].buckets]
        for bucket, times in zip(buckets, timing.buckets_of(rank), strict=True):
            if bucket.save is not None:
                free = max(free, times.unpack[1]) + bucket.save.duration_ns
                name = bucket.name.replace("reduce_scatter", "to host", 1)
                added.append(call_of("host", name, bucket.save, (free - bucket.save.duration_ns, free)))
        update = (max(begin, free), max(begin, free) + sum(stages[stage].optimizer_ns for stage in own))
        wire = up = started = update[1]
        for bucket in buckets:
            started += bucket.start_ns  # all are started before the first is waited for
            what = bucket.name.removeprefix(f"{bucket.kind} ")
            if bucket.load is not None:
                added.append(call_of("host", f"to device {what}", bucket.load, (up, up + bucket.load.duration_ns)))
                up += bucket.load.duration_ns
            if bucket.gather is not None:
                at = max(wire, up, started)
                wire = at + bucket.gather.duration_ns
                added.append(call_of("gather", f"all_gather {what}", bucket.gather, (at, wire)))
        updates.append(update)
        calls.append((*(timing.calls[rank] if timing.calls else ()), *added))
    return replace(timing, optimizer=tuple(updates), calls=tuple(calls))


def time_fsdp_step(
    compiled: CompiledSchedule, stage: Stage, sharding: Sharding, *, contention: Contention | None = None
) -> Timing:
    """Time a step of stage 3 on the event engine; the one pipeline stage runs on rank 0."""
    step = _UnitGraph(compiled, stage, sharding)
    step.build()
    start, end = engine.run(step.graph, contention)

    def pair(operation: int) -> Pair:
        return int(start[operation]), int(end[operation])

    bounds = np.array(step.bounds, np.int64).reshape(-1, 2)
    action_end = end[bounds[:, 1]]
    rows = np.array(step.layers, np.int64).reshape(-1, 3)
    calls = [call_of(lane, name, what, pair(number), m) for lane, name, what, number, m in step.calls]
    copies = tuple(ShardCall("compute", name, "copy", *pair(operation), size) for name, operation, size in step.copies)
    return Timing(
        order=compiled.order,
        start_ns=start[bounds[:, 0]],
        end_ns=action_end,
        send_start_ns=action_end,
        send_end_ns=action_end,
        buckets=((),),
        optimizer=(pair(step.update),),
        layers=np.stack([rows[:, 0], rows[:, 1], start[rows[:, 2]], end[rows[:, 2]]], axis=1),
        calls=(tuple(sorted(calls, key=lambda call: (call.start_ns, call.end_ns))),),
        copies=(copies,),
    )


class _UnitGraph:
    """Builds the graph of a step of stage 3, in the order in which a rank's program asks for operations."""

    def __init__(self, compiled: CompiledSchedule, stage: Stage, sharding: Sharding) -> None:
        self.order, self.stage, self.sharding = compiled.order, stage, sharding
        self.units = stage.units
        self.owner = {layer: index for index, unit in enumerate(self.units) for layer in unit.unit.layers}
        self.graph = Graph()
        self.gathered: dict[int, int] = {}  # unit -> the operation that gathered it
        self.bounds: list[Pair] = []
        self.layers: list[tuple[int, int, int]] = []
        self.calls: list[tuple[str, str, Transfer, int, int]] = []
        self.copies: list[tuple[str, int, int]] = []
        self.arrived: list[int] = []  # what the update waits for
        self.scattering: tuple[int, int] | None = None  # unit and operation
        self.crossing: list[tuple[int, int]] = []
        self.last_microbatch = int(self.order.microbatch[-1])
        self.update = 0
        self.computed: list[int] = []  # the last operation of the compute lane, if any

    def build(self) -> None:
        """Add all actions, then the update."""
        count = len(self.order.kind)
        for action in range(count):
            if self.order.kind[action] == F:
                self._forward(action)
            else:
                self._backward(action, last=action == count - 1)
        self._finish_scatter()
        for index, crossing in self.crossing:
            self._keep(index, crossing)
        host = self.sharding.offload != "none"
        rank, lane = (TO_HOST, COMPUTE) if host else (DEVICE, COMPUTE)
        self.update = self.graph.add(rank, lane, self.stage.optimizer_ns, needs=self.arrived + self.computed)
        if self.sharding.offload == "optimizer":
            for unit in self.units:
                self._load(unit, [self.update], -1)

    def _forward(self, action: int) -> None:
        for unit, ends in self._pass(action, range(len(self.stage.layers))):
            if ends and not self.units[unit].unit.is_root and self.sharding.reshard_after_forward:
                del self.gathered[unit]
        if self.sharding.reshard_after_forward:
            self.gathered.clear()  # the root

    def _backward(self, action: int, *, last: bool) -> None:
        root = [index for index, unit in enumerate(self.units) if unit.unit.is_root]
        for unit, ends in self._pass(action, range(len(self.stage.layers) - 1, -1, -1)):
            if ends and unit not in root:
                self._free(unit, scatter=last)
        for unit in root:  # its gradients are complete at the end of backward only
            self._free(unit, scatter=last)
        self.bounds[-1] = (self.bounds[-1][0], self.computed[0])

    def _pass(self, action: int, numbers: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Add each layer's operation; yield the layer's unit, and whether it was its last layer in this pass."""
        forward = self.order.kind[action] == F
        durations = self.stage.forward_ns if forward else self.stage.backward_ns
        owners = [self.owner.get(number, -1) for number in numbers]
        begins = {unit: place for place, unit in reversed(list(enumerate(owners)))}
        ends = {unit: place for place, unit in enumerate(owners)}
        turn = sorted(range(len(self.units)), reverse=not forward)
        if self.units and self.units[0].unit.is_root:
            turn = [0, *(unit for unit in turn if unit)]
        microbatch = int(self.order.microbatch[action])
        for place, (layer, unit) in enumerate(zip(numbers, owners, strict=True)):
            needs = []
            if place == 0 and self.units and self.units[0].unit.is_root:
                self._gather(turn[: self.sharding.prefetch + 1], microbatch)
                needs = [self.gathered[0]]
            if unit >= 0:
                if begins[unit] == place:
                    self._gather(turn[turn.index(unit) :][: self.sharding.prefetch + 1], microbatch)
                needs.append(self.gathered[unit])
                if forward and begins[unit] == place:
                    needs = [self._compute("show", unit, self.units[unit].show_ns, needs)]
            operation = self.graph.add(DEVICE, COMPUTE, durations[layer], needs=needs)
            self.computed = [operation]
            self.layers.append((action, layer, operation))
            self.bounds = self.bounds if place else [*self.bounds, (operation, operation)]
            self.bounds[-1] = (self.bounds[-1][0], operation)
            if unit >= 0:
                yield unit, ends[unit] == place

    def _gather(self, units: Sequence[int], microbatch: int) -> None:
        """Ask for what is not gathered yet; the wire serves requests in their order."""
        for index in units:
            if index in self.gathered:
                continue
            unit = self.units[index]
            needs = self.computed
            if self.sharding.offload == "all":
                needs = [self._load(unit, needs, microbatch)]
            if unit.start_ns:
                needs = [self._compute("start", index, unit.start_ns, needs)]
            operation = self.graph.add(DEVICE, COMMUNICATION, unit.gather.duration_ns, needs=needs)
            self.calls.append(("gather", f"all_gather {unit.unit.name}", unit.gather, operation, microbatch))
            self.gathered[index] = operation

    def _free(self, index: int, *, scatter: bool) -> None:
        """End a unit's backward: free its parameters; in the last micro-batch scatter its gradients."""
        del self.gathered[index]
        if not scatter:
            return
        self._finish_scatter()
        unit = self.units[index]
        pack = self._compute("pack", index, unit.pack_ns, [])
        self.scattering = index, self._send(index, unit.scatter[0], [pack])

    def _finish_scatter(self) -> None:
        """Wait for the scatter that is on its way; with replicas, send the sum across."""
        if self.scattering is None:
            return
        index, scatter = self.scattering
        self.scattering = None
        across = self.units[index].scatter[1:]
        if self.units[index].sum_ns:
            scatter = self._compute("sum", index, self.units[index].sum_ns, [scatter])
        if across:
            self.crossing.append((index, self._send(index, across[0], [scatter, *self.computed])))
        else:
            self._keep(index, scatter)

    def _keep(self, index: int, arrived: int) -> None:
        """Divide the sum by the number of ranks, and copy it to the host where the update is there."""
        unit = self.units[index]
        kept = self._compute("unpack", index, unit.unpack_ns, [arrived])
        if unit.save is not None:
            kept = self.graph.add(TO_HOST, COMPUTE, unit.save.duration_ns, needs=[kept])
            self.calls.append(("host", f"to host {unit.unit.name}", unit.save, kept, self.last_microbatch))
        self.arrived.append(kept)

    def _compute(self, verb: str, index: int, duration_ns: int, needs: Sequence[int]) -> int:
        operation = self.graph.add(DEVICE, COMPUTE, duration_ns, needs=needs)
        unit = self.units[index]
        self.copies.append((f"{verb} {unit.unit.name}", operation, unit.scatter[0].num_bytes))
        self.computed = [operation]
        return operation

    def _send(self, index: int, transfer: Transfer, needs: Sequence[int]) -> int:
        operation = self.graph.add(DEVICE, COMMUNICATION, transfer.duration_ns, needs=needs)
        name = f"{transfer.kind} {self.units[index].unit.name}"
        self.calls.append(("scatter", name, transfer, operation, self.last_microbatch))
        return operation

    def _load(self, unit: UnitTimes, needs: Sequence[int], microbatch: int) -> int:
        assert unit.load is not None, "an offloaded unit has its copies costed"
        operation = self.graph.add(TO_DEVICE, COMPUTE, unit.load.duration_ns, needs=needs)
        self.calls.append(("host", f"to device {unit.unit.name}", unit.load, operation, microbatch))
        return operation
