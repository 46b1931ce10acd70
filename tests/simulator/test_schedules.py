"""Every schedule through the simulator: exact, within its bounds, with stragglers; memory, traces, deadlocks."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import SCHEDULES, ActionTimes, Plan, make_schedule, one_f_one_b, parse_schedule
from simulator import arrays_of, simulate, simulate_schedule
from simulator.pipeline.schedule_arrays import F, W
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
    assert names == {
        f"{stage}{word}{m}"
        for stage, word in ((0, "SEND_F"), (2, "SEND_F"), (3, "SEND_B"), (1, "SEND_B"))
        for m in (0, 1)
    }
    assert {span.rank for span in step.trace if span.name in ("2RECV_B0", "1SEND_B1")} == {1}
    assert step.memory.in_flight == (3, 4)


def plain_event_loop(order, duration, latency):
    """The definition, one action at a time: max(rank's previous, what it needs + latency) + duration."""
    place = {}
    for action, (kind, stage, mb) in enumerate(zip(order.kind, order.stage, order.microbatch, strict=True)):
        place["FBIW"[kind].replace("B", "I"), int(stage), int(mb)] = action
    last_stage = int(order.stage.max())
    end = [None] * len(order.kind)
    pointer = [int(first) for first in order.offsets[:-1]]
    free = [0] * order.num_ranks
    rank_of = np.repeat(np.arange(order.num_ranks), np.diff(order.offsets))
    while any(at < stop for at, stop in zip(pointer, order.offsets[1:], strict=True)):
        moved = False
        for rank in range(order.num_ranks):
            while pointer[rank] < order.offsets[rank + 1]:
                action = pointer[rank]
                kind, stage, mb = order.kind[action], int(order.stage[action]), int(order.microbatch[action])
                if kind == F:
                    key = ("F", stage - 1, mb) if stage else None
                elif kind == W:
                    key = ("I", stage, mb)
                else:
                    key = ("I", stage + 1, mb) if stage < last_stage else ("F", stage, mb)
                start = free[rank]
                if key is not None:
                    needed = place[key]
                    if end[needed] is None:
                        break
                    start = max(start, end[needed] + (int(latency[action]) if rank_of[needed] != rank else 0))
                end[action] = free[rank] = start + int(duration[action])
                pointer[rank] += 1
                moved = True
        assert moved, "deadlock"
    return np.array(end)


def plain_ends(schedule, times, slow=1):
    """The ends of all actions by the plain event loop; rank 0 may be slow."""
    order = arrays_of(schedule)
    columns = np.broadcast_arrays(*times, np.zeros(schedule.num_stages))[:4]
    forward, inputs, weights, handover = (column.astype(np.int64) for column in columns)
    table = np.stack([forward, inputs + weights, inputs, weights], axis=1)
    sender = np.clip(order.stage + np.where(np.isin(order.kind, (1, 2)), 1, -1), 0, schedule.num_stages - 1)
    duration = table[order.stage, order.kind]
    duration[: order.offsets[1]] *= slow
    return plain_event_loop(order, duration, handover[sender])


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_a_schedule_that_differs_somewhere_runs_as_it_is_or_is_refused(name):
    """Swap or double any two actions of a rank: the ends are a plain loop's, or the error names the fault."""
    draw, equal = np.random.default_rng(0), ActionTimes(100.0, 100.0, 100.0, 3.0)
    text = str(make_schedule(name, 3, 64)).splitlines()
    refused = 0
    for case in range(60):
        lines = [line.split(",") for line in text]
        row = lines[case % 3]
        place, other = draw.integers(0, len(row), 2)
        if case % 2:
            row[place], row[other] = row[other], row[place]
        else:
            row[place] = row[other]
        schedule = parse_schedule("\n".join(",".join(line) for line in lines))
        said, ends = "", None
        try:
            ends = simulate_schedule(schedule, equal, unit_s=1e-9).end_ns
        except ValueError as error:
            said = str(error)
            refused += 1
        if ends is None:
            assert any(fault in said for fault in ("deadlock", "twice", "in no rank's order"))
        else:
            assert np.array_equal(ends, plain_ends(schedule, equal))
    assert 0 < refused < 60
