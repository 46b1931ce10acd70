"""Ten training steps on one device, predicted by the simulator from measured rates, against the measured ones."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np
import torch
from _rows import Row, median_interval, single, without_bar

from distlab.blocks.models import GPTConfig
from distlab.measure import best_device, device_for, operators_of, workload_from_module
from distlab.plan import Cluster, Device, Link, Plan, Protocol
from gpu.job import Finding, Job
from gpu.models import Batch, draw, size_of, training_step
from gpu.timing import device_here, seconds_of
from simulator import simulate

BAR = 0.05
BLOCKS = 10
CASES = (  # layers, heads, hidden size, context, vocabulary, samples, half precision
    (12, 12, 768, 1024, 50_304, 8, True),
    (12, 12, 768, 1024, 50_304, 8, False),
    (24, 16, 1024, 1024, 50_304, 8, True),
    (24, 16, 1024, 512, 32_000, 16, True),
    (6, 8, 512, 512, 32_000, 32, True),
    (6, 8, 512, 512, 32_000, 32, False),
    (4, 32, 2048, 1024, 32_000, 8, True),
    (4, 32, 2048, 2048, 32_000, 2, True),
    (48, 4, 256, 256, 8_192, 16, True),
    (4, 4, 128, 64, 256, 16, False),
)
SMALL_CASES = ((2, 4, 64, 64, 256, 4, False), (4, 4, 128, 64, 256, 2, False))


def findings(job: Job) -> Iterator[Finding]:
    """Yield the error of each step, and the median of all with the bar."""
    device = device_here(job)
    cases = SMALL_CASES if job.small else CASES
    dtypes = [torch.float32] if job.small else [torch.float32, getattr(torch, job.half)]
    base = Device("one device", 1e12, 1e11, 1e12)
    best = {dtype: best_device(base, device, dtype) for dtype in dtypes}
    errors = []
    for case in cases:
        row, error = judge(case, job, device, best)
        errors.append(error)
        yield row
    claim, sizes = (
        f"{len(errors)} steps on one device, predicted against measured (median error)",
        list(map(abs, errors)),
    )
    note, holds = f"from {min(errors):+.1%} to {max(errors):+.1%}", median(sizes) <= BAR
    row = single(claim, sizes, "relative", bar=f"<= {BAR}", holds=holds, note=note)
    yield without_bar(row) if job.small else row


def judge(
    case: tuple[int, int, int, int, int, int, bool], job: Job, device: torch.device, best: dict[torch.dtype, Device]
) -> tuple[Row, float]:
    """Measure and predict one step; return its row and the signed error of the prediction."""
    layers, heads, hidden, context, vocabulary, samples, half = case
    config = GPTConfig(vocabulary, context, layers, heads, hidden, tied=False)
    dtype = getattr(torch, job.half) if half else torch.float32
    drawn = draw(config, max(1, samples // 2) if job.shrunk else samples, job, device)
    batch = drawn._replace(dtype=dtype)
    predicted = predict(batch, best[dtype], device)
    step = training_step(batch.model(), batch)
    seconds_of(step, 3, device)
    times = [seconds_of(step, 3, device) for _ in range(BLOCKS)]
    error = predicted / median(times) - 1
    ratios = predicted / np.array(times)
    claim = f"a step of {size_of(batch)}, {layers} layers of {hidden}: predicted against measured"
    row = Row(claim, predicted, median(times), 1 + error, median_interval(ratios.tolist()), "s", "-", None)
    return row, error


def predict(batch: Batch, best: Device, device: torch.device) -> float:
    """Count the step on the device, and let the simulator time it on one such device."""
    model = batch.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    workload = workload_from_module(
        model, lambda: model.loss(model(batch.inputs), batch.targets), optimizer=optimizer, samples=len(batch.inputs)
    )
    here = device_for(operators_of(training_step(model, batch)), workload, best, device, batch.dtype)
    alone = Link("none", (Protocol(0.0, 1e18),))
    return simulate(workload, Cluster("one device", here, 1, 1, alone, alone), Plan()).duration_s
