"""The GPT of the timed parts: 0.1 to 1 billion parameters by the GPU's memory, and a batch that fills the card."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from _rows import Row
from torch import Tensor, nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks, device as seam
from distlab.measure import on_first_rank
from gpu.job import Job
from gpu.timing import Step, Turns, built, device_here, rows_of, take_turns

VOCABULARY = 50_304  # GPT-2's 50,257, rounded up to a multiple of 128
SIZES = (  # free memory from which on: layers, heads, hidden size (those of GPT-2 large, medium and small)
    (60e9, GPTConfig(VOCABULARY, 1024, 36, 20, 1280, tied=False)),
    (20e9, GPTConfig(VOCABULARY, 1024, 24, 16, 1024, tied=False)),
    (0.0, GPTConfig(VOCABULARY, 1024, 12, 12, 768, tied=False)),
)
SMALL = GPTConfig(vocab_size=256, context=64, num_layers=2, num_heads=4, hidden_size=64, tied=False)
FILLED = 0.75  # of the free memory; the rest is for what torch's allocator cannot use, and for nccl
LONGEST_STEP_S = 0.4  # a step of the batch: 20 blocks of two programs must fit the part's time
MOST_SAMPLES = 64
LEARNING_RATE = 1e-4


class Batch(NamedTuple):
    """One model's sizes, and a batch of random tokens for it on a device."""

    config: GPTConfig
    inputs: Tensor
    targets: Tensor
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens of a step on one rank."""
        return self.inputs.numel()

    def model(self) -> GPT:
        """Build the model, with the same weights each time."""
        generator = torch.Generator(self.inputs.device).manual_seed(0)
        with self.inputs.device:
            return GPT(self.config, generator).to(self.dtype)


def dtype_of(job: Job) -> torch.dtype:
    """Return the type of parameters and activations: half precision on GPUs."""
    return torch.float32 if job.small else getattr(torch, job.half)


def config_of(job: Job) -> GPTConfig:
    """Return the largest model whose training leaves most of the memory to the batch."""
    return SMALL if job.small else next(config for least, config in SIZES if job.free_bytes >= least)


def adam(parameters: object) -> torch.optim.Optimizer:
    """Return the optimizer of every timed program."""
    ready = list(parameters)  # type: ignore[call-overload]
    return torch.optim.AdamW(ready, lr=LEARNING_RATE, fused=ready[0].is_cuda)


def training_step(model: nn.Module, batch: Batch, *, loss: Callable[[Tensor, Tensor], Tensor] = GPT.loss) -> Step:
    """Return one plain training step: zero_grad, forward, backward, update."""
    optimizer = adam(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(batch.inputs), batch.targets)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def draw(config: GPTConfig, samples: int, job: Job, device: torch.device) -> Batch:
    """Draw a batch, other tokens on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator(device).manual_seed(1 + rank)
    tokens = torch.randint(config.vocab_size, (2, samples, config.context), generator=generator, device=device)
    return Batch(config, tokens[0], tokens[1], dtype_of(job))


def filling_batch(job: Job, *, programs: int = 2, multiple: int = 1) -> Batch:
    """Return the batch with which so many programs at once fill the card; call it on every rank.

    What one sample needs is measured: steps of the plain model with 1 and with 2 samples. A step also stays short
    enough for its blocks to fit the part's time.

    Args:
        job: what the part was told; after it ran out of memory the batch is half as large.
        programs: whose parameters and optimizer state are held at once.
        multiple: what the number of samples is a multiple of.
    """
    device, config = device_here(job), config_of(job)
    samples = 2
    if not job.small:
        samples = (
            on_first_rank(lambda: _fitting(job, device, config, programs))
            if dist.is_initialized()
            else (_fitting(job, device, config, programs))
        )
    samples = max(1, samples // 2) if job.shrunk else samples
    return draw(config, max(multiple, samples // multiple * multiple), job, device)


def _fitting(job: Job, device: torch.device, config: GPTConfig, programs: int) -> int:
    peaks, times = [], []
    for samples in (1, 2):
        batch = draw(config, samples, job, device)
        peak, step = built(lambda batch=batch: training_step(batch.model(), batch), device)
        peaks.append(peak)
        times.append(_alone_s(step, device))
        del step
    each = max(1, peaks[1] - peaks[0])
    kept = max(0, peaks[0] - each)
    by_memory = (FILLED * job.free_bytes - programs * kept) / each
    each_s = max(times[1] - times[0], times[1] / 4)
    by_time = LONGEST_STEP_S / each_s
    return max(1, math.floor(min(by_memory, by_time, MOST_SAMPLES)))


def _alone_s(step: Step, device: torch.device) -> float:
    """Time three steps on this rank alone: the others wait for what it finds, and take no part in a barrier."""
    first = seam.event(device, timing=True)
    for _ in range(3):
        step()
    return seam.seconds_between(first, seam.event(device, timing=True)) / 3


def size_of(batch: Batch) -> str:
    """Say which model and batch."""
    config = batch.config
    count = sum(parameter.numel() for parameter in _on_meta(config).parameters())
    name = str(batch.dtype).removeprefix("torch.")
    return f"a GPT of {count / 1e6:.3g} million parameters ({name}), {len(batch.inputs)} x {config.context} tokens"


def _on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def flops_of(batch: Batch) -> float:
    """Return the operations of matrix products in one step, recompute not counted.

    Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H S for each token, N without the embeddings.
    """
    config = batch.config
    model = _on_meta(config)
    inner = model.num_parameters - model.token_embedding.weight.numel() - model.position_embedding.weight.numel()
    return batch.num_tokens * (6.0 * inner + 12.0 * config.num_layers * config.hidden_size * config.context)


def large_gpt(job: Job, benchmark: str, peer: str, ours: str, **bars: float) -> Iterator[Row]:
    """Yield time, peak memory and noise of two programs of a benchmark with a large GPT, one rank for each GPU."""
    with Ranks(job.num_ranks, timeout_s=job.seconds, backend=job.backend, record=False) as ranks:
        results = ranks.run(_time_both, job, benchmark, (peer, ours))
    turns, words = [one for one, _ in results], results[0][1]
    yield from rows_of(turns, f"a {ours} step of {words} on {job.where}", job, against=peer, **bars)


def _time_both(job: Job, benchmark: str, programs: Sequence[str]) -> tuple[Turns, str]:
    """Run on each rank: time both programs; return also which model and batch."""
    small_models, batch, model = importlib.import_module(benchmark), filling_batch(job), "a large GPT"
    small_models.MODELS[model] = lambda device: (batch.model(), batch.inputs, batch.targets, GPT.loss)
    makes = [partial(small_models.step_of, program, model, batch.inputs.device) for program in programs]
    return take_turns(makes, job), size_of(batch)
