"""Bytes of each kind on a rank, at the peak and over a step, for any plan.

    memory = memory_of(workload, plan)          # no clock: counts alone
    memory.of("activations"), memory.total_bytes, memory.over_time()

What a step holds: parameters, optimizer state and master weights all the time; gradients from the first backward on,
or all the time where they live in buckets; the activations of a micro-batch from each layer's forward to the end of
that layer's backward. The update takes a little more. Buffers are what communication needs: buckets, gathered units.
Temporary is what lives for less than a pass: recomputed activations, gradients of activations. Errors, with
compression, are what was not sent yet. While one stage of a rank works, its other stages rest: they hold the
activations of the micro-batches that they have in flight, and the gradients that they have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import PLAIN, Device, Plan, Software, Workload, make_schedule
from simulator.memory.model_states import GRADIENTS, KINDS as KINDS
from simulator.memory.stage import AFTER, FIRST, LAST, MIDDLE, NONE, ONLY, Ints, StageBytes, count_stage
from simulator.pipeline.schedule_arrays import CHANGE, B, F, I, ScheduleArrays, W, arrays_of
from simulator.stage.modules import check_modules
from simulator.stage.stage import Stage, cut_layers

if TYPE_CHECKING:
    from simulator.stage.step_times import Timing

# What torch reserves for all tensors together: 3 to 19 % more in logs of Megatron-Bridge, 2025. Without expandable
# segments 20 to 36 % more by FSDP (pytorch/torchtitan, pull 165, 2024), and a peak of 58.8 GB failed on a device of 80
# by fragments alone (NVIDIA-NeMo/Megatron-Bridge@304786df, skills/perf-memory-tuning, 2026).
RESERVED = (1.03, 1.19, 1.36)
CONTEXT_BYTES = 1.3e9  # and kernels, beside all tensors: huggingface/transformers, model_memory_anatomy.md, V100, 2022
WAITS = np.array([0, 0, 1, -1])  # of what has had its I and not its W


class RankPasses(NamedTuple):
    """What a rank runs, in order.

    Attributes:
        stage: of each pass [A].
        kind: F, B, I or W [A].
    """

    stage: Ints
    kind: Ints

    @property
    def stages(self) -> tuple[int, ...]:
        """The rank's stages."""
        return tuple(np.unique(self.stage).tolist())

    @property
    def peak_in_flight(self) -> int:
        """The largest number of micro-batches (per stage) in flight: forward has run, and B or W has not."""
        return int(np.cumsum(CHANGE[self.kind]).max(initial=0))


def passes_of_ranks(order: ScheduleArrays) -> tuple[RankPasses, ...]:
    """Return what each rank runs."""
    bounds = zip(order.offsets[:-1].tolist(), order.offsets[1:].tolist(), strict=True)
    stage, kind = order.stage.astype(np.int64), order.kind.astype(np.int64)
    return tuple(RankPasses(stage[first:stop], kind[first:stop]) for first, stop in bounds)


def one_f_one_b_passes(stage: int, in_flight: int, total: int) -> RankPasses:
    """Return the order of one stage: forwards until `in_flight` are held, then one backward for one forward."""
    steady = np.tile([B, F], total - in_flight)
    kind = np.concatenate([np.full(in_flight, F), steady, np.full(in_flight, B)])
    return RankPasses(np.full(len(kind), stage), kind)


@dataclass(frozen=True, eq=False)
class TimedPasses:
    """When a rank's passes run, in its order.

    Attributes:
        order: what each pass is.
        start_ns: [A].
        end_ns: [A].
        layers_ns: of each stage, times of each layer in an F, B, I and W; a pass that takes longer is stretched.
        update_ns: start and end of the optimizer's update.
    """

    order: RankPasses
    start_ns: Ints
    end_ns: Ints
    layers_ns: Mapping[int, Sequence[Sequence[int]]]
    update_ns: tuple[int, int]

    def moments(self) -> Ints:
        """Return when each layer of each pass begins, and the pass ends, and the update's two; as `rows_of`."""
        stage, kind = self.order
        places, size = _places(stage, {number: len(layers[F]) for number, layers in self.layers_ns.items()})
        moments = np.empty(size, np.int64)
        for number, layers_ns in self.layers_ns.items():
            mine = np.flatnonzero(stage == number)
            passes = [np.array(layers, np.int64)[:: 1 if code == F else -1] for code, layers in enumerate(layers_ns)]
            shares = np.stack([_shares(layers) for layers in passes])[kind[mine]]
            inside = np.rint(shares * (self.end_ns - self.start_ns)[mine, None]).astype(np.int64)
            moments[places[number]] = self.start_ns[mine, None] + inside
        return np.append(moments, self.update_ns)


