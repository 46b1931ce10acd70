"""Wrong versions of a merge of two attentions, and of the positions that ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def merge_plain_mean(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Ignore how much weight each part has."""
    return (mean + new) / 2, torch.logaddexp(log_sum, new_log_sum)


def merge_without_max(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Go through the sums themselves."""
    old, more = log_sum.exp(), new_log_sum.exp()
    total = old + more
    return (old[..., None] * mean + more[..., None] * new) / total[..., None], total.log()


def merge_by_logarithms(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Take logarithms for shares."""
    total = (log_sum + new_log_sum)[..., None]
    return (log_sum[..., None] * mean + new_log_sum[..., None] * new) / total, torch.logaddexp(log_sum, new_log_sum)


def merge_adding_logs(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Add the logarithms."""
    share = torch.sigmoid(new_log_sum - log_sum)[..., None]
    return mean + share * (new - mean), log_sum + new_log_sum


def merge_larger(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Keep the larger logarithm, as one keeps a maximum."""
    share = torch.sigmoid(new_log_sum - log_sum)[..., None]
    return mean + share * (new - mean), torch.maximum(log_sum, new_log_sum)


def merge_swapped(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Give each part the other's share."""
    share = torch.sigmoid(log_sum - new_log_sum)[..., None]
    return mean + share * (new - mean), torch.logaddexp(log_sum, new_log_sum)


def merge_by_ratio(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Divide by the old log_sum's weight, which is nothing where no key was visible."""
    ratio = (new_log_sum - log_sum).exp()
    merged = (mean + ratio[..., None] * new) / (1 + ratio)[..., None]
    return merged, log_sum + (1 + ratio).log()


def merge_undivided(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Subtract the larger log_sum, and forget to divide by what the weights add up to."""
    largest = torch.maximum(log_sum, new_log_sum)
    merged = (log_sum - largest).exp()[..., None] * mean + (new_log_sum - largest).exp()[..., None] * new
    return merged, torch.logaddexp(log_sum, new_log_sum)


def merge_without_rescaling(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Add the new part's share to a mean that still has the weight it had alone."""
    total = torch.logaddexp(log_sum, new_log_sum)
    return mean + (new_log_sum - total).exp()[..., None] * new, total


def merge_keeping_max_out(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Subtract the larger log_sum, and not add it again."""
    largest = torch.maximum(log_sum, new_log_sum)
    share = torch.sigmoid(new_log_sum - log_sum)[..., None]
    return mean + share * (new - mean), ((log_sum - largest).exp() + (new_log_sum - largest).exp()).log()


def merge_in_place(mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor) -> Pair:
    """Write into the first part."""
    share = torch.sigmoid(new_log_sum - log_sum)[..., None]
    mean.lerp_(new, share)
    log_sum.copy_(torch.logaddexp(log_sum, new_log_sum))
    return mean, log_sum


def zigzag_straight(length: int, num_ranks: int, rank: int) -> Tensor:
    """Cut into as many pieces as there are ranks."""
    size = length // num_ranks
    return torch.arange(rank * size, (rank + 1) * size)


def zigzag_striped(length: int, num_ranks: int, rank: int) -> Tensor:
    """Deal positions out one by one."""
    return torch.arange(rank, length, num_ranks)


def zigzag_parallel(length: int, num_ranks: int, rank: int) -> Tensor:
    """Take chunks r and n + r."""
    size = length // (2 * num_ranks)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (rank, num_ranks + rank)])


def zigzag_late_first(length: int, num_ranks: int, rank: int) -> Tensor:
    """Put the late chunk in front."""
    size = length // (2 * num_ranks)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (2 * num_ranks - 1 - rank, rank)])


def zigzag_overlapping(length: int, num_ranks: int, rank: int) -> Tensor:
    """Forget that chunks count from 0."""
    size = length // (2 * num_ranks)
    chunks = (rank, (2 * num_ranks - rank) % (2 * num_ranks))
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in sorted(chunks)])
