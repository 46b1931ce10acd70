"""A round of measurements, fitted to a machine: the one that made the times."""

import numpy as np
import pytest
import torch

from distlab.measure import Round, fit_cluster, median_round
from distlab.measure.machine import speed
from distlab.measure.machine.speed import MESSAGE_BYTES, Observation, fit_device
from distlab.plan import Contention, Work
from simulator import all_reduce_s

WORKS = [Work(1e6 * k**2, 1e5 * (7 - k) ** 2, 10 + k) for k in range(1, 7)]


def observed(kernel_s=1e-5, flops_per_s=2e10, bytes_per_s=5e9, noise=0.0):
    factors = 1 + noise * np.random.default_rng(1).standard_normal(len(WORKS))
    times = [w.num_kernels * kernel_s + w.matmul_flops / flops_per_s + w.memory_bytes / bytes_per_s for w in WORKS]
    return tuple(Observation("a phase", *row) for row in zip(WORKS, np.multiply(times, factors).tolist(), strict=True))


def test_a_reference_trains_on_fixed_tokens_and_is_counted_by_phase():
    reference = speed.REFERENCES[0]
    losses = []
    for _ in range(2):
        _, optimizer, loss = reference.build(torch.device("cpu"))
        loss().backward()
        optimizer.step()
        losses.append(loss().item())
    assert losses[0] == losses[1] == pytest.approx(np.log(256), rel=0.1)
    assert len(set(reference.phases)) == 3


def test_the_fit_finds_the_machine_that_made_the_times():
    assert fit_device(observed()) == pytest.approx((1e-5, 2e10, 5e9))
    assert fit_device(observed(noise=0.02))[:2] == pytest.approx((1e-5, 2e10), rel=0.3)
    free = [
        Observation("free kernels", work, max(work.matmul_flops / 1e10 - 1e-7 * work.num_kernels, 1e-9))
        for work in WORKS
    ]
    kernel_s, flops_per_s, bytes_per_s = fit_device(free)  # a term that would be negative is left out
    assert kernel_s == 0.0
    assert min(flops_per_s, bytes_per_s) > 0


def test_rounds_combine_by_median_and_fit_to_a_cluster():
    def one(scale):
        rows = tuple(Observation(row.what, row.work, row.seconds * scale) for row in observed())
        times = tuple(scale * (1e-3 + size / 1e9) for size in MESSAGE_BYTES)
        return Round(rows, times, Contention(1.5 * scale, 1.2))

    middle = median_round([one(1.0), one(1.1), one(9.0)])
    cluster = fit_cluster(middle, 4)
    assert cluster.num_devices == 4
    assert cluster.device.matmul_flops_per_s == pytest.approx(2e10 / 1.1)
    assert cluster.contention.compute_slowdown == pytest.approx(1.65)
    assert fit_cluster(middle, 1).num_devices == 1, "one rank has no link to fit"


def messages_timed():
    """Return the sizes whose all-reduces a round times, by the largest message that is to be predicted."""
    found = {}
    speed._time_reference = lambda *_: list(observed())
    speed._time_contention = lambda device: (0.9, 0.9)
    speed._time_all_reduce = lambda size, *_: timed.append(size) or 1e-4 + size / 1e9
    for largest_bytes in (1, 524_288, 524_289, 1 << 30):
        timed = []
        round_ = speed.measure_round(torch.device("cpu"), works={"counted": Work()}, largest_bytes=largest_bytes)
        found[largest_bytes] = timed, len(round_.all_reduce_s), all_reduce_s(1e6, 2, fit_cluster(round_, 2).intra_node)
    return found


def test_messages_up_to_the_largest_one_to_be_predicted_are_timed(ranks):
    for found in ranks(2).run(messages_timed):
        for largest_bytes, num_sizes in ((1, 3), (524_288, 3), (524_289, 4), (1 << 30, 5)):
            timed, length, second_s = found[largest_bytes]
            assert (timed, length) == (list(MESSAGE_BYTES[:num_sizes]), num_sizes)
            assert second_s == pytest.approx(1e-4 + 1e-3, rel=0.05), "what is not timed follows from what is"


def test_nodes_are_fitted_to_two_links():
    inside = tuple(1e-5 + size / 5e9 for size in MESSAGE_BYTES)
    between = tuple(2 * (2e-4 + size / 2 / 4e7) for size in MESSAGE_BYTES)  # a ring of two ranks
    measured = Round(observed(), inside, Contention(), between)
    cluster = fit_cluster(measured, 4, num_nodes=2)
    assert (cluster.num_devices, cluster.devices_per_node) == (4, 2)
    near, far = cluster.intra_node.protocols[-1], cluster.inter_node.protocols[-1]
    assert (near.bytes_per_s, far.bytes_per_s, far.latency_s) == pytest.approx((5e9, 4e7, 2e-4), rel=1e-3)
    alone = fit_cluster(measured, 2, num_nodes=2)  # a rank in each node: nothing is inside
    assert alone.intra_node.protocols == alone.inter_node.protocols == cluster.inter_node.protocols
