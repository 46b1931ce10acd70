"""A round of measurements, fitted to a machine: the one that made the times."""

import numpy as np
import pytest
import torch

from distlab.measure import Round, fit_cluster, median_round
from distlab.measure.machine import speed
from distlab.measure.machine.speed import MESSAGE_BYTES, Observation, fit_device
from distlab.plan import Contention, Work

WORKS = [Work(1e6 * k**2, 1e5 * (7 - k) ** 2, 10 + k) for k in range(1, 7)]
INSIDE = tuple(1e-5 + size / 5e9 for size in MESSAGE_BYTES)


def observed(noise=0.0):
    """What a machine of 10 us a kernel, 2e10 FLOP/s and 5e9 bytes/s takes."""
    factors = 1 + noise * np.random.default_rng(1).standard_normal(len(WORKS))
    times = [w.num_kernels * 1e-5 + w.matmul_flops / 2e10 + w.memory_bytes / 5e9 for w in WORKS]
    return tuple(Observation("a phase", *row) for row in zip(WORKS, np.multiply(times, factors).tolist(), strict=True))


def test_the_fit_finds_the_machine_that_made_the_times():
    assert fit_device(observed()) == pytest.approx((1e-5, 2e10, 5e9))
    assert fit_device(observed(noise=0.02))[:2] == pytest.approx((1e-5, 2e10), rel=0.3)
    free = [Observation("free", w, max(w.matmul_flops / 1e10 - 1e-7 * w.num_kernels, 1e-9)) for w in WORKS]
    kernel_s, flops_per_s, bytes_per_s = fit_device(free)  # a term that would be negative is left out
    assert kernel_s == 0.0
    assert min(flops_per_s, bytes_per_s) > 0


def test_rounds_combine_by_median_and_fit_to_a_cluster():
    def one(scale):
        rows = tuple(Observation(row.what, row.work, row.seconds * scale) for row in observed())
        return Round(rows, tuple(scale * each for each in INSIDE), Contention(1.5 * scale, 1.2))

    middle = median_round([one(1.0), one(1.1), one(9.0)])
    cluster = fit_cluster(middle, 4)
    assert cluster.num_devices == 4
    assert cluster.device.matmul_flops_per_s == pytest.approx(2e10 / 1.1)
    assert cluster.contention.compute_slowdown == pytest.approx(1.65)
    assert fit_cluster(middle, 1).num_devices == 1, "one rank has no link to fit"


def test_nodes_are_fitted_to_two_links():
    between = tuple(2 * (2e-4 + size / 2 / 4e7) for size in MESSAGE_BYTES)  # a ring of two ranks
    measured = Round(observed(), INSIDE, Contention(), between)
    cluster = fit_cluster(measured, 4, num_nodes=2)
    assert (cluster.num_devices, cluster.devices_per_node) == (4, 2)
    near, far = cluster.intra_node.protocols[-1], cluster.inter_node.protocols[-1]
    assert (near.bytes_per_s, far.bytes_per_s, far.latency_s) == pytest.approx((5e9, 4e7, 2e-4), rel=1e-3)
    alone = fit_cluster(measured, 2, num_nodes=2)  # a rank in each node: nothing is inside
    assert alone.intra_node.protocols == alone.inter_node.protocols == cluster.inter_node.protocols


def test_a_round_has_each_phase_and_messages_up_to_the_largest_one_to_be_predicted(ranks):
    def rounds():
        device, works = torch.device("cpu"), {}
        return [speed.measure_round(device, works=works, largest_bytes=size) for size in (1, 1 << 20)], sorted(works)

    (short, long), works = ranks(2).run(rounds)[0]
    assert [len(short.all_reduce_s), len(long.all_reduce_s)] == [3, 4]
    assert sorted(row.what for row in short.observations) == works
    assert len(works) == 3 * len(speed.REFERENCES)
    assert min(row.seconds for row in (*short.observations, *long.observations)) > 0
