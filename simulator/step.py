"""Step: simulate one training step of a workload on a cluster under a plan.

    step = simulate(workload, cluster, plan)
    step.duration_s, step.bubble_fraction, step.exposed_communication_s, step.memory, step.trace

One replica's pipeline is timed; its replicas do the same at the same time, since devices are equal. With `slow_ranks`
a rank of the pipeline is slow in every replica: the others would wait for the slow one at each exchange of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from distlab.plan.records import Cluster, Link, Plan, Workload
from distlab.plan.schedules import Schedule
from distlab.trace import Trace
from simulator.codec import MeasuredCodec
from simulator.compiled import CompiledOrder
from simulator.jitter import EVEN, Floats, Jitter, Uneven
from simulator.memory import Memory, step_memory
from simulator.orders import W
from simulator.sharded import finish_sharded, repeat_passes, time_by_units
from simulator.slowed import slowed
from simulator.stages import Stage, make_stages, sent_bytes
from simulator.step_graph import time_by_graph
from simulator.step_order import compile_family, homes_of, order_of_step
from simulator.times import Timing
from simulator.timing import queues, time_directly
from simulator.trace import layer_trace, step_trace
from simulator.units import format_bytes, format_s, to_s


@dataclass(frozen=True, eq=False)
class Step:
    """What a simulation returns: when everything happens, what is held, what is sent.

    Attributes:
        workload: the model.
        cluster: what it runs on.
        plan: how.
        stages: each stage's layers and costs.
        timing: starts and ends on the ranks of one replica, in nanoseconds.
    """

    workload: Workload
    cluster: Cluster
    plan: Plan
    stages: tuple[Stage, ...]
    timing: Timing

    @property
    def duration_s(self) -> float:
        """Seconds from the step's start to the end of the last rank's update, and of gathers after it."""
        return to_s(max(self._rank_end_ns(rank) for rank in range(self.num_pipeline_ranks)))

    @property
    def num_pipeline_ranks(self) -> int:
        """Ranks of one replica; each has one stage, or several."""
        return self.timing.order.num_ranks

    @property
    def pipeline_s(self) -> float:
        """Seconds from the step's start to the end of the last backward."""
        return to_s(int(self.timing.end_ns.max()))

    @property
    def bubble_fraction(self) -> float:
        """Idle over total time of the compute lanes, from the step's start to the end of the last backward."""
        total = int(self.timing.end_ns.max()) * self.num_pipeline_ranks
        busy = int((self.timing.end_ns - self.timing.start_ns).sum())
        if self.plan.sharding.stage == 3:  # a pass waits inside
            busy = self._computing_ns()
        return (total - busy) / total if total else 0.0

    @property
    def exposed_communication_s(self) -> float:
        """Seconds in which the rank that ends last waits for communication and computes nothing.

        A copy between a device and its host counts as communication.
        """
        rank = max(range(self.num_pipeline_ranks), key=self._rank_end_ns)
        begin, finish = self.timing.optimizer[rank]
        after = self._rank_end_ns(rank) - finish
        if self.plan.sharding.stage == 3 or _sums_each_pass(self.plan):
            return to_s(begin - self._computing_ns() + after)
        end = int(self.timing.end_ns[self.timing.order.offsets[rank + 1] - 1])
        parts = [part for sync in self.timing.syncs_of(rank) for part in sync.computing]
        return to_s(begin - end + after - sum(stop - start for start, stop in parts if start >= end))

    def _rank_end_ns(self, rank: int) -> int:
        calls = self.timing.calls[rank] if self.timing.calls else ()
        return max([self.timing.optimizer[rank][1], *(call.end_ns for call in calls)])

    def _computing_ns(self) -> int:
        """Return the time that layers compute and gradients are copied, the update apart."""
        assert self.timing.layers is not None, "these steps are timed layer by layer"
        packs = sum(call.end_ns - call.start_ns for rank in self.timing.packs for call in rank)
        for times in self.timing.syncs[0]:
            packs += sum(end - begin for begin, end in times.computing)
        return int((self.timing.layers[:, 3] - self.timing.layers[:, 2]).sum()) + packs

    @property
    def sent_bytes_per_rank(self) -> tuple[float, ...]:
        """Bytes that each rank sends in the step (rings for gradients, messages between stages), rank 0 first."""
        each = [0.0] * self.num_pipeline_ranks
        for stage in self.stages:
            each[stage.rank] += sent_bytes(stage, self.plan)
        for rank, calls in enumerate(self.timing.calls):
            each[rank] += sum(call.sent_bytes for call in calls)
        return tuple(value for value in each for _ in range(self.plan.data))

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas and micro-batches over the step's duration."""
        return self.workload.samples * self.plan.num_microbatches * self.plan.data / self.duration_s

    @cached_property
    def memory(self) -> Memory:
        """Bytes of each kind on each stage's ranks."""
        return step_memory(self.workload, self.plan, self.stages, self.timing)

    @cached_property
    def trace(self) -> Trace:
        """The step as a measured one looks: whole passes, the wait for gradients, all-reduces and messages."""
        return step_trace(self.stages, self.timing, self.plan)

    @cached_property
    def layer_trace(self) -> Trace:
        """The same step in detail: each layer's pass, each bucket's copies."""
        return layer_trace(self.stages, self.timing, self.plan)

    def __str__(self) -> str:
        return (
            f"{self.workload.name} on {self.plan.world_size} ranks of {self.cluster.name}: {format_s(self.duration_s)} "
            f"a step, bubble {self.bubble_fraction:.1%}, "
            f"exposed communication {format_s(self.exposed_communication_s)}, "
            f"{format_bytes(max(self.sent_bytes_per_rank))} sent a rank, {format_bytes(self.memory.max_bytes)} held"
        )


