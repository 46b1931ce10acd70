"""A step of FullyShard with a large GPT against torch FSDP2's: at most its time and its peak memory."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.job import Finding, Job
from gpu.models import large_gpt


def findings(job: Job) -> Iterator[Finding]:
    """Yield time, peak memory and noise, with one rank for each GPU and each block as a unit."""
    yield from large_gpt(job, "sharding_units", "torch FSDP2", "FullyShard", bar=1.0, memory_bar=1.0)
