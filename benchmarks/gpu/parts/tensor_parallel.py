"""A step of a tensor-parallel GPT against torch's DTensor: at most its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import tensor_parallel as small_models

from distlab.comm import Ranks
from gpu.job import Finding, Job, Note
from gpu.models import config_of, dtype_of
from gpu.timing import Turns, device_here, rows_of, take_turns

SAMPLES = 8
PROGRAMS = ("DTensor", "distlab")


def findings(job: Job) -> Iterator[Finding]:
    """Yield time, peak memory and noise; heads and features are split over as many ranks as divide them."""
    heads = config_of(job).num_heads
    num_ranks = max(count for count in range(1, job.num_ranks + 1) if heads % count == 0)
    if num_ranks == 1:
        yield Note("on one device nothing is split: the rows say what the layers themselves cost")
    with Ranks(num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        turns = ranks.run(measure, job)
    config = config_of(job)
    what = f"a tensor-parallel step of a GPT of {config.num_layers} layers of {config.hidden_size} on {num_ranks} ranks"
    yield from rows_of(turns, f"{what} ({job.device}, {job.backend})", job, against="DTensor", bar=1.0)


def measure(job: Job) -> Turns:
    """Run on each rank: time both programs."""
    device = device_here(job)
    samples = SAMPLES // 4 if job.small else SAMPLES // 2 if job.shrunk else SAMPLES
    setup = replace(small_models.SMALL, config=config_of(job), samples=samples, device=device.type, dtype=dtype_of(job))
    make = partial(small_models.gpt_step, setup=setup)
    return take_turns([partial(small_models.step_of, program, make) for program in PROGRAMS], job)