def untimed(order: RankPasses, num_layers: Mapping[int, int]) -> TimedPasses:
    """Return passes one after the other, where a layer's forward takes 1, and its backward 2 (I and W 1 each)."""
    layers = np.array([num_layers.get(stage, 0) for stage in range(int(order.stage.max(initial=0)) + 1)])
    length = np.array([1, 2, 1, 1])[order.kind] * layers[order.stage]
    end = np.cumsum(length)
    each = {stage: [[unit] * count for unit in (1, 2, 1, 1)] for stage, count in num_layers.items()}
    last = int(end[-1])
    return TimedPasses(order, end - length, end, each, (last, last + sum(num_layers.values())))


def rows_of(own: Mapping[int, StageBytes], order: RankPasses) -> Ints:
    """Return what a rank holds all through a step: as each layer of each pass begins, after the pass, at the update.

    Shapes: A passes of L layers -> [A (L + 1) + 2, K], where L may differ between stages
    """
    return _evaluate(own, order, *_states(own, order))


def peaks_of(own: Mapping[int, StageBytes], order: RankPasses) -> tuple[Ints, Ints]:
    """Return the most of each kind, and the kinds at the fullest moment; each state of the rank is looked at once."""
    table = np.unique(np.column_stack([*order, *_states(own, order)]), axis=0)
    order, states = RankPasses(table[:, 0], table[:, 1]), np.split(table[:, 2:], 3, axis=1)
    rows = _evaluate(own, order, *states)
    return rows.max(axis=0), rows[rows.sum(axis=1).argmax()]


def _states(own: Mapping[int, StageBytes], order: RankPasses) -> tuple[Ints, Ints, Ints]:
    """Return, for each pass, what every stage of the rank has in flight, without the one at work, and its phase.

    Of what is in flight, the second array counts the micro-batches that wait for their W.
    """
    stage, kind = order
    others, waiting, phases = [], [], []
    for number in own:
        mine = stage == number
        in_flight = np.cumsum(np.where(mine, CHANGE[kind], 0))
        others.append(in_flight - (mine & ((kind == F) | (kind == I))))
        waits = np.cumsum(np.where(mine, WAITS[kind], 0))
        waiting.append(waits - (mine & (kind == I)))
        weighs = mine & ((kind == B) | (kind == W))
        made = np.cumsum(weighs)
        total = int(made[-1])
        rest = np.where(made == 0, NONE, np.where(made == total, AFTER, MIDDLE))
        at_work = np.where(made == 1, FIRST if total > 1 else ONLY, np.where(made == total, LAST, MIDDLE))
        phases.append(np.where(weighs, at_work, rest))
    return np.stack(others, axis=1), np.stack(waiting, axis=1), np.stack(phases, axis=1)


def _evaluate(own: Mapping[int, StageBytes], order: RankPasses, others: Ints, waiting: Ints, phase: Ints) -> Ints:
    always = np.sum([each.always for each in own.values()], axis=0)
    places, size = _places(order.stage, {number: len(each.kept) for number, each in own.items()})
    out = np.empty((size + 2, len(KINDS)), np.int64)
    for at, (number, each) in enumerate(own.items()):
        mine = order.stage == number
        rows = each.working(order.kind[mine], others[mine, at], waiting[mine, at], phase[mine, at])
        for place, other in enumerate(own.values()):
            if place != at:
                rows += other.resting(others[mine, place], waiting[mine, place], phase[mine, place])[:, None]
        out[places[number]] = rows + always
    out[-1] = always
    out[-1, GRADIENTS] += sum(int(each.gradients[-1]) for each in own.values())
    out[-2] = out[-1] + np.max([each.update for each in own.values()], axis=0)
    return out


def _places(stage: Ints, num_layers: Mapping[int, int]) -> tuple[dict[int, Ints], int]:
    """Return where each stage's passes stand among all rows [A of the stage, L + 1], and how many rows there are."""
    lengths = np.zeros(int(stage.max(initial=0)) + 1, np.int64)
    for number, count in num_layers.items():
        lengths[number] = count + 1
    ends = np.cumsum(lengths[stage])
    begins = ends - lengths[stage]
    places = {number: begins[stage == number, None] + np.arange(count + 1) for number, count in num_layers.items()}
    return places, int(ends[-1])


