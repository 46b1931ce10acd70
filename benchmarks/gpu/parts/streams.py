"""No hidden wait: what the host waits for in a step, and how much of the communication runs next to computing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from _rows import Row
from torch.profiler import ProfilerActivity, profile

from distlab.comm import Ranks
from distlab.data_parallel import DataParallel
from distlab.models import GPT
from gpu.job import Finding, Job, Note
from gpu.models import Batch, adam, filling_batch
from gpu.timing import Step

WAITS = {"cpu": ("aten::_local_scalar_dense",), "cuda": ("cudaStreamSynchronize", "cudaEventSynchronize")}


def findings(job: Job) -> Iterator[Finding]:
    """Yield the host's waits in a step of DataParallel, counted by torch's profiler on the first rank."""
    with Ranks(job.num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        counts = ranks.run(count_waits, job)[0]
    for program, found in counts.items():
        total = float(sum(found.values()))
        note = ", ".join(f"{count} x {name}" for name, count in found.items() if count) or "none"
        bar = program.endswith("NaN not looked for")
        yield Row(
            f"waits of the host in a step of {program} on {job.where}",
            *(total, None, None, (total, total), "waits", "<= 0 waits" if bar else "-", total == 0 if bar else None),
            note=note,
        )
    if job.small:
        yield Note("on the CPU there are no streams: only calls that read a tensor's value were counted")


def count_waits(job: Job) -> dict[str, dict[str, int]]:
    """Run on each rank: count, in one step of each program, the calls that make the host wait."""
    found = {}
    for program in ("DataParallel", "DataParallel, NaN not looked for"):
        batch = filling_batch(job)
        model = batch.model()
        replicas = DataParallel(model, check_finite=program == "DataParallel")
        found[program] = waits_of(partial(one_step, batch, model, replicas, adam(model.parameters())), job.device)
        replicas.close()
    return found


def one_step(batch: Batch, model: GPT, replicas: DataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Run one training step."""
    optimizer.zero_grad()
    model.loss(model(batch.inputs), batch.targets).backward()
    replicas.synchronize()
    optimizer.step()


def waits_of(step: Step, kind: str) -> dict[str, int]:
    """Count the waits of one step, after two that warm up."""
    step(), step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
    with profile(activities=activities) as seen:
        step()
    events = seen.key_averages()
    return {name: sum(event.count for event in events if event.key == name) for name in WAITS[kind]}
