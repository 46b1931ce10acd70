"""Pipelines whose gradients or parameters are sharded: how often each stage gathers and scatters, and when."""

from collections import Counter
from dataclasses import replace

import pytest
from sharding_cases import cluster_of, plan_of, spans_of, workload_of

from simulator import simulate
from simulator.units import to_ns

M = 4
SCHEDULES = [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2)]


def step_of(stage, schedule, stages_per_rank, num_layers=8, **sharding):
    plan = plan_of(stage, data=2, microbatches=M)
    plan = replace(
        plan,
        pipeline=2,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        sharding=replace(plan.sharding, **sharding),
    )
    return simulate(workload_of([1] * num_layers), cluster_of(4), plan)


def passes_of(step, rank):
    found = [span for span in step.trace if span.rank == rank and span.kind in ("F", "B")]
    return sorted(found, key=lambda span: span.start_ns)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_stage_3_gathers_in_every_pass_and_scatters_in_a_stages_last_backward(schedule, stages_per_rank):
    step = step_of(3, schedule, stages_per_rank)
    for rank in range(2):
        own = [stage for stage in step.stages if stage.rank == rank]
        num_units = sum(len(stage.units) for stage in own)
        gathers, scatters = spans_of(step, "gather", 2 * rank), spans_of(step, "scatter", 2 * rank)
        assert len(gathers) == 2 * M * num_units
        assert set(Counter(span.microbatch for span in gathers).values()) == {2 * num_units}
        assert len(scatters) == num_units
        passes = passes_of(step, 2 * rank)
        assert len(passes) == 2 * M * len(own)
        assert gathers[0].end_ns <= passes[0].start_ns, "a stage computes with what it has gathered"
        update = spans_of(step, "compute", 2 * rank)[-1]
        assert max(span.end_ns for span in scatters) <= update.start_ns
    arrived = spans_of(step, "recv forward", 2)[0].end_ns
    assert spans_of(step, "gather", 2)[0].start_ns >= arrived, "a stage asks for parameters when its input has come"
    kept = step_of(3, schedule, stages_per_rank, reshard_after_forward=False)
    assert len(spans_of(kept, "gather", 0)) < len(spans_of(step, "gather", 0))


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_stage_2_scatters_in_every_backward_of_a_stage(schedule, stages_per_rank):
    step, once = (step_of(stage, schedule, stages_per_rank) for stage in (2, 1))
    for rank in range(2):
        scatters = [span for span in spans_of(step, "scatter", 2 * rank) if span.kind == "reduce_scatter"]
        fewer = [span for span in spans_of(once, "scatter", 2 * rank) if span.kind == "reduce_scatter"]
        assert len(scatters) == M * len(fewer) > 0
        backward = {}
        for one in passes_of(step, 2 * rank):
            if one.kind == "B":
                backward.setdefault(one.microbatch, one.start_ns)
        assert all(span.start_ns >= backward.get(span.microbatch, 0) for span in scatters)
    assert step.duration_s > once.duration_s, "its sums wait in every micro-batch"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_times_add_up(stage, schedule, stages_per_rank):
    step = step_of(stage, schedule, stages_per_rank)
    exposed = step.exposed_by_axis
    assert 0 < exposed["data"] < step.duration_s
    assert 0 <= step.bubble_fraction < 1
    assert (step.memory.peak_bytes.sum(axis=1) > 0).all()
    assert max(span.end_ns for span in step.trace) == to_ns(step.duration_s)
    assert len(step.layer_trace) > len(step.trace)