def _shares(layers_ns: Ints) -> NDArray[np.float64]:
    """Return where in a pass each layer begins, and the end, from 0 to 1; equal parts where nothing takes time."""
    if not layers_ns.any():
        layers_ns = np.ones_like(layers_ns)
    return np.concatenate([[0.0], np.cumsum(layers_ns) / layers_ns.sum()])


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes on each rank of the pipeline; all replicas hold the same.

    With one stage per rank, rank and stage have the same number.

    Attributes:
        stages: what each stage holds, and when.
        peak_bytes: the most of each kind, one row per rank and one column per kind. Kinds peak at different moments.
        at_peak_bytes: the same at the one moment when the rank holds most.
        in_flight: passes whose activations each rank holds at most.
        order: what each rank runs, in order.
        clock: when each rank's passes run, or None.
    """

    stages: tuple[StageBytes, ...]
    peak_bytes: Ints
    at_peak_bytes: Ints
    in_flight: tuple[int, ...]
    order: tuple[RankPasses, ...]
    clock: tuple[TimedPasses, ...] | None = None

    @cached_property
    def passes(self) -> tuple[TimedPasses, ...]:
        """When each rank's passes run, by the clock or one after the other."""
        if self.clock is not None:
            return self.clock
        return tuple(untimed(order, {at: len(self.stages[at].kept) for at in order.stages}) for order in self.order)

    def rows(self, rank: int = 0) -> Ints:
        """Return what a rank holds as each layer of each pass begins, and after it, at the update and at the end."""
        order = self.order[rank]
        return rows_of({at: self.stages[at] for at in order.stages}, order)

    @cached_property
    def total_bytes(self) -> Ints:
        """Bytes of all kinds at the fullest moment, one number per rank of the pipeline."""
        return np.asarray(self.at_peak_bytes.sum(axis=1), np.int64)

    @property
    def max_bytes(self) -> int:
        """Bytes at the peak on the fullest rank."""
        return int(self.total_bytes.max())

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """What torch reserves for that with its fragments, in published logs: the least; the most, with a context."""
        return int(self.max_bytes * RESERVED[0]), int(self.max_bytes * RESERVED[2] + CONTEXT_BYTES)

    @property
    def fullest_stage(self) -> int:
        """The rank of the pipeline that holds the most: its stage, where it has one."""
        return int(self.total_bytes.argmax())

    @cached_property
    def host_bytes_of_ranks(self) -> tuple[int, ...]:
        """Bytes that each rank of the pipeline keeps in the host's memory."""
        found = []
        for order, in_flight in zip(self.order, self.in_flight, strict=True):
            own = [self.stages[stage] for stage in order.stages]
            found.append(sum(stage.host for stage in own) + in_flight * max(stage.kept_on_host for stage in own))
        return tuple(found)

    @property
    def host_bytes(self) -> int:
        """Bytes that the fullest rank keeps in the host's memory."""
        return max(self.host_bytes_of_ranks)

    def of(self, kind: str, rank: int = 0) -> int:
        """Return the peak bytes of one kind on one rank of the pipeline.

        Raises:
            ValueError: the kind is not one of KINDS.
        """
        if kind not in KINDS:
            raise ValueError(f"no memory kind {kind!r}; choose one of {', '.join(KINDS)}")
        return int(self.peak_bytes[rank, KINDS.index(kind)])

    def verdict(self, device: Device) -> str:
        """Return "fits", "tight" (it may reserve more than there is, see RESERVED) or "does not fit"; see `fits`."""
        if not self.fits(device):
            return "does not fit"
        return "tight" if self.max_bytes * RESERVED[1] > device.memory_bytes else "fits"

    def fits(self, device: Device) -> bool:
        """Return whether the fullest rank fits on the device (allocator and library overheads not counted)."""
        host = device.host_memory_bytes
        return self.max_bytes <= device.memory_bytes and (host is None or self.host_bytes <= host)

    def over_time(self, rank: int = 0) -> tuple[Ints, Ints]:
        """Return times, and the bytes of each kind from each time on.

        Times are nanoseconds. Where nothing was timed, they count passes of one layer.

        Shapes: times [T], bytes [T, len(KINDS)]
        """
        always = np.sum([self.stages[stage].always for stage in self.order[rank].stages], axis=0)
        rows = np.concatenate([always[None], self.rows(rank)])
        times = np.append(0, self.passes[rank].moments())
        times[-1] = max(times[-1], times[-2] + 1)  # the last row is always shown
        first = np.flatnonzero(np.diff(times, prepend=-1))
        return times[first], np.maximum.reduceat(rows, first, axis=0)  # of one moment, the most


