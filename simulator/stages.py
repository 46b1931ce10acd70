"""Stages: what each pipeline stage of a plan costs on a cluster, in whole nanoseconds and bytes.

Ranks are numbered stage by stage, replica by replica: rank = stage x data + replica. So the replicas of a stage, which
exchange the most, sit next to each other and share a node where they fit.

With sharding each rank updates its own 1/N of the parameters. Stages 1 and 2 scatter each bucket of gradients and
gather its parameters after the update; stage 3 has units in place of buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        syncs: all-reduces of gradients, in the order in which they start.
        optimizer_ns: updating the stage's parameters.
        send_forward_ns: sending the output of a micro-batch to the next stage (0 for the last).
        send_backward_ns: sending the gradient of a micro-batch's input to the stage before (0 for the first).
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

    @property
    def num_parameters(self) -> int:
        """Elements in the stage's parameters."""
        return sum(layer.num_parameters for layer in self.layers)


def make_stages(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    codec: MeasuredCodec | None = None,
    links: Mapping[str, Link] | None = None,
) -> tuple[Stage, ...]:
    """Cut the model into stages of nearly equal time and cost each on the cluster.

    Args:
        workload: the model.
        cluster: what it runs on.
        plan: how.
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
    if plan.pipeline > len(workload.layers):
        raise ValueError(
            f"the plan has {plan.pipeline} pipeline stages; workload {workload.name!r} has {len(workload.layers)} "
            f"layers; use at most {len(workload.layers)} stages"
        )
    device, each = cluster.device, number_bytes(workload, plan)
    forward = [to_ns(compute_s(layer.forward, device)) for layer in workload.layers]
    backward = [to_ns(compute_s(_backward(layer, plan.recompute), device)) for layer in workload.layers]
    cuts = _cut([f + b for f, b in zip(forward, backward, strict=True)], plan.pipeline)
    stages = []
    for index, (first, stop) in enumerate(cuts):
        layers, shards = workload.layers[first:stop], shards_of(cluster, plan, index, links)
        syncs: tuple[Sync, ...] = ()
        if plan.sharding.stage < 3:
            group = Group(cluster, index * plan.data, plan.data)
            syncs = make_syncs(layers, each.gradient, group=group, plan=plan, codec=codec)
        if plan.sharding.stage in (1, 2):
            syncs = scattered(syncs, shards, each, plan.sharding.offload)
        units = units_of(layers, plan.sharding.unit_layers) if plan.sharding.stage == 3 else ()
        stages.append(
            _stage(
                workload,
                shards,
                plan,
                index,
                (first, stop),
                times_ns=(forward[first:stop], backward[first:stop]),
                exchange=(syncs, time_units(units, shards, each, plan)),
            )
        )
    return tuple(stages)


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
    index: int,
    cut: tuple[int, int],
    *,
    times_ns: tuple[list[int], list[int]],
    exchange: tuple[tuple[Sync, ...], tuple[UnitTimes, ...]],
) -> Stage:
    layers, cluster = workload.layers[cut[0] : cut[1]], shards.cluster
    last = index == plan.pipeline - 1
    forward_bytes = 0 if last else layers[-1].output_bytes
    backward_bytes = 0 if index == 0 else workload.layers[cut[0] - 1].output_bytes
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
        send_forward_ns=0 if last else to_ns(message_s(forward_bytes, _boundary_link(cluster, plan, index))),
        send_backward_ns=0
        if index == 0
        else to_ns(message_s(backward_bytes, _boundary_link(cluster, plan, index - 1))),
        send_forward_bytes=forward_bytes,
        send_backward_bytes=backward_bytes,
        units=units,
        faults=faults,
    )


def _boundary_link(cluster: Cluster, plan: Plan, boundary: int) -> Link:
    """Return the link between two stages; where only some replicas cross nodes the step waits for those."""
    first = boundary * plan.data
    crosses = any(
        rank // cluster.devices_per_node != (rank + plan.data) // cluster.devices_per_node
        for rank in range(first, first + plan.data)
    )
    return cluster.inter_node if crosses else cluster.intra_node
