"""Zero-bubble's published bubble rates (arXiv:2401.10241v2, tables 5 and 9), from its published times."""

import numpy as np
import pytest

from distlab.plan import SCHEDULES, automatic, validate, zb_1p, zb_h1
from simulator import order_of, simulate_schedule
from simulator.pipeline.simulate_schedule import ActionTimes, F, I
from simulator.published_bubbles import BUBBLE_TABLE, bubble_rate

ROUNDING = 0.00005 + 1e-9


def rate_of(schedule, times):
    return bubble_rate(simulate_schedule(schedule, times))


@pytest.mark.parametrize("cell", BUBBLE_TABLE, ids=lambda cell: f"{cell.model}-{cell.microbatches}")
def test_rates_of_the_tables(cell):
    """Schedules made by hand have the printed rate to its four decimals; the searched ones that, or less."""
    size, rates = (cell.ranks, cell.microbatches), cell.rates
    for name in {"one_f_one_b", "zb_h1", "zb_h2"} & set(rates):
        assert rate_of(SCHEDULES[name].make(*size), cell.times) == pytest.approx(rates[name], abs=ROUNDING), name
    schedule = zb_1p(*size, cell.times)
    assert max(validate(schedule).peak_in_flight) <= cell.ranks
    assert rate_of(schedule, cell.times) <= rates["zb_1p"] + 0.0001
    if "zb_2p" in rates:
        held = cell.held_after_input_gradient
        schedule = automatic(*size, cell.times, 2 * cell.ranks, held_after_input_gradient=held)
        assert memory_peak(schedule, held) <= 2 * cell.ranks + 1e-9
        assert rate_of(schedule, cell.times) <= rates["zb_2p"] + 0.0001


def memory_peak(schedule, held):
    order = order_of(schedule)
    change = np.where(order.kind == F, 1.0, np.where(order.kind == I, held - 1, -held))
    rows = zip(order.offsets[:-1], order.offsets[1:], strict=True)
    return max(np.cumsum(change[start:stop]).max() for start, stop in rows)


def test_long_pipelines_keep_their_bubble_small():
    """With 64 ranks x 1,024 micro-batches: within p the bubble of ZB-H1; within 2p next to none."""
    times = ActionTimes(1.0, 1.0, 1.0, 0.05)
    once = rate_of(zb_1p(64, 1024, times), times)
    assert once <= rate_of(zb_h1(64, 1024), times) + 1e-9
    assert rate_of(automatic(64, 1024, times, 128), times) < 0.003 < once