def memory_of(
    workload: Workload, plan: Plan, *, software: Software = PLAIN, cuts: Sequence[tuple[int, int]] | None = None
) -> Memory:
    """Count what each rank of the pipeline holds under any plan, with no cluster and no clock.

    `cuts` are each stage's first layer and one past its last. Without `cuts` stages are cut so that their matrix
    products are balanced, or have as many blocks each (`Plan.cut`); a step that is timed has a cut of its own. In
    flight under 1F1B: min(m, p - i) micro-batches on stage i; under GPipe all m. Any other schedule is counted action
    by action: a split backward holds a micro-batch's activations until its W, which needs them. Automatic schedules are
    made for equal times here; `simulate` knows the stages' own.

    With several micro-batches, distlab's own runs and torch's DDP keep the sum of gradients outside the buckets. With
    `Software.flat_buffers` gradients are kept once, in the buffers that travel, as Megatron-LM does: 6 + 12/d bytes per
    parameter with 32-bit sums and sharding's stage 1 over d ranks, in place of 10 + 12/d. `Cluster` says which it is.

    Cost: some tens of microseconds per stage for GPipe and 1F1B, whatever the number of micro-batches. Any other
        schedule is walked through once, and kept for the next call.
    Error: exact for what it counts, with padding. Not counted: inner gradients of a layer, work spaces of libraries,
        and fragmentation in the allocator. Under the plan's own precision all activations are scaled, although dropout
        masks stay at one byte per element. ZeRO-3's copy of the shard in the compute type is counted, as in the paper.
    Source: Rajbhandari et al. 2020 (1910.02054); Korthikanti et al. 2022 (2205.05198), equations 1 to 5.

    Raises:
        ValueError: more stages than the workload has layers, or blocks that do not divide into them.
    """
    check_modules(workload, plan)
    cuts = cuts or cut_layers(workload, plan, workload.matmul_flops, plan.pipeline * plan.stages_per_rank)
    stages = tuple(count_stage(workload, plan, cut, software=software) for cut in cuts)
    if plan.schedule not in ("gpipe", "one_f_one_b"):
        make = (plan.schedule, plan.pipeline, plan.num_microbatches, plan.stages_per_rank)
        return _memory(stages, _passes_of_family(*make))
    total = plan.num_microbatches
    held = [total if plan.schedule == "gpipe" else min(total, plan.pipeline - at) for at in range(plan.pipeline)]
    order = tuple(one_f_one_b_passes(index, count, total) for index, count in enumerate(held))
    # The shortest order that has the peaks: two steady pairs behind the filling, the last apart.
    short = tuple(one_f_one_b_passes(index, count, min(total, count + 2)) for index, count in enumerate(held))
    return replace(_memory(stages, short), order=order)


def step_memory(
    workload: Workload, plan: Plan, stages: Sequence[Stage], timing: Timing, *, software: Software = PLAIN
) -> Memory:
    """Return what each rank of a simulated step holds, with the step's own cut and clock."""
    stops = np.cumsum([len(stage.layers) for stage in stages]).tolist()
    counted = tuple(
        count_stage(workload, plan, (start, stop), software=software)
        for start, stop in zip([0, *stops[:-1]], stops, strict=True)
    )
    offsets = timing.order.offsets.tolist()
    order = passes_of_ranks(timing.order)
    passes = []
    for rank, (own, first, stop) in enumerate(zip(order, offsets[:-1], offsets[1:], strict=True)):
        layers_ns = {stage: stages[stage].passes_ns for stage in own.stages}
        times = (timing.start_ns[first:stop], timing.end_ns[first:stop])
        passes.append(TimedPasses(own, *times, layers_ns, timing.optimizer[rank]))
    return _memory(counted, order, tuple(passes))


def _memory(
    stages: tuple[StageBytes, ...], order: tuple[RankPasses, ...], clock: tuple[TimedPasses, ...] | None = None
) -> Memory:
    """Find the peaks."""
    pairs = [peaks_of({at: stages[at] for at in own.stages}, own) for own in order]
    peak, at_peak = (np.array(rows, np.int64) for rows in zip(*pairs, strict=True))
    return Memory(stages, peak, at_peak, tuple(own.peak_in_flight for own in order), order, clock)


@lru_cache(maxsize=64)
def _passes_of_family(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> tuple[RankPasses, ...]:
    return passes_of_ranks(arrays_of(make_schedule(name, num_ranks, num_microbatches, stages_per_rank=stages_per_rank)))
