"""Calibrate this machine into a preset of the simulator, and time nccl by size where there are several GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from _rows import single

from distlab.comm import Ranks
from distlab.measure import calibrate, operator_host_s
from gpu.job import Finding, Job, Note
from gpu.timing import device_here, seconds_of

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
BLOCKS = 10
SECONDS = 8.0


def findings(job: Job) -> Iterator[Finding]:
    """Keep preset.json; yield what is in it, and the all-reduces by size."""
    result = calibrate(job.num_ranks, device=job.device, seconds=2.0 if job.small else SECONDS)
    result.save(job.folder / "preset.json")
    device = result.cluster.device
    yield single("preset: matrix products", [device.matmul_flops_per_s / 1e12], "TFLOP/s")
    yield single("preset: other kernels", [device.memory_bytes_per_s / 1e9], "GB/s")
    slower = "preset: copies between device and pinned host memory, the slower way"
    yield single(slower, [device.host_link_bytes_per_s / 1e9], "GB/s")
    half = torch.float32 if job.small else getattr(torch, job.half)
    claim = f"what the host spends on one operator of a training step in {str(half).removeprefix('torch.')}"
    yield single(claim, [1e6 * operator_host_s(device_here(job), half)], "us")
    yield Note(f"preset.json holds the preset; `distlab simulate --cluster FILE` takes it ({result.machine})")
    if job.num_ranks == 1:
        yield Note("one GPU: nothing travels, so that nccl was not timed")
        return
    with Ranks(job.num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        for size in SIZES[:2] if job.small else SIZES:
            times = np.array(ranks.run(partial(time_all_reduce, job, size))).max(axis=0)
            sent = 2 * (job.num_ranks - 1) / job.num_ranks * size / times / 1e9
            claim = f"all-reduce of {size >> 10} KiB over {job.where}: bytes through each rank's link, one way"
            yield single(claim, sent.tolist(), "GB/s")


def time_all_reduce(job: Job, size: int) -> list[float]:
    """Run on each rank: return the seconds of an all-reduce in each block."""
    device = device_here(job)
    tensor = torch.zeros(size // 4, device=device)
    seconds_of(lambda: dist.all_reduce(tensor), 3, device)
    return [seconds_of(lambda: dist.all_reduce(tensor), 5, device) for _ in range(BLOCKS)]
