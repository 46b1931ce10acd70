"""Tight bounds: the pipeline of a row run alone, passes and messages without all else.

What a step does besides can only make it longer: packing gradients, sending them, updating, gathering. Some of that
follows a rank's last pass and is added. So these bounds differ from steps by what overlaps the last passes, and by
messages that queue. What ranks hold is bounded in the same way: states, and what passes keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distlab.plan import AXES, Plan
from distlab.plan.partition import Cuts
from simulator.advisor.bounds import SLACK, local_parameters, pack_s, update_s, wire_s
from simulator.advisor.question import Candidates, Costs, Floats, Ints, Shape
from simulator.hardware.rank_layout import RankLayout
from simulator.pipeline.schedule_arrays import F, last_actions
from simulator.precision import widths_of
from simulator.stage.local_layer import output_bytes
from simulator.stage.stage import message_ns, parts_of_messages
from simulator.step.schedule_of_plan import compile_family


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
    _least: dict[int, float] = field(default_factory=dict)

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
            firsts = np.array([first for first, _ in self._cuts[shape].into(p * v)])
            self._stages[shape, p * v] = (firsts, np.add.reduceat(forward, firsts), np.add.reduceat(backward, firsts))
        return self._stages[shape, p * v]

    def least_bytes(self, row: int) -> float:
        """Return bytes that the row's fullest rank does not hold less than, whatever its schedule's order."""
        if row not in self._least:
            (_, p, v, m), firsts, (plan, shape, cost) = self._key(row), self.stages(row)[0], self._of(row)
            widths, stage = widths_of(cost.workload, plan), plan.sharding.stage
            gradient = widths.gradient if plan.copies > 1 else 0
            sizes = ((widths.parameter, 3), (gradient, 2), (widths.master + widths.optimizer, 1))
            states, kept = np.zeros((v, p)), np.add.reduceat(cost.kept, firsts).reshape(v, p)
            every, few = plan.copies, plan.data * plan.context
            for parameters, copies in zip(local_parameters(shape, cost), (every, few), strict=True):
                each = sum(size / (copies if stage >= needed else 1) for size, needed in sizes)
                states += each * np.add.reduceat(parameters, firsts).reshape(v, p)
            if v == 1:
                most = states[0] + np.minimum(m, p - np.arange(p)) * kept[0]
            else:
                most = states[:, 0].sum() + min(m * v, 2 * (p - 1) + (v - 1) * p + 1) * kept[:, 0].min()
            self._least[row] = float(most.max() * SLACK)
        return self._least[row]

    def _update_s(self, row: int) -> Floats:
        question, (plan, shape, cost) = self.found.question, self._of(row)
        own, experts = (self._of_ranks(row, each) for each in local_parameters(shape, cost))
        shards, few = (plan.copies, plan.data * plan.context) if plan.sharding.stage else (1, 1)
        update = update_s(question, cost, own, self._of_ranks(row, cost.tensors), np.array(shards))
        return update + update_s(question, cost, experts, 0, np.array(few))

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
