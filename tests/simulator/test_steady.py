"""Leaving the steady part out and putting it back changes no nanosecond, and is not done where it would."""

import numpy as np
import pytest

import simulator.pipeline.steady as steady
from distlab.plan import ActionTimes, make_schedule, parse_schedule
from simulator import simulate_schedule
from simulator.pipeline.compiled import CompiledOrder
from simulator.pipeline.folds import Fold
from simulator.pipeline.schedule_arrays import order_of
from simulator.pipeline.simulate_schedule import forget_orders

CASES = {
    "naive": (4, 96),
    "gpipe": (4, 96),
    "looped_bfs": (4, 96),
    "one_f_one_b": (4, 96),
    "interleaved": (3, 96),
    "zb_h1": (4, 128),
    "zb_h2": (4, 128),
    "interleaved_zero_bubble": (3, 96),
    "v_half": (4, 96),
    "v_min": (4, 96),
}
EQUAL = ActionTimes(100.0, 100.0, 100.0, 3.0)


@pytest.fixture(autouse=True)
def small_orders_too(monkeypatch):
    monkeypatch.setattr(steady, "SMALL", 0)
    forget_orders()
    yield
    forget_orders()


def many_times(num_stages, seed):
    """Equal stages, one slow stage, and all different."""
    draw = np.random.default_rng(seed)
    yield EQUAL
    yield ActionTimes(130.0, 90.0, 70.0, 10.0)
    yield EQUAL._replace(forward=tuple(100.0 + 40 * (stage == 1) for stage in range(num_stages)))
    for _ in range(3):
        yield ActionTimes(*(tuple(column.tolist()) for column in draw.integers(0, 300, (4, num_stages))))


def whole_run(schedule, times):
    """The ends of all actions, with nothing left out."""
    columns = np.broadcast_arrays(*times, np.zeros(schedule.num_stages))[:4]
    forward, inputs, weights, handover = (column.astype(np.int64) for column in columns)
    table = np.stack([forward, inputs + weights, inputs, weights], axis=1)
    return CompiledOrder(order_of(schedule)).run_by_stage(table, handover)


def folds_of(schedule):
    """What is tried, likeliest first."""
    order = order_of(schedule)
    found = [steady.fold(order, period) for period in steady.likely_periods(order)]
    return [each for each in found if each is not None]


@pytest.fixture
def put_back(monkeypatch):
    """The folds of which beats were put back."""
    found, unfold = [], Fold.unfold

    def noted(self, duration_ns, end_ns):
        whole = unfold(self, duration_ns, end_ns)
        found.extend([] if whole is None else [self])
        return whole

    monkeypatch.setattr(Fold, "unfold", noted)
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_out_and_put_back_is_exact(name, put_back):
    schedule = make_schedule(name, *CASES[name])
    folds = folds_of(schedule)
    assert folds
    assert all(steady.WORTH * len(each.left.order.kind) <= len(schedule) for each in folds)
    runs = 0
    for times in many_times(schedule.num_stages, seed=len(schedule)):
        run = simulate_schedule(schedule, times, unit_s=1e-9)
        expected = whole_run(schedule, times)
        assert np.array_equal(run.end_ns, expected)
        again = simulate_schedule(schedule, times, unit_s=1e-9, slow_ranks={0: 1.0})  # goes through the whole order
        assert np.array_equal(run.start_ns, again.start_ns)
        runs += 1
    needed = 2 if name in ("gpipe", "looped_bfs") else runs // 2  # parts repeat where all stages take as long
    assert len(put_back) >= needed, "most runs are spared"


def test_a_part_that_waits_for_an_earlier_one_is_run_whole(put_back):
    """Breadth-first: rank 0's second stage needs what the last rank made of the first one a whole part ago."""
    schedule = make_schedule("looped_bfs", 4, 96)
    for communication, spared in ((3.0, True), (100.0, True), (600.0, False), (5000.0, False)):
        put_back.clear()
        times = EQUAL._replace(communication=communication)
        assert np.array_equal(simulate_schedule(schedule, times, unit_s=1e-9).end_ns, whole_run(schedule, times))
        assert bool(put_back) == spared


def test_a_wave_that_goes_round_some_of_the_ranks(put_back):
    """V-Min repeats after some beats that neither one nor the number of ranks is a multiple of."""
    schedule = make_schedule("v_min", 8, 256)
    run = simulate_schedule(schedule, EQUAL, unit_s=1e-9)
    assert np.array_equal(run.end_ns, whole_run(schedule, EQUAL))
    assert [each.period for each in put_back] == [5]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_where_no_beat_repeats_on_all_ranks_nothing_is_left_out(name):
    assert not folds_of(make_schedule(name, 4, 96))


def simulated_ends(schedule, times):
    return simulate_schedule(schedule, times, unit_s=1e-9).end_ns


def outcome(run, schedule):
    """The ends, or the words of the error."""
    try:
        return run(schedule, EQUAL)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "gpipe", "looped_bfs"])
def test_a_schedule_of_another_order_is_not_taken_for_a_steady_one(name):
    """Whatever is swapped, doubled or shifted somewhere, the ends or the error are those of the whole order."""
    draw = np.random.default_rng(0)
    text = str(make_schedule(name, 3, 64)).splitlines()
    left_out = 0
    for case in range(60):
        lines = [line.split(",") for line in text]
        row = lines[case % 3]
        place, other = draw.integers(0, len(row), 2)
        if case % 2:
            row[place], row[other] = row[other], row[place]
        else:
            row[place] = row[other]
        schedule = parse_schedule("\n".join(",".join(line) for line in lines))
        left_out += bool(folds_of(schedule))
        expected, found = (outcome(run, schedule) for run in (whole_run, simulated_ends))
        assert np.array_equal(expected, found) if isinstance(expected, np.ndarray) else expected == found
    assert left_out < 60


def test_what_is_needed_from_far_away_is_left_alone():
    """Rank 0 is `ahead` micro-batches ahead: what rank 1 needs lies that many beats back."""
    num = 160
    for ahead, is_left_alone in ((2, False), (30, True)):
        warm = [f"0F{k}" for k in range(ahead)]
        pairs = [f"0F{k},0B{k - ahead}" for k in range(ahead, num)]
        drain = [f"0B{k}" for k in range(num - ahead, num)]
        second = [f"1F{k},1B{k}" for k in range(num)]
        schedule = parse_schedule(",".join([*warm, *pairs, *drain]) + "\n" + ",".join(second))
        assert (not folds_of(schedule)) == is_left_alone
        for times in many_times(2, seed=ahead):
            assert np.array_equal(simulate_schedule(schedule, times, unit_s=1e-9).end_ns, whole_run(schedule, times))
