"""Wrong versions of a norm over all axes, and of a step on a mesh of data and tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

Groups = dict[str, dist.ProcessGroup]
Gradients = dict[str, Tensor]
Axes = dict[str, list[str]]


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _shared(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Return this rank's part of the sum of squares, each element counted once over all ranks."""
    square = _zero()
    for name, gradient in gradients.items():
        copies = prod(group.size() for axis, group in groups.items() if axis not in split_over[name])
        square += gradient.square().sum() / copies
    return square


def norm_of_own(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Clip as on one device."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()


def norm_of_stage(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Sum over tensor and data, and leave the stages to themselves."""
    square = _shared(gradients, split_over, groups)
    for axis in ("data", "tensor"):
        dist.all_reduce(square, group=groups[axis])
    return square.sqrt()


def norm_of_all_copies(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Sum the squares of all ranks, whatever they hold."""
    square = sum((gradient.square().sum() for gradient in gradients.values()), _zero())
    dist.all_reduce(square)
    return square.sqrt()


def norm_with_copies_on_tensor(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Sum over pipeline and tensor, what is whole on every tensor rank too."""
    square = sum((gradient.square().sum() for gradient in gradients.values()), _zero())
    for axis in ("pipeline", "tensor"):
        dist.all_reduce(square, group=groups[axis])
    return square.sqrt()


def norm_rounded(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Add up in float32."""
    square = _shared(gradients, split_over, groups).float()
    for group in groups.values():
        dist.all_reduce(square, group=group)
    return square.sqrt()


def norm_of_divided(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Divide gradients by their number of copies, before they are squared."""
    square = _zero()
    for name, gradient in gradients.items():
        copies = prod(group.size() for axis, group in groups.items() if axis not in split_over[name])
        square += (gradient / copies).square().sum()
    for group in groups.values():
        dist.all_reduce(square, group=group)
    return square.sqrt()


def norm_with_replicas(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Count what tensor ranks share once, and every replica."""
    square = _shared(gradients, split_over, groups) * groups["data"].size()
    for group in groups.values():
        dist.all_reduce(square, group=group)
    return square.sqrt()


def norm_of_norms(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Add up lengths."""
    norm = _shared(gradients, split_over, groups).sqrt()
    dist.all_reduce(norm)
    return norm


def norm_averaged(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Average the squares over all ranks."""
    square = _shared(gradients, split_over, groups)
    dist.all_reduce(square)
    return (square / dist.get_world_size()).sqrt()


def norm_by_tensor(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Make the calls of each gradient; stages that hold fewer make fewer."""
    total = _zero()
    for name, gradient in gradients.items():
        square = gradient.square().sum()
        for axis in split_over[name]:
            dist.all_reduce(square, group=groups[axis])
        total += square
    return total.sqrt()


def norm_gathered(gradients: Gradients, split_over: Axes, groups: Groups) -> Tensor:
    """Send squares of every element."""
    row = torch.zeros(10, dtype=torch.float64)
    for name, gradient in gradients.items():
        copies = prod(group.size() for axis, group in groups.items() if axis not in split_over[name])
        row[:5] += gradient.square() / copies
    dist.all_reduce(row)
    return row.sum().sqrt()


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Groups], tuple[Tensor, Tensor, Tensor]]


def _part(samples: str | None, groups: Groups) -> tuple[int, int]:
    """Return which part of the samples to take, and of how many: by an axis' place, None by rank, or by arithmetic."""
    rank, data, tensor = dist.get_rank(), groups["data"].size(), groups["tensor"].size()
    if samples in groups:
        return dist.get_rank(groups[samples]), groups[samples].size()
    return {
        None: (rank, data * tensor),
        "all": (0, 1),
        "rank // tensor": (rank // tensor, data),
        "rank % data": (rank % data, data),
        "of all ranks": (dist.get_rank(groups["data"]), data * tensor),
    }[samples]


def stepper(
    *,
    samples: str | None = "data",
    outputs: str | None = "tensor",
    gradients: str | None = "data",
    divide: str | None = "data",
) -> Step:
    """Make a step that takes samples (see _part), sums and divides by other groups; None is all ranks, "" none."""

    def step_on_mesh(
        first: Tensor, second: Tensor, x: Tensor, target: Tensor, groups: Groups
    ) -> tuple[Tensor, Tensor, Tensor]:
        part, num_parts = _part(samples, groups)
        x, target = x.chunk(num_parts)[part], target.chunk(num_parts)[part]
        hidden = torch.tanh(x @ first)
        output = hidden @ second
        if outputs != "":
            dist.all_reduce(output, group=None if outputs is None else groups[outputs])
        difference = output - target
        loss, grad = difference.square().mean(), 2 * difference / difference.numel()
        results = loss, x.T @ (grad @ second.T * (1 - hidden.square())), hidden.T @ grad
        for value in results:
            if gradients != "":
                dist.all_reduce(value, group=None if gradients is None else groups[gradients])
            if divide != "":
                value /= dist.get_world_size(None if divide is None else groups[divide])
        return results

    return step_on_mesh


def step_on_place_0(
    first: Tensor, second: Tensor, x: Tensor, target: Tensor, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """Let only the first rank of each tensor group average its gradients."""
    data, tensor = groups["data"], groups["tensor"]
    loss, *gradients = stepper(gradients="", divide="")(first, second, x, target, groups)
    for value in (loss, *gradients):
        if dist.get_rank(tensor) == 0:
            dist.all_reduce(value, group=data)
            value /= dist.get_world_size(data)
    return loss, gradients[0], gradients[1]
