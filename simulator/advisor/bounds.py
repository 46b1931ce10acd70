"""What no step can be shorter than: for all rows of a shape at once, and for single rows, tighter.

Why no step is shorter than its rough bound, with F and B the times of all layers in a pass, m micro-batches, p ranks:

    each rank's work     a rank computes m times its stage: on average m (F + B) / p, then updates its parameters
    the bubble           rank k starts after the forwards of the ranks before it, and their backwards follow its last:
                         F_1 + .. + F_(k-1) + m (F_k + B_k) + B_(k-1) + .. + B_1. Whatever the cut, the largest of these
                         is at least (F + B) / (1 - (1 - 1/m)^p); and layers are whole, so that some ranks have many
    the wire             gradients leave once the last backward has begun, at the bandwidth of the wire

A tight bound runs the row's own pipeline, passes and messages alone. What a step does besides can only make it longer:
packing gradients, sending them, updating, gathering. Some of that follows a rank's last pass and is added. So these
bounds differ from steps by what overlaps the last passes, and by messages that queue. What ranks hold is bounded in the
same way: states, and what passes keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distlab.plan import AXES, Link, Plan
from distlab.plan.partition import Cuts, even_blocks
from simulator.advisor.question import Candidates, Costs, Floats, Ints, Question, Shape
from simulator.gradients.fsdp_units import UNIT_KERNELS, VIEW_KERNELS
from simulator.hardware.cost import host_seconds_per_byte
from simulator.hardware.rank_layout import RankLayout
from simulator.pipeline.schedule_arrays import F, last_actions
from simulator.stage.local_layer import output_bytes
from simulator.stage.stage import message_ns, parts_of_messages
from simulator.step.timed import compile_family
from simulator.units import widths_of

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
    question: Question,
    cost: Costs,
    parameters: Floats,
    tensors: Floats | Ints | int,
    shards: Floats | Ints,
    on_host: NDArray[np.bool_] | bool,
) -> Floats:
    """Return a lower bound of the time of an update: parameters in a number of tensors, spread over shards."""
    whole, device = cost.workload.optimizer, question.cluster.device
    size = whole.memory_bytes / max(cost.workload.num_parameters, 1) * parameters / shards
    kernels = np.maximum(0.0, whole.num_kernels / max(cost.workload.num_tensors, 1) * tensors / shards - 1)
    kernels = kernels * (not question.cluster.software.flat_buffers)
    busy = size / device.memory_bytes_per_s + kernels * device.kernel_s
    on_host_s = size * host_seconds_per_byte(question.cluster, question.cluster.num_devices)
    return np.asarray(np.where(on_host, on_host_s, np.maximum(busy, kernels * device.launch_s)), np.float64)


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
    p, v, data, m, stage, offload = rows.T
    both = cost.forward + cost.backward
    total, blocks = float(both.sum()), both[1:-1]
    own, experts = local_parameters(shape, cost)
    copies = data * shape.expert * shape.context
    shards, few = np.where(stage > 0, copies, 1), np.where(stage > 0, data * shape.context, 1)
    widths, tensors = widths_of(cost.workload, question.fixed), cost.tensors.sum() / p
    width = min(widths.reduce, widths.parameter)
    updated = np.where(stage < 3, tensors, 0)  # stage 3 updates units, which are fewer
    update = update_s(question, cost, own.sum() / p, updated, shards, offload > 0)
    update = update + update_s(question, cost, experts.sum() / p, 0, few, offload > 0)
    packs = np.where((copies > 1) & (stage < 3), pack_s(question, widths.reduce * own.sum() / p, tensors), 0.0)
    once = wire_s(question, shape, copies, width * own.sum() / p)
    late = (stage > 0) & (stage < 3) & (not question.cluster.software.gathers_ahead)
    gathered = np.where(late, once, 0.0)  # after the update
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


@dataclass(eq=False)
class Pipelines:
    """Bounds from the stages that a model is cut into.

    Attributes:
        found: all rows.
    """

    found: Candidates
    _cuts: dict[int, Cuts] = field(default_factory=dict)
    _stages: dict[tuple[int, int], tuple[Ints, Ints, Ints]] = field(default_factory=dict)
    _known: dict[int, float] = field(default_factory=dict)
    _least: dict[int, tuple[float, float]] = field(default_factory=dict)

    def short_s(self, row: int) -> float:
        """Return a bound from the stages' times without a schedule; 0 where there is no pipeline.

        A rank's span holds what passes the ranks from it to a bottleneck, all of the bottleneck's work, and the way
        back, however many stages a rank has: its first and its last pass are of its first stage.
        """
        _, p, v, m = self._key(row)
        if p == 1:
            return 0.0
        _, forward, backward = self.stages(row)
        both = (forward + backward) / 1e9
        work = m * both.reshape(v, p).sum(axis=0)
        before = np.append(0.0, np.cumsum(both[: p - 1]))
        reach = work + before
        spans = np.maximum.accumulate(reach[::-1])[::-1] - before
        return float(spans.max() * SLACK)

    def bound_s(self, row: int) -> float:
        """Return the bound of a row's own pipeline: its passes and messages, and what follows them at least."""
        if row not in self._known:
            (_, p, v, m), (_, forward, backward) = self._key(row), self.stages(row)
            compiled = compile_family("interleaved" if v > 1 else "one_f_one_b", p, m, v)
            order, first, last = compiled.order, compiled.order.offsets[:-1], last_actions(compiled.order)
            is_forward, messages = order.kind == F, self._messages_ns(row, p * v)
            durations = np.where(is_forward, forward[order.stage], backward[order.stage])
            durations[last] += self._packs_ns(row)
            waits = np.where(is_forward, np.append(0, messages)[order.stage], np.append(messages, 0)[order.stage])
            ends = compiled.run(durations, waits)
            spans = (ends[last[:p]] - ends[first] + durations[first]) / 1e9
            self._known[row] = float((spans + self._update_s(row) + self._gather_s(row)).max() * SLACK)
        return self._known[row]

    def stages(self, row: int) -> tuple[Ints, Ints, Ints]:
        """Return the first layer of each stage, and the stages' forward and backward in nanoseconds [S]."""
        shape, p, v, _ = self._key(row)
        if (shape, p * v) not in self._stages:
            cost = self.found.costs[shape]
            forward, backward = (np.rint(times * 1e9).astype(np.int64) for times in (cost.forward, cost.backward))
            if shape not in self._cuts:
                self._cuts[shape] = Cuts((forward + backward).tolist())
            is_even = self.found.question.fixed.cut == "blocks"
            even = even_blocks(*cost.workload.blocks, len(forward), p * v) if is_even else ()
            firsts = np.array([first for first, _ in even or self._cuts[shape].into(p * v)])
            self._stages[shape, p * v] = (firsts, np.add.reduceat(forward, firsts), np.add.reduceat(backward, firsts))
        return self._stages[shape, p * v]

    def least_bytes(self, row: int) -> tuple[float, float]:
        """Return bytes that the row's fullest rank does not hold less than, on its device and on its host.

        They are of its first backward, of its last stage's: behind the forwards of all that is in flight.
        """
        if row not in self._least:
            (_, p, v, m), firsts, (plan, _, cost) = self._key(row), self.stages(row)[0], self._of(row)
            states, grown = self._states(row)
            warm = p - np.arange(p) if v == 1 else 2 * (p - 1 - np.arange(p)) + (v - 1) * p + 1
            rounds, rest = np.divmod(np.minimum(m * v, warm), p * v)
            in_flight = rounds * p + np.clip(rest - p * np.arange(v)[:, None], 0, p)
            kept = cost.kept * (not plan.offload_activations)
            of_stages = np.add.reduceat(kept, firsts)
            most = states[0] + (in_flight * of_stages.reshape(v, p)).sum(axis=0)
            freed = np.cumsum(of_stages).repeat(np.diff(np.append(firsts, len(kept)))) - np.cumsum(kept)
            beside = np.maximum.reduceat(cost.beside - freed, firsts).reshape(v, p)[-1]
            most = np.maximum(most, most - grown + beside)
            self._least[row] = float(most.max() * SLACK), float(states[1].max() * SLACK)
        return self._least[row]

    def _states(self, row: int) -> tuple[Floats, Floats]:
        """Return each rank's model states at least, on its device and on its host [2, p], and gradients not made yet.

        Without copies, gradients may come when activations are gone.
        """
        (_, p, _, _), (plan, shape, cost) = self._key(row), self._of(row)
        software, widths, stage = (
            self.found.question.cluster.software,
            widths_of(cost.workload, plan),
            plan.sharding.stage,
        )
        gradient = widths.gradient if plan.copies > 1 or software.flat_buffers else 0
        sizes = ((widths.parameter, 3), (gradient, 2), (widths.master + widths.optimizer, 1))
        on_host = {"none": (), "optimizer": (1,), "all": (1, 2, 3)}[plan.sharding.offload]
        (every, few), states, grown = (plan.copies, plan.expert_copies), np.zeros((2, p)), np.zeros(p)
        states[int(3 in on_host)] += self._of_ranks(row, cost.base) / (every if stage == 3 else 1)
        for parameters, copies in zip(local_parameters(shape, cost), (every, few), strict=True):
            own = self._of_ranks(row, parameters)
            for size, needed in sizes:
                states[int(needed in on_host)] += size / (copies if stage >= needed else 1) * own
            grown += gradient / (copies if stage >= 2 else 1) * own * (2 not in on_host)
        pooled = software.flat_buffers or (plan.copies > 1 and (stage > 0 or plan.gradient_sync == "overlapped"))
        return states, grown * (not (software.pools_gradients if stage == 3 else pooled))

    def _update_s(self, row: int) -> Floats:
        question, (plan, shape, cost) = self.found.question, self._of(row)
        own, experts = (self._of_ranks(row, each) for each in local_parameters(shape, cost))
        shards, few = (plan.copies, plan.expert_copies) if plan.sharding.stage else (1, 1)
        on_host = plan.sharding.offload != "none"
        update = update_s(question, cost, own, self._of_ranks(row, cost.tensors), np.array(shards), on_host)
        return update + update_s(question, cost, experts, 0, np.array(few), on_host)

    def _gather_s(self, row: int) -> Floats | float:
        question, (plan, shape, cost) = self.found.question, self._of(row)
        if not plan.sharding.stage or question.cluster.software.gathers_ahead:
            return 0.0
        widths = widths_of(cost.workload, plan)
        own = min(widths.reduce, widths.parameter) * self._of_ranks(row, local_parameters(shape, cost)[0])
        return wire_s(question, shape, np.array(plan.copies), own)

    def _of_ranks(self, row: int, of_layers: Floats | Ints) -> Floats:
        """Return the sums of each rank's layers [p]."""
        _, p, v, _ = self._key(row)
        return np.asarray(np.add.reduceat(of_layers, self.stages(row)[0]).reshape(v, p).sum(axis=0), np.float64)

    def _of(self, row: int) -> tuple[Plan, Shape, Costs]:
        number = int(self.found.shape[row])
        return self.found.plan(row), self.found.shapes[number], self.found.costs[number]

    def _key(self, row: int) -> tuple[int, int, int, int]:
        found = self.found
        return int(found.shape[row]), int(found.pipeline[row]), int(found.per_rank[row]), int(found.microbatches[row])

    def _packs_ns(self, row: int) -> Ints:
        """Return a time that putting a stage's gradients into buckets does not take less than, inside its last B [S].

        A tensor as large as a bucket has one of its own, for which a kernel is launched at least.
        """
        question, (plan, shape, cost), firsts = self.found.question, self._of(row), self.stages(row)[0]
        if plan.copies == 1:
            return np.zeros(len(firsts), np.int64)
        width, device = widths_of(cost.workload, plan).reduce, question.cluster.device
        large = [
            sum(size * width >= plan.bucket_bytes * shape.tensor * shape.expert for size in layer.parameter_sizes)
            for layer in cost.workload.layers
        ]
        sizes, tensors, launched = (
            np.add.reduceat(each, firsts) for each in (local_parameters(shape, cost)[0], cost.tensors, np.array(large))
        )
        packs = np.maximum(pack_s(question, width * sizes, tensors), launched * device.launch_s)
        return np.floor(packs * 1e9).astype(np.int64)

    def _messages_ns(self, row: int, num_stages: int) -> Ints:
        """Return a time that the message behind each stage but the last does not take less than [S - 1]."""
        found = self.found
        cluster, plan, workload = found.question.cluster, found.plan(row), found.workload(row)
        layout = RankLayout(cluster, plan, AXES, {})
        size = min(output_bytes(layer, workload, plan) for layer in workload.layers[:-1]) // parts_of_messages(layout)
        inside, across = (message_ns(size, link, layout, 0) for link in (cluster.intra_node, cluster.inter_node))
        here = np.arange(num_stages - 1) % plan.pipeline
        there = (here + 1) % plan.pipeline
        leaves = [layout.crosses_nodes(one, other) for one, other in zip(here.tolist(), there.tolist(), strict=True)]
        return np.where(leaves, across, inside)
