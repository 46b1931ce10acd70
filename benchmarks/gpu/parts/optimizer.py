"""An update of LAMB with the tensors of a large GPT against batched (foreach) LAMBs: at most their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _rows import Row, compare, single, without_bar
from torch import nn

from distlab.large_batch import LAMB, Trust
from gpu.job import Finding, Job, Note
from gpu.models import config_of, draw, size_of
from gpu.timing import Step, device_here, rows_of, take_turns

LEARNING_RATE, DECAY, EPS = 1e-4, 0.01, 1e-6
BETAS = (0.9, 0.999)
SAME = 1e-6  # in float32: weights near 1 at most, updates of a ten-thousandth
Make = Callable[[list[nn.Parameter]], Any]


class ForeachLAMB:
    """LAMB as a plain list of batched operators of torch, with no wait for the device: the peer.

    Source: You et al. 2020, algorithm 2, every tensor adapted, without bias correction.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.means = [torch.zeros_like(parameter) for parameter in parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its gradient."""
        gradients = [parameter.grad for parameter in self.parameters]
        torch._foreach_lerp_(self.means, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self.squares, BETAS[1])
        torch._foreach_addcmul_(self.squares, gradients, gradients, 1 - BETAS[1])
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_add_(roots, EPS)
        updates = torch._foreach_div(self.means, roots)
        torch._foreach_add_(updates, self.parameters, alpha=DECAY)
        ratios = torch._foreach_div(torch._foreach_norm(self.parameters), torch._foreach_norm(updates))
        lengths = [torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0) * -LEARNING_RATE for ratio in ratios]
        torch._foreach_mul_(updates, lengths)
        torch._foreach_add_(self.parameters, updates)


def findings(job: Job) -> Iterator[Finding]:
    """Yield LAMB against the plain foreach LAMB, against torch's fused AdamW, and what was not run."""
    device = device_here(job)
    batch = draw(config_of(job), 1, job, device)._replace(dtype=torch.float32)  # as master weights are
    generator = torch.Generator(device).manual_seed(1)
    shapes = [parameter.shape for parameter in batch.model().parameters()]
    gradients = [torch.randn(shape, generator=generator, device=device) / 100 for shape in shapes]

    def program(make: Make) -> tuple[list[nn.Parameter], Step]:
        parameters = list(batch.model().parameters())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return parameters, make(parameters).step

    yield _difference([program(make) for make in (ForeachLAMB, our_lamb)])
    makes: list[Make] = [ForeachLAMB, our_lamb, partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=not job.small)]
    turns = take_turns([lambda make=make: program(make)[1] for make in makes], job)
    what = f"a LAMB update of {size_of(batch).split(', ')[0]}"
    yield from rows_of([turns], what, job, against="a foreach LAMB", bar=1.0)
    adam = "fused" if not job.small else "foreach"
    yield without_bar(compare(f"{what} against torch's {adam} AdamW", turns.times[1], turns.times[2]))
    yield from _against_pytorch_optimizer(job)


def our_lamb(parameters: list[nn.Parameter]) -> LAMB:
    """Return the library's LAMB with the options of the peer."""
    options = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
    return LAMB(parameters, LEARNING_RATE, **options, trust=Trust(adapt="all"))


def _difference(programs: list[tuple[list[nn.Parameter], Step]]) -> Row:
    """Make the row of how far two programs are apart after three updates."""
    for _ in range(3):
        for _, step in programs:
            step()
    peer, ours = (parameters for parameters, _ in programs)
    apart = max(float((one - other).detach().abs().max()) for one, other in zip(peer, ours, strict=True))
    claim = "LAMB and the foreach LAMB after 3 updates (largest difference of a weight)"
    return single(claim, [apart], "absolute", bar=f"<= {SAME:g}", holds=apart <= SAME)


def _against_pytorch_optimizer(job: Job) -> Iterator[Finding]:
    try:
        import large_batch
    except ModuleNotFoundError as error:
        yield Note(f"{error.name} is not installed: the rows of benchmarks/large_batch.py against it were not run")
        return
    if not job.small:
        yield from large_batch.rows(device=job.device)
