"""Steps on a device that does nothing but products take what the published formulas count."""

from dataclasses import replace

import pytest

from distlab.plan import Cluster, Device, Link, Plan, Protocol
from simulator import gpt_step_flops, simulate
from simulator.validation.case import gpt

# heads, hidden, layers: Narayanan et al. 2021 (2104.04473), table 1; sequences of 2048.
SC21 = [(24, 2304, 24), (32, 4096, 36)]
# heads, hidden, layers, pipeline, stages per rank, batch, micro-batch: Korthikanti et al. 2022 (2205.05198), tables 3,
# 5; tensor 8, one replica.
FREE = Link("free", (Protocol(0.0, 1e30),))


def model(heads, hidden, layers, microbatch):
    return gpt(hidden, layers, heads, 2048, microbatch)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("plan", [Plan(), Plan(tensor=8), Plan(tensor=8, sequence_parallel=True), Plan(data=4)])
@pytest.mark.parametrize("row", SC21, ids=["1.7B", "7.5B"])
def test_products_alone_take_what_the_formula_counts(row, plan, recompute):
    """Nothing is forgotten: what is recomputed, logits and scores are in, and tensor ranks divide them."""
    heads, hidden, layers = row
    device = Device("products", 312e12, 1e30, 1e30)
    plan = replace(plan, recompute=recompute, num_microbatches=3)
    step = simulate(model(heads, hidden, layers, 4), Cluster("ideal", device, 8, 8, FREE, FREE), plan)
    flops = gpt_step_flops(hidden, layers, 2048, 51200, 3 * 4 * plan.data, recompute=recompute)
    assert step.duration_s == pytest.approx(flops / plan.world_size / 312e12, rel=1e-5)  # nanoseconds are whole
