"""A step of FullyShard with a large GPT against torch FSDP2's: at most its time and its peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import sharding_units as small_models

from distlab.blocks.models import GPT
from distlab.comm import Ranks
from gpu.job import Finding, Job
from gpu.models import filling_batch, size_of
from gpu.timing import Turns, rows_of, take_turns

PEER = "torch FSDP2"
PROGRAMS = (PEER, "FullyShard")


def findings(job: Job) -> Iterator[Finding]:
    """Yield time, peak memory and noise, with one rank for each GPU and each block as a unit."""
    with Ranks(job.num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        results = ranks.run(measure, job)
    turns, words = [one for one, _ in results], results[0][1]
    yield from rows_of(
        turns, f"a FullyShard step of {words} on {job.where}", job, against=PEER, bar=1.0, memory_bar=1.0
    )


def measure(job: Job) -> tuple[Turns, str]:
    """Run on each rank: time both programs; return also which model and batch."""
    batch = filling_batch(job)
    model = "a large GPT"
    small_models.MODELS[model] = lambda device: (batch.model(), batch.inputs, batch.targets, GPT.loss)
    makes = [partial(small_models.step_of, program, model, batch.inputs.device) for program in PROGRAMS]
    return take_turns(makes, job), size_of(batch)
