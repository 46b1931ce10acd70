"""What holds for every sharded step: no lane is cut short, smaller units hold less; pipelines, nodes."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from sharding_cases import cluster_of, plan_of, spans_of, workload_of

from distlab.plan import Contention, Plan, Sharding
from simulator import cluster, gpt_workload, memory_of, simulate, sweep_units
from simulator.gradients.fsdp_units import peak_gathered_elements, units_of
from simulator.sweeps.fsdp_units import with_unit_layers
from simulator.units import to_ns

shardings = st.builds(
    Sharding,
    stage=st.integers(1, 3),
    unit_layers=st.integers(1, 4),
    reshard_after_forward=st.booleans(),
    prefetch=st.integers(0, 3),
    replicas=st.sampled_from([1, 2]),
    offload=st.sampled_from(["none", "optimizer"]),
)
contentions = st.sampled_from([Contention(), Contention(1.2, 1.7)])


@settings(max_examples=30, deadline=None)
@given(shardings, st.lists(st.floats(0.1, 5), min_size=1, max_size=6), st.integers(1, 3), contentions)
def test_a_step_is_never_shorter_than_any_of_its_lanes(sharding, milliseconds, microbatches, contention):
    plan = replace(plan_of(3, microbatches=microbatches), sharding=sharding)
    step = simulate(workload_of(milliseconds, ends=50_000), cluster_of(4, contention=contention), plan)
    totals = {}
    for span in step.layer_trace:
        if span.rank == 0:
            lane = "wire" if span.lane in ("gather", "scatter") else span.lane
            lane = span.name.split(" unit")[0].split(" bucket")[0] if lane == "host" else lane
            totals[lane] = totals.get(lane, 0) + span.end_ns - span.start_ns
    duration = to_ns(step.duration_s)
    assert duration >= max(totals.values())
    assert 0 <= to_ns(step.exposed_communication_s) < duration
    host = totals.get("optimizer", 0)  # an update on the host is no communication either
    assert to_ns(step.exposed_communication_s) == pytest.approx(duration - totals["compute"] - host, abs=2)
    assert 0 <= step.bubble_fraction < 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(0, 3))
def test_smaller_units_hold_less(sizes, prefetch):
    layers = workload_of([1.0] * len(sizes), sizes, ends=10).layers
    halves = [peak_gathered_elements(units_of(layers, count), prefetch) for count in (1, 2, 4, 8)]
    assert halves == sorted(halves)
    assert halves[-1] == sum(sizes) + 20


WORKLOAD = workload_of([3.0] * 12, [40_000] * 12, ends=1000)


def test_each_size_is_a_step_of_its_own():
    cluster, plan = cluster_of(4), plan_of(3)
    sweep = sweep_units(WORKLOAD, cluster, plan)
    assert sweep.unit_layers == (1, 2, 3, 4, 6, 12)
    assert sweep.num_units == (12, 6, 4, 3, 2, 1)
    assert sweep.unit_bytes == tuple(160_000 * layers for layers in sweep.unit_layers)
    for index, layers in enumerate(sweep.unit_layers):
        step = simulate(WORKLOAD, cluster, with_unit_layers(plan, layers))
        assert sweep.duration_s[index] == step.duration_s
        assert sweep.exposed_s[index] == step.exposed_communication_s
        assert sweep.memory_bytes[index] == memory_of(WORKLOAD, step.plan).max_bytes
        ahead = min(12, 2 * layers)  # the unit at work and the next
        assert sweep.gathered_bytes[index] == 160_000 * ahead + 2000 * 4


def test_a_plan_without_units_is_refused():
    with pytest.raises(ValueError, match="sharding stage is 1; pass a plan of stage 3"):
        sweep_units(WORKLOAD, cluster_of(4), plan_of(1))
    with pytest.raises(ValueError, match="sizes is empty; pass at least one number of layers"):
        sweep_units(WORKLOAD, cluster_of(4), plan_of(3), sizes=[])


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
    return simulate(workload_of([1] * num_layers, ends=1000), cluster_of(4), plan)


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


GPT = gpt_workload(hidden_size=1024, num_layers=4, num_heads=8, sequence_length=256, vocab_size=1024)


def test_tensors_gathered_one_by_one_pay_a_ring_and_a_slice_for_each_rank():
    plan = Plan(data=32, sharding=Sharding(3))
    machine = cluster("dgx-a100", 32)
    flat, listed = (replace(machine, software=replace(machine.software, slice_s=each)) for each in (0.0, 1e-5))
    before, after = (simulate(GPT, machine, plan).stages[0].units[1] for machine in (flat, listed))
    tensors = len(before.unit.sizes)
    for one, other in ((before.gather, after.gather), (before.scatter[0], after.scatter[0])):
        assert other.duration_ns > one.duration_ns + tensors * 32 * 1e-5 * 1e9
        assert other.sent_bytes == pytest.approx(one.sent_bytes, rel=1e-3)


def test_nothing_is_gathered_ahead_beyond_the_limit():
    machine = cluster("dgx-a100", 32)
    size = simulate(GPT, machine, Plan(data=32, sharding=Sharding(3))).stages[0].units[1].unit.num_elements
    for live, prefetch in ((1.5 * size, 0), (2 * size, 1), (3 * size, 2), (None, 3)):
        limited = simulate(
            GPT,
            replace(machine, software=replace(machine.software, live_elements=live)),
            Plan(data=32, sharding=Sharding(3, prefetch=3)),
        )
        free = simulate(GPT, machine, Plan(data=32, sharding=Sharding(3, prefetch=prefetch)))
        assert limited.duration_s == free.duration_s
