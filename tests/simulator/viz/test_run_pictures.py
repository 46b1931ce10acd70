"""Pictures of runs and of sweeps: costs, where the time goes, when compression pays, with words that say the same."""

import numpy as np
import pytest
from picture_facts import with_gid

from distlab.plan import Plan
from simulator import (
    Failures,
    cluster,
    gpt_workload,
    simulate,
    with_bandwidth,
)
from simulator.viz import (
    draw_goodput,
)

MACHINE, PLAN = cluster("dgx-a100"), Plan(2, 2, 8)
FAILURES = Failures("llama-3-all", restart_s=600)


def line(figure, gid):
    (found,) = with_gid(figure, gid)
    return found.get_xdata(), found.get_ydata()


def test_goodput_is_computed_drawn_and_split_into_parts():
    figure = draw_goodput(FAILURES, 16_384, 30.0).figure
    intervals, useful = line(figure, "computed")
    tried, drawn = line(figure, "drawn")
    assert np.interp(np.log(tried), np.log(intervals), useful) == pytest.approx(drawn, abs=0.02)
    best = FAILURES.goodput(16_384, 30.0)
    assert line(figure, "chosen")[0][0] == best.interval_s
    assert useful.max() == pytest.approx(best.useful, abs=1e-3)


WORKLOAD = gpt_workload(hidden_size=128, num_layers=4, num_heads=4, sequence_length=64, vocab_size=500)
LAPTOP = with_bandwidth(cluster("laptop", 4), Plan(data=4), 5e8)


def test_the_best_bucket_size_lies_between_too_small_and_too_large():
    each = WORKLOAD.gradient_bytes
    plans = [Plan(data=4, bucket_bytes=size, first_bucket_bytes=size) for size in (each // 1000, each // 10, each)]
    small, middle, large = (simulate(WORKLOAD, LAPTOP, plan) for plan in plans)
    assert middle.duration_s < min(small.duration_s, large.duration_s)
    assert len(small.stages[0].buckets) > len(middle.stages[0].buckets) > len(large.stages[0].buckets)
