"""Leaving the steady part out and putting it back changes no nanosecond, and is not done where it would."""

import numpy as np
import pytest

import simulator.steady as steady
from distlab.plan.schedules import ActionTimes, make_schedule, parse_schedule
from simulator.compiled import CompiledOrder
from simulator.orders import order_of
from simulator.pipeline import forget_orders, simulate_schedule

CASES = {
    "naive": (4, 96),
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


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_out_and_put_back_is_exact(name, monkeypatch):
    put_back = []
    unfold = steady.Fold.unfold

    def counted(self, end_ns):
        put_back.append((found := unfold(self, end_ns)) is not None)
        return found

    monkeypatch.setattr(steady.Fold, "unfold", counted)
    schedule = make_schedule(name, *CASES[name])
    folded = steady.fold(order_of(schedule))
    assert folded is not None
    assert steady.WORTH * len(folded.order.kind) <= len(schedule)
    for times in many_times(schedule.num_stages, seed=len(schedule)):
        run = simulate_schedule(schedule, times, unit_s=1e-9)
        assert np.array_equal(run.end_ns, whole_run(schedule, times))
    assert sum(put_back) >= len(put_back) // 2, "most runs are spared"


@pytest.mark.parametrize("name", ["gpipe", "looped_bfs"])
def test_where_no_beat_repeats_nothing_is_left_out(name):
    assert steady.fold(order_of(make_schedule(name, 4, 96))) is None


def simulated_ends(schedule, times):
    return simulate_schedule(schedule, times, unit_s=1e-9).end_ns


def outcome(run, schedule):
    """The ends, or the words of the error."""
    try:
        return run(schedule, EQUAL)
    except ValueError as error:
        return str(error)


def test_a_schedule_of_another_order_is_not_taken_for_a_steady_one():
    """Whatever is swapped, doubled or shifted somewhere, the ends or the error are those of the whole order."""
    draw = np.random.default_rng(0)
    text = str(make_schedule("one_f_one_b", 3, 64)).splitlines()
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
        left_out += steady.fold(order_of(schedule)) is not None
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
        assert (steady.fold(order_of(schedule)) is None) == is_left_alone
        for times in many_times(2, seed=ahead):
            assert np.array_equal(simulate_schedule(schedule, times, unit_s=1e-9).end_ns, whole_run(schedule, times))
