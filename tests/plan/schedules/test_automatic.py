"""The automatic zero-bubble search: valid whatever the times and the limit, within memory, and tiled without loss."""

import random

import numpy as np
import pytest

from distlab.plan import ActionTimes, automatic, make_schedule, one_f_one_b, validate, zb_1p, zb_2p, zb_h1
from distlab.plan.schedules.automatic import can_run, find_steady, schedule_of, tile
from distlab.plan.schedules.grammar import F, I
from distlab.plan.schedules.rules import PassCosts, Rules, follow_rules
from simulator import simulate_schedule


def span_of(schedule, times):
    return round(simulate_schedule(schedule, times).steady_s * 1e9)


def random_times(rng, ranks):
    def column(low, high):
        if rng.random() < 0.4:
            return rng.uniform(low, high)
        return [rng.uniform(low, high) for _ in range(ranks)]

    return ActionTimes(column(0.2, 2), column(0.2, 2), column(0, 2), rng.choice([0.0, column(0, 0.3), column(0, 3)]))


def test_random_times_and_limits_give_valid_schedules_within_memory():
    rng = random.Random(7)
    for case in range(80):
        ranks = rng.choice([1, 2, 3, 4, 5, 8])
        microbatches = rng.choice([1, 2, ranks, 2 * ranks + 1, 4 * ranks])
        limit = rng.choice([1, 1.5, ranks / 2 + 1, ranks, 1.4 * ranks, 2 * ranks, 1000])
        held = rng.choice([0.0, 0.3, 0.7, 1.0, 1.0])
        times = random_times(rng, ranks)
        schedule = automatic(ranks, microbatches, times, max(limit, 1), held_after_input_gradient=held)
        report = validate(schedule)
        assert (report.num_ranks, report.num_microbatches) == (ranks, microbatches), case
        change = np.where(schedule.kind == F, 1.0, np.where(schedule.kind == I, held - 1, -held))
        for rank, (start, stop) in enumerate(zip(schedule.offsets[:-1], schedule.offsets[1:], strict=True)):
            assert np.cumsum(change[start:stop]).max() <= max(limit, 1) + 1e-9, (case, rank)
        if held == 1.0:
            assert max(report.peak_in_flight) <= limit, case


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 5), (2, 1), (4, 3), (4, 16), (8, 8)])
def test_unit_times_do_as_well_as_schedules_made_by_hand(ranks, microbatches):
    unit = ActionTimes(1.0, 1.0, 1.0)
    within_p, within_2p = zb_1p(ranks, microbatches), zb_2p(ranks, microbatches)
    assert span_of(within_p, unit) <= span_of(zb_h1(ranks, microbatches), unit)
    assert span_of(zb_h1(ranks, microbatches), unit) <= span_of(one_f_one_b(ranks, microbatches), unit)
    if microbatches >= 2 * ranks:
        assert span_of(within_2p, unit) == 3 * microbatches * 10**6  # no bubble at all
    assert make_schedule("zb_1p", ranks, microbatches) == within_p
    assert make_schedule("zb_2p", ranks, microbatches) == within_2p


def test_the_search_fits_the_times_and_the_memory():
    """Slow W need other orders than quick ones; more memory never makes a step longer; the unit of time is nothing."""
    slow, quick = ActionTimes(1.0, 1.0, 2.0, 0.1), ActionTimes(1.0, 1.0, 0.3, 0.1)
    assert make_schedule("zb_1p", 4, 12, times=slow) != make_schedule("zb_1p", 4, 12, times=quick)
    spans = [span_of(automatic(4, 24, quick, limit), quick) for limit in (1, 2, 3, 4, 6, 8)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > 1.5 * spans[3] > 1.5 * spans[5]
    uneven = ActionTimes([1.3, 1.0, 1.0, 1.6], [1.0, 1.0, 1.0, 1.5], [0.8, 0.6, 0.6, 1.0], 0.05)
    schedule = automatic(4, 16, uneven, 8)
    assert span_of(schedule, uneven) <= span_of(zb_h1(4, 16), uneven)
    assert schedule == automatic(4, 16, ActionTimes(*(np.asarray(column) * 1000 for column in uneven)), 8)


def test_tiled_steps_cost_what_steps_planned_whole_cost():
    """Rules applied to all micro-batches, or to a few whose steady part is repeated: the same span."""
    for ranks, lead, debt, limit in ((4, [4, 3, 2, 1], [0, 1, 2, 3], 4), (4, [8, 6, 4, 1], [0, 2, 4, 7], 8)):
        costs = PassCosts([100] * ranks, [90] * ranks, [70] * ranks, [5] * ranks)
        times = ActionTimes(100.0, 90.0, 70.0, 5.0)
        rules = Rules(lead, debt, 0.5, limit, 1.0)
        draft, whole = follow_rules(24, costs, rules), follow_rules(94, costs, rules)
        steady = next(find_steady(draft, 8))
        assert steady.period == 1
        kinds = tile(draft, steady, 70)
        assert can_run(kinds)
        tiled = schedule_of(kinds)
        assert max(validate(tiled).peak_in_flight) <= limit
        assert span_of(tiled, times) <= span_of(schedule_of(np.array(whole.kinds, np.int8)), times)
        assert span_of(tiled, times) == pytest.approx((draft.span + 70 * steady.cycle) * 1e6)


def test_long_steps_are_tiled_and_stay_within_memory():
    for limit in (5, 12):  # below p the steady state repeats only after `limit` micro-batches
        report = validate(automatic(8, 2000, ActionTimes(1.0, 0.9, 0.7, 0.03), limit))
        assert report.num_microbatches == 2000
        assert max(report.peak_in_flight) <= limit


def test_bad_input_is_refused_and_times_may_be_nothing():
    for change, message in (
        ({"memory_limit": 0.5}, "memory_limit is 0.5; a rank holds 1 micro-batch at least"),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"times": ActionTimes(-1.0, 1.0, 1.0)}, "times has forward of -1.0"),
        ({"times": ActionTimes(1.0, [1.0] * 3, 1.0)}, "times has 3 numbers of input_gradient"),
        ({"times": ActionTimes(1.0, 1.0, float("inf"))}, "times has weight_gradient of inf"),
        ({"held_after_input_gradient": 1.2}, "held_after_input_gradient is 1.2"),
    ):
        with pytest.raises(ValueError, match=message):
            automatic(**{"num_ranks": 4, "num_microbatches": 8} | change)
    assert max(validate(automatic(3, 7, ActionTimes(0.0, 0.0, 0.0), 3)).peak_in_flight) <= 3
    assert validate(automatic(3, 7, ActionTimes(1.0, 0.0, 0.0, 5.0), 6)).num_actions == 63
