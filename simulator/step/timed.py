"""Which plans `simulate` times and why it does not time others, notes on their figures, and the schedule of a step."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from distlab.plan import SCHEDULES, ActionTimes, Plan, Schedule, Workload, make_schedule, validate
from distlab.plan.schedules.families import TIMED
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.schedule_arrays import W, arrays_of
from simulator.stage.stage import Stage, check_enough_layers
from simulator.units import format_s

NOTES = tomllib.loads(Path(__file__).with_name("notes.toml").read_text("utf-8"))


def sums_each_pass(plan: Plan) -> bool:
    """Return whether gradients are summed over ranks in every micro-batch: stage 2 does not keep whole ones."""
    return plan.sharding.stage == 2 and plan.num_microbatches > 1


def why_not_timed(plan: Plan, schedule: Schedule | None = None) -> str:
    """Return why `simulate` gives the plan's step no time, and what to use instead; "" where it gives one.

    Args:
        plan: the plan.
        schedule: what the pipeline runs in place of `plan.schedule`.
    """
    stage, num_stages = plan.sharding.stage, plan.pipeline * plan.stages_per_rank
    splits = SCHEDULES[plan.schedule].splits_backward
    if schedule is not None:
        num_stages, splits = schedule.num_stages, bool((schedule.kind == W).any())
    if stage != 3 and not sums_each_pass(plan):
        return ""
    if splits:
        return (
            f"sharding stage {stage} is timed with whole backwards; schedule {plan.schedule!r} splits them: choose "
            "gpipe, one_f_one_b or interleaved"
        )
    if num_stages > 1 and stage == 3 and plan.sharding.offload != "none":
        return (
            f"the plan shards parameters (stage 3) over {num_stages} pipeline stages and keeps shards on the host; "
            "simulate times offload with pipeline=1, or use offload='none'"
        )
    return ""


def notes_on(
    plan: Plan, mfu: float = 0.0, workload: Workload | None = None, loader_wait_s: float = 0.0
) -> tuple[str, ...]:
    """Return notes on a plan's figures, a sentence each: what other libraries refuse, and what is not modelled."""
    rest = plan.num_microbatches % plan.pipeline
    layers = workload.layers if workload else ()
    experts = max((layer.experts.num_experts for layer in layers if layer.experts), default=0)
    multiplies = workload is not None and plan.expert > 1
    told = {
        "rounds": plan.schedule == "interleaved" and plan.pipeline > 1 and rest,
        "experts": experts,
        "ranks": multiplies and not plan.fold_experts,
        "replicas": multiplies and experts == 0,
        "idle": multiplies and 0 < experts < plan.expert,
        "sequence": plan.sequence_parallel and plan.tensor == 1,
        "folded": plan.fold_experts and plan.expert == 1,
        "copies": plan.sharding.replicas > 1 and not plan.sharding.stage,
        "units": plan.sharding.unit_layers > 1 and plan.sharding.stage < 3,
        "float8": plan.float8 != "none",
        "type": plan.precision is not None and plan.precision.compute in ("float32", "float64"),
        "pairs": mfu > 1,
        "loader": loader_wait_s,
    }
    values = {"plan": plan, "experts": experts, "wait": format_s(loader_wait_s)}
    return tuple(NOTES[name].format(**values) for name, is_so in told.items() if is_so)


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
    times = None
    if plan.schedule in TIMED:  # of a stage's two messages the longer one counts
        passes = ([sum(layers) for layers in stage.passes_ns] for stage in stages)
        forward, _, inputs, weights = zip(*passes, strict=True)
        sends = tuple(max(stage.send_forward_ns, stage.send_backward_ns) for stage in stages)
        times = ActionTimes(forward, inputs, weights, sends)
    size = (plan.pipeline, plan.num_microbatches, plan.stages_per_rank)
    return compile_family(plan.schedule, *size, times, held_after_input_gradient(plan, stages))


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
    own: dict[str, Any] = {"stages_per_rank": stages_per_rank, "times": times, "held_after_input_gradient": held}
    return CompiledSchedule(arrays_of(make_schedule(name, num_ranks, num_microbatches, **own)))
