"""What ranks exchange in a step besides messages between stages, and when each rank's program asks for it.

`Buckets` are of gradients that every rank has whole. Overlapped, a bucket leaves during the pass that completes it;
otherwise all leave after the rank's last pass. The update waits for them. ZeRO's stages 1 and 2 then gather the
parameters that each rank updated. Stage 2 does not keep whole gradients: every backward exchanges what it made.

`Units` are of stage 3 (FSDP). Before a unit computes, its parameters are gathered, up to `prefetch` units ahead. After
it they are freed, and gathered again for backward. After its backward its gradients are scattered: in a stage's last
backward, or in every one with `scatters_each`.

Calls of a rank share one wire, in the order in which its program asks for them. Copies to and from the host have a wire
of their own in each direction; they slow nothing else down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from distlab.plan import Cluster, Sharding
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, NONE, Graph
from simulator.gradients.buckets import BucketCost, Transfer
from simulator.gradients.fsdp_units import UnitTimes
from simulator.pipeline.schedule_arrays import F
from simulator.stage.stage import Stage
from simulator.stage.step_times import AskedCall, Pair


class Pass(NamedTuple):
    """A pass of a stage: its kind, its micro-batch, and whether it completes the stage's gradients."""

    stage: int
    kind: int
    microbatch: int
    completes: bool

    def layers(self, num_layers: int) -> range:
        """Return the stage's layers in the order in which the pass runs them."""
        return range(num_layers) if self.kind == F else range(num_layers - 1, -1, -1)


class Programs:
    """The programs of a pipeline's ranks: operations of one graph, in the order in which each rank asks for them.

    Attributes:
        graph: the operations so far.
        stages: what each stage costs.
        computed: of each rank, the last operation of its compute lane, if any.
        calls: of each rank, what sharding adds, but for what the last micro-batch's buckets send; copies of gradients
            on its compute lane are among them.
    """

    def __init__(self, stages: Sequence[Stage], num_ranks: int) -> None:
        self.graph, self.stages, self.num_ranks = Graph(), stages, num_ranks
        self.computed: list[list[int]] = [[] for _ in range(num_ranks)]
        self.calls: list[list[AskedCall]] = [[] for _ in range(num_ranks)]

    def compute(self, rank: int, duration_ns: int, needs: Sequence[int] = ()) -> int:
        """Add work on a rank's compute lane."""
        operation = self.graph.add(rank, COMPUTE, duration_ns, needs=needs)
        self.computed[rank] = [operation]
        return operation

    def call(self, rank: int, lane: str, name: str, cost: Transfer, needs: Sequence[int], microbatch: int = -1) -> int:
        """Add a call on a rank's wire."""
        operation = self.graph.add(rank, COMMUNICATION, cost.duration_ns, needs=needs)
        self.calls[rank].append(AskedCall(lane, name, cost, operation, microbatch))
        return operation

    def host_copy(
        self, rank: int, what: str, cost: Transfer, needs: Sequence[int], microbatch: int = -1, *, up: bool = False
    ) -> int:
        """Add a copy to a rank's host, or `up` to its device."""
        operation = self.graph.add(self._host(rank, up=up), COMPUTE, cost.duration_ns, needs=needs)
        name = f"to {'device' if up else 'host'} {what}"
        self.calls[rank].append(AskedCall("host", name, cost, operation, microbatch))
        return operation

    def note_copy(self, rank: int, name: str, num_bytes: int, operation: int) -> None:
        """Note that work on a rank's compute lane copies gradients."""
        cost = Transfer("copy", num_bytes, self.graph.duration_ns[operation], 0.0)
        self.calls[rank].append(AskedCall("compute", name, cost, operation))

    def update(self, rank: int, own: Sequence[int], needs: Sequence[int], *, on_host: bool) -> int:
        """Add the update of a rank's stages."""
        duration_ns = sum(self.stages[number].optimizer_ns for number in own)
        return self.graph.add(self._host(rank) if on_host else rank, COMPUTE, duration_ns, needs=needs)

    def _host(self, rank: int, *, up: bool = False) -> int:
        """Return what stands for a wire of the host: a rank of its own, so that it does not contend with the device."""
        return self.num_ranks + 2 * rank + up


