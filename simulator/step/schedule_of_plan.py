"""Which schedule a step runs, and on which rank each of its stages is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from distlab.plan import SCHEDULES, ActionTimes, Plan, Schedule, Workload, make_schedule, validate
from distlab.plan.schedules.families import TIMED
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import arrays_of
from simulator.stage.stage import Stage, check_enough_layers


def ranks_of_stages(workload: Workload, plan: Plan, schedule: Schedule | None) -> tuple[int, ...]:
    """Return the rank of each stage.

    Raises:
        ValueError: there are more stages than layers; the schedule is for other ranks or micro-batches, or faulty.
    """
    if schedule is None:
        check_enough_layers(workload, plan, plan.pipeline * plan.stages_per_rank)
        return SCHEDULES[plan.schedule].home(plan.pipeline, plan.stages_per_rank)
    if (schedule.num_ranks, schedule.num_microbatches) != (plan.pipeline, plan.num_microbatches):
        raise ValueError(
            f"the schedule has {schedule.num_ranks} ranks and {schedule.num_microbatches} micro-batches; the plan has "
            f"pipeline={plan.pipeline} and num_microbatches={plan.num_microbatches}; make them equal"
        )
    validate(schedule)
    check_enough_layers(workload, plan, schedule.num_stages)
    return tuple(schedule.home.tolist())


def compile_schedule_of(plan: Plan, schedule: Schedule | None, stages: Sequence[Stage]) -> CompiledSchedule:
    """Return the order that the step runs; an automatic schedule is made for the times of the stages."""
    if schedule is not None:
        return CompiledSchedule(arrays_of(schedule))
    times = action_times(stages) if plan.schedule in TIMED else None
    size = (plan.pipeline, plan.num_microbatches, plan.stages_per_rank)
    return compile_family(plan.schedule, *size, times, held_after_input_gradient(plan, stages))


def action_times(stages: Sequence[Stage]) -> ActionTimes:
    """Return the times of each stage's actions in nanoseconds; of its two messages the longer one counts."""
    forward, _, inputs, weights = zip(*([sum(layers) for layers in stage.passes_ns] for stage in stages), strict=True)
    return ActionTimes(
        forward, inputs, weights, tuple(max(stage.send_forward_ns, stage.send_backward_ns) for stage in stages)
    )


def held_after_input_gradient(plan: Plan, stages: Sequence[Stage]) -> float:
    """Return the part of the model's activations that stays until W under ZB-2p; 1.0 under other schedules."""
    if plan.schedule != "zb_2p" or plan.recompute != "none":
        return 1.0
    kept = until = 0
    for layer in (layer for stage in stages for layer in stage.layers):
        size = layer.activation_bytes - layer.logits_bytes
        kept += size
        until += size if layer.kept_until_weights_bytes is None else layer.kept_until_weights_bytes
    return min(1.0, until / kept) if kept else 1.0


@lru_cache(maxsize=32)
def compile_family(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    times: ActionTimes | None = None,
    held: float = 1.0,
) -> CompiledSchedule:
    """Return a family's order, compiled; the last ones are kept."""
    return CompiledSchedule(
        arrays_of(
            make_schedule(
                name,
                num_ranks,
                num_microbatches,
                stages_per_rank=stages_per_rank,
                times=times,
                held_after_input_gradient=held,
            )
        )
    )
