"""Pipeline stages on one device against the plain model: at most 1.05 times its time; on several, against torch's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pipeline as small_models
import torch
from torch import Tensor

from distlab.blocks.models import GPT
from distlab.comm import Ranks
from distlab.pipeline import Pipeline
from distlab.plan import make_schedule
from gpu.job import Finding, Job, Note
from gpu.models import config_of, dtype_of
from gpu.timing import Step, Turns, device_here, rows_of, take_turns

BAR = 1.05
MICROBATCHES = 4
STAGES = 2  # on the one device
SAMPLES = 4  # in a micro-batch


def findings(job: Job) -> Iterator[Finding]:
    """Yield time, peak memory and noise."""
    config = config_of(job)
    what = f"a GPT of {config.num_layers} layers of {config.hidden_size}, {MICROBATCHES} micro-batches"
    with Ranks(1, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        turns = ranks.run(on_one_device, job)
    words = f"a step of {STAGES} pipeline stages on one device, {what},"
    yield from rows_of(turns, words, job, against="the plain model", bar=BAR)
    if job.num_gpus < 2:
        yield Note("one GPU: no pipeline over several GPUs was timed")
        return
    num_ranks = min(job.num_gpus, config.num_layers)
    with Ranks(num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        turns = ranks.run(over_ranks, job)
    words = f"a step of 1F1B over {num_ranks} GPUs, {what} for each,"
    yield from rows_of(turns, words, job, against="torch.distributed.pipelining", bar=1.0)


def setup_of(job: Job) -> small_models.Setup:
    """Return the model and the size of a micro-batch."""
    samples = 1 if job.small else SAMPLES // 2 if job.shrunk else SAMPLES
    return small_models.Setup(config_of(job), samples, dtype_of(job))


def on_one_device(job: Job) -> Turns:
    """Run on one rank: the plain model accumulates the same micro-batches."""
    device, setup = device_here(job), setup_of(job)
    return take_turns([partial(plain_step, setup, device), partial(stages_step, setup, device)], job, share=0.35)


def over_ranks(job: Job) -> Turns:
    """Run on each rank: torch's pipeline and ours, with one stage on each."""
    device, setup = device_here(job), setup_of(job)
    makes = (small_models.torch_step, small_models.our_step)
    count = MICROBATCHES * job.num_gpus
    return take_turns([partial(make, "one_f_one_b", count, device, setup) for make in makes], job, share=0.35)


def plain_step(setup: small_models.Setup, device: torch.device) -> Step:
    """Return a step of the whole model, one micro-batch after the other."""
    model = GPT(setup.config, torch.Generator().manual_seed(0)).to(device, setup.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=small_models.LEARNING_RATE)
    inputs, targets = (part.chunk(MICROBATCHES) for part in small_models.batch_of(MICROBATCHES, device, setup))

    def step() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for x, wanted in zip(inputs, targets, strict=True):
            loss = GPT.loss(model(x), wanted) / MICROBATCHES
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum()

    return step


def stages_step(setup: small_models.Setup, device: torch.device) -> Step:
    """Return the same step by stages that all stand on this rank."""
    schedule = make_schedule("interleaved", 1, MICROBATCHES, stages_per_rank=STAGES)
    pipeline = Pipeline(small_models.stages_of(schedule, device, setup), schedule, loss=GPT.loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=small_models.LEARNING_RATE)
    inputs, targets = small_models.batch_of(MICROBATCHES, device, setup)

    def step() -> Tensor | None:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()
        return loss

    return step
