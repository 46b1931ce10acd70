"""A step of DataParallel with a large GPT against torch DDP's: at most 1.02 times its time."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.job import Finding, Job
from gpu.models import large_gpt


def findings(job: Job) -> Iterator[Finding]:
    """Yield time, peak memory and noise, with one rank for each GPU."""
    yield from large_gpt(job, "data_parallel", "torch DDP", "DataParallel", bar=1.02)
