"""What the checks of lesson 8 share: activations and parts of tensors, and the way through a function and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading import Fault
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.values import compare, same, seeded

SAMPLES, POSITIONS, HIDDEN, WIDE = 2, 12, 6, 24  # 1, 2, 3 and 4 ranks divide what they cut
FILLING = 3.0  # what stands in columns beyond the vocabulary
DOUBLE = 8  # bytes of an element in all cases
ACTIVATION = DOUBLE * SAMPLES * POSITIONS * HIDDEN
CUT = "it has no history, so backward stops there. autograd cannot go back through a call to torch.distributed"
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


def plain(value: Any) -> Any:
    """Return a tensor without its history: what travels from a rank to the judge."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def part(tensor: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part of a tensor, a leaf of its own."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


def backward(output: Any, gradient: Tensor) -> bool:
    """Go back from an output with a copy of a gradient; say whether there was a history to go back through."""
    if not isinstance(output, Tensor) or output.shape != gradient.shape or not output.requires_grad:
        return False
    output.backward(gradient)  # type: ignore[no-untyped-call]
    return True


def whole_x(purpose: str = "x") -> Tensor:
    """Return an activation that all ranks hold."""
    return seeded(-1, SAMPLES, POSITIONS, HIDDEN, purpose=purpose)


def own_x(rank: int, purpose: str) -> Tensor:
    """Return a rank's own numbers in the shape of an activation."""
    return seeded(rank, SAMPLES, POSITIONS, HIDDEN, purpose=purpose)


def one_way(function: Callable[[Tensor], Any], x: Tensor, gradient: Tensor) -> dict[str, Any]:
    """Send x through a function and a gradient back; note what came out and whether arguments were changed."""
    x, given = x.clone().requires_grad_(), gradient.clone()
    before = x.detach().clone()
    out = function(x)
    value = plain(out)  # before backward, which may write to it
    went = backward(out, given)
    kept = torch.equal(before, x.detach()) and torch.equal(given, gradient)
    return {"out": value, "went": went, "grad": plain(x.grad), "kept": kept}


def is_times(got: Any, want: Tensor, n: int) -> bool:
    """Whether something is n times what it should be, and not zero."""
    return n > 1 and bool(want.any()) and same(got, n * want)


def total(parts: list[Tensor]) -> Tensor:
    """Add up the ranks' tensors."""
    return torch.stack(parts).sum(0)


def reduce_bytes(num_bytes: float, n: int) -> float:
    """Return what a rank sends in an all-reduce."""
    return 2 * (n - 1) / n * num_bytes


def judge_way(row: dict[str, Any], want: tuple[Tensor, Tensor], what: str, n: int) -> Iterator[Fault]:
    """Say what is wrong with one way through a function and back, in general words."""
    if not row["kept"]:
        text = f"{what} changes what it is given, its input or the gradient: others may hold the same tensor"
        yield Fault("changed argument", f"{text}; clone before you sum in place")
    yield from found(compare(row["out"], want[0], f"the output of {what}", n))
    if not row["went"] or row["grad"] is None:
        yield Fault("graph cut", f"the output of {what}: {CUT}. Write forward and backward of an autograd Function")
    yield from found(compare(row["grad"], want[1], f"the gradient through {what}", n))
