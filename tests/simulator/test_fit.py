import numpy as np
import pytest

from distlab.plan import Link, Protocol
from simulator import all_reduce_s
from simulator.hardware import fit
from simulator.hardware.cost import Steps

SIZES = [2**power for power in range(12, 30)]

# vTrain@f8dda84 trace/: all_reduce among 2 A100 (NVLink 3), out of place.
A100_PAIR = (
    (1048576, 45.1), (2097152, 51.13), (4194304, 60.26), (8388608, 87.36), (16777216, 129.4), (33554432, 229.0),
    (67108864, 404.0), (134217728, 765.7), (268435456, 1454.4), (536870912, 2833.4), (1073741824, 5453.4),
)  # fmt: skip
LARGE = 64 * 2**20


def columns(rows):
    return [size for size, _ in rows], [us * 1e-6 for _, us in rows]


@pytest.mark.parametrize(("num_ranks", "algorithm"), [(2, "ring"), (3, "tree"), (8, "in_network")])
def test_times_of_two_protocols_give_the_protocols_back(num_ranks, algorithm):
    link = Link("two", (Protocol(2e-6, 1e10), Protocol(3e-5, 2e11)))
    times = [all_reduce_s(size, num_ranks, link, algorithm) for size in SIZES]
    fitted = fit.fit_link(SIZES, times, num_ranks, algorithm)
    for found, true in zip(fitted.protocols, link.protocols, strict=True):
        assert found.latency_s == pytest.approx(true.latency_s, rel=1e-3)
        assert found.bytes_per_s == pytest.approx(true.bytes_per_s, rel=1e-3)


def test_one_disturbed_measurement_does_not_move_the_line():
    times = [1e-5 + size / 1e9 for size in SIZES]
    times[9] *= 5
    link = fit.fit_steps(SIZES, times, Steps(1, 1.0))
    assert link.protocols[-1].bytes_per_s == pytest.approx(1e9, rel=0.02)


def leave_one_size_out(sizes, times, num_ranks, algorithm):
    """Predict each size from a link fitted to all the others; return the relative errors."""
    errors = []
    for size, time in zip(sizes, times, strict=True):
        others = [(other, measured) for other, measured in zip(sizes, times, strict=True) if other != size]
        link = fit.fit_link(*zip(*others, strict=True), num_ranks, algorithm)
        errors.append(all_reduce_s(size, num_ranks, link, algorithm) / time - 1.0)
    return np.array(errors)


def test_published_collectives_a_size_left_out():
    sizes, times = columns(A100_PAIR)
    errors = np.abs(leave_one_size_out(sizes, times, 2, "ring"))
    assert errors[np.array(sizes) >= LARGE].mean() <= 0.04
    assert errors.mean() <= 0.07


@pytest.mark.parametrize(
    ("sizes", "times", "num_ranks"),
    [
        ([1, 2], [1.0], 2),
        ([], [], 2),
        ([8], [1.0], 2),
        ([8, 8], [1.0, 1.1], 2),
        ([1, 2], [1.0, float("nan")], 2),
        ([1, 2], [1.0, 0.0], 2),
        ([0, 2], [1.0, 2.0], 2),
        ([1, 2], [1.0, 2.0], 1),
    ],
)
def test_measurements_that_fit_no_link_are_refused(sizes, times, num_ranks):
    with pytest.raises(ValueError, match=r"size|rank"):
        fit.fit_link(sizes, times, num_ranks)
