"""A plain training step of a large GPT: tokens a second and the share of the data sheet's rate, compiled and not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from _rows import Row, compare, median_interval, without_bar

from gpu.job import Finding, Job, Note
from gpu.models import Batch, filling_batch, flops_of, size_of, training_step
from gpu.sheet import no_sheet, sheet_of
from gpu.timing import Step, take_turns


def findings(job: Job) -> Iterator[Finding]:
    """Yield tokens a second, the share of the peak (MFU), and what compiling gains."""
    batch = filling_batch(job, programs=2)
    what = f"a step of {size_of(batch)}"
    makes = [lambda: training_step(batch.model(), batch)]
    refused = compiles(batch)
    if refused:
        yield Note(f"torch.compile does not work here, so that only the plain model is timed: {refused}")
    else:
        makes.append(lambda: compiled_step(batch))
    turns = take_turns(makes, job, share=0.35)
    sheet = sheet_of(job)
    if sheet is None:
        yield Note(no_sheet(job))
    for name, times in zip(("plain", "compiled"), turns.times[: len(makes)], strict=False):
        rates = batch.num_tokens / np.array(times)
        yield _row(f"{what}, {name}: tokens a second on one device", rates, "tokens/s")
        if sheet is not None:
            shares = flops_of(batch) / np.array(times) / sheet.matmul_flops_per_s
            yield _row(f"{what}, {name}: share of the data sheet's matrix rate (MFU)", shares, "of the peak")
    if not refused:
        yield without_bar(compare(f"{what}, compiled against plain", turns.times[1], turns.times[0]))


def compiled_step(batch: Batch) -> Step:
    """Return the training step of the compiled model."""
    model = batch.model()
    model.compile()
    return training_step(model, batch)


def compiles(batch: Batch) -> str:
    """Try to compile a small function on the batch's device; return what was in the way, or nothing."""
    try:
        torch.compile(lambda x: (2 * x + 1).relu())(torch.ones(8, device=batch.inputs.device))
    except Exception as error:  # a missing compiler, Triton or Python header: many types, no common one
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _row(claim: str, values: np.ndarray, unit: str) -> Row:
    return Row(claim, float(np.median(values)), None, None, median_interval(values.tolist()), unit, "-", None)
