"""Every schedule through the simulator: exact, within its bounds, with stragglers; memory and traces."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import SCHEDULES, ActionTimes, Plan, Sharding, make_schedule, one_f_one_b, parse_schedule
from simulator import arrays_of, simulate, simulate_schedule
from tests.simulator.test_compiled import plain_event_loop
from tests.simulator.test_step import cluster_of, workload_of

NAMES = sorted(SCHEDULES)
SEEDS = st.integers(0, 2**32 - 1)
TIMES = ActionTimes(1.0, 1.0, 1.0)
NOT_SHARDED = Sharding()


def stages_per_rank(name, loop=2):
    return {"loop": loop, "v": 2}.get(SCHEDULES[name].placement, 1)


def random_schedule(generator):
    name = str(generator.choice(NAMES))
    ranks, microbatches = int(generator.integers(1, 6)), int(generator.integers(1, 13))
    if name == "dualpipe":
        ranks, microbatches = 2 * ranks, 2 * microbatches
    loop = int(generator.integers(1, 4))
    return make_schedule(name, ranks, microbatches, stages_per_rank=stages_per_rank(name, loop))


def random_times(generator, num_stages):
    columns = generator.integers(0, 1000, (4, num_stages)) * generator.choice([1, 1, 1, 0], (4, 1))
    return ActionTimes(*(tuple(column.tolist()) for column in columns))


@settings(deadline=None, max_examples=15)
@given(SEEDS)
def test_any_schedule_keeps_the_rules_and_the_bounds(seed):
    generator = np.random.default_rng(seed)
    for _ in range(10):  # 300 configurations
        schedule = random_schedule(generator)
        times = random_times(generator, schedule.num_stages)
        run = simulate_schedule(schedule, times, unit_s=1e-9, slow_ranks={0: 1.5})
        offsets = run.order.offsets
        first = np.zeros(len(run.start_ns), bool)
        first[offsets[:-1]] = True
        assert (run.start_ns[1:] >= run.end_ns[:-1])[~first[1:]].all()
        needs = np.flatnonzero(run.compiled.needed >= 0)
        arrives = run.end_ns[run.compiled.needed[needs]] + np.where(
            run.compiled.remote[needs], run.handover_ns[run.order.stage[run.compiled.needed[needs]]], 0
        )
        assert (run.start_ns[needs] >= arrives).all()
        assert run.duration_s >= max(run.busy_s) - 1e-12
        assert run.duration_s >= run.ideal_s - 1e-12
        assert -1e-9 <= run.bubble_fraction <= 1  # 1: computing takes no time
        assert 0 <= run.speedup <= schedule.num_ranks + 1e-9


@settings(deadline=None, max_examples=60)
@given(SEEDS)
def test_any_schedule_equals_a_plain_event_loop_bit_for_bit(seed):
    generator = np.random.default_rng(seed)
    schedule = random_schedule(generator)
    times = random_times(generator, schedule.num_stages)
    run = simulate_schedule(schedule, times, unit_s=1e-9)
    order = arrays_of(schedule)
    assert np.array_equal(run.end_ns, run.start_ns + durations(order, times))
    handover = np.array(times.communication)
    latency = np.where(run.compiled.remote, handover[order.stage[run.compiled.needed]], 0)
    assert np.array_equal(run.end_ns, plain_event_loop(order, durations(order, times), latency))


def durations(order, times):
    forward, inputs, weights = (np.array(column) for column in times[:3])
    table = np.stack([forward, inputs + weights, inputs, weights], axis=1)
    return table[order.stage, order.kind]


def test_the_figures_of_a_run():
    run = simulate_schedule(one_f_one_b(4, 4), ActionTimes(1, 1, 1, 0.25))
    assert run.work_s == pytest.approx(4 * 4 * 3e-3)
    assert run.ideal_s == pytest.approx(12e-3)
    alone = simulate_schedule(one_f_one_b(4, 4), TIMES)
    assert alone.duration_s == pytest.approx((4 + 3) * 3e-3)
    assert alone.duration_s + 2 * 3 * 0.25e-3 <= run.duration_s <= alone.duration_s + 4 * 3 * 0.25e-3
    assert run.speedup == pytest.approx(run.work_s / run.duration_s)
    assert run.bubble_fraction == pytest.approx(1 - run.ideal_s / run.duration_s)
    assert run.peak_in_flight == (4, 3, 2, 1)
    sends = [span for span in run.trace if span.lane == "send"]
    assert {span.name for span in sends} == {f"{s}SEND_F{m}" for s in range(3) for m in range(4)} | {
        f"{s}SEND_B{m}" for s in range(1, 4) for m in range(4)
    }
    assert {span.end_ns - span.start_ns for span in sends} == {250_000}
    computing = [span for span in run.trace if span.lane == "compute"]
    assert [span.name for span in computing if span.rank == 3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert run.trace.duration_s == pytest.approx(run.duration_s)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: simulate_schedule(s, ActionTimes((1, 2), 1, 1)), "2 numbers of forward; pass one, or one for each"),
        (lambda s: simulate_schedule(s, ActionTimes(1, -1, 1)), "input_gradient of -1; pass times >= 0"),
        (lambda s: simulate_schedule(s, TIMES, slow_ranks={4: 2}), r"rank 4; the pipeline has ranks 0\.\.3"),
        (lambda s: simulate_schedule(s, TIMES, slow_ranks={1: 0}), "gives rank 1 the factor 0; pass a number above 0"),
        (lambda s: step_of("one_f_one_b", schedule=s, microbatches=5), "4 ranks and 4 micro-batches; the plan has"),
        (lambda s: step_of("zb_v", layers=7), r"4 \(pipeline\) x 2 \(a rank\) = 8 stages; workload 'w' has 7 layers"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(one_f_one_b(4, 4))


def step_of(name, *, layers=8, microbatches=6, data=1, schedule=None, sharding=NOT_SHARDED, **options):
    plan = Plan(
        data=data,
        pipeline=4,
        num_microbatches=microbatches,
        schedule=name,
        stages_per_rank=stages_per_rank(name),
        bucket_bytes=10_000,
        sharding=sharding,
    )
    return simulate(workload_of(np.arange(1, layers + 1)), cluster_of(4 * data), plan, schedule=schedule, **options)


def test_a_schedule_of_ones_own_and_neighbours_on_one_rank():
    own = parse_schedule("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1")
    step = simulate(workload_of([1] * 4), cluster_of(2), Plan(pipeline=2, num_microbatches=2), schedule=own)
    names = {span.name for span in step.trace if span.kind == "send"}
    assert names == {
        f"{stage}{word}{m}"
        for stage, word in ((0, "SEND_F"), (2, "SEND_F"), (3, "SEND_B"), (1, "SEND_B"))
        for m in (0, 1)
    }
    assert {span.rank for span in step.trace if span.name in ("2RECV_B0", "1SEND_B1")} == {1}
    assert step.memory.in_flight == (3, 4)
