"""Sharded: when gathers, scatters and copies to the host happen, beside the passes and the update.

Stages 1 and 2 change a step at its end: ranks tell one another of faulty gradients, and each updates its own part; then
each bucket's parameters are gathered. Stage 3 changes all of it. Before a unit computes its parameters are gathered, up
to `prefetch` units ahead; after it they are let go, and gathered again for backward; after its backward its gradients
are scattered.

Gathers and scatters share one wire, in the order in which the program asks for them. At the start of a unit it asks for
the next units' gathers; at the end of a unit's backward for its scatter. Copies to and from the host have a wire each
way of their own, which disturbs nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from distlab.plan import Contention, Sharding
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, GraphBuilder
from simulator.gradients.buckets import Transfer
from simulator.gradients.fsdp_units import UnitTimes
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import F, ScheduleArrays
from simulator.stage.stage import Stage
from simulator.stage.step_times import Call, Pair, SyncTimes, Timing
from simulator.step.trace import exchanges, layer_rows

# The wires of the host stand as ranks of their own, so that they do not contend with the device.
DEVICE, TO_DEVICE, TO_HOST = 0, 1, 2


def finish_sharded(timing: Timing, stages: Sequence[Stage]) -> Timing:
    """Add what follows the backward under stages 1 and 2: copies to the host, the update, gathers of parameters."""
    updates, calls = [], []
    for rank, own in enumerate(timing.finishing):
        begin, free, rows = timing.optimizer[rank][0], 0, []
        for faults in (stages[stage].faults for stage in own):
            if faults is not None:
                rows.append(_call("scatter", "all_reduce faults", faults, (begin, begin + faults.duration_ns)))
                begin += faults.duration_ns
        syncs = [sync for stage in own for sync in stages[stage].syncs]
        for sync, times in zip(syncs, timing.syncs_of(rank), strict=True):
            if sync.save is not None:
                free = max(free, times.unpack[1]) + sync.save.duration_ns
                rows.append(_call("host", _save_name(sync.name), sync.save, (free - sync.save.duration_ns, free)))
        update = (max(begin, free), max(begin, free) + sum(stages[stage].optimizer_ns for stage in own))
        wire = up = started = update[1]
        for sync in syncs:
            started += sync.start_ns  # all are started before the first is waited for
            what = sync.name.removeprefix(f"{sync.kind} ")
            if sync.load is not None:
                rows.append(_call("host", f"to device {what}", sync.load, (up, up + sync.load.duration_ns)))
                up += sync.load.duration_ns
            if sync.gather is not None:
                at = max(wire, up, started)
                wire = at + sync.gather.duration_ns
                rows.append(_call("gather", f"all_gather {what}", sync.gather, (at, wire)))
        updates.append(update)
        calls.append((*(timing.calls[rank] if timing.calls else ()), *rows))
    return replace(timing, optimizer=tuple(updates), calls=tuple(calls))


def repeat_passes(timing: Timing, stage: Stage, order: ScheduleArrays) -> Timing:
    """Repeat a micro-batch's passes for all of `order`: stage 2 sums gradients over the ranks in each of them.

    There is no place for whole gradients, so a backward ends when its sums have arrived.
    """
    rows = layer_rows([stage], timing) if timing.layers is None else timing.layers
    passes = (int(timing.end_ns[0]), timing.optimizer[0][0] - int(timing.end_ns[0]))  # forward, and what follows it
    which = (order.kind != F).astype(np.int64)
    begins = np.cumsum(np.array(passes)[which]) - np.array(passes)[which]
    later = begins - np.array([0, passes[0]])[which]  # of each action, than in a step of one micro-batch
    shifts = later[which == 1]
    moves = np.stack([np.arange(len(which)) - which, np.zeros_like(later), later, later], axis=1)
    calls, packs = [], []
    for microbatch, shift in enumerate(shifts[:-1].tolist()):  # of backwards
        for sync, times in zip(stage.syncs, timing.syncs[0], strict=True):
            for span, part in zip(exchanges(0, sync, times), sync.parts, strict=True):
                ends = (span.start_ns + shift, span.end_ns + shift)
                calls.append(_call("scatter", span.name, part, ends, microbatch))
            for begin, end in times.computing:
                name = f"copies of {sync.name.removeprefix(f'{sync.kind} ')}"
                packs.append(Call("compute", name, "copy", begin + shift, end + shift, sync.num_bytes))
    last = int(shifts[-1])
    return Timing(
        order=order,
        start_ns=timing.start_ns[which] + later,
        end_ns=timing.end_ns[which] + later,
        send_start_ns=timing.send_start_ns[which] + later,
        send_end_ns=timing.send_end_ns[which] + later,
        syncs=(tuple(_all_later(times, last) for times in timing.syncs[0]),),
        optimizer=tuple((begin + last, end + last) for begin, end in timing.optimizer),
        layers=np.concatenate([rows[rows[:, 0] == kind] + shift for kind, shift in zip(which, moves, strict=True)]),
        calls=(tuple(calls),),
        packs=(tuple(packs),),
    )


def time_by_units(
    compiled: CompiledSchedule, stage: Stage, sharding: Sharding, *, contention: Contention | None = None
) -> Timing:
    """Time a step of stage 3 on the event engine; the one pipeline stage runs on rank 0."""
    step = _UnitGraph(compiled, stage, sharding)
    step.build()
    start, end = engine.run(step.builder.graph(), contention)

    def pair(operation: int) -> Pair:
        return int(start[operation]), int(end[operation])

    bounds = np.array(step.bounds, np.int64).reshape(-1, 2)
    action_end = end[bounds[:, 1]]
    rows = np.array(step.layers, np.int64).reshape(-1, 3)
    calls = [_call(lane, name, what, pair(number), m) for lane, name, what, number, m in step.calls]
    packs = tuple(Call("compute", name, "copy", *pair(operation), size) for name, operation, size in step.packs)
    return Timing(
        order=compiled.order,
        start_ns=start[bounds[:, 0]],
        end_ns=action_end,
        send_start_ns=action_end,
        send_end_ns=action_end,
        syncs=((),),
        optimizer=(pair(step.update),),
        layers=np.stack([rows[:, 0], rows[:, 1], start[rows[:, 2]], end[rows[:, 2]]], axis=1),
        calls=(tuple(sorted(calls, key=lambda call: (call.start_ns, call.end_ns))),),
        packs=(packs,),
    )


class _UnitGraph:
    """Builds the graph of a step of stage 3 in the order in which a rank's program asks for things."""

    def __init__(self, compiled: CompiledSchedule, stage: Stage, sharding: Sharding) -> None:
        self.order, self.stage, self.sharding = compiled.order, stage, sharding
        self.units = stage.units
        self.owner = {layer: index for index, unit in enumerate(self.units) for layer in unit.unit.layers}
        self.builder = GraphBuilder()
        self.gathered: dict[int, int] = {}  # unit -> the operation that gathered it
        self.bounds: list[Pair] = []
        self.layers: list[tuple[int, int, int]] = []
        self.calls: list[tuple[str, str, Transfer, int, int]] = []
        self.packs: list[tuple[str, int, int]] = []
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
        self.update = self.builder.add(rank, lane, self.stage.optimizer_ns, needs=self.arrived + self.computed)
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
                self._let_go(unit, scatter=last)
        for unit in root:  # the end of backward says that its gradients are whole
            self._let_go(unit, scatter=last)
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
            operation = self.builder.add(DEVICE, COMPUTE, durations[layer], needs=needs)
            self.computed = [operation]
            self.layers.append((action, layer, operation))
            self.bounds = self.bounds if place else [*self.bounds, (operation, operation)]
            self.bounds[-1] = (self.bounds[-1][0], operation)
            if unit >= 0:
                yield unit, ends[unit] == place

    def _gather(self, units: Sequence[int], microbatch: int) -> None:
        """Ask for what is not there; the wire gets to it when what was asked before is done."""
        for index in units:
            if index in self.gathered:
                continue
            unit = self.units[index]
            needs = self.computed
            if self.sharding.offload == "all":
                needs = [self._load(unit, needs, microbatch)]
            if unit.start_ns:
                needs = [self._compute("start", index, unit.start_ns, needs)]
            operation = self.builder.add(DEVICE, COMMUNICATION, unit.gather.duration_ns, needs=needs)
            self.calls.append(("gather", f"all_gather {unit.unit.name}", unit.gather, operation, microbatch))
            self.gathered[index] = operation

    def _let_go(self, index: int, *, scatter: bool) -> None:
        """End a unit's backward: its parameters go; in the last micro-batch its gradients are scattered."""
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
            kept = self.builder.add(TO_HOST, COMPUTE, unit.save.duration_ns, needs=[kept])
            self.calls.append(("host", f"to host {unit.unit.name}", unit.save, kept, self.last_microbatch))
        self.arrived.append(kept)

    def _compute(self, verb: str, index: int, duration_ns: int, needs: Sequence[int]) -> int:
        operation = self.builder.add(DEVICE, COMPUTE, duration_ns, needs=needs)
        unit = self.units[index]
        self.packs.append((f"{verb} {unit.unit.name}", operation, unit.scatter[0].num_bytes))
        self.computed = [operation]
        return operation

    def _send(self, index: int, transfer: Transfer, needs: Sequence[int]) -> int:
        operation = self.builder.add(DEVICE, COMMUNICATION, transfer.duration_ns, needs=needs)
        name = f"{transfer.kind} {self.units[index].unit.name}"
        self.calls.append(("scatter", name, transfer, operation, self.last_microbatch))
        return operation

    def _load(self, unit: UnitTimes, needs: Sequence[int], microbatch: int) -> int:
        assert unit.load is not None, "an offloaded unit has its copies costed"
        operation = self.builder.add(TO_DEVICE, COMPUTE, unit.load.duration_ns, needs=needs)
        self.calls.append(("host", f"to device {unit.unit.name}", unit.load, operation, microbatch))
        return operation


def _call(lane: str, name: str, transfer: Transfer, ends: Pair, microbatch: int = -1) -> Call:
    return Call(lane, name, transfer.kind, *ends, transfer.num_bytes, transfer.sent_bytes, microbatch)


def _all_later(times: SyncTimes, shift: int) -> SyncTimes:
    pairs = (times.pack, times.all_reduce, times.unpack)
    return SyncTimes(*((begin + shift, end + shift) for begin, end in pairs))


def _save_name(sync_name: str) -> str:
    return sync_name.replace("reduce_scatter", "to host", 1)