class Buckets:
    """Passes whose gradients are exchanged in buckets.

    Attributes:
        parts: of each stage, and of each of its buckets that has been received, the operations that are the fields of
            `BucketTimes`.
    """

    def __init__(self, programs: Programs, sync: str, *, each_pass: bool = False) -> None:
        """`sync`: see `Plan.gradient_sync`; `each_pass`: every backward exchanges (see `sums_each_pass`)."""
        self.programs, self.sync, self.each_pass = programs, sync, each_pass
        self.graph, self.stages = programs.graph, programs.stages
        self.parts: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        # Of those sent, which operation packs each; its wire is the operation behind.
        self._sent: defaultdict[int, list[tuple[BucketCost, int]]] = defaultdict(list)

    def run(self, each: Pass, needs: Sequence[int]) -> tuple[list[int], int]:
        """Add a pass layer by layer; where it completes gradients, buckets leave during it.

        Return the operation of each layer in the order in which they run, and the last operation of the pass.
        """
        number, kind = each.stage, each.kind
        stage, is_earlier = self.stages[number], self.each_pass and kind != F and not each.completes
        leaving = stage.buckets if self.sync == "overlapped" and (each.completes or is_earlier) else ()
        so_far, sent, last = len(self.graph), 0, NONE
        durations, found = stage.passes_ns[kind], list[int]()
        lane, duration, waits = list[int](), list[int](), list[int]()
        for layer in each.layers(len(durations)):
            last = so_far + len(lane)
            found.append(last)
            lane.append(COMPUTE)
            duration.append(durations[layer])
            waits.append(NONE if waits or not needs else needs[0])
            while sent < len(leaving) and leaving[sent].layer >= layer:
                last = so_far + len(lane)
                lane += (COMPUTE, COMMUNICATION)
                duration += (leaving[sent].pack_ns, leaving[sent].duration_ns)
                waits += (NONE, last)
                self._sent[number].append((leaving[sent], last))
                sent += 1
        self.graph.extend(stage.rank, lane, duration, waits)
        self.programs.computed[stage.rank] = [last]
        if is_earlier:
            self._exchange_earlier(each)
        return found, last

    def _exchange_earlier(self, each: Pass) -> None:
        """Exchange what a micro-batch before the last one made (sharding stage 2)."""
        stage, programs = self.stages[each.stage], self.programs
        self.exchange(stage.rank, [each.stage])
        for bucket, (pack, wire, unpack) in zip(stage.buckets, self.parts.pop(each.stage, ()), strict=True):
            so_far = 0
            for part in bucket.parts:
                name = bucket.name.replace(bucket.kind, part.kind, 1)
                place = (so_far, bucket.duration_ns)
                programs.calls[stage.rank].append(AskedCall("scatter", name, part, wire, each.microbatch, *place))
                so_far += part.duration_ns
            for number in (pack, unpack):
                programs.note_copy(stage.rank, f"copies of {bucket.what}", bucket.num_bytes, number)

    def exchange(self, rank: int, numbers: Sequence[int]) -> list[int]:
        """Exchange the complete gradients of a rank's stages: send those not sent yet, then receive.

        Return the operations that unpacked their buckets.
        """
        if self.sync != "overlapped":
            for number in numbers:
                for bucket in self.stages[number].buckets:
                    pack = self.programs.compute(rank, bucket.pack_ns)
                    self.graph.add(rank, COMMUNICATION, bucket.duration_ns, needs=[pack])
                    self._sent[number].append((bucket, pack))
                    if self.sync == "per_parameter":
                        self._receive(rank, [number])
        if self.sync != "per_parameter":
            self._receive(rank, numbers)
        return [parts[2] for number in numbers for parts in self.parts[number]]

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
            self.parts[number].append((pack, pack + 1, first + place, *again.get(place, ())))
            self.programs.computed[rank] = [first + place]

    def close(self, rank: int, own: Sequence[int], received: Sequence[int], shown: float = 1.0) -> int:
        """End a rank's program: tell of faults, update, and gather what others updated; return the update.

        Args:
            rank: the rank.
            own: its stages.
            received: the operation that unpacked each of their buckets.
            shown: the part of the gathers that nothing hides.
        """
        programs, buckets = self.programs, [bucket for number in own for bucket in self.stages[number].buckets]
        ready = programs.computed[rank]
        for faults in (self.stages[number].faults for number in own):
            if faults is not None:
                ready = [programs.call(rank, "scatter", "all_reduce faults", faults, ready)]
        saved = [
            programs.host_copy(rank, bucket.what, bucket.save, [operation])
            for bucket, operation in zip(buckets, received, strict=True)
            if bucket.save is not None
        ]
        update = programs.update(rank, own, [*ready, *saved], on_host=bool(saved))
        for bucket in buckets:
            needs = [update]
            if bucket.load is not None:
                needs.append(programs.host_copy(rank, bucket.what, bucket.load, [update], up=True))
            if bucket.gather is not None:
                cost = bucket.gather._replace(duration_ns=round(bucket.gather.duration_ns * shown))
                programs.call(rank, "gather", f"all_gather {bucket.what}", cost, needs)
        return update


