"""What the checks of lesson 8 share: activations and parts of tensors, and the way through a function and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.diagnosis.values import seeded

SAMPLES, POSITIONS, HIDDEN, WIDE = 2, 12, 6, 24  # 1, 2, 3 and 4 ranks divide what they cut
FILLING = 3.0  # what stands in columns beyond the vocabulary
DOUBLE = 8  # bytes of an element in all cases
ACTIVATION = DOUBLE * SAMPLES * POSITIONS * HIDDEN
CUT = "no gradient comes back: autograd cannot go back through a plain call to torch.distributed"
JOIN = """
    class Join(torch.autograd.Function):
        @staticmethod
        def forward(ctx, part):
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part.contiguous())
            return torch.cat(parts, -1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]
"""
TWO_SUMS = """
    from distlab.tensor_parallel import copy_to_ranks, reduce_from_ranks as g


    def reduce_from_ranks(x):
        return g(copy_to_ranks(x))
"""


def activation(rank: int, purpose: str) -> Tensor:
    """Return numbers in the shape of an activation; rank -1: those that all ranks hold."""
    return seeded(rank, SAMPLES, POSITIONS, HIDDEN, purpose=purpose)


def there_and_back(fn: Callable[..., Any], name: str, gradient: Tensor, **given: Tensor) -> dict[str, Any]:
    """Send tensors through a function and a gradient back; say what came out, and what reached each of them."""
    leaves = {key.replace("_of_", " of "): tensor.detach().requires_grad_() for key, tensor in given.items()}
    out = fn(*leaves.values())
    if isinstance(out, Tensor) and out.requires_grad and out.shape == gradient.shape:
        torch.autograd.backward(out, gradient)
    return {
        name: out.detach() if isinstance(out, Tensor) else out,
        **{f"a gradient reaches {key}": leaf.grad is not None for key, leaf in leaves.items()},
        **{
            f"gradient of {key}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for key, leaf in leaves.items()
        },
    }


def use_two(fn: Callable[..., Any], names: tuple[str, str], *ways: tuple[Tensor, Tensor]) -> Any:
    """Go through both of two functions and back, each with its tensor and its gradient."""
    pair = fn()
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(callable, pair)):
        return pair
    went = [there_and_back(one, "output", grad, input=x) for one, (x, grad) in zip(pair, ways, strict=True)]
    return {"what it returns": "two functions", **dict(zip(names, went, strict=True))}


def reduce_bytes(num_bytes: float, n: int) -> float:
    """Return what a rank sends in an all-reduce."""
    return 2 * (n - 1) / n * num_bytes
