"""Stages: what each pipeline stage of a plan costs on a cluster, in whole nanoseconds and bytes.

Ranks are numbered stage by stage, replica by replica: rank = stage x data + replica. So the replicas of a stage, which
exchange the most, sit next to each other and share a node where they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from distlab.plan.buckets import assign_buckets
from distlab.plan.partition import balance
from distlab.plan.records import Cluster, Layer, Link, Plan, Work, Workload
from simulator.cost import (
    all_reduce_s,
    all_reduce_steps,
    compute_s,
    hierarchical_all_reduce_s,
    message_s,
)
from simulator.units import to_ns


@dataclass(frozen=True)
class Sync:
    """One all-reduce of gradients.

    Attributes:
        name: what a reader sees.
        num_bytes: payload.
        layer: layer of the stage (0 first) whose backward makes the last of its gradients.
        pack_ns: copying the gradients into a buffer and dividing them, before.
        duration_ns: the all-reduce.
        unpack_ns: copying the mean back, after.
    """

    name: str
    num_bytes: int
    layer: int
    pack_ns: int
    duration_ns: int
    unpack_ns: int


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


def make_stages(workload: Workload, cluster: Cluster, plan: Plan) -> tuple[Stage, ...]:
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
    return tuple(
        _stage(workload, cluster, plan, index, (forward[first:stop], backward[first:stop]), (first, stop))
        for index, (first, stop) in enumerate(cuts)
    )


def all_reduce_ns(num_bytes: int, cluster: Cluster, first_rank: int, num_ranks: int) -> int:
    """Return the time of an all-reduce among consecutive ranks: a ring in one node, hierarchical over whole nodes.

    A group that spans nodes without filling them runs a ring over the slower of the two links.
    """
    per_node = cluster.devices_per_node
    if first_rank // per_node == (first_rank + num_ranks - 1) // per_node:
        return to_ns(all_reduce_s(num_bytes, num_ranks, cluster.intra_node))
    if first_rank % per_node == 0 and num_ranks % per_node == 0:
        seconds = hierarchical_all_reduce_s(
            num_bytes,
            per_node,
            num_ranks // per_node,
            intra_node=cluster.intra_node,
            inter_node=cluster.inter_node,
        )
        return to_ns(seconds)
    links = (cluster.intra_node, cluster.inter_node)
    return to_ns(max(all_reduce_s(num_bytes, num_ranks, link) for link in links))


def sent_bytes(stage: Stage, plan: Plan) -> float:
    """Return the bytes that one rank of the stage sends in a step: gradients by a ring, messages to its neighbours."""
    ring = all_reduce_steps(plan.data).bytes_factor * sum(sync.num_bytes for sync in stage.syncs)
    return ring + plan.num_microbatches * (stage.send_forward_bytes + stage.send_backward_bytes)


def _cut(costs: list[int], num_stages: int) -> tuple[tuple[int, int], ...]:
    if num_stages == 1:
        return ((0, len(costs)),)
    return balance(costs, num_stages)


def _stage(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    index: int,
    times_ns: tuple[list[int], list[int]],
    cut: tuple[int, int],
) -> Stage:
    layers = workload.layers[cut[0] : cut[1]]
    last = index == plan.pipeline - 1
    forward_bytes = 0 if last else layers[-1].output_bytes
    backward_bytes = 0 if index == 0 else workload.layers[cut[0] - 1].output_bytes
    syncs = _syncs(layers, workload.bytes_per_parameter, cluster, plan, index)
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


def _syncs(
    layers: tuple[Layer, ...], bytes_per_parameter: int, cluster: Cluster, plan: Plan, index: int
) -> tuple[Sync, ...]:
    sizes = [size * bytes_per_parameter for layer in layers for size in layer.parameter_sizes]
    owner = [number for number, layer in enumerate(layers) for _ in layer.parameter_sizes]
    if plan.data == 1 or not sizes:
        return ()

    def sync(name: str, parameters: tuple[int, ...]) -> Sync:
        num_bytes = sum(sizes[parameter] for parameter in parameters)
        pack, unpack = _copies(num_bytes, len(parameters), plan.gradient_sync)
        return Sync(
            name,
            num_bytes,
            layer=min(owner[parameter] for parameter in parameters),
            pack_ns=to_ns(compute_s(pack, cluster.device)),
            duration_ns=all_reduce_ns(num_bytes, cluster, index * plan.data, plan.data),
            unpack_ns=to_ns(compute_s(unpack, cluster.device)),
        )

    everything = tuple(range(len(sizes)))
    if plan.gradient_sync == "per_parameter":
        return tuple(sync(f"all_reduce parameter {parameter}", (parameter,)) for parameter in everything)
    if plan.gradient_sync == "flat":
        return (sync("all_reduce all gradients", everything),)
    first_bucket_bytes = plan.first_bucket_bytes if plan.gradient_sync == "overlapped" else None
    buckets = assign_buckets(sizes, plan.bucket_bytes, first_bucket_bytes)
    return tuple(sync(f"all_reduce bucket {bucket.index}", bucket.parameters) for bucket in buckets)


def _copies(num_bytes: int, num_tensors: int, gradient_sync: str) -> tuple[Work, Work]:
    """Return the work before and after one all-reduce.

    Dividing reads and writes every gradient, and so does a copy. A parameter alone is divided in place. Flat and
    bucketed gradients are copied into a buffer, divided there, and copied back. Overlapped gradients live in the buffer
    and are divided there one by one, each from a hook, which costs about what a kernel does.
    """
    one_pass = 2 * num_bytes
    if gradient_sync == "per_parameter":
        return Work(memory_bytes=one_pass, num_kernels=num_tensors), Work()
    if gradient_sync == "overlapped":
        return Work(memory_bytes=one_pass, num_kernels=2 * num_tensors), Work()
    copy = Work(memory_bytes=one_pass, num_kernels=num_tensors)
    return copy + Work(memory_bytes=one_pass, num_kernels=1), copy
