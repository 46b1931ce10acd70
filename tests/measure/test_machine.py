"""A machine: the one that made the times is found again, and what its kernels take by kind and shape."""

import numpy as np
import pytest
import torch

from distlab import measure
from distlab.blocks.models import GPT, GPTConfig
from distlab.measure.machine import rates, speed
from distlab.measure.machine.rates import Operator
from distlab.measure.machine.speed import MESSAGE_BYTES, Observation, fit_device
from distlab.plan import Cluster, Contention, Device, Link, Plan, Protocol, Work
from simulator import simulate

CPU = torch.device("cpu")
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
        return measure.Round(rows, tuple(scale * each for each in INSIDE), Contention(1.5 * scale, 1.2))

    middle = measure.median_round([one(1.0), one(1.1), one(9.0)])
    cluster = measure.fit_cluster(middle, 4)
    assert cluster.num_devices == 4
    assert cluster.device.matmul_flops_per_s == pytest.approx(2e10 / 1.1)
    assert cluster.contention.compute_slowdown == pytest.approx(1.65)
    assert measure.fit_cluster(middle, 1).num_devices == 1, "one rank has no link to fit"


def test_nodes_are_fitted_to_two_links():
    between = tuple(2 * (2e-4 + size / 2 / 4e7) for size in MESSAGE_BYTES)  # a ring of two ranks
    measured = measure.Round(observed(), INSIDE, Contention(), between)
    cluster = measure.fit_cluster(measured, 4, num_nodes=2)
    assert (cluster.num_devices, cluster.devices_per_node) == (4, 2)
    near, far = cluster.intra_node.protocols[-1], cluster.inter_node.protocols[-1]
    assert (near.bytes_per_s, far.bytes_per_s, far.latency_s) == pytest.approx((5e9, 4e7, 2e-4), rel=1e-3)
    alone = measure.fit_cluster(measured, 2, num_nodes=2)  # a rank in each node: nothing is inside
    assert alone.intra_node.protocols == alone.inter_node.protocols == cluster.inter_node.protocols


def test_a_round_has_each_phase_and_messages_up_to_the_largest_one_to_be_predicted(ranks):
    def rounds():
        works = {}
        return speed.measure_round(CPU, works=works, largest_bytes=70_000), sorted(works)

    short, works = ranks(2).run(rounds)[0]
    assert len(short.all_reduce_s) == 3, "up to 524,288 bytes"
    assert sorted(row.what for row in short.observations) == works
    assert len(works) == 3 * len(speed.REFERENCES)
    assert min(row.seconds for row in short.observations) > 0


ALONE = Link("none", (Protocol(0.0, 1e18),))
BASE = Device("one device", 1e12, 1e11, 1e12)


def gpt_step():
    model = GPT(GPTConfig(context=16, num_layers=2, num_heads=2, hidden_size=32, tied=False))
    tokens = torch.zeros((2, 16), dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)

    def step():
        model.loss(model(tokens), tokens).backward()
        optimizer.step()

    step()
    loss = lambda: model.loss(model(tokens), tokens)  # noqa: E731
    return measure.workload_from_module(model, loss, optimizer=optimizer), measure.operators_of(step)


@pytest.mark.parametrize("behind", [False, True])
def test_the_simulator_adds_up_what_the_operators_take_or_what_the_host_takes_if_that_is_longer(behind, monkeypatch):
    workload, listed = gpt_step()
    shapes = {(one.kind, one.shape) for one in listed}
    # x W^T: 32 tokens, 32 features to query, key and value; the input's gradient, and the weight's
    assert {("NT", (32, 96, 32)), ("NN", (32, 32, 96)), ("TN", (96, 32, 32)), ("attention", (2, 2, 16, 16))} <= shapes
    assert [sum(one.kind == kind for one in listed) for kind in ("attention", "attention backward")] == [2, 2]
    each_s = {"memory": 1e-9, "NT": 3e-9}
    monkeypatch.setattr(rates, "seconds_of", lambda one, *_: each_s.get(one.kind, 2e-9) * one.amount)
    monkeypatch.setattr(rates, "operator_host_s", lambda *_: float(behind))
    device = measure.device_for(listed, workload, BASE, CPU, torch.float32)
    predicted = simulate(workload, Cluster("one", device, 1, 1, ALONE, ALONE), Plan()).duration_s
    kernels_s = sum(rates.seconds_of(one) for one in listed)
    assert predicted == pytest.approx(max(kernels_s, len(listed) * float(behind)), rel=0.02)
    assert (device.host_link_bytes_per_s, device.memory_bytes) == (BASE.host_link_bytes_per_s, BASE.memory_bytes)


def test_operators_are_timed_by_kind_and_shape_and_a_device_is_kept_and_read_again(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    with monkeypatch.context() as patch:
        patch.setattr(rates, "_seconds", lambda call, device: call() is not None)  # each call is made, and takes 1 s
        for operator, seconds in (
            (Operator("NT", (8, 4, 2), 128.0), 1.0),
            (Operator("TN", (8, 4, 2), 512.0), 4.0),  # four in a batch
            (Operator("attention", (2, 2, 16, 8), 1.0), 1.0),
            (Operator("attention backward", (2, 2, 16, 8), 1.0), 1.0),
            (Operator("memory", (), 4096.0), 1.0),
            (Operator("memory", (), 1 << 26), 4.0),  # more bytes than are timed
        ):
            assert rates.seconds_of(operator, CPU, torch.float32) == seconds, operator
    device = measure.best_device(BASE, CPU)
    assert min(device.matmul_flops_per_s, device.memory_bytes_per_s, rates.operator_host_s(CPU, torch.float32)) > 0
    assert (device.kernel_s, device.name, device.host_link_bytes_per_s > 1e6) == (0.0, BASE.name, True)
    kept = measure.Calibration(Cluster("one", device, 1, 1, ALONE, ALONE), {"a": 0.1}, 1.0, "a machine")
    kept.save(tmp_path / "preset.json")
    assert measure.load_calibration(tmp_path / "preset.json") == kept
    for content, words in (('{"cluster": 7}', "is not a calibration"), (None, "does not exist")):
        path = tmp_path / f"{words}.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=f"{words}.*run .*calibrate"):
            measure.load_calibration(path)
