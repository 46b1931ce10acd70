"""What the checks of accumulation, samplers and uneven batches run: weights that stand still, so every part is seen."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.grading.values import seeded

NUM_MICROBATCHES, NUM_ACCUMULATED = 6, 3
SAMPLER_CASES = ((10, 4), (13, 6), (3, 5))  # samples, batch; in the last a batch is larger than the data
SAMPLER_WORLDS = (1, 2, 3, 4)
SEEDS = (0, 1)
Case = tuple[int, int, int, int]  # samples, batch, ranks, seed
TOKENS = ([5, 2, 9], [3], [], [7, 4])  # of each rank's micro-batches; rank 2 has run out of data


class Watched(DistributedDataParallel):
    """torch's own, which also notes what ran inside no_sync, and how many forwards still lacked their backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.num_entered = 0
        self.quiet: list[bool] = []
        self.num_open = 0
        self.most_open = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Note that somebody asked for silence."""
        self.num_entered += 1
        with super().no_sync():
            yield

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Note whether this forward pass is inside no_sync, and how many wait for their backward."""
        self.quiet.append(not self.require_backward_grad_sync)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        outputs = super().forward(*inputs, **named)
        outputs.register_hook(self._backward_began)
        return outputs

    def _backward_began(self, _: Tensor) -> None:
        self.num_open -= 1


class _Still(torch.optim.SGD):
    """Notes the gradients of every step and moves nothing: gradients of later micro-batches stay what they were."""

    def __init__(self, parameters: Any) -> None:
        self.noted: list[Tensor] = []
        super().__init__(parameters, lr=0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Note the gradients."""
        self.noted.append(_gradients(self.param_groups[0]["params"]))


def _gradients(parameters: Any) -> Tensor:
    filled = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([gradient.detach().flatten() for gradient in filled])


def drive_accumulate(fn: Callable[..., Any]) -> dict[str, Any]:
    """Give fn a wrapped model, an optimizer that stands still and six micro-batches, three for each update."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    alone = copy.deepcopy(net)
    pairs = [
        (seeded(rank, 4, 5, purpose=f"inputs {i}"), seeded(rank, 4, 3, purpose=f"targets {i}"))
        for i in range(NUM_MICROBATCHES)
    ]
    own = []
    for inputs, targets in pairs:
        alone.zero_grad()
        nn.functional.mse_loss(alone(inputs), targets).backward()
        own.append(_gradients(alone.parameters()))
    model = Watched(net)
    optimizer = _Still(net.parameters())
    start_ns = time.monotonic_ns()
    fn(
        model,
        optimizer,
        microbatches=pairs,
        num_accumulated=NUM_ACCUMULATED,
        loss_fn=nn.functional.mse_loss,
    )
    return {
        "own": own,
        "updates": optimizer.noted,
        "num_entered": model.num_entered,
        "quiet": model.quiet,
        "most_open": model.most_open,
        "start_ns": start_ns,
    }


def positions(num_samples: int, batch_size: int, num_epochs: int = 2) -> list[int]:
    """Return where each batch of the first epochs begins."""
    starts = range(0, num_samples, batch_size)
    return [epoch * num_samples + start for epoch in range(num_epochs) for start in starts]


def drive_sampler(fn: Callable[..., Any]) -> dict[Case, dict[str, Any]]:
    """Ask for two epochs of several data sets on several numbers of ranks; then ask again, from the end."""
    found: dict[Case, dict[str, Any]] = {}
    for case in itertools.product(SAMPLER_CASES, SAMPLER_WORLDS, SEEDS):
        (num_samples, batch_size), world_size, seed = case
        given = (num_samples, batch_size, world_size, seed)
        asked = positions(num_samples, batch_size)
        first = [_ask(fn, position, given) for position in asked]
        again = [_ask(fn, position, given) for position in reversed(asked)][::-1]
        found[given] = {"positions": asked, "batches": first, "again": again}
    return found


def _ask(fn: Callable[..., Any], position: int, case: Case) -> list[Any]:
    """Return what each rank gets of one batch."""
    num_samples, batch_size, world_size, seed = case
    named = {"num_samples": num_samples, "seed": seed, "world_size": world_size}
    return [fn(position, batch_size, rank=rank, **named) for rank in range(world_size)]


def drive_tokens(fn: Callable[[list[int]], Any]) -> dict[str, Any]:
    """Give every rank its own numbers of tokens."""
    given = list(TOKENS[dist.get_rank()])
    return {"weights": fn(given), "left": given}
