"""Wrong versions of a cut linear layer, of f and g, and of two layers between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distlab.tensor_parallel import copy_to_ranks, reduce_from_ranks

Part = tuple[Tensor, Tensor | None]


def cut_turned(weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int) -> Part:
    """Cut columns where the paper writes columns, though torch keeps the transpose."""
    if kind == "column":
        return weight.chunk(num_ranks, 1)[rank].clone(), bias.chunk(num_ranks)[rank].clone()
    return weight.chunk(num_ranks, 0)[rank].clone(), bias.clone() if rank == 0 else None


def cut_with_every_bias(weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int) -> Part:
    """Let every rank of a row layer add the bias."""
    if kind == "column":
        return weight.chunk(num_ranks, 0)[rank].clone(), bias.chunk(num_ranks)[rank].clone()
    return weight.chunk(num_ranks, 1)[rank].clone(), bias.clone()


def cut_with_bias_in_parts(weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int) -> Part:
    """Cut the bias of a row layer too."""
    dim = 0 if kind == "column" else 1
    return weight.chunk(num_ranks, dim)[rank].clone(), bias.chunk(num_ranks)[rank].clone()


def cut_as_views(weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int) -> Part:
    """Return views, which keep the whole layer in memory."""
    if kind == "column":
        return weight.chunk(num_ranks, 0)[rank], bias.chunk(num_ranks)[rank]
    return weight.chunk(num_ranks, 1)[rank], bias if rank == 0 else None


def cut_nothing(weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int) -> Part:
    """Put the full layer where its part should be."""
    return weight.clone(), bias.clone()


def function(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Make an autograd function of two plain ones."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(gradient)

    return Made.apply


def handed_on(x: Tensor) -> Tensor:
    """Do nothing."""
    return x.view_as(x)


def _sum(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _sum_in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _gathered_sum(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts).sum(0)


def pair_without_f() -> tuple[Any, Any]:
    """Forget that f has a backward."""
    return function(handed_on, handed_on), function(_sum, handed_on)


def pair_with_plain_call() -> tuple[Any, Any]:
    """Call torch.distributed in forward and hope that autograd knows it."""
    return function(handed_on, _sum), lambda x: _gathered_sum(x.detach())


def pair_with_two_sums() -> tuple[Any, Any]:
    """Sum the gradient behind g, as if ranks had parts of it."""
    return function(handed_on, _sum), function(_sum, _sum)


def pair_in_place() -> tuple[Any, Any]:
    """Sum into the tensors of others."""
    return function(handed_on, _sum_in_place), function(_sum_in_place, handed_on)


def pair_swapped() -> tuple[Any, Any]:
    """Return g and f."""
    return function(_sum, handed_on), function(handed_on, _sum)


def pair_by_gathering() -> tuple[Any, Any]:
    """Gather all ranks' tensors to add them up."""
    return function(handed_on, _gathered_sum), function(_gathered_sum, handed_on)


def mlp_bias_inside(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Add the bias before the sum, on every rank."""
    hidden = F.gelu(F.linear(copy_to_ranks(x), widen, widen_bias))
    return reduce_from_ranks(F.linear(hidden, output, output_bias))


def mlp_without_f(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Begin the region with nothing."""
    return reduce_from_ranks(F.linear(F.gelu(F.linear(x, widen, widen_bias)), output)) + output_bias


def mlp_without_g(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """End the region with nothing."""
    return F.linear(F.gelu(F.linear(copy_to_ranks(x), widen, widen_bias)), output) + output_bias


def mlp_gathering(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Gather the wide features, then cut them again."""
    rank = dist.get_rank()

    def join(part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, -1)

    whole = function(join, lambda gradient: gradient.chunk(dist.get_world_size(), -1)[rank])
    back = function(lambda x: x.chunk(dist.get_world_size(), -1)[rank].clone(), join)
    hidden = back(F.gelu(whole(F.linear(copy_to_ranks(x), widen, widen_bias))))
    return reduce_from_ranks(F.linear(hidden, output)) + output_bias


def mlp_with_all_gather(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Add up by dist.all_gather, through which no gradient comes."""
    partial = F.linear(F.gelu(F.linear(copy_to_ranks(x), widen, widen_bias)), output)
    return _gathered_sum(partial.detach()) + output_bias


def mlp_two_sums(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Sum the gradient behind the layers as well."""
    hidden = F.gelu(F.linear(copy_to_ranks(x), widen, widen_bias))
    return function(_sum, _sum)(F.linear(hidden, output)) + output_bias


def mlp_no_gelu(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Leave GeLU out."""
    return reduce_from_ranks(F.linear(F.linear(copy_to_ranks(x), widen, widen_bias), output)) + output_bias


def cut_with_shared_bias(
    weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int
) -> tuple[Tensor, Tensor | None]:
    """Give every rank of a row layer a t-th of each number of the bias."""
    if kind == "column":
        return weight.chunk(num_ranks)[rank].clone(), bias.chunk(num_ranks)[rank].clone()
    return weight.chunk(num_ranks, 1)[rank].clone(), bias / num_ranks


def mlp_bias_on_one(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Add the bias on rank 0, before the sum."""
    hidden = F.gelu(F.linear(copy_to_ranks(x), widen, widen_bias))
    return reduce_from_ranks(F.linear(hidden, output, output_bias if dist.get_rank() == 0 else None))
