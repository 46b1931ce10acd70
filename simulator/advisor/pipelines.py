"""Tight bounds: the pipelines of many rows with one schedule run side by side, passes and messages alone.

What a step does besides can only make it longer: packing gradients, sending them, updating, gathering. Some of that
follows a rank's last pass and is added. So these bounds differ from steps by what overlaps the last passes, and by
messages that queue. What ranks hold is bounded in the same way: states, and what passes keep.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from distlab.plan import AXES, Plan
from distlab.plan.partition import Cuts
from simulator.advisor.bounds import SLACK, local_parameters, pack_s, update_s, wire_s
from simulator.advisor.question import Candidates, Costs, Floats, Ints, Shape
from simulator.hardware.rank_layout import RankLayout
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import F, last_actions
from simulator.precision import widths_of
from simulator.stage.local_layer import output_bytes
from simulator.stage.stage import message_ns, parts_of_messages
from simulator.step.schedule_of_plan import compile_family

MOST_CELLS = 3_000_000  # of actions times rows that run side by side: 24 MB
MOST_ROWS = 48
NEAR = 1.02  # rows whose bounds are so near to the one that is asked for run with it


@dataclass(eq=False)
class Pipelines:
    """Bounds from the stages that a model is cut into.

    Attributes:
        found: all rows.
    """

    found: Candidates
    _cuts: dict[int, Cuts] = field(default_factory=dict)
    _stages: dict[tuple[int, int], tuple[Ints, Ints, Ints]] = field(default_factory=dict)
    _groups: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    _after: dict[int, Floats] = field(default_factory=dict)
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
        return float((spans + self.after_s(row)).max() * SLACK)

    def bound_s(self, row: int) -> float:
        """Return the bound of a row's own pipeline; rows with its schedule and near bounds are counted with it."""
        if row not in self._known:
            rows = self._beside(row)
            for each, starts, ends in zip(rows, *self._passes_s(rows), strict=True):
                after = ends[0] + self._update_s(each) + self._gather_s(each)
                self._known[each] = float((np.maximum(after, self._left_s(each, ends)) - starts).max() * SLACK)
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
            _, p, v, m = self._key(row)
            fixed, kept = self._held(row)
            if v == 1:
                most = fixed[0] + np.minimum(m, p - np.arange(p)) * kept[0]
            else:
                most = fixed[:, 0].sum() + min(m * v, 2 * (p - 1) + (v - 1) * p + 1) * kept[:, 0].min()
            self._least[row] = float(most.max() * SLACK)
        return self._least[row]

    def peak_bytes(self, row: int) -> float:
        """Return the same from the order in which its schedule runs."""
        _, p, v, m = self._key(row)
        if v == 1:
            return self.least_bytes(row)
        fixed, kept = self._held(row)
        order = _compiled(p, m, v).order
        change = np.where(order.kind == F, 1.0, -1.0) * kept.reshape(-1)[order.stage]
        return float((fixed.sum(axis=0) + change.reshape(p, -1).cumsum(axis=1).max(axis=1)).max() * SLACK)

    def _held(self, row: int) -> tuple[Floats, Floats]:
        """Return the bytes of each stage's states, and of what a micro-batch keeps there [v, p] and [v, p]."""
        (_, p, v, _), firsts = self._key(row), self.stages(row)[0]
        plan, shape, cost = self._of(row)
        widths, stage = widths_of(cost.workload, plan), plan.sharding.stage
        states = np.zeros((v, p))
        for parameters, copies in zip(
            local_parameters(shape, cost), (plan.copies, plan.data * plan.context), strict=True
        ):
            gradient = widths.gradient if plan.copies > 1 else 0
            sizes = ((widths.parameter, 3), (gradient, 2), (widths.master + widths.optimizer, 1))
            each = sum(size / (copies if stage >= needed else 1) for size, needed in sizes)
            states += each * np.add.reduceat(parameters, firsts).reshape(v, p)
        return states, np.add.reduceat(cost.kept, firsts).reshape(v, p)

    def after_s(self, row: int) -> Floats:
        """Return what follows each rank's last pass at least: packing, sending, updating and gathering [p]."""
        if row not in self._after:
            plan, shape, cost = self._of(row)
            own, tensors = self._of_ranks(row, local_parameters(shape, cost)[0]), self._of_ranks(row, cost.tensors)
            reduced = widths_of(cost.workload, plan).reduce * own
            packs = pack_s(self.found.question, reduced, tensors) if plan.copies > 1 else 0.0
            self._after[row] = packs + self._update_s(row) + self._gather_s(row)
        return self._after[row]

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
        return (
            int(found.shape[row]),
            int(found.pipeline[row]),
            int(found.per_rank[row]),
            int(found.microbatches[row]),
        )

    def _beside(self, row: int) -> list[int]:
        """Return the row and others with its schedule, whose rough bounds are the nearest to its own."""
        if not self._groups:
            groups = defaultdict(list)
            piped = np.flatnonzero(self.found.pipeline > 1)
            for each in piped[np.argsort(self.found.bound_s[piped], kind="stable")].tolist():
                groups[self._key(each)[1:]].append(each)
            self._groups = dict(groups)
        _, p, v, m = self._key(row)
        most = max(1, min(MOST_ROWS, MOST_CELLS // (2 * m * v * p)))
        bounds, limit = self.found.bound_s, NEAR * max(self.found.bound_s[row], self.short_s(row))
        group = self._groups.get((p, v, m), [])
        near = (each for each in takewhile(lambda one: bounds[one] <= limit, group) if each not in self._known)
        return [row, *islice((each for each in near if each != row and self._room(each)), most - 1)]

    def _room(self, row: int) -> bool:
        return self.least_bytes(row) <= self.found.question.device.memory_bytes

    def _left_s(self, row: int, ends: Floats) -> Floats:
        """Return when each rank is done at least, as its stages' gradients leave one after the other [p].

        A stage's gradients leave once its last backward has begun; the last stage is the first to have its own.
        """
        question, (plan, shape, cost), (firsts, _, backward) = self.found.question, self._of(row), self.stages(row)
        own = np.add.reduceat(local_parameters(shape, cost)[0], firsts).reshape(ends.shape)
        widths, stage = widths_of(cost.workload, plan), plan.sharding.stage
        width = min(widths.reduce, widths.parameter)
        sums = (1 if stage else 2) * wire_s(question, shape, np.array(plan.copies), width * own)
        begin = ends - (backward + self._packs_ns(row)).reshape(ends.shape) / 1e9
        left = (begin + sums.cumsum(axis=0)).max(axis=0)
        return np.asarray(left + self._update_s(row) + self._gather_s(row), np.float64)

    def _passes_s(self, rows: list[int]) -> tuple[Floats, Floats]:
        """Return for rows with one schedule when ranks begin [R, p], and when their stages' last backwards end.

        Shapes: -> starts [R, p], ends [R, v, p]
        """
        _, p, v, m = self._key(rows[0])
        durations, latencies = [], []
        for row in rows:
            _, forward, backward = self.stages(row)
            messages = self._messages_ns(row, p * v)
            durations.append(np.concatenate([forward, backward, backward + self._packs_ns(row)]))
            latencies.append(np.concatenate([[0], messages, messages, [0], messages, [0]]))
        compiled = _compiled(p, m, v)
        first, last = compiled.order.offsets[:-1], last_actions(compiled.order)
        durations_ns = np.array(durations, np.int64)
        ends = compiled.run_rows(durations_ns, np.array(latencies, np.int64), np.concatenate([first, last])).T / 1e9
        starts = ends[:, :p] - durations_ns[:, :p] / 1e9
        return starts, ends[:, p:].reshape(len(rows), v, p)

    def _packs_ns(self, row: int) -> NDArray[np.int64]:
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

    def _messages_ns(self, row: int, num_stages: int) -> NDArray[np.int64]:
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


def _compiled(p: int, m: int, v: int) -> CompiledSchedule:
    return compile_family("interleaved" if v > 1 else "one_f_one_b", p, m, v)
