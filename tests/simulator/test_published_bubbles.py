"""Zero-bubble's published bubble rates (arXiv:2401.10241v2, tables 5 and 9), from its published times."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from distlab.plan import SCHEDULES, ActionTimes, automatic, validate, zb_1p, zb_h1
from simulator import arrays_of, simulate_schedule
from simulator.pipeline.schedule_arrays import F, I

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "zero_bubble.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_zero_bubble", PATH)
benchmark = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = benchmark
SPEC.loader.exec_module(benchmark)
BUBBLE_TABLE, bubble_rate = benchmark.BUBBLE_TABLE, benchmark.bubble_rate

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
    order = arrays_of(schedule)
    change = np.where(order.kind == F, 1.0, np.where(order.kind == I, held - 1, -held))
    rows = zip(order.offsets[:-1], order.offsets[1:], strict=True)
    return max(np.cumsum(change[start:stop]).max() for start, stop in rows)


def test_long_pipelines_keep_their_bubble_small():
    """With 64 ranks x 1,024 micro-batches: within p the bubble of ZB-H1; within 2p next to none."""
    times = ActionTimes(1.0, 1.0, 1.0, 0.05)
    once = rate_of(zb_1p(64, 1024, times), times)
    assert once <= rate_of(zb_h1(64, 1024), times) + 1e-9
    assert rate_of(automatic(64, 1024, times, 128), times) < 0.003 < once
