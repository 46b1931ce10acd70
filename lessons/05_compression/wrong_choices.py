"""Wrong versions of choosing elements and of remembering the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def _gathered(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return everyone


def _top_k_of(gradient: Tensor, indices: Tensor, index_dtype: torch.dtype = torch.int32) -> Tensor:
    """Exchange and add the elements at these indices."""
    total = torch.zeros_like(gradient)
    all_indices = _gathered(indices.to(index_dtype))
    for their_indices, their_values in zip(all_indices, _gathered(gradient[indices]), strict=True):
        total.index_add_(0, their_indices, their_values)
    return total


def top_k_with_zeros(gradient: Tensor, k: int) -> Tensor:
    """Send a whole tensor in which most elements are zero."""
    kept = torch.zeros_like(gradient)
    indices = gradient.abs().topk(k).indices
    kept[indices] = gradient[indices] / dist.get_world_size()
    dist.all_reduce(kept)
    return kept


def top_k_reduced(gradient: Tensor, k: int) -> Tensor:
    """Sum values of different elements."""
    indices = gradient.abs().topk(k).indices
    values = gradient[indices] / dist.get_world_size()
    dist.all_reduce(values)
    mean = torch.zeros_like(gradient)
    mean[indices] = values
    return mean


def top_k_added_once(gradient: Tensor, k: int) -> Tensor:
    """Lose all but one value where ranks chose the same element."""
    indices = gradient.abs().topk(k).indices
    everywhere = torch.cat(_gathered(indices.int())).long()
    mean = torch.zeros_like(gradient)
    mean[everywhere] += torch.cat(_gathered(gradient[indices])) / dist.get_world_size()
    return mean


def top_k_signed(gradient: Tensor, k: int) -> Tensor:
    """Choose the largest, not the largest by magnitude."""
    return _top_k_of(gradient, gradient.topk(k).indices) / dist.get_world_size()


def top_k_sum(gradient: Tensor, k: int) -> Tensor:
    """Forget to divide."""
    return _top_k_of(gradient, gradient.abs().topk(k).indices)


def top_k_wide(gradient: Tensor, k: int) -> Tensor:
    """Send indices of 8 bytes."""
    return _top_k_of(gradient, gradient.abs().topk(k).indices, torch.int64) / dist.get_world_size()


def top_k_of_mean(gradient: Tensor, k: int) -> Tensor:
    """Average everything first, and compress what needs no sending any more."""
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    kept = torch.zeros_like(mean)
    indices = mean.abs().topk(k).indices
    kept[indices] = mean[indices]
    return kept


def random_k_by_rank(gradient: Tensor, k: int, step: int) -> Tensor:
    """Let each rank draw its own places."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return _random_k(gradient, torch.randperm(gradient.numel(), generator=generator)[:k])


def _random_k(gradient: Tensor, places: Tensor) -> Tensor:
    values = gradient[places] / dist.get_world_size()
    dist.all_reduce(values)
    estimate = torch.zeros_like(gradient)
    estimate[places] = values * (gradient.numel() / len(places))
    return estimate


def random_k_same_places(gradient: Tensor, k: int, step: int) -> Tensor:
    """Seed with a constant."""
    generator = torch.Generator().manual_seed(0)
    return _random_k(gradient, torch.randperm(gradient.numel(), generator=generator)[:k])


def random_k_unscaled(gradient: Tensor, k: int, step: int) -> Tensor:
    """Leave out the factor L / k."""
    return random_k_right(gradient, k, step) * (k / gradient.numel())


def random_k_right(gradient: Tensor, k: int, step: int) -> Tensor:
    """Do it right; for wrong versions that spoil something else."""
    generator = torch.Generator().manual_seed(step)
    return _random_k(gradient, torch.randperm(gradient.numel(), generator=generator)[:k])


def random_k_masked(gradient: Tensor, k: int, step: int) -> Tensor:
    """Send the zeros too."""
    generator = torch.Generator().manual_seed(step)
    places = torch.randperm(gradient.numel(), generator=generator)[:k]
    estimate = torch.zeros_like(gradient)
    estimate[places] = gradient[places] / dist.get_world_size() * (gradient.numel() / k)
    dist.all_reduce(estimate)
    return estimate


def random_k_with_indices(gradient: Tensor, k: int, step: int) -> Tensor:
    """Send indices that everybody knows."""
    generator = torch.Generator().manual_seed(step)
    places = torch.randperm(gradient.numel(), generator=generator)[:k]
    mean = _top_k_of(gradient, places) / dist.get_world_size()
    return mean * (gradient.numel() / k)


def random_k_sum(gradient: Tensor, k: int, step: int) -> Tensor:
    """Forget to divide by the number of ranks."""
    return random_k_right(gradient, k, step) * dist.get_world_size()


def random_k_repeated(gradient: Tensor, k: int, step: int) -> Tensor:
    """Draw with putting back, so that a place may come twice."""
    generator = torch.Generator().manual_seed(step)
    return _random_k(gradient, torch.randint(gradient.numel(), (k,), generator=generator))


Compress = Callable[[Tensor], Tensor]


def _mean(sent: Tensor) -> Tensor:
    mean = sent / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def memory_ignored(gradient: Tensor, memory: Tensor, compress: Compress) -> Tensor:
    """Fill the memory and never use it."""
    sent = compress(gradient)
    memory.copy_(gradient - sent)
    return _mean(sent)


def memory_rebound(gradient: Tensor, memory: Tensor, compress: Compress) -> Tensor:
    """Give the name to a new tensor, which nobody sees."""
    wanted = gradient + memory
    sent = compress(wanted)
    memory = wanted - sent  # noqa: F841
    return _mean(sent)


def memory_of_gradient(gradient: Tensor, memory: Tensor, compress: Compress) -> Tensor:
    """Keep what is left of the gradient, not of what was wanted."""
    sent = compress(gradient + memory)
    memory.copy_(gradient - sent)
    return _mean(sent)


def memory_of_mean(gradient: Tensor, memory: Tensor, compress: Compress) -> Tensor:
    """Keep what the mean lacks."""
    wanted = gradient + memory
    mean = _mean(compress(wanted))
    memory.copy_(wanted - mean)
    return mean


def memory_of_all(gradient: Tensor, memory: Tensor, compress: Compress) -> Tensor:
    """Keep what was sent, too."""
    memory.add_(gradient)
    return _mean(compress(memory))


def memory_negative(gradient: Tensor, memory: Tensor, compress: Compress) -> Tensor:
    """Keep the rest with the wrong sign."""
    wanted = gradient + memory
    sent = compress(wanted)
    memory.copy_(sent - wanted)
    return _mean(sent)


def memory_piled_up(gradient: Tensor, memory: Tensor, compress: Compress) -> Tensor:
    """Add the rest to what was there, though it is in it already."""
    wanted = gradient + memory
    sent = compress(wanted)
    memory.add_(wanted - sent)
    return _mean(sent)
