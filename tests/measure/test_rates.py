"""Rates by kind and shape: what is listed, how it is priced, and that the simulator adds it up to the same."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from distlab.blocks.models import GPT, GPTConfig
from distlab.measure import (
    Calibration,
    Rates,
    device_for,
    load_calibration,
    measure_rates,
    operators_of,
    workload_from_module,
)
from distlab.measure.machine.rates import LAYOUTS, Operator, best_device
from distlab.plan import Cluster, Device, Link, Plan, Protocol
from simulator import simulate

SIZES = (16, 64, 256)
ALONE = Link("none", (Protocol(0.0, 1e18),))
BASE = Device("one device", 1e12, 1e11, 1e12)


def made(operator_host_s=0.0):
    """Rates with a known law: a product's rate is m x n x k to the power of a third."""
    grid = tuple(float(m * n * k) ** (1 / 3) for m, n, k in product(SIZES, repeat=3))
    both = {"attention": (1e6, 2e6), "attention backward": (5e5, 1e6)}
    return Rates(
        "float32",
        SIZES,
        dict.fromkeys(LAYOUTS, grid),
        (16, 64),
        both,
        (1024, 4096),
        (1e-3, 4e-3),
        operator_host_s,
        2e9,
        1e9,
    )


def gpt_step():
    model = GPT(GPTConfig(context=16, num_layers=2, num_heads=2, hidden_size=32, tied=False))
    tokens = torch.zeros((2, 16), dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)

    def loss():
        return model.loss(model(tokens), tokens)

    def step():
        loss().backward()
        optimizer.step()

    return model, loss, optimizer, step


def test_operators_are_priced_at_grid_points_between_them_and_beyond():
    rates = made()
    assert rates.seconds(Operator("NT", (16, 16, 16), 8192.0)) == pytest.approx(8192 / 16)
    middle = (16 * 64 * 256) ** (1 / 3)
    assert rates.seconds(Operator("TN", (256, 16, 64), 1.0)) == pytest.approx(1 / middle)
    low, high = 16.0, (16 * 16 * 64) ** (1 / 3)
    assert rates.seconds(Operator("NN", (16, 16, 32), 1.0)) == pytest.approx(2 / (low + high))
    assert rates.seconds(Operator("NN", (1, 16, 16), 1.0)) == pytest.approx(1 / 16), "beyond the grid the edge holds"
    assert rates.seconds(Operator("memory", (), 2048.0)) == pytest.approx(2e-3)
    assert rates.seconds(Operator("memory", (), 8192.0)) == pytest.approx(8e-3), "the last rate goes on"
    assert rates.seconds(Operator("attention", (64,), 4e6)) == pytest.approx(2.0)


def test_every_product_of_a_step_is_listed_with_its_shape_and_layout():
    _, _, _, step = gpt_step()
    found = operators_of(step)
    shapes = {(one.kind, one.shape) for one in found if one.kind in LAYOUTS}
    assert ("NT", (32, 96, 32)) in shapes, "x W^T: 32 tokens, 32 features to query, key and value"
    assert ("NN", (32, 32, 96)) in shapes, "the input's gradient"
    assert ("TN", (96, 32, 32)) in shapes, "the weight's gradient"
    assert sum(one.kind == "attention" for one in found) == 2
    assert sum(one.kind == "attention backward" for one in found) == 2


@pytest.mark.parametrize("behind", [False, True])
def test_the_simulator_adds_up_what_the_operators_take_or_what_the_host_takes_if_that_is_longer(behind):
    model, loss, optimizer, step = gpt_step()
    step()
    workload = workload_from_module(model, loss, optimizer=optimizer)
    listed = operators_of(step)
    rates = made(1.0 if behind else 0.0)
    device = device_for(rates, listed, workload, BASE)
    predicted = simulate(workload, Cluster("one", device, 1, 1, ALONE, ALONE), Plan()).duration_s
    kernels_s = sum(map(rates.seconds, listed))
    assert predicted == pytest.approx(max(kernels_s, len(listed) * rates.operator_host_s), rel=0.02)
    assert device.host_link_bytes_per_s == 1e9
    assert device.memory_bytes == BASE.memory_bytes


def test_rates_are_measured_kept_and_read_again(tmp_path):
    torch.set_num_threads(1)
    rates = measure_rates(torch.device("cpu"))
    assert rates.precision == "float32"
    assert len(rates.matmul["NN"]) == len(rates.sizes) ** 3
    assert all(rate > 0 for table in (*rates.matmul.values(), *rates.attention.values()) for rate in table)
    assert rates.operator_host_s > 0
    cluster = Cluster("one", best_device(rates, BASE), 1, 1, ALONE, ALONE)
    assert cluster.device.matmul_flops_per_s == max(max(table) for table in rates.matmul.values())
    assert cluster.device.kernel_s == 0.0
    kept = Calibration(cluster, {"a": 0.1}, 1.0, "a machine", (made(), rates))
    kept.save(tmp_path / "preset.json")
    assert load_calibration(tmp_path / "preset.json") == kept
    replace(kept, rates=()).save(tmp_path / "old.json")
    assert load_calibration(tmp_path / "old.json").rates == ()
