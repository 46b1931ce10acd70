"""Wrong versions of running units: never let go, not ahead, all at once, gradients kept whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sharding import gather_into, scatter_sum

Compute = Callable[[int, Tensor, Tensor], Tensor]
Backward = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _room(shard: Tensor) -> Tensor:
    return torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype)


def forward_keeping(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Gather the model, then run it."""
    wholes = [_room(shard) for shard in shards]
    for whole, shard in zip(wholes, shards, strict=True):
        gather_into(whole, shard)
    for index, whole in enumerate(wholes):
        x = compute(index, whole, x)
    return x


def forward_rebinding(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Let go of a unit when the next has been made."""
    for index, shard in enumerate(shards):
        whole = _room(shard)
        gather_into(whole, shard)
        x = compute(index, whole, x)
    return x


def forward_of_shards(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Compute with what is here, filled up with zeros."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for index, shard in enumerate(shards):
        whole = torch.zeros(shard.numel() * n, dtype=shard.dtype)
        whole.chunk(n)[rank].copy_(shard)
        x = compute(index, whole, x)
        del whole
    return x


def forward_by_all_reduce(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Add up rows that hold zeros but for the own shard."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for index, shard in enumerate(shards):
        whole = torch.zeros(shard.numel() * n, dtype=shard.dtype)
        whole.chunk(n)[rank].copy_(shard)
        dist.all_reduce(whole)
        x = compute(index, whole, x)
        del whole
    return x


def forward_on_first_input(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Give every unit the first input."""
    result = x
    for index, shard in enumerate(shards):
        whole = _room(shard)
        gather_into(whole, shard)
        result = compute(index, whole, x)
        del whole
    return result


def forward_twice_gathered(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Gather to look at the unit, and again to use it."""
    for index, shard in enumerate(shards):
        whole = _room(shard)
        gather_into(whole, shard)
        gather_into(whole, shard)
        x = compute(index, whole, x)
        del whole
    return x


def ahead_not(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Start each gather when its unit is needed."""
    for index, shard in enumerate(shards):
        whole = _room(shard)
        gather_into(whole, shard, async_op=True).wait()
        x = compute(index, whole, x)
        del whole
    return x


def ahead_all(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Start all gathers first."""
    wholes = [_room(shard) for shard in shards]
    works = [gather_into(whole, shard, async_op=True) for whole, shard in zip(wholes, shards, strict=True)]
    for index, work in enumerate(works):
        work.wait()
        x = compute(index, wholes[index], x)
    return x


def ahead_waiting(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Gather the next unit before compute, and wait there."""
    coming = _room(shards[0])
    gather_into(coming, shards[0])
    for index in range(len(shards)):
        whole = coming
        if index + 1 < len(shards):
            coming = _room(shards[index + 1])
            gather_into(coming, shards[index + 1], async_op=True).wait()
        x = compute(index, whole, x)
        del whole
    return x


def ahead_unwaited(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Compute at once, with what the row held before."""
    for index, shard in enumerate(shards):
        whole = torch.zeros(shard.numel() * dist.get_world_size(), dtype=shard.dtype)
        seen = whole.clone()  # what a reader sees who does not wait, made sure of
        work = gather_into(whole, shard, async_op=True)
        x = compute(index, seen, x)
        work.wait()
        del whole
    return x


def ahead_keeping(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Gather one ahead, and keep all in a list."""
    wholes = [_room(shards[0])]
    work = gather_into(wholes[0], shards[0], async_op=True)
    for index in range(len(shards)):
        work.wait()
        if index + 1 < len(shards):
            wholes.append(_room(shards[index + 1]))
            work = gather_into(wholes[-1], shards[index + 1], async_op=True)
        x = compute(index, wholes[index], x)
    return x


def _backward(
    shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward, *, pass_on: bool, divide: bool
) -> list[Tensor]:
    means = [torch.empty_like(shard) for shard in shards]
    for index in reversed(range(len(shards))):
        whole = _room(shards[index])
        gather_into(whole, shards[index])
        whole_grad, down = compute(index, whole, inputs[index], grad)
        grad = down if pass_on else grad
        del whole
        scatter_sum(whole_grad, means[index])
        if divide:
            means[index] /= dist.get_world_size()
        del whole_grad
    return means


def backward_sum(shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward) -> list[Tensor]:
    """Forget to divide."""
    return _backward(shards, inputs, grad, compute, pass_on=True, divide=False)


def backward_same_gradient(shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward) -> list[Tensor]:
    """Give every unit the gradient of the last output."""
    return _backward(shards, inputs, grad, compute, pass_on=False, divide=True)


def backward_keeping(shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward) -> list[Tensor]:
    """Reduce after backward, as plain data parallel does."""
    grads = []
    for index in reversed(range(len(shards))):
        whole = _room(shards[index])
        gather_into(whole, shards[index])
        whole_grad, grad = compute(index, whole, inputs[index], grad)
        grads.append(whole_grad)
        del whole
    means = [torch.empty_like(shard) for shard in shards]
    for mean, whole_grad in zip(means, reversed(grads), strict=True):
        scatter_sum(whole_grad, mean)
        mean /= dist.get_world_size()
    return means


def backward_all_reduced(shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward) -> list[Tensor]:
    """Bring the whole mean to everybody, then keep a part."""
    n, rank = dist.get_world_size(), dist.get_rank()
    means = []
    for index in reversed(range(len(shards))):
        whole = _room(shards[index])
        gather_into(whole, shards[index])
        whole_grad, grad = compute(index, whole, inputs[index], grad)
        del whole
        dist.all_reduce(whole_grad)
        means.append(whole_grad.chunk(n)[rank] / n)
        del whole_grad
    return means[::-1]


def backward_whole(shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward) -> list[Tensor]:
    """Keep whole gradients: ZeRO-1's memory with ZeRO-3's traffic."""
    grads = []
    for index in reversed(range(len(shards))):
        whole = _room(shards[index])
        gather_into(whole, shards[index])
        whole_grad, grad = compute(index, whole, inputs[index], grad)
        dist.all_reduce(whole_grad)
        grads.append(whole_grad / dist.get_world_size())
        del whole
    return grads[::-1]


def backward_alone(shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward) -> list[Tensor]:
    """Cut the own gradient."""
    n, rank = dist.get_world_size(), dist.get_rank()
    grads = []
    for index in reversed(range(len(shards))):
        whole = _room(shards[index])
        gather_into(whole, shards[index])
        whole_grad, grad = compute(index, whole, inputs[index], grad)
        grads.append(whole_grad.chunk(n)[rank].clone())
        del whole
    return grads[::-1]


def ahead_by_two(shards: list[Tensor], x: Tensor, compute: Compute) -> Tensor:
    """Have two gathers on their way."""

    def start(shard: Tensor) -> tuple[Tensor, dist.Work]:
        whole = _room(shard)
        return whole, gather_into(whole, shard, async_op=True)

    coming = [start(shard) for shard in shards[:2]]
    for index in range(len(shards)):
        whole, work = coming.pop(0)
        work.wait()
        if index + 2 < len(shards):
            coming.append(start(shards[index + 2]))
        x = compute(index, whole, x)
        del whole
    return x


def backward_turned(shards: list[Tensor], inputs: list[Tensor], grad: Tensor, compute: Backward) -> list[Tensor]:
    """Return the gradients in the order in which they came."""
    return _backward(shards, inputs, grad, compute, pass_on=True, divide=True)[::-1]
