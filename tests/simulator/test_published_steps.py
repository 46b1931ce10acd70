"""Published steps of tensor and pipeline parallelism, predicted from data sheets alone.

No error is bounded here: kernels reach less than a data sheet's peak. What is asserted is what must be so: nothing runs
faster than its matrix products at the peak, and of two ways the published one is faster in the prediction too.
"""

from dataclasses import replace

import pytest

from distlab.plan.records import Plan
from simulator import cluster, gpt_step_flops, gpt_workload, simulate

# heads, hidden, layers, tensor, pipeline, data, batch, seconds: Narayanan et al. 2021 (2104.04473), table 1, derived
# from its TFLOP/s by equation 3; full recompute, sequences of 2048, a vocabulary of 51200.
SC21 = [
    (24, 2304, 24, 1, 1, 32, 512, 3.528),
    (32, 4096, 36, 4, 1, 32, 512, 3.696),
    (64, 8192, 48, 8, 2, 32, 1536, 14.453),
]
# heads, hidden, layers, pipeline, batch, micro-batch, seconds with full recompute, and with sequence parallelism and
# selective recompute: Korthikanti et al. 2022 (2205.05198), table 5; tensor 8, one replica.
KORTHIKANTI = [(64, 6144, 48, 1, 4, 4, 1.42, 1.10), (96, 12288, 96, 8, 64, 1, 18.13, 13.75)]


def model(heads, hidden, layers, microbatch):
    return gpt_workload(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        sequence_length=2048,
        vocab_size=51200,
        microbatch_size=microbatch,
    )


def predict(workload, plan):
    return simulate(workload, cluster("dgx-a100", -(-plan.world_size // 8) * 8, measured=False), plan)


@pytest.mark.parametrize("row", SC21, ids=["1.7B", "7.5B", "39.1B"])
def test_weak_scaling_is_never_faster_than_its_products(row):
    heads, hidden, layers, tensor, pipeline, data, batch, seconds = row
    workload = model(heads, hidden, layers, 4)
    plan = Plan(data=data, tensor=tensor, pipeline=pipeline, num_microbatches=batch // data // 4, recompute="full")
    step = predict(workload, plan)
    flops = gpt_step_flops(hidden, layers, 2048, 51200, batch, recompute="full")
    executed = flops / (plan.world_size * step.cluster.device.matmul_flops_per_s)
    print(f"{row}: {step.duration_s:.3f} s, {step.duration_s / seconds - 1:+.1%}; {dict(step.exposed_by_axis)}")
    assert executed < step.duration_s
    model_flops = gpt_step_flops(hidden, layers, 2048, 51200, batch)
    assert (
        step.utilization * step.duration_s * plan.world_size * step.cluster.device.matmul_flops_per_s
        == pytest.approx(model_flops, rel=1e-9)
    )


@pytest.mark.parametrize("row", KORTHIKANTI, ids=["22B", "175B"])
def test_sequence_parallelism_with_selective_recompute_is_faster(row):
    heads, hidden, layers, pipeline, batch, microbatch, full_s, selective_s = row
    workload = model(heads, hidden, layers, microbatch)
    full = Plan(tensor=8, pipeline=pipeline, num_microbatches=batch // microbatch, recompute="full")
    both = replace(full, recompute="selective", sequence_parallel=True)
    old, new = (predict(workload, plan) for plan in (full, both))
    for step, seconds in ((old, full_s), (new, selective_s)):
        print(f"{row}: {step.duration_s:.3f} s, {step.duration_s / seconds - 1:+.1%}, MFU {step.utilization:.1%}")
    assert new.duration_s < old.duration_s
    assert new.utilization > old.utilization
