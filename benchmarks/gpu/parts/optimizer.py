"""An update of LAMB with the tensors of a large GPT against batched (foreach) LAMBs: at most their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from _rows import compare, without_bar
from torch import Tensor, nn

from distlab.large_batch import LAMB, Trust
from gpu.job import Finding, Job, Note
from gpu.models import config_of, draw, size_of
from gpu.timing import Step, device_here, rows_of, take_turns

LEARNING_RATE, DECAY, EPS = 1e-4, 0.01, 1e-6
BETAS = (0.9, 0.999)


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
    kept: list[tuple[str, list[nn.Parameter]]] = []

    def program(name: str, make: Callable[[list[nn.Parameter]], object]) -> Callable[[], Step]:
        def build() -> Step:
            parameters = list(batch.model().parameters())
            kept.append((name, parameters))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            return make(parameters).step  # type: ignore[attr-defined, no-any-return]

        return build

    generator = torch.Generator(device).manual_seed(1)
    gradients: list[Tensor] = [
        torch.randn(p.shape, generator=generator, device=device) / 100 for p in batch.model().parameters()
    ]
    trust = Trust(adapt="all")
    options = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, "bias_correction": False, "trust": trust}
    makes = [
        program("foreach", ForeachLAMB),
        program("LAMB", lambda parameters: LAMB(parameters, LEARNING_RATE, **options)),
        program("AdamW", lambda parameters: torch.optim.AdamW(parameters, LEARNING_RATE, fused=not job.small)),
    ]
    turns = take_turns(makes, job)
    weights = {name: torch.cat([p.detach().double().flatten() for p in parameters]) for name, parameters in kept}
    apart = float((weights["foreach"] - weights["LAMB"]).abs().max())
    yield Note(f"after equally many updates LAMB and the foreach LAMB differ by at most {apart:.1e}")
    what = f"a LAMB update of {size_of(batch).split('), ')[0]})"
    yield from rows_of([turns], what, against="a foreach LAMB", bar=1.0)
    adam = "fused" if not job.small else "foreach"
    yield without_bar(compare(f"{what} against torch's {adam} AdamW", turns.times[1], turns.times[2]))
    yield from _against_pytorch_optimizer(job)


def _against_pytorch_optimizer(job: Job) -> Iterator[Finding]:
    try:
        import large_batch
    except ModuleNotFoundError as error:
        yield Note(f"{error.name} is not installed: the rows of benchmarks/large_batch.py against it were not run")
        return
    if not job.small:
        yield from large_batch.rows(device=job.device)