def simulate(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    codec: MeasuredCodec | None = None,
    links: Mapping[str, Link] | None = None,
    schedule: Schedule | None = None,
    uneven: Uneven = EVEN,
) -> Step:
    """Simulate one training step.

    The pipeline runs `plan.schedule`, or `schedule`, an order of one's own for `plan.pipeline` ranks. Stages next to
    each other in the model that share a rank hand over in memory. Each stage's gradients are averaged once its last
    backward, or weight gradient, has run. Automatic schedules are made for the times of the stages.

    `uneven` makes equal work take unequal time: Uneven(slow_ranks={2: 1.3}) makes what rank 2 of the pipeline computes
    take 1.3 times as long, Uneven(jitter=Jitter(0.05)) stretches each pass by a random factor of its own.

    With `plan.compression` a bucket is encoded on the compute lane once it is full, what is left of it travels, and it
    is decoded on the compute lane, from every rank's payload where ranks gather them. PowerSGD's second factor is made
    and sent while the rank waits, as its hook does it. `codec` gives measured times in place of counted work.

    With `plan.sharding` ranks update their own part of the parameters. Stages 1 and 2 scatter buckets of gradients and
    gather parameters after the update; stage 3 gathers and scatters units (see `simulator.sharded`). Gradients of
    several micro-batches are added up on each rank and scattered in the last; with stage 2, which has no place for
    them, in each. `links` gives a line of its own to a kind of call ("all_gather", "reduce_scatter", "all_reduce"
    across replicas), and to what calls cost the computing rank ("all_gather start", "reduce_scatter start",
    "reduce_scatter sum"), where they were measured apart.

    Error: exact for its cost model, in whole nanoseconds: each layer's pass and each message is rounded to one.
        Not modelled: differences between devices, and all-reduces that share a wire with messages between stages.

    Raises:
        ValueError: the plan needs more ranks than the cluster has, or more stages than the workload has layers; the
            codec was measured for another compression or number of replicas; the schedule is not for the plan's ranks
            and micro-batches, or is faulty; the plan splits layers or sequences, or shards a pipeline's parameters, or
            its gradients in several micro-batches, which is not timed.
    """
    if codec is not None:
        codec.check(plan)
    home = homes_of(workload, plan, schedule)
    stages = make_stages(workload, cluster, plan, home, codec=codec, links=links)
    stages = slowed(stages, uneven.slow_ranks, plan.pipeline)
    compiled = order_of_step(plan, schedule, stages)
    _check_is_timed(plan, len(home), splits=bool((compiled.order.kind == W).any()), jitter=uneven.jitter)
    factors = None if uneven.jitter is None else uneven.jitter.factors(len(compiled.order.kind))
    if plan.sharding.stage == 3:
        timing = time_by_units(compiled, stages[0], plan.sharding, contention=cluster.contention)
    elif _sums_each_pass(plan):
        one = compile_family(plan.schedule, 1, 1)
        timing = repeat_passes(_time(one, stages, cluster, plan), stages[0], compiled.order)
    else:
        timing = _time(compiled, stages, cluster, plan, factors)
    if plan.sharding.stage in (1, 2):
        timing = finish_sharded(timing, stages)
    return Step(workload, cluster, plan, stages, timing)


