"""Records: checked fields, sums, and errors that say which field and what to pass."""

from dataclasses import FrozenInstanceError, replace

import pytest

from distlab.plan import Cluster, Contention, Device, Layer, Link, Plan, Protocol, Work, Workload
from distlab.plan.require import changed

LINK = Link("wire", (Protocol(1e-6, 1e9),))
CPU = Device("cpu", 1e9, 1e9, 1e9)
LAYER = Layer("linear", (12, 4), Work(1, 2, 3), Work(1), Work(1))


def test_sums():
    assert Work(1, 2, 3) + Work(10, 20, 30) == Work(11, 22, 33)
    workload = Workload("two layers", (LAYER, LAYER), bytes_per_parameter=2)
    assert (LAYER.num_parameters, workload.num_parameters, workload.gradient_bytes) == (16, 32, 64)
    assert Plan(data=2, pipeline=3).world_size == 6
    assert Plan(pipeline=3, schedule="interleaved", stages_per_rank=4).world_size == 3
    assert Plan(pipeline=3, schedule="v_half", stages_per_rank=2).world_size == 3


def test_a_changed_record_equals_a_replaced_one_and_leaves_the_first():
    other = changed(LAYER, name="other", forward=Work(5))
    assert other == replace(LAYER, name="other", forward=Work(5))
    assert (LAYER.name, LAYER.forward) == ("linear", Work(1, 2, 3))
    with pytest.raises(FrozenInstanceError):
        other.name = "third"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Work(matmul_flops=-1), "Work: matmul_flops is -1"),
        (lambda: Work(memory_bytes=float("nan")), "memory_bytes is nan"),
        (lambda: Workload("empty", ()), "'empty' has no layers"),
        (lambda: Workload("w", (LAYER,), samples=0), "samples is 0; pass a whole number"),
        (lambda: Device("d", 0, 1, 1), "Device 'd': matmul_flops_per_s is 0"),
        (lambda: Device("d", 1, 1, 1, kernel_s=-1), "kernel_s is -1"),
        (lambda: Protocol(-1, 1), "latency_s is -1"),
        (lambda: Link("l", ()), "Link 'l' has no protocol"),
        (lambda: Contention(0.5), r"compute_slowdown is 0.5; pass 1.0"),
        (lambda: Cluster("c", CPU, 6, 4, LINK, LINK), "6 devices do not fill nodes of 4; use a multiple of 4"),
        (lambda: Cluster("c", CPU, 4, 4, LINK, LINK, num_cores=0), "num_cores"),
        (lambda: Plan(data=0), "Plan: data is 0; pass a whole number of at least 1"),
        (lambda: Plan(pipeline=True), "pipeline is True"),
        (lambda: Plan(schedule="zigzag"), "schedule is 'zigzag'; choose one of naive, gpipe, one_f_one_b"),
        (lambda: Plan(schedule="dualpipe"), "schedule is 'dualpipe'; choose one of"),  # two copies of the model
        (lambda: Plan(schedule="zb_v"), "zb_v needs 2 stages per rank, got stages_per_rank=1; pass stages_per_rank=2"),
        (lambda: Plan(cut="size"), "cut is 'size'; choose one of time, blocks"),
        (lambda: Device("d", 1, 1, 1, multiprocessors=0), "multiprocessors is 0"),
        (lambda: Link("l", (Protocol(0.0, 1e9, 1e6),)), "its last protocol ends at 1000000.0 bytes"),
        (lambda: Link("l", (Protocol(0.0, 1e9),), start_s=-1.0), "start_s is -1.0"),
        (lambda: Protocol(0.0, 1e9, 0.0), "most_bytes is 0.0"),
        (lambda: Plan(stages_per_rank=2), "one_f_one_b needs 1 stage per rank, got stages_per_rank=2; .* interleaved"),
        (lambda: Plan(schedule="interleaved", stages_per_rank=0), "stages_per_rank is 0; pass a whole number"),
        (lambda: Plan(gradient_sync="never"), "gradient_sync is 'never'; choose one of per_parameter"),
    ],
)
def test_errors_name_the_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()
