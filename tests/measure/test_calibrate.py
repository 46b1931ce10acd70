import numpy as np
import pytest
import torch

from distlab.measure import Round, fit_cluster, median_round
from distlab.measure.machine import speed
from distlab.measure.machine.speed import MESSAGE_BYTES, Observation, fit_device
from distlab.plan import Contention, Work
from simulator import all_reduce_s

WORKS = [Work(1e6 * k**2, 1e5 * (7 - k) ** 2, 10 + k) for k in range(1, 7)]


def observed(kernel_s, flops_per_s, bytes_per_s, noise=0.0):
    generator = np.random.default_rng(1)
    return [
        Observation(
            f"work {k}",
            work,
            (work.num_kernels * kernel_s + work.matmul_flops / flops_per_s + work.memory_bytes / bytes_per_s)
            * (1 + noise * generator.standard_normal()),
        )
        for k, work in enumerate(WORKS)
    ]


def test_the_fit_finds_the_machine_that_made_the_times():
    assert fit_device(observed(1e-5, 2e10, 5e9)) == pytest.approx((1e-5, 2e10, 5e9))


def test_the_fit_is_close_under_noise():
    kernel_s, flops_per_s, bytes_per_s = fit_device(observed(1e-5, 2e10, 5e9, noise=0.02))
    assert kernel_s == pytest.approx(1e-5, rel=0.3)
    assert flops_per_s == pytest.approx(2e10, rel=0.3)


def test_a_term_that_would_be_negative_is_left_out():
    rows = [
        Observation("free kernels", work, max(work.matmul_flops / 1e10 - 1e-7 * work.num_kernels, 1e-9))
        for work in WORKS
    ]
    kernel_s, flops_per_s, bytes_per_s = fit_device(rows)
    assert kernel_s == 0.0
    assert flops_per_s > 0
    assert bytes_per_s > 0


def test_rounds_combine_by_median_and_fit_to_a_cluster():
    def one(scale):
        rows = [Observation(row.what, row.work, row.seconds * scale) for row in observed(1e-5, 2e10, 5e9)]
        times = tuple(scale * (1e-3 + size / 1e9) for size in MESSAGE_BYTES)
        return Round(tuple(rows), times, Contention(1.5 * scale, 1.2))

    cluster = fit_cluster(median_round([one(1.0), one(1.1), one(9.0)]), 4)
    assert cluster.num_devices == 4
    assert cluster.device.matmul_flops_per_s == pytest.approx(2e10 / 1.1)
    assert cluster.contention.compute_slowdown == pytest.approx(1.65)


def messages_timed(largest_bytes):
    """Return the sizes whose all-reduces a round times, with steps and all-reduces that take a time by their size."""
    timed = []
    speed._time_reference = lambda *_: observed(1e-5, 2e10, 5e9)
    speed._time_contention = lambda device: (0.9, 0.9)
    speed._time_all_reduce = lambda size, *_: timed.append(size) or 1e-4 + size / 1e9
    device, named = torch.device("cpu"), {} if largest_bytes is None else {"largest_bytes": largest_bytes}
    found = speed.measure_round(device, works={"counted": Work()}, **named)
    link = fit_cluster(found, 2).intra_node
    return timed, len(found.all_reduce_s), all_reduce_s(1e6, 2, link)


@pytest.mark.parametrize(("largest_bytes", "num_sizes"), [(1, 3), (524_288, 3), (524_289, 4), (1 << 30, 5), (None, 5)])
def test_messages_up_to_the_largest_one_to_be_predicted_are_timed(ranks, largest_bytes, num_sizes):
    for timed, length, second_s in ranks(2).run(messages_timed, largest_bytes):
        assert timed == list(MESSAGE_BYTES[:num_sizes])
        assert length == num_sizes
        assert second_s == pytest.approx(1e-4 + 1e-3, rel=0.05), "what is not timed follows from what is"


def test_one_rank_has_no_link_to_fit():
    measured = Round(tuple(observed(1e-5, 2e10, 5e9)), (1e-5,) * len(MESSAGE_BYTES), Contention())
    assert fit_cluster(measured, 1).num_devices == 1


def test_nodes_are_fitted_to_two_links():
    inside = tuple(1e-5 + size / 5e9 for size in MESSAGE_BYTES)
    between = tuple(2 * (2e-4 + size / 2 / 4e7) for size in MESSAGE_BYTES)  # a ring of two ranks
    measured = Round(tuple(observed(1e-5, 2e10, 5e9)), inside, Contention(), between)
    cluster = fit_cluster(measured, 4, num_nodes=2)
    assert (cluster.num_devices, cluster.devices_per_node) == (4, 2)
    assert cluster.intra_node.protocols[-1].bytes_per_s == pytest.approx(5e9, rel=1e-3)
    assert cluster.inter_node.protocols[-1].bytes_per_s == pytest.approx(4e7, rel=1e-3)
    assert cluster.inter_node.protocols[-1].latency_s == pytest.approx(2e-4, rel=1e-3)
    alone = fit_cluster(measured, 2, num_nodes=2)  # a rank in each node: nothing is inside
    assert alone.intra_node.protocols == alone.inter_node.protocols == cluster.inter_node.protocols