class Units:
    """Passes whose units are gathered before they compute, and scattered after their backward.

    Attributes:
        parts: of each stage, the operations of its buckets: there are none.
    """

    def __init__(self, programs: Programs, sharding: Sharding, cluster: Cluster) -> None:
        self.programs, self.sharding, self.parts = programs, sharding, defaultdict[int, list[tuple[int, ...]]](list)
        self.ahead, self.scatters_each = sharding.prefetch, cluster.software.scatters_each
        self.gathers_once = cluster.software.gathers_once and len(programs.stages) > 1
        limit = cluster.software.live_elements
        if limit is not None:  # of what is whole at once, besides the root and the unit that computes
            units = [unit.unit for stage in programs.stages for unit in stage.units]
            largest = max((unit.num_elements for unit in units if not unit.is_root), default=1)
            self.ahead = min(self.ahead, max(0, int(limit // largest) - 1))
        self._gathered: dict[Pair, int] = {}  # by stage and unit, the operation that gathered what is whole now
        # Of each rank, the scatter that is on its way, and the sums that travel among replicas; what the update needs.
        self._scattering: dict[int, tuple[UnitTimes, int, int]] = {}
        self._crossing: defaultdict[int, list[tuple[UnitTimes, int, int]]] = defaultdict(list)
        self._arrived: defaultdict[int, list[int]] = defaultdict(list)

    def run(self, each: Pass, needs: Sequence[int]) -> tuple[list[int], int]:
        """Add a pass layer by layer, as `Buckets.run`."""
        number, forward, programs = each.stage, each.kind == F, self.programs
        stage = programs.stages[number]
        rank, units, durations = stage.rank, stage.units, stage.passes_ns[each.kind]
        owner = {layer: index for index, unit in enumerate(units) for layer in unit.unit.layers}
        layers = each.layers(len(durations))
        owners = [owner.get(layer, -1) for layer in layers]
        begins = {unit: place for place, unit in reversed(list(enumerate(owners)))}
        ends = {unit: place for place, unit in enumerate(owners)}
        has_root = bool(units) and units[0].unit.is_root
        turn = [0] * has_root + sorted(range(has_root, len(units)), reverse=not forward)
        found = []
        for place, (layer, unit) in enumerate(zip(layers, owners, strict=True)):
            waits = list(needs)
            if has_root and place == 0:
                self._gather(number, turn[: self.ahead + 1], each.microbatch, needs)
                waits.append(self._gathered[number, 0])
            if unit >= 0:
                if begins[unit] == place and unit >= has_root:
                    self._gather(number, turn[turn.index(unit) :][: self.ahead + 1], each.microbatch, needs)
                waits.append(self._gathered[number, unit])
                if forward and begins[unit] == place:
                    waits = [self._copy(rank, "show", units[unit], units[unit].show_ns, waits)]
            found.append(programs.compute(rank, durations[layer], waits))
            needs = ()
            if unit >= has_root and ends[unit] == place:
                self._leave(each, unit)
        if has_root:  # its gradients are complete at the end of backward only
            self._leave(each, 0)
        return found, programs.computed[rank][0]

    def _gather(self, number: int, indices: Sequence[int], microbatch: int, before: Sequence[int]) -> None:
        """Ask for what is not gathered yet; the wire serves requests in their order."""
        programs, stage = self.programs, self.programs.stages[number]
        for index in indices:
            if (number, index) in self._gathered:
                continue
            unit, needs = stage.units[index], [*programs.computed[stage.rank], *before]
            if self.sharding.offload == "all" and unit.load is not None:
                needs = [programs.host_copy(stage.rank, unit.unit.name, unit.load, needs, microbatch, up=True)]
            gather = programs.call(stage.rank, "gather", f"all_gather {unit.unit.name}", unit.gather, needs, microbatch)
            self._gathered[number, index] = gather

    def _leave(self, each: Pass, index: int) -> None:
        """End a unit's pass: free its parameters; scatter the gradients of a backward, or keep them for a later one."""
        if each.completes if self.gathers_once else each.kind != F or self.sharding.reshard_after_forward:
            del self._gathered[each.stage, index]
        if each.kind == F or not (self.scatters_each or each.completes):
            return
        stage = self.programs.stages[each.stage]
        rank, unit = stage.rank, stage.units[index]
        self._finish_scatter(rank)
        pack = self._copy(rank, "pack", unit, unit.pack_ns, [])
        self._scattering[rank] = unit, each.microbatch, self._scatter(rank, unit, 0, [pack], each.microbatch)

    def _finish_scatter(self, rank: int) -> None:
        """Wait for the scatter that is on its way; with replicas, send the sum across."""
        if rank not in self._scattering:
            return
        unit, microbatch, scatter = self._scattering.pop(rank)
        if len(unit.scatter) > 1:
            sent = self._scatter(rank, unit, 1, [scatter, *self.programs.computed[rank]], microbatch)
            self._crossing[rank].append((unit, microbatch, sent))
        else:
            self._keep(rank, unit, microbatch, scatter)

    def _scatter(self, rank: int, unit: UnitTimes, which: int, needs: Sequence[int], microbatch: int) -> int:
        cost = unit.scatter[which]
        return self.programs.call(rank, "scatter", f"{cost.kind} {unit.unit.name}", cost, needs, microbatch)

    def _keep(self, rank: int, unit: UnitTimes, microbatch: int, arrived: int) -> None:
        """Divide the sum by the number of ranks, and copy it to the host where the update is there."""
        kept = self._copy(rank, "unpack", unit, unit.unpack_ns, [arrived])
        if unit.save is not None:
            kept = self.programs.host_copy(rank, unit.unit.name, unit.save, [kept], microbatch)
        self._arrived[rank].append(kept)

    def _copy(self, rank: int, verb: str, unit: UnitTimes, duration_ns: int, needs: Sequence[int]) -> int:
        operation = self.programs.compute(rank, duration_ns, needs)
        self.programs.note_copy(rank, f"{verb} {unit.unit.name}", unit.scatter[0].num_bytes, operation)
        return operation

    def exchange(self, rank: int, numbers: Sequence[int]) -> list[int]:
        """Wait for what still travels of a rank's gradients; return what the update waits for."""
        self._finish_scatter(rank)
        for crossing in self._crossing[rank]:
            self._keep(rank, *crossing)
        return self._arrived[rank]

    def close(self, rank: int, own: Sequence[int], received: Sequence[int]) -> int:
        """End a rank's program: update, and bring new values to the device; return the update."""
        programs, offload = self.programs, self.sharding.offload
        needs = [*received, *programs.computed[rank]]
        update = programs.update(rank, own, needs, on_host=offload != "none")
        for unit in (unit for number in own for unit in programs.stages[number].units):
            if offload == "optimizer" and unit.load is not None:
                programs.host_copy(rank, unit.unit.name, unit.load, [update], up=True)
        return update
