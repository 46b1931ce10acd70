"""Stages: what each pipeline stage of a plan costs on a cluster, in whole nanoseconds and bytes.

Ranks are numbered stage by stage, replica by replica: rank = stage x data + replica. So the replicas of a stage, which
exchange the most, sit next to each other and share a node where they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from distlab.plan.partition import balance
from distlab.plan.records import Cluster, Layer, Link, Plan, Work, Workload
from simulator.codec import MeasuredCodec
from simulator.cost import compute_s, message_s
from simulator.syncs import Group, Sync, make_syncs
from simulator.units import to_ns


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

    @property
    def num_parameters(self) -> int:
        """Elements in the stage's parameters."""
        return sum(layer.num_parameters for layer in self.layers)


def make_stages(
    workload: Workload, cluster: Cluster, plan: Plan, codec: MeasuredCodec | None = None
) -> tuple[Stage, ...]:
    """Cut the model into stages of nearly equal time and cost each on the cluster.

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
    device = cluster.device
    forward = [to_ns(compute_s(layer.forward, device)) for layer in workload.layers]
    backward = [to_ns(compute_s(layer.input_gradient + layer.weight_gradient, device)) for layer in workload.layers]
    cuts = _cut([f + b for f, b in zip(forward, backward, strict=True)], plan.pipeline)
    stages = []
    for index, (first, stop) in enumerate(cuts):
        group = Group(cluster, index * plan.data, plan.data)
        bytes_each = workload.bytes_per_parameter
        syncs = make_syncs(workload.layers[first:stop], bytes_each, group=group, plan=plan, codec=codec)
        times_ns = (forward[first:stop], backward[first:stop])
        stages.append(_stage(workload, cluster, plan, index, (first, stop), times_ns=times_ns, syncs=syncs))
    return tuple(stages)


def sent_bytes(stage: Stage, plan: Plan) -> float:
    """Return the bytes that one rank of the stage sends in a step: gradients by a ring, messages to its neighbours."""
    messages = plan.num_microbatches * (stage.send_forward_bytes + stage.send_backward_bytes)
    return sum(sync.sent_bytes for sync in stage.syncs) + messages


def _cut(costs: list[int], num_stages: int) -> tuple[tuple[int, int], ...]:
    if num_stages == 1:
        return ((0, len(costs)),)
    return balance(costs, num_stages)


def _stage(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    index: int,
    cut: tuple[int, int],
    *,
    times_ns: tuple[list[int], list[int]],
    syncs: tuple[Sync, ...],
) -> Stage:
    layers = workload.layers[cut[0] : cut[1]]
    last = index == plan.pipeline - 1
    forward_bytes = 0 if last else layers[-1].output_bytes
    backward_bytes = 0 if index == 0 else workload.layers[cut[0] - 1].output_bytes
    num_parameters = sum(layer.num_parameters for layer in layers)
    share = num_parameters / workload.num_parameters if workload.num_parameters else 0.0
    tensors = sum(len(layer.parameter_sizes) for layer in workload.layers)
    own_tensors = sum(len(layer.parameter_sizes) for layer in layers)
    kernels = workload.optimizer.num_kernels * (own_tensors / tensors if tensors else 0.0)
    optimizer = compute_s(
        Work(workload.optimizer.matmul_flops * share, workload.optimizer.memory_bytes * share, round(kernels)),
        cluster.device,
    )
    return Stage(
        layers=layers,
        forward_ns=tuple(times_ns[0]),
        backward_ns=tuple(times_ns[1]),
        syncs=syncs,
        optimizer_ns=to_ns(optimizer),
        send_forward_ns=0 if last else to_ns(message_s(forward_bytes, _boundary_link(cluster, plan, index))),
        send_backward_ns=0
        if index == 0
        else to_ns(message_s(backward_bytes, _boundary_link(cluster, plan, index - 1))),
        send_forward_bytes=forward_bytes,
        send_backward_bytes=backward_bytes,
    )


def _boundary_link(cluster: Cluster, plan: Plan, boundary: int) -> Link:
    """Return the link between two stages; where only some replicas cross nodes the step waits for those."""
    first = boundary * plan.data
    crosses = any(
        rank // cluster.devices_per_node != (rank + plan.data) // cluster.devices_per_node
        for rank in range(first, first + plan.data)
    )
    return cluster.inter_node if crosses else cluster.intra_node
