"""Stages: what each pipeline stage of a plan costs on a cluster, in whole nanoseconds and bytes.

Ranks are numbered by the pipeline's rank, then by replica: rank = pipeline rank x data + replica. So the replicas of a
stage, which exchange the most, sit next to each other and share a node where they fit. Where a rank of the pipeline has
several stages, two neighbouring stages may share it; they hand over in memory.

With sharding each rank updates its own 1/N of the parameters. Stages 1 and 2 scatter each bucket of gradients and
gather its parameters after the update; stage 3 has units in place of buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from distlab.plan.partition import balance
from distlab.plan.records import Cluster, Layer, Link, Plan, Work, Workload
from simulator.codec import MeasuredCodec
from simulator.cost import compute_s, message_s
from simulator.shards import Shards, number_bytes, shards_of
from simulator.syncs import Group, Sync, Transfer, make_syncs
from simulator.units import to_ns
from simulator.units_of_sharding import UnitTimes, scattered, time_units, units_of


@dataclass(frozen=True)
class Stage:
    """One stage: its layers, and how long each part of a step takes on one rank.

    Attributes:
        layers: in forward order.
        forward_ns: of each layer, one micro-batch.
        backward_ns: of each layer, one micro-batch (I and W together).
        input_gradient_ns: of each layer, one micro-batch: I alone, with what is computed again before it.
        rank: rank of the pipeline that has the stage.
        syncs: all-reduces of gradients, in the order in which they start.
        optimizer_ns: updating the stage's parameters.
        send_forward_ns: sending the output of a micro-batch to the next stage (0 for the last, and on the same rank).
        send_backward_ns: sending the gradient of a micro-batch's input to the stage before (0 likewise).
        send_forward_bytes: size of the former.
        send_backward_bytes: size of the latter.
        units: what is gathered, computed with and scattered together (sharding's stage 3).
        faults: the small all-reduce before the update that tells ranks of faulty gradients (sharding's stages 1, 2).
    """

    layers: tuple[Layer, ...]
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    syncs: tuple[Sync, ...]
    optimizer_ns: int
    send_forward_ns: int
    send_backward_ns: int
    send_forward_bytes: int
    send_backward_bytes: int
    units: tuple[UnitTimes, ...] = ()
    faults: Transfer | None = None
    input_gradient_ns: tuple[int, ...] = ()
    rank: int = 0

    @cached_property
    def passes_ns(self) -> tuple[tuple[int, ...], ...]:
        """Time of each layer in an F, B, I and W: what one does not take of the backward, the other does."""
        weights = (back - mine for back, mine in zip(self.backward_ns, self.input_gradient_ns, strict=True))
        return self.forward_ns, self.backward_ns, self.input_gradient_ns, tuple(weights)

    @property
    def num_parameters(self) -> int:
        """Elements in the stage's parameters."""
        return sum(layer.num_parameters for layer in self.layers)


def make_stages(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    home: Sequence[int],
    *,
    codec: MeasuredCodec | None = None,
    links: Mapping[str, Link] | None = None,
) -> tuple[Stage, ...]:
    """Cut the model into stages of nearly equal time and cost each on the cluster.

    Args:
        workload: the model.
        cluster: what it runs on.
        plan: how.
        home: rank of the pipeline of each stage.
        codec: measured times of compression.
        links: a link of its own for each kind of sharding's calls that was measured.

    Raises:
        ValueError: the plan needs more ranks than the cluster has, or more stages than the model has layers.
    """
    if plan.world_size > cluster.num_devices:
        raise ValueError(
            f"the plan needs {plan.data} (data) x {plan.pipeline} (pipeline) = {plan.world_size} ranks; cluster "
            f"{cluster.name!r} has {cluster.num_devices} devices; lower a degree or use a larger cluster"
        )
    check_enough_layers(workload, plan, len(home))
    device, each = cluster.device, number_bytes(workload, plan)
    forward = [to_ns(compute_s(layer.forward, device)) for layer in workload.layers]
    backward = [to_ns(compute_s(_backward(layer, plan.recompute), device)) for layer in workload.layers]
    weights = [to_ns(compute_s(layer.weight_gradient, device)) for layer in workload.layers]
    inputs = [max(0, back - weight) for back, weight in zip(backward, weights, strict=True)]
    cuts = _cut([f + b for f, b in zip(forward, backward, strict=True)], len(home))
    stages = []
    for index, (first, stop) in enumerate(cuts):
        layers, shards = workload.layers[first:stop], shards_of(cluster, plan, home[index], links)
        syncs: tuple[Sync, ...] = ()
        if plan.sharding.stage < 3:
            group = Group(cluster, home[index] * plan.data, plan.data)
            syncs = make_syncs(layers, each.gradient, group=group, plan=plan, codec=codec)
        if plan.sharding.stage in (1, 2):
            syncs = scattered(syncs, shards, each, plan.sharding.offload)
        units = units_of(layers, plan.sharding.unit_layers) if plan.sharding.stage == 3 else ()
        stages.append(
            _stage(
                workload,
                shards,
                plan,
                _Place(index, tuple(home)),
                (first, stop),
                times_ns=(forward[first:stop], backward[first:stop], inputs[first:stop]),
                exchange=(syncs, time_units(units, shards, each, plan)),
            )
        )
    return tuple(stages)


def check_enough_layers(workload: Workload, plan: Plan, num_stages: int) -> None:
    """Refuse to cut a model into more stages than it has layers.

    Raises:
        ValueError: there are more.
    """
    if num_stages > len(workload.layers):
        whole = f"{plan.pipeline} (pipeline) x {num_stages // plan.pipeline} (a rank) = {num_stages}"
        count = f"{num_stages} pipeline" if num_stages == plan.pipeline else whole
        raise ValueError(
            f"the plan has {count} stages; workload {workload.name!r} has {len(workload.layers)} "
            f"layers; use at most {len(workload.layers)} stages"
        )


class _Place(NamedTuple):
    """Where a stage is: its number, and the rank of the pipeline of every stage."""

    number: int
    home: tuple[int, ...]

    def link_behind(self, cluster: Cluster, plan: Plan) -> Link | None:
        """Return the link to the stage behind: None where there is none, or where it is on the same rank."""
        here, there = self.home[self.number], self.home[min(self.number + 1, len(self.home) - 1)]
        return None if here == there else _boundary_link(cluster, plan, here, there)

    def link_before(self, cluster: Cluster, plan: Plan) -> Link | None:
        """Return the link to the stage before, or None likewise."""
        return None if self.number == 0 else _Place(self.number - 1, self.home).link_behind(cluster, plan)


def sent_bytes(stage: Stage, plan: Plan) -> float:
    """Return the bytes that one rank of the stage sends in a step: gradients by a ring, messages to its neighbours.

    What sharding's own calls send is theirs to say.
    """
    messages = plan.num_microbatches * (stage.send_forward_bytes + stage.send_backward_bytes)
    return sum(sync.sent_bytes for sync in stage.syncs) + messages


def _cut(costs: list[int], num_stages: int) -> tuple[tuple[int, int], ...]:
    if num_stages == 1:
        return ((0, len(costs)),)
    return balance(costs, num_stages)


def _backward(layer: Layer, recompute: str) -> Work:
    """Return the work of a backward, with the part of forward that runs again before it."""
    work = layer.input_gradient + layer.weight_gradient
    if recompute == "full" and layer.input_bytes:
        return work + layer.forward
    return work + layer.score_forward if recompute == "selective" else work


def _update_ns(workload: Workload, layers: tuple[Layer, ...], shards: Shards, plan: Plan, num_tensors: int) -> int:
    """Return the time of updating this rank's part of the layers' parameters, on the device or on its host."""
    num_parameters = sum(layer.num_parameters for layer in layers)
    share = num_parameters / workload.num_parameters if workload.num_parameters else 0.0
    share /= shards.num_shards if plan.sharding.stage else 1
    tensors = sum(len(layer.parameter_sizes) for layer in workload.layers)
    kernels = round(workload.optimizer.num_kernels * (num_tensors / tensors if tensors else 0.0))
    work = Work(workload.optimizer.matmul_flops * share, workload.optimizer.memory_bytes * share, kernels)
    if plan.sharding.offload != "none":
        return to_ns(work.memory_bytes / shards.cluster.device.host_memory_bytes_per_s)
    return to_ns(compute_s(work, shards.cluster.device))


def _stage(
    workload: Workload,
    shards: Shards,
    plan: Plan,
    place: _Place,
    cut: tuple[int, int],
    *,
    times_ns: tuple[list[int], list[int], list[int]],
    exchange: tuple[tuple[Sync, ...], tuple[UnitTimes, ...]],
) -> Stage:
    layers, cluster = workload.layers[cut[0] : cut[1]], shards.cluster
    behind, before = place.link_behind(cluster, plan), place.link_before(cluster, plan)
    forward_bytes = 0 if behind is None else layers[-1].output_bytes
    backward_bytes = 0 if before is None else workload.layers[cut[0] - 1].output_bytes
    syncs, units = exchange
    num_tensors = len(units) if units else sum(len(layer.parameter_sizes) for layer in layers)
    faults = None
    if plan.sharding.stage in (1, 2):
        faults = shards.faults(num_tensors) if syncs else None
        num_tensors = -(-num_tensors // shards.num_shards)
    return Stage(
        layers=layers,
        forward_ns=tuple(times_ns[0]),
        backward_ns=tuple(times_ns[1]),
        syncs=syncs,
        optimizer_ns=_update_ns(workload, layers, shards, plan, num_tensors),
        send_forward_ns=0 if behind is None else to_ns(message_s(forward_bytes, behind)),
        send_backward_ns=0 if before is None else to_ns(message_s(backward_bytes, before)),
        send_forward_bytes=forward_bytes,
        send_backward_bytes=backward_bytes,
        units=units,
        faults=faults,
        input_gradient_ns=tuple(times_ns[2]),
        rank=place.home[place.number],
    )


def _boundary_link(cluster: Cluster, plan: Plan, here: int, there: int) -> Link:
    """Return the link between two ranks; where only some replicas cross nodes the step waits for those."""
    crosses = any(
        (here * plan.data + replica) // cluster.devices_per_node
        != (there * plan.data + replica) // cluster.devices_per_node
        for replica in range(plan.data)
    )
    return cluster.inter_node if crosses else cluster.intra_node
