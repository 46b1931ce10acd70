"""Step: simulate one training step of a workload on a cluster under a plan.

    step = simulate(workload, cluster, plan)
    step.duration_s, step.bubble_fraction, step.exposed_communication_s, step.memory, step.trace

One rank of each place in the pipeline is timed. The others there do the same at the same time, since devices are equal:
replicas on other samples, ranks that share its layers, sequences or experts on other parts. With `slow_ranks` a rank of
the pipeline is slow in every replica: the others would wait for the slow one at each exchange of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from distlab.plan import AXES, Cluster, Plan, Schedule, Workload
from simulator.engine.event_engine import SharedCores
from simulator.hardware.rank_layout import Layout
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.jitter import EVEN, Floats, Jitter, Uneven
from simulator.pipeline.schedule_arrays import W
from simulator.stage.local_layer import check_divides
from simulator.stage.stage import Stage, make_stages
from simulator.stage.step_times import Timing
from simulator.step.closed_form import queues, time_directly
from simulator.step.event_graph import time_by_graph
from simulator.step.measured import Measured
from simulator.step.result import Step, sums_each_pass
from simulator.step.schedule_of_plan import compile_family, homes_of, order_of_step
from simulator.step.sharded_events import finish_sharded, repeat_passes, time_by_units
from simulator.step.stragglers import slowed

NOTHING_MEASURED = Measured()
__all__ = ["Step", "closed_form_bubble", "simulate"]


def simulate(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    measured: Measured = NOTHING_MEASURED,
    schedule: Schedule | None = None,
    uneven: Uneven = EVEN,
    order: Sequence[str] = AXES,
) -> Step:
    """Simulate one training step.

    The pipeline runs `plan.schedule`, or `schedule`, an order of one's own for `plan.pipeline` ranks. Stages next to
    each other in the model that share a rank hand over in memory. Each stage's gradients are averaged once its last
    backward, or weight gradient, has run. Automatic schedules are made for the times of the stages.

    `uneven` makes equal work take unequal time: Uneven(slow_ranks={2: 1.3}) makes what rank 2 of the pipeline computes
    take 1.3 times as long, Uneven(jitter=Jitter(0.05)) stretches each pass by a random factor of its own.

    With `plan.compression` a bucket is encoded on the compute lane once it is full, what is left of it travels, and it
    is decoded on the compute lane, from every rank's payload where ranks gather them. PowerSGD's second factor is made
    and sent while the rank waits, as its hook does it.

    With `plan.sharding` ranks update their own part of the parameters. Stages 1 and 2 scatter buckets of gradients and
    gather parameters after the update; stage 3 gathers and scatters units (see `simulator.step.sharded_events`).
    Gradients of several micro-batches are added up on each rank and scattered in the last; with stage 2, which has no
    place for them, in each. Where ranks outnumber `cluster.num_cores`, ranks that wait lend their cores to others.

    `measured` gives times of compression in place of counted work, and lines to kinds of call, whatever axis makes
    them, in place of the cluster's links.

    Error: exact for its cost model, in whole nanoseconds: each layer's pass and each message is rounded to one.
        Not modelled: differences between devices, and all-reduces that share a wire with messages between stages.

    Raises:
        ValueError: the plan needs more ranks than the cluster has, or more stages than the workload has layers; the
            codec was measured for another compression or number of replicas; the schedule is not for the plan's ranks
            and micro-batches, or is faulty; the plan shards a pipeline's parameters, or its gradients in several
            micro-batches, which is not timed.
    """
    if measured.codec is not None:
        measured.codec.check(plan)
    home = homes_of(workload, plan, schedule)
    check_divides(workload, plan)
    layout = Layout(cluster, plan, tuple(order), measured.links)
    stages = make_stages(workload, layout, home, codec=measured.codec)
    stages = slowed(stages, uneven.slow_ranks, plan.pipeline)
    compiled = order_of_step(plan, schedule, stages)
    _check_is_timed(plan, len(home), splits=bool((compiled.order.kind == W).any()), jitter=uneven.jitter)
    factors = None if uneven.jitter is None else uneven.jitter.factors(len(compiled.order.kind))
    if plan.sharding.stage == 3:
        timing = time_by_units(compiled, stages[0], plan.sharding, contention=cluster.contention)
    elif sums_each_pass(plan):
        one = compile_family(plan.schedule, 1, 1)
        timing = repeat_passes(_time(one, stages, cluster, plan), stages[0], compiled.order)
    else:
        timing = _time(compiled, stages, cluster, plan, factors)
    if plan.sharding.stage in (1, 2):
        timing = finish_sharded(timing, stages)
    return Step(workload, cluster, plan, stages, timing, layout.order)


def _time(
    compiled: CompiledSchedule, stages: Sequence[Stage], cluster: Cluster, plan: Plan, factors: Floats | None = None
) -> Timing:
    """Time the passes and exchanges by the short road where it is exact."""
    contention = cluster.contention
    contends = contention.compute_slowdown > 1.0 or contention.communication_slowdown > 1.0
    communicates = plan.pipeline > 1 or (plan.copies > 1 and plan.gradient_sync in ("bucketed", "overlapped"))
    cores = _shared_cores(cluster, plan)
    if not (contends and communicates) and cores is None:
        timing = time_directly(compiled, stages, sync=plan.gradient_sync, factors=factors)
        if not queues(timing):
            return timing
    return time_by_graph(compiled, stages, sync=plan.gradient_sync, contention=contention, factors=factors, cores=cores)


def _shared_cores(cluster: Cluster, plan: Plan) -> SharedCores | None:
    """Return the cores that ranks of a pipeline share unevenly: where one waits, the others have its part."""
    if cluster.num_cores is None or plan.world_size <= cluster.num_cores or plan.pipeline == 1:
        return None
    return SharedCores(cluster.num_cores, plan.world_size // plan.pipeline)


def closed_form_bubble(num_stages: int, num_microbatches: int) -> float:
    """Return the textbook bubble of GPipe and 1F1B, idle over total time: (p-1) / (m + p - 1).

    Error: exact where all stages take equal time and communication none; otherwise simulate.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def _check_is_timed(plan: Plan, num_stages: int, *, splits: bool, jitter: Jitter | None) -> None:
    by_pass = plan.sharding.stage == 3 or sums_each_pass(plan)
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
    if sums_each_pass(plan) and num_stages > 1:
        raise ValueError(
            f"the plan shards gradients (stage 2) over {num_stages} pipeline stages, where each of "
            f"{plan.num_microbatches} micro-batches would sum them over the ranks; simulate times stage 2 with "
            "pipeline=1, or use stage 1"
        )
