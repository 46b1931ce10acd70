"""The steps in which buckets must leave during backward: layers that sleep there, and buckets that are watched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.data_parallel.steps import FlatBucket

SLEEP_S = 0.004
NUM_LAYERS = 4
NUM_BUCKETS = 2
GRADIENTS_PER_BUCKET = 4  # two layers' weights and biases
LAYER_AFTER_BUCKET_0 = 0  # backward of layer 0 begins when all gradients of bucket 0 (layers 3 and 2) are there
EARLY_HOOK = (
    "Its hooks come from register_hook, and run before the gradient is written: register_post_accumulate_grad_hook"
)
PLAIN, AGAIN, REORDERED, UNUSED = RUNS = ("plain", "again", "reordered", "unused")


class _Pause(torch.autograd.Function):
    """Does nothing in forward; in backward writes down that its layer's backward begins, and sleeps."""

    @staticmethod
    def forward(context: Any, x: Tensor, log: list[tuple[int, int]], layer: int) -> Tensor:
        context.log, context.layer = log, layer
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        context.log.append((context.layer, time.monotonic_ns()))
        time.sleep(SLEEP_S)
        return gradient, None, None


class Layers(nn.Module):
    """Layers of one shape, run in any order, that write down when each one's backward begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same model on every rank
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_LAYERS)).double()
        self.log: list[tuple[int, int]] = []

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        """Run the layers in this order, to a scalar."""
        for layer in order:
            x = _Pause.apply(self.layers[layer](x), self.log, layer)
        return x.square().mean()


class WatchedBucket(FlatBucket):
    """A bucket that knows how many of its gradients were there at each start of this step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.starts: list[int] = []

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Start, and note how many gradients were there."""
        self.starts.append(sum(parameter.grad is not None for parameter in self.parameters))
        super().start(group)


class Hooks(NamedTuple):
    """How many of a bucket's parameters have a hook: after the gradient is written, and before (register_hook)."""

    after: int
    before: int

    @classmethod
    def of(cls, parameters: list[nn.Parameter]) -> Hooks:
        """Count them."""
        after = sum(bool(parameter._post_accumulate_grad_hooks) for parameter in parameters)
        return cls(after, sum(bool(parameter._backward_hooks) for parameter in parameters))

    def why_not_started(self) -> str:
        """Say why no hook started a bucket all of whose gradients were there."""
        if self.after == GRADIENTS_PER_BUCKET:
            text = (
                f"Its {GRADIENTS_PER_BUCKET} hooks ran, and none started it. A count of what is missing comes to 0 in"
            )
            return (
                f"{text} the last one: it begins at the number of parameters, and each hook takes 1 from it, for good"
            )
        if self.before:
            return EARLY_HOOK
        if self.after:
            return f"{self.after} of its {GRADIENTS_PER_BUCKET} parameters have a hook: register one on each"
        return "None of its parameters has a hook (register_post_accumulate_grad_hook)"


def orders(rank: int, world_size: int) -> Iterator[tuple[str, list[int]]]:
    """Yield runs: twice the same; then odd ranks go backwards; then rank 0 leaves out layer 0."""
    forward = list(range(NUM_LAYERS))
    yield PLAIN, forward
    yield AGAIN, forward
    yield REORDERED, forward[::-1] if rank % 2 else forward
    yield UNUSED, forward[1:] if rank == 0 and world_size > 1 else forward
