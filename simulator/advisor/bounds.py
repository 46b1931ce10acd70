"""What no step can be shorter than, for all rows of a shape at once.

Why no step is shorter than its bound, with F and B the times of all layers in a pass, m micro-batches, p ranks:

    each rank's work     a rank computes m times its stage: on average m (F + B) / p, then updates its parameters
    the bubble           rank k starts after the forwards of the ranks before it, and their backwards follow its last:
                         F_1 + .. + F_(k-1) + m (F_k + B_k) + B_(k-1) + .. + B_1. Whatever the cut, the largest of these
                         is at least (F + B) / (1 - (1 - 1/m)^p); and layers are whole, so that some ranks have many
    the wire             gradients leave once the last backward has begun, at the bandwidth of the wire

`simulator.advisor.pipelines` draws the bounds of single rows tighter, and bounds what they hold.
"""

from __future__ import annotations

import numpy as np

from distlab.plan import Link, Plan
from simulator.advisor.question import Costs, Floats, Ints, Question, Shape
from simulator.gradients.fsdp_units import UNIT_KERNELS, VIEW_KERNELS
from simulator.precision import widths_of

PLAIN = Plan()  # of the workload's own precision, as all that is searched
SLACK = 1 - 1e-6  # of sums of rounded times


def fastest(link: Link) -> float:
    """Return a link's largest bandwidth; a switch that adds up takes one pass of the bytes, where a ring takes two."""
    rates = [protocol.bytes_per_s for protocol in link.protocols]
    return max([*rates, *(2 * protocol.bytes_per_s for protocol in link.switch)])


def wire_s(question: Question, shape: Shape, copies: Floats | Ints, num_bytes: Floats) -> Floats:
    """Return a lower bound of the time of a reduce-scatter or all-gather of these bytes among the copies.

    A ring over nodes that a group fills takes as long as the slower wire, as `Group.exchange_ns`; a ring over uneven
    nodes is not faster than its part across.
    """
    cluster, filled = question.cluster, copies * shape.tensor
    each = max(1, cluster.devices_per_node // shape.tensor)  # copies in a node, at most
    wide, narrow = fastest(cluster.inter_node), fastest(cluster.intra_node)
    nodes = -(-copies // each)
    alone = (copies - 1) / copies * num_bytes / narrow
    across = (nodes - 1) / nodes * (num_bytes / each) / wide
    inside = np.where(filled % cluster.devices_per_node == 0, (each - 1) / each * num_bytes / narrow, 0.0)
    straddles = cluster.devices_per_node % np.maximum(filled, 1) != 0  # one node's worth that may lie in two
    one = np.where(straddles, (copies - 1) / copies * num_bytes / max(wide, narrow), alone)
    return np.asarray(np.where(nodes > 1, np.maximum(across, inside), one), np.float64)


def update_s(
    question: Question, cost: Costs, parameters: Floats, tensors: Floats | Ints | int, shards: Floats | Ints
) -> Floats:
    """Return a lower bound of the time of an update: parameters in a number of tensors, spread over shards."""
    whole, device = cost.workload.optimizer, question.cluster.device
    size = whole.memory_bytes / max(cost.workload.num_parameters, 1) * parameters / shards
    kernels = np.maximum(0.0, whole.num_kernels / max(cost.workload.num_tensors, 1) * tensors / shards - 1)
    kernels = kernels * (not question.cluster.software.flat_buffers)
    busy = size / device.memory_bytes_per_s + kernels * device.kernel_s
    return np.asarray(np.maximum(busy, kernels * device.launch_s), np.float64)


def pack_s(question: Question, num_bytes: Floats, tensors: Floats | Ints | int) -> Floats:
    """Return a time that dividing gradients for their buckets keeps a rank busy at least."""
    device, kernels = question.cluster.device, 3 * tensors * (not question.cluster.software.flat_buffers)
    busy = 2 * num_bytes / device.memory_bytes_per_s + kernels * device.kernel_s
    return np.asarray(np.maximum(busy, kernels * device.launch_s), np.float64)


def local_parameters(shape: Shape, cost: Costs) -> tuple[Floats, Floats]:
    """Return the parameters of a rank by layers, experts apart, and its experts', at least [L]."""
    columns = cost.columns
    tensor, experts = columns["tensor_parameters"], columns["expert_parameters"]
    return columns["num_parameters"] - experts - tensor + tensor / shape.tensor, experts / shape.expert


def bounds_s(question: Question, shape: Shape, cost: Costs, rows: Ints) -> Floats:
    """Return a time for each row that its step in a run is not below."""
    p, v, data, m, stage = rows.T
    both = cost.forward + cost.backward
    total, blocks = float(both.sum()), both[1:-1]
    own, experts = local_parameters(shape, cost)
    copies = data * shape.expert * shape.context
    shards, few = np.where(stage > 0, copies, 1), np.where(stage > 0, data * shape.context, 1)
    widths, tensors = widths_of(cost.workload, PLAIN), cost.tensors.sum() / p
    width = min(widths.reduce, widths.parameter)
    updated = np.where(stage < 3, tensors, 0)  # stage 3 updates units, which are fewer
    update = update_s(question, cost, own.sum() / p, updated, shards)
    update = update + update_s(question, cost, experts.sum() / p, 0, few)
    packs = np.where((copies > 1) & (stage < 3), pack_s(question, widths.reduce * own.sum() / p, tensors), 0.0)
    once = wire_s(question, shape, copies, width * own.sum() / p)
    gathered = np.where(
        (stage > 0) & (stage < 3) & (not question.cluster.software.gathers_ahead), once, 0.0
    )  # after the update
    sums = np.where(stage > 0, 1, 2) * (v == 1) * once
    work = m * total / p + packs + update + gathered
    wire = (m * total - cost.backward.sum()) / p + sums + update + gathered
    relaxed = total / (1 - (1 - 1 / m) ** p)
    block, count = float(blocks.min()) if len(blocks) else 0.0, len(blocks)
    most = -(-count // p)  # blocks of some rank, at least
    full = count - p * (most - 1)  # ranks that have as many, at least
    whole = np.minimum((m + full - 1) * most, m * (most + 1)) * block
    bubble = np.where(v == 1, np.maximum(relaxed, whole), m * most * block)
    gathers = wire_s(question, shape, copies, width * own[1:-1].sum() / p)  # stage 3: forward's and backward's
    device = question.cluster.device
    shown = (VIEW_KERNELS * cost.tensors.sum() + UNIT_KERNELS * count) * max(device.kernel_s, device.launch_s)
    sharded = np.where(stage == 3, np.maximum(m * 2 * gathers + once, work + m * shown), 0.0)
    return np.asarray(np.maximum.reduce([work, np.where(stage < 3, wire, 0.0), bubble, sharded]) * SLACK, np.float64)
