"""A step that recomputes every block against torch.utils.checkpoint's: at most its time and its peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch.utils.checkpoint import checkpoint

from distlab.recompute import recompute_blocks
from gpu.job import Finding, Job
from gpu.models import Batch, filling_batch, size_of, training_step
from gpu.timing import Step, rows_of, take_turns


def findings(job: Job) -> Iterator[Finding]:
    """Yield time, peak memory and noise, on one device."""
    batch = filling_batch(job)
    turns = take_turns([lambda: torch_step(batch), lambda: our_step(batch)], job)
    what = f"a step of {size_of(batch)} that recomputes every block, on one device,"
    yield from rows_of([turns], what, job, against="torch.utils.checkpoint", bar=1.0, memory_bar=1.0)


def our_step(batch: Batch) -> Step:
    """Return the step of a model whose blocks keep only their inputs."""
    model = batch.model()
    recompute_blocks(model)
    return training_step(model, batch)


def torch_step(batch: Batch) -> Step:
    """Return the same with torch's checkpoint around each block."""
    model = batch.model()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return training_step(model, batch)
