"""All plans for a question, and the best of them: simulated in the order of their bounds, best first.

A row comes off the heap with a bound. First the bound is drawn tighter, by the stages into which the row cuts the
model, then by running its passes and messages alone; then the step is simulated. Rows without room are left out on the
way. A simulated step that comes off the heap is at most as long as every bound that is left, so it is the best: exactly
the plan that simulating all of them would find.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distlab.plan import AXES, Plan, Workload
from distlab.plan.require import changed
from distlab.plan.sharding import OFFLOADS
from simulator.advisor.bounds import Pipelines, bounds_s
from simulator.advisor.question import Candidates, Costs, Floats, Ints, Question, Shape
from simulator.hardware.rank_layout import RankLayout
from simulator.memory.memory import Memory, memory_of
from simulator.memory.stage import kept_and_beside
from simulator.stage.local_layer import base_on_a_rank, divides, time_layers
from simulator.stage.recomputed import recomputed
from simulator.step.result import Step
from simulator.step.simulate import simulate

Seconds = tuple[Floats, Floats]

MOST_MICROBATCH = 64
MOST_PER_RANK = 8
MOST_CONTEXT = 16
EVERY = (2, 4)  # one block in 2, or in 4, is recomputed, where that is searched
NOT_SEARCHED = (
    "other orders of axes, schedules that split backward, stage 3 beside a pipeline or expert ranks, sizes of buckets "
    "and units, other stacks (--stack)"
)


def candidates(question: Question, keep: Callable[[Shape], bool] | None = None) -> Candidates:
    """Return all plans for a question, or those of the shapes to keep.

    Searched: every way to divide the devices among pipeline, data, expert, context and tensor ranks whose groups sit
    alike in all nodes (3 tensor ranks in nodes of 8 would cross some); micro-batches of up to MOST_MICROBATCH samples;
    1F1B, and interleaved stages where the micro-batches fill rounds; sharding; recompute; sequence parallelism; offload
    where the question has it. With `cut` "blocks" in what is fixed, stages have as many blocks each.
    Sharding's stage 2 is searched with one micro-batch, since it sends gradients in each; stage 3 without a pipeline
    and without expert ranks, since every pass gathers. That is 128,397 plans for 175B on 1,536 devices with 1,536
    samples, and 256,794 with `partial_recompute`. Not searched: NOT_SEARCHED.

    Raises:
        ValueError: nothing divides the batch and the model among the devices.
    """
    shapes: list[Shape] = []
    costs: list[Costs] = []
    plans: list[Ints] = []
    bounds: list[Floats] = []
    for base, workload in _bases(question):
        wanted = [base._replace(**recompute) for recompute in _recomputes(question, workload)]
        wanted = [shape for shape in wanted if keep is None or keep(shape)]
        rows = _rows(question, base, workload)
        if not (len(rows) and wanted and divides(workload, base.plan(question.fixed))):
            continue
        known: dict[str, Seconds] = {}
        for shape in wanted:
            cost = _costs(question, shape, workload, known)
            plans.append(np.column_stack([np.full(len(rows), len(shapes)), rows]))
            bounds.append(bounds_s(question, shape, cost, rows))
            shapes.append(shape)
            costs.append(cost)
    if not shapes:
        own = f" by {', '.join(question.axes)} ranks alone, as its stack does" if len(question.axes) < len(AXES) else ""
        even = " into stages with as many blocks each" if question.fixed.cut == "blocks" else ""
        raise ValueError(
            f"no plan divides {question.batch_size} samples among {question.cluster.num_devices} devices{even}{own}; "
            "change the batch, or the number of devices"
        )
    columns = (*np.concatenate(plans).T, np.concatenate(bounds))  # from the shape to the bound
    return Candidates(question, tuple(shapes), tuple(costs), *columns)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, rising."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _recomputes(question: Question, workload: Workload) -> list[dict[str, Any]]:
    """Return what may be computed again, as fields of a shape: from nothing to all."""
    names = ["none"]
    names += ["selective"] if any(layer.score_bytes for layer in workload.layers) else []
    if question.partial_recompute:
        names += ["operators"] if any(layer.operator_bytes for layer in workload.layers) else []
    some = [{"recompute": "full", "recompute_layers": number} for number in EVERY if question.partial_recompute]
    return [*({"recompute": name} for name in names), *some, {"recompute": "full"}]


def _bases(question: Question) -> Iterator[tuple[Shape, Workload]]:
    """Yield all shapes that compute nothing again, with the model of their micro-batch."""
    num, batch = question.cluster.num_devices, question.batch_size
    one = question.model.with_microbatch(1).workload()
    attention = next((r.attention for layer in one.layers for r in layer.regions if r.attention), None)
    heads = attention.num_key_value_heads if attention else 1
    positions = attention.num_positions if attention else 1
    experts = max((layer.experts.num_experts for layer in one.layers if layer.experts), default=1)
    has = question.axes
    most, longest = experts if "expert" in has else 1, MOST_CONTEXT if "context" in has else 1
    for microbatch in (size for size in divisors(batch) if size <= MOST_MICROBATCH):
        workload = one if microbatch == 1 else question.model.with_microbatch(microbatch).workload()
        for tensor in (t for t in divisors(num) if t == 1 or ("tensor" in has and heads % t == 0)):
            for context in (
                c for c in divisors(num // tensor) if c == 1 or (c <= longest and positions % (2 * c) == 0)
            ):
                for expert in (e for e in divisors(num // tensor // context) if most % e == 0):
                    split = (False, True) if tensor > 1 and positions // context % tensor == 0 else (False,)
                    for along in split:
                        shape = Shape(tensor, context, expert, along, microbatch, "none")
                        if shape.is_aligned(question.cluster):
                            yield shape, workload


def _rows(question: Question, shape: Shape, workload: Workload) -> Ints:
    """Return pipeline, stages per rank, data, micro-batches, sharding and offload of a shape's plans, one per row."""
    rest = question.cluster.num_devices // (shape.tensor * shape.context * shape.expert)
    rows, is_packed = [], question.model.weights == "nf4" and not question.cluster.software.packs_units
    own, on_host = {*question.stages}, question.cluster.device.host_memory_bytes
    offloads = [name for name in question.offloads if on_host is not None or name == OFFLOADS[0]]
    for pipeline in divisors(rest) if "pipeline" in question.axes else (1,):
        data, num_layers = rest // pipeline, len(workload.layers)
        each, left = divmod(question.batch_size, data * shape.expert)
        if left or each % shape.microbatch or pipeline > num_layers:
            continue
        count = each // shape.microbatch
        most = min(MOST_PER_RANK, num_layers // pipeline) if pipeline > 1 and count % pipeline == 0 else 1
        copies = data * shape.expert * shape.context
        numbers = [v for v in range(1, most + 1) if question.fixed.cut == "time" or is_even(workload, pipeline * v)]
        units = pipeline == shape.expert == 1 and not is_packed
        stages = {0, 1} | ({2} if count == 1 else set()) | ({3} if units else set())
        holding = {"none": {0, 1, 2, 3} if copies > 1 else {0}, "optimizer": {1, 2, 3}, "all": {3}}  # what it says
        ways = [(stage, OFFLOADS.index(name)) for name in offloads for stage in sorted(stages & own & holding[name])]
        rows += [(pipeline, v, data, count, *way) for v in numbers for way in ways]
    return np.array(rows, np.int64).reshape(-1, 6)


def is_even(workload: Workload, num_stages: int) -> bool:
    """Return whether stages have as many blocks each; see `even_blocks`."""
    first, stop = workload.blocks
    return num_stages in (1, *divisors(stop - first), *divisors(stop - first + 2))


def _costs(question: Question, shape: Shape, workload: Workload, known: dict[str, Seconds]) -> Costs:
    """Cost a shape's layers; `known` has forward and backward of shapes that differ in what runs again alone."""
    plan = shape.plan(question.fixed)
    for name in (shape.recompute, *(["none"] if shape.recompute_layers > 1 else [])):
        if name not in known:
            own = replace(plan, recompute=name, recompute_method="uniform", recompute_layers=1)
            own = changed(own, schedule="interleaved")  # which hides most: no step is shorter
            times = time_layers(workload, RankLayout(question.cluster, own, AXES, {}), splits=False)
            forward, backward = np.array([each.durations_ns[:2] for each in times], np.float64).T / 1e9
            known[name] = forward, backward
    forward, backward = known[shape.recompute]
    if shape.recompute_layers > 1:
        backward = np.where(recomputed(workload, plan, (0, len(workload.layers))), backward, known["none"][1])
    base = np.array([base_on_a_rank(layer, plan) for layer in workload.layers], np.float64)
    return Costs(workload, forward, backward, *kept_and_beside(workload, plan, question.cluster.software), base)


ROUGH, TIGHT, RUN, EXACT = range(4)
TELL_EVERY = 50  # looks at a row
COUNTED = 20  # plans that do not fit, of which the memory is counted exactly


@dataclass(frozen=True, eq=False)
class Choice:
    """A plan that was simulated and fits.

    Attributes:
        question: the question that this plan answers.
        plan: the plan.
        step: its step.
    """

    question: Question
    plan: Plan
    step: Step

    @property
    def seconds(self) -> float:
        """Of a step in a run."""
        return self.step.steady_s

    @property
    def microbatch(self) -> int:
        """Samples in a micro-batch."""
        return self.step.workload.samples


@dataclass(eq=False)
class Search:
    """Plans for one question, simulated as far as was necessary.

    Attributes:
        found: all plans in columns.
        num_simulated: steps simulated so far.
        is_complete: False after an interrupt, where better plans may be left.
    """

    found: Candidates
    num_simulated: int = 0
    is_complete: bool = True
    _exact: dict[int, Choice | None] = field(default_factory=dict)
    _memory: dict[int, Memory] = field(default_factory=dict)

    @cached_property
    def pipelines(self) -> Pipelines:
        """Tight bounds."""
        return Pipelines(self.found)

    def best(
        self,
        count: int = 1,
        *,
        among: NDArray[np.bool_] | None = None,
        most: int | None = None,
        apart: bool = False,
        tell: Callable[[int, int], None] | None = None,
    ) -> list[Choice]:
        """Return the plans with the shortest steps, the best first; of equal ones the first in the order of rows.

        Args:
            count: how many.
            among: rows to choose from; None: all.
            most: steps to simulate at most; then the best of them are returned. None: as many as it takes.
            apart: of plans that differ in stages per rank alone, return the best one.
            tell: called now and then with the rows left and the steps simulated.

        An interrupt ends the search: what was simulated by then is returned, and `is_complete` is False.
        """
        rows = np.arange(len(self.found)) if among is None else np.flatnonzero(among)
        heap = [*zip(self.found.bound_s[rows].tolist(), [ROUGH] * len(rows), rows.tolist(), strict=True)]
        heapq.heapify(heap)
        chosen: dict[object, int] = {}
        last, looked = None if most is None else self.num_simulated + most, 0
        try:
            while heap and len(chosen) < count and self.num_simulated != last:
                bound, level, row = heapq.heappop(heap)
                looked += 1
                if tell and looked % TELL_EVERY == 1:
                    tell(len(heap), self.num_simulated)
                if level == EXACT:
                    chosen.setdefault(self._but_stages(row) if apart else row, row)
                elif level == ROUGH:
                    if self.may_fit(row):
                        heapq.heappush(heap, (max(bound, self.pipelines.short_s(row)), TIGHT, row))
                elif level == TIGHT and self.found.pipeline[row] > 1:
                    heapq.heappush(heap, (max(bound, self.pipelines.bound_s(row)), RUN, row))
                elif (choice := self.exact(row)) is not None:
                    heapq.heappush(heap, (choice.seconds, EXACT, row))
        except KeyboardInterrupt:
            self.is_complete = False
        done = sorted((entry for entry in heap if entry[1] == EXACT), key=lambda entry: (entry[0], entry[2]))
        best = [*chosen.values(), *(row for _, _, row in done[: count - len(chosen)])]
        assert all(self._exact[row] for row in best), "only rows that fit are kept"
        return [choice for row in best if (choice := self._exact[row])]

    def advised(self, count: int, tell: Callable[[int, int], None] | None = None) -> list[Choice]:
        """Return the best plans without offload, whose times are surer, and where none fits the best with it.

        They differ in more than stages per rank.
        """
        best = self.best(count, among=self.found.offload == 0, apart=True, tell=tell)
        return best if best or not self.is_complete else self.best(count, apart=True, tell=tell)

    @property
    def choices(self) -> list[Choice]:
        """All that was simulated and fits."""
        return [choice for choice in self._exact.values() if choice is not None]

    def _but_stages(self, row: int) -> tuple[int, ...]:
        names = ("shape", "pipeline", "data", "sharding", "offload")
        return tuple(int(getattr(self.found, name)[row]) for name in names)

    def exact(self, row: int) -> Choice | None:
        """Simulate a row; None where it does not fit, which its memory tells first and much sooner."""
        if row not in self._exact:
            question, plan = self.found.question, self.found.plan(row)
            self._exact[row] = None
            if self.memory(row).fits(question.device):
                self.num_simulated += 1
                step = simulate(self.found.workload(row), question.cluster, plan)
                self._memory[row] = step.memory
                self._exact[row] = Choice(question, step.plan, step) if step.memory.fits(question.device) else None
        return self._exact[row]

    def may_fit(self, row: int) -> bool:
        """Return whether a row's fullest rank may have room."""
        device = self.found.question.device
        least, on_host = self.pipelines.least_bytes(row)
        return least <= device.memory_bytes and on_host <= (device.host_memory_bytes or np.inf)

    def tight_s(self, row: int) -> float:
        """Return a time that a row's step is not below: by its passes and messages."""
        return self.pipelines.bound_s(row) if self.found.pipeline[row] > 1 else 0.0

    def memory(self, row: int) -> Memory:
        """Return a row's memory, of the stages into which its step cuts the model."""
        if row not in self._memory:
            workload, firsts = self.found.workload(row), self.pipelines.stages(row)[0].tolist()
            cuts = [*pairwise([*firsts, len(workload.layers)])]
            software = self.found.question.cluster.software
            self._memory[row] = memory_of(workload, self.found.plan(row), software=software, cuts=cuts)
        return self._memory[row]

    def part(self, needed: tuple[float, float]) -> float:
        """Return which part bytes are of what a device and its host have for them, whichever is larger."""
        device = self.found.question.device
        return max(needed[0] / device.memory_bytes, needed[1] / (device.host_memory_bytes or np.inf))

    def nearest(self, among: NDArray[np.bool_] | None = None) -> int:
        """Return the row that lacks least memory, of those simulated and the COUNTED with the lowest bounds."""
        own = range(len(self.found)) if among is None else np.flatnonzero(among).tolist()
        rows = sorted(own, key=lambda row: self.part(self.pipelines.least_bytes(row)))[:COUNTED]
        held = {row: self.memory(row) for row in {*self._memory, *rows} & {*own}}
        return min(sorted(held), key=lambda row: self.part((held[row].max_bytes, held[row].host_bytes)))

    def too_large(self) -> list[int]:
        """Return rows that do not fit and could be 1 % faster than the best, those that lack least memory first."""
        best = min((choice.seconds for choice in self.choices), default=np.inf)
        plain = any(choice.plan.sharding.offload == "none" for choice in self.choices)
        rows = np.flatnonzero((self.found.bound_s < 0.99 * best) & ((self.found.offload == 0) | (not plain))).tolist()
        large = [row for row in rows if not self.may_fit(row) or (row in self._exact and self._exact[row] is None)]
        return sorted(large, key=lambda row: self.part(self.pipelines.least_bytes(row)))


def search(question: Question, keep: Callable[[Shape], bool] | None = None) -> Search:
    """Return a search over all plans for a question, or over those of the shapes to keep; see `Search.best`.

    Raises:
        ValueError: no plan divides the model and the batch among the devices.
    """
    return Search(candidates(question, keep))
