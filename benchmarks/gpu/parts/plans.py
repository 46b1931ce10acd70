"""Whole plans of the small GPT compute what one process computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from _rows import Row, absolute

from distlab.blocks.models import GPTConfig
from distlab.comm import Ranks
from distlab.measure import TrainingRun, time_training
from distlab.plan import Plan, Sharding
from gpu.job import Finding, Job, Note

MODEL = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=64, tied=False)
PLAIN = TrainingRun(model=MODEL, batch_size=16, num_updates=5, num_windows=0)
NOT_AVAILABLE = re.compile(r"not support|unsupported device|No backend type|not implemented for", re.IGNORECASE)
BAR = 1e-5  # of a loss near 5, in float32: SGD's five updates on other sums
PIPELINES = {"gpipe": 1, "one_f_one_b": 1, "zb_h1": 1, "interleaved": 2, "interleaved_zero_bubble": 2, "zb_v": 2}
PLANS = {
    2: {
        "DataParallel": Plan(data=2),
        "ZeRO-1": Plan(data=2, sharding=Sharding(1)),
        "ZeRO-2": Plan(data=2, sharding=Sharding(2)),
        "FullyShard": Plan(data=2, sharding=Sharding(3)),
        "tensor parallel": Plan(tensor=2),
        "tensor and sequence parallel": Plan(tensor=2, sequence_parallel=True),
        "ring attention": Plan(context=2),
        "attention by all-to-all": Plan(context=2, context_kind="all_to_all"),
        **{
            f"pipeline by {name}": Plan(pipeline=2, num_microbatches=4, schedule=name, stages_per_rank=stages)
            for name, stages in PIPELINES.items()
        },
    },
    4: {
        "data x tensor": Plan(data=2, tensor=2),
        "data x pipeline": Plan(data=2, pipeline=2, num_microbatches=2),
        "tensor x pipeline": Plan(tensor=2, pipeline=2, num_microbatches=2),
    },
}


def findings(job: Job) -> Iterator[Finding]:
    """Yield for each plan how far the losses of five updates are from one process's on the same device."""
    alone = _losses(job, PLAIN, 1)
    yield _row(job, "the same run again, bit for bit", 1, alone, _losses(job, PLAIN, 1), bar=0.0)
    for num_ranks, plans in PLANS.items():
        if job.small and num_ranks > 2:
            continue
        if not job.small and num_ranks > job.num_gpus and not job.may_share:
            yield Note(f"nothing on {num_ranks} ranks was run: they would have to share a GPU, which may not be shared")
            continue
        with Ranks(num_ranks, timeout_s=job.seconds, backend=_backend(job, num_ranks), record=False) as ranks:
            for words, plan in plans.items():
                try:
                    found = _losses(job, replace(PLAIN, plan=plan), num_ranks, ranks)
                except (RuntimeError, ValueError) as error:  # one technique that fails must not hide the others
                    print(error)
                    yield _refused(job, words, num_ranks, error)
                else:
                    yield _row(job, words, num_ranks, alone, found, bar=BAR)


def _backend(job: Job, num_ranks: int) -> str:
    """Return nccl where each rank has a GPU of its own; ranks that share one use gloo."""
    return "nccl" if not job.small and job.num_gpus >= num_ranks else "gloo"


def _losses(job: Job, run: TrainingRun, num_ranks: int, ranks: Ranks | None = None) -> list[float]:
    call = partial(_train, replace(run, device=job.device))
    if ranks is not None:
        return max(ranks.run(call), key=len)
    with Ranks(num_ranks, timeout_s=job.seconds, backend=_backend(job, num_ranks), record=False) as own:
        return max(own.run(call), key=len)


def _train(run: TrainingRun) -> list[float]:
    torch.manual_seed(0)
    return list(time_training(run).losses)


def _where(job: Job, num_ranks: int) -> str:
    shared = ", a GPU is shared" if not job.small and num_ranks > max(1, job.num_gpus) else ""
    return f"on {num_ranks} rank{'s' if num_ranks > 1 else ''} ({job.device}, {_backend(job, num_ranks)}{shared})"


def _row(job: Job, words: str, num_ranks: int, alone: Sequence[float], found: Sequence[float], *, bar: float) -> Row:
    apart = max(abs(one - other) for one, other in zip(alone, found, strict=True))
    claim = f"{words} {_where(job, num_ranks)}: losses of {len(alone)} updates against one process (largest difference)"
    return absolute(claim, [apart], bar=bar, unit="nats")


def _refused(job: Job, words: str, num_ranks: int, error: Exception) -> Finding:
    """Tell what a backend does not have (gloo has few calls for tensors on GPUs) from what went wrong."""
    said = " ".join(str(error).split())[:300]
    if NOT_AVAILABLE.search(said):
        return Note(f"{words} {_where(job, num_ranks)} is not available: {said}")
    claim = f"{words} {_where(job, num_ranks)}: runs that failed"
    return absolute(claim, [1.0], bar=0, unit="runs", note=f"{type(error).__name__}: {said}")
