"""A plain training step of a large GPT: tokens per second and the share of the data sheet's rate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from _rows import compare, single, without_bar

from gpu.job import Finding, Job, Note
from gpu.models import Batch, filling_batch, flops_of, size_of, training_step
from gpu.sheet import no_sheet, sheet_of
from gpu.timing import Step, take_turns


def findings(job: Job) -> Iterator[Finding]:
    """Yield tokens per second and the share of the peak (MFU); where that is the choice, with every block compiled."""
    batch = filling_batch(job)
    what = f"a step of {size_of(batch)}"
    makes = {"plain": lambda: training_step(batch.model(), batch)}
    if job.choice == "compiled":
        refused = compiles(batch)
        if refused:
            yield Note(f"torch.compile does not work here: {refused}")
            return
        makes["compiled"] = lambda: compiled_step(batch, "aot_eager" if job.small else "inductor")
    turns = take_turns(list(makes.values()), job)
    times = dict(zip(makes, turns.times, strict=False))
    sheet = sheet_of(job)
    if sheet is None:
        yield Note(no_sheet(job))
    for name in times:
        rates = batch.num_tokens / np.array(times[name])
        yield single(f"{what}, {name}: tokens per second on one device", rates.tolist(), "tokens/s")
        if sheet is not None:
            shares = flops_of(batch) / np.array(times[name]) / sheet.matmul_flops_per_s
            yield single(f"{what}, {name}: share of the data sheet's matrix rate (MFU)", shares.tolist(), "of the peak")
    if "compiled" in times:
        yield without_bar(compare(f"{what}, every block compiled against plain", times["compiled"], times["plain"]))


def compiled_step(batch: Batch, backend: str) -> Step:
    """Return the training step of a model whose blocks are compiled: they are alike, so one is compiled for all."""
    model = batch.model()
    for block in model.blocks:
        block.compile(backend=backend)
    return training_step(model, batch)


def compiles(batch: Batch) -> str:
    """Try to compile a small function on the batch's device; return what was in the way, or nothing."""
    try:
        torch.compile(lambda x: (2 * x + 1).relu())(torch.ones(8, device=batch.inputs.device))
    except Exception as error:  # a missing compiler, Triton or Python header: many types, no common one
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""
