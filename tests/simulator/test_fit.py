import numpy as np
import pytest

from distlab.plan import Link, Protocol
from simulator import all_reduce_s
from simulator.hardware import fit
from simulator.hardware.cost import Steps

SIZES = [2**power for power in range(12, 30)]

# stas00/ml-engineering@744d01e1 network/README.md: all_reduce among 8 H200, reduced in the network; bytes, us.
H200_NVLS = (
    (32768, 39.96), (65536, 39.24), (131072, 40.08), (262144, 39.07), (524288, 38.33), (1048576, 45.95),
    (2097152, 56.88), (4194304, 68.5), (8388608, 94.39), (16777216, 133.52), (33554432, 212.88), (67108864, 338.92),
    (134217728, 584.39), (268435456, 1077.06), (536870912, 2086.48), (1073741824, 4053.39), (2147483648, 8010.01),
    (4294967296, 15887.28), (8589934592, 31484.57), (17179869184, 62340.77),
)  # fmt: skip

# The same source: nccl-tests all_reduce among 8 A100 (NVLink 3).
A100 = (
    (32768, 43.83), (65536, 46.8), (131072, 51.76), (262144, 61.38), (524288, 80.4), (1048576, 101.9),
    (2097152, 101.4), (4194304, 101.5), (8388608, 133.5), (16777216, 276.6), (33554432, 424.0), (67108864, 684.6),
    (134217728, 1327.6), (268435456, 2420.6), (536870912, 4218.4), (1073741824, 8203.9), (2147483648, 16240.0),
    (4294967296, 32136.0), (8589934592, 64074.0), (17179869184, 127997.0),
)  # fmt: skip

# vTrain@f8dda84 trace/: all_reduce among 2 A100 (NVLink 3), out of place.
A100_PAIR = (
    (1048576, 45.1), (2097152, 51.13), (4194304, 60.26), (8388608, 87.36), (16777216, 129.4), (33554432, 229.0),
    (67108864, 404.0), (134217728, 765.7), (268435456, 1454.4), (536870912, 2833.4), (1073741824, 5453.4),
)  # fmt: skip
LARGE = 64 * 2**20


def columns(rows):
    return [size for size, _ in rows], [us * 1e-6 for _, us in rows]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "in_network"])
def test_times_of_two_protocols_give_the_protocols_back(num_ranks, algorithm):
    link = Link("two", (Protocol(2e-6, 1e10), Protocol(3e-5, 2e11)))
    times = [all_reduce_s(size, num_ranks, link, algorithm) for size in SIZES]
    fitted = fit.fit_link(SIZES, times, num_ranks, algorithm)
    for found, true in zip(fitted.protocols, link.protocols, strict=True):
        assert found.latency_s == pytest.approx(true.latency_s, rel=1e-3)
        assert found.bytes_per_s == pytest.approx(true.bytes_per_s, rel=1e-3)


def test_one_line_stays_one_protocol():
    link = Link("one", (Protocol(2e-6, 1e10),))
    times = [all_reduce_s(size, 4, link) for size in SIZES]
    (protocol,) = fit.fit_link(SIZES, times, 4).protocols
    assert protocol.bytes_per_s == pytest.approx(1e10, rel=1e-6)
    assert protocol.latency_s == pytest.approx(2e-6, rel=1e-6)


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


@pytest.mark.parametrize(
    ("name", "rows", "num_ranks", "algorithm", "large_bar", "all_bar"),
    [
        ("8 H200, in network", H200_NVLS, 8, "in_network", 0.04, 0.07),
        ("2 A100, ring", A100_PAIR, 2, "ring", 0.04, 0.07),
        # Two published runs of 8 A100 differ by 10 to 18 % from 64 to 256 MiB; this one also jumps at 16 MiB.
        ("8 A100, ring", A100, 8, "ring", 0.08, 0.10),
    ],
)
def test_published_collectives_a_size_left_out(name, rows, num_ranks, algorithm, large_bar, all_bar):
    sizes, times = columns(rows)
    errors = np.abs(leave_one_size_out(sizes, times, num_ranks, algorithm))
    large = errors[np.array(sizes) >= LARGE].mean()
    print(f"{name}: {large:.1%} from 64 MiB on, {errors.mean():.1%} overall, worst {errors.max():.1%}")
    assert large <= large_bar
    assert errors.mean() <= all_bar


def test_errors_are_relative_to_what_was_measured():
    link = Link("one", (Protocol(0.0, 1e9),))
    errors = fit.relative_errors([1e9], [2.0], link, Steps(1, 1.0))
    assert errors.tolist() == [-0.5]


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
