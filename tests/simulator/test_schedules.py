"""Every schedule through the simulator: exact, within its bounds, with stragglers; memory, traces, deadlocks."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import SCHEDULES, ActionTimes, Plan, make_schedule, one_f_one_b, parse_schedule
from simulator import simulate, simulate_schedule
from tests.simulator.sharding_cases import cluster_of, workload_of

NAMES = sorted(SCHEDULES)
SEEDS = st.integers(0, 2**32 - 1)
TIMES = ActionTimes(1.0, 1.0, 1.0)


def random_schedule(generator):
    name = str(generator.choice(NAMES))
    ranks, microbatches = int(generator.integers(1, 6)), int(generator.integers(1, 13))
    stages = {"loop": int(generator.integers(1, 4)), "v": 2}.get(SCHEDULES[name].placement, 1)
    return make_schedule(name, ranks, microbatches, stages_per_rank=stages)


def random_times(generator, num_stages):
    columns = generator.integers(0, 1000, (4, num_stages)) * generator.choice([1, 1, 1, 0], (4, 1))
    return ActionTimes(*(tuple(column.tolist()) for column in columns))


@settings(deadline=None, max_examples=60)
@given(SEEDS)
def test_any_schedule_equals_a_plain_event_loop_bit_for_bit(seed):
    generator = np.random.default_rng(seed)
    schedule = random_schedule(generator)
    times = random_times(generator, schedule.num_stages)
    for slow in (1, 2):
        run = simulate_schedule(schedule, times, unit_s=1e-9, slow_ranks={0: slow})
        assert np.array_equal(run.end_ns, plain_ends(schedule, times, slow))
        assert run.duration_s >= max(*run.busy_s, run.ideal_s) - 1e-12
        assert -1e-9 <= run.bubble_fraction <= 1  # 1: computing takes no time
        assert 0 <= run.speedup <= schedule.num_ranks + 1e-9


def test_the_figures_of_a_run():
    run = simulate_schedule(one_f_one_b(4, 4), ActionTimes(1, 1, 1, 0.25))
    assert (run.work_s, run.ideal_s) == (pytest.approx(4 * 4 * 3e-3), pytest.approx(12e-3))
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
    ("text", "seconds"), [("1F0,1I0,1W0\n,\n0F0,0I0,0W0", 7), ("0F0,0B0\n,", 3), (",\n0F0,0B0", 3)]
)
def test_a_rank_with_nothing_to_do_takes_no_time(text, seconds):
    run = simulate_schedule(parse_schedule(text), ActionTimes(1, 1, (1, 5)[: 1 + text.count("1W")]))
    assert run.steady_s == pytest.approx(seconds / 1e3)


def test_a_schedule_of_ones_own_and_neighbours_on_one_rank():
    own = parse_schedule("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1")
    step = simulate(workload_of([1] * 4), cluster_of(2), Plan(pipeline=2, num_microbatches=2), schedule=own)
    names = {span.name for span in step.trace if span.kind == "send"}
    assert names == {f"{sent}{m}" for sent in ("0SEND_F", "2SEND_F", "3SEND_B", "1SEND_B") for m in (0, 1)}
    assert {span.rank for span in step.trace if span.name in ("2RECV_B0", "1SEND_B1")} == {1}
    assert step.memory.in_flight == (3, 4)


def plain_ends(schedule, times, slow):
    """The definition: an action ends its duration after its rank's previous one, and what it needs, have ended."""
    rows = [schedule.actions(rank) for rank in range(schedule.num_ranks)]
    place = {(s, k.replace("B", "I"), m): (r, step) for r, row in enumerate(rows) for step, (s, k, m) in enumerate(row)}
    columns = np.broadcast_arrays(*times, np.zeros(schedule.num_stages))[:4]
    forward, inputs, weights, handover = (column.astype(int).tolist() for column in columns)

    @cache
    def end(rank, step):
        if step < 0:
            return 0
        s, kind, m = rows[rank][step]
        backward = (s + 1, "I", m) if s + 1 < schedule.num_stages else (s, "F", m)
        need = {"F": (s - 1, "F", m), "W": (s, "I", m)}.get(kind, backward)
        arrival = 0
        if need in place:
            arrival = end(*place[need]) + (handover[need[0]] if place[need][0] != rank else 0)
        duration = {"F": forward[s], "B": inputs[s] + weights[s], "I": inputs[s], "W": weights[s]}[kind]
        return max(end(rank, step - 1), arrival) + duration * (1 if rank else slow)

    return [end(rank, step) for rank, row in enumerate(rows) for step in range(len(row))]