def _time(
    compiled: CompiledOrder, stages: Sequence[Stage], cluster: Cluster, plan: Plan, factors: Floats | None = None
) -> Timing:
    """Time the passes and exchanges by the short road where it is exact."""
    contention = cluster.contention
    contends = contention.compute_slowdown > 1.0 or contention.communication_slowdown > 1.0
    communicates = plan.pipeline > 1 or (plan.data > 1 and plan.gradient_sync in ("bucketed", "overlapped"))
    if not (contends and communicates):
        timing = time_directly(compiled, stages, sync=plan.gradient_sync, factors=factors)
        if not queues(timing):
            return timing
    return time_by_graph(compiled, stages, sync=plan.gradient_sync, contention=contention, factors=factors)


def closed_form_bubble(num_stages: int, num_microbatches: int) -> float:
    """Return the textbook bubble of GPipe and 1F1B, idle over total time: (p-1) / (m + p - 1).

    Error: exact where all stages take equal time and communication none; otherwise simulate.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def _sums_each_pass(plan: Plan) -> bool:
    """Return whether gradients are summed over ranks in every micro-batch: stage 2 has no place for whole ones."""
    return plan.sharding.stage == 2 and plan.num_microbatches > 1


def _check_is_timed(plan: Plan, num_stages: int, *, splits: bool, jitter: Jitter | None) -> None:
    if plan.tensor > 1 or plan.context > 1:
        raise ValueError(
            f"the plan has tensor={plan.tensor} and context={plan.context}; simulate times data, pipeline and "
            "sharding: set both to 1; memory_of counts the rest"
        )
    by_pass = plan.sharding.stage == 3 or _sums_each_pass(plan)
    if by_pass and jitter is not None:
        raise ValueError(f"sharding stage {plan.sharding.stage} is timed without jitter; leave it out, or use stage 1")
    if by_pass and num_stages == 1 and splits:
        raise ValueError(
            f"sharding stage {plan.sharding.stage} is timed with whole backwards; schedule {plan.schedule!r} splits "
            "them: choose gpipe or one_f_one_b"
        )
    if plan.sharding.stage == 3 and num_stages > 1:
        raise ValueError(
            f"the plan shards parameters (stage 3) over {num_stages} pipeline stages, where each micro-batch would "
            "gather every unit again; simulate times stage 3 with pipeline=1, or use stage 1"
        )
    if _sums_each_pass(plan) and num_stages > 1:
        raise ValueError(
            f"the plan shards gradients (stage 2) over {num_stages} pipeline stages, where each of "
            f"{plan.num_microbatches} micro-batches would sum them over the ranks; simulate times stage 2 with "
            "pipeline=1, or use stage 1"
        )
