"""Wrong versions of heads that are dealt out, of a pair for sequences, and of an embedding cut by tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distlab_lesson_08.wrong_layers import function
from torch import Tensor

from distlab.sharding import gather_into, scatter_sum
from distlab.tensor_parallel import copy_to_ranks, reduce_from_ranks


def _refuse(num_heads: int, num_shared: int, num_ranks: int) -> None:
    if num_heads % num_ranks or num_shared % num_ranks:
        raise ValueError(f"{num_ranks} ranks do not divide {num_heads} heads and {num_shared} of keys and values")


def _sections(weight: Tensor, num_heads: int, num_shared: int) -> tuple[Tensor, ...]:
    size = len(weight) // (num_heads + 2 * num_shared)
    return weight.split([num_heads * size, num_shared * size, num_shared * size])


def heads_in_one_piece(weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int) -> Tensor:
    """Cut the fused layer as any other."""
    _refuse(num_heads, num_shared, num_ranks)
    return weight.chunk(num_ranks)[rank]


def heads_with_all_keys(weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int) -> Tensor:
    """Share out the queries alone."""
    _refuse(num_heads, num_shared, num_ranks)
    query, key, value = _sections(weight, num_heads, num_shared)
    return torch.cat([query.chunk(num_ranks)[rank], key, value])


def heads_dealt_out(weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int) -> Tensor:
    """Give a rank every t-th head."""
    _refuse(num_heads, num_shared, num_ranks)
    size = len(weight) // (num_heads + 2 * num_shared)
    return torch.cat(
        [part.view(-1, size, weight.shape[1])[rank::num_ranks].flatten(0, 1)
         for part in _sections(weight, num_heads, num_shared)]
    )  # fmt: skip


def heads_rounded_down(weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int) -> Tensor:
    """Lose the heads that are left over."""
    size = len(weight) // (num_heads + 2 * num_shared)
    sections = zip(_sections(weight, num_heads, num_shared), (num_heads, num_shared, num_shared), strict=True)
    counts = [(part, count // num_ranks * size) for part, count in sections]
    return torch.cat([part[rank * rows : (rank + 1) * rows] for part, rows in counts])


def heads_in_thirds(weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int) -> Tensor:
    """Take query, key and value for equally large."""
    _refuse(num_heads, num_shared, num_ranks)
    return torch.cat([part.chunk(num_ranks)[rank] for part in weight.chunk(3)])


def _join(part: Tensor) -> Tensor:
    whole = part.new_empty(len(part) * dist.get_world_size(), *part.shape[1:])
    gather_into(whole, part.contiguous())
    return whole


def _add_up(whole: Tensor) -> Tensor:
    whole = whole.contiguous().clone()
    part = whole.new_empty(len(whole) // dist.get_world_size(), *whole.shape[1:])
    scatter_sum(whole.view(-1), part.view(-1))
    return part


def _own(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


def _sum_and_own(whole: Tensor) -> Tensor:
    total = whole.clone()
    dist.all_reduce(total)
    return _own(total)


def _alone(part: Tensor) -> Tensor:
    whole = part.new_zeros(len(part) * dist.get_world_size(), *part.shape[1:])
    own = whole.chunk(dist.get_world_size())[dist.get_rank()]
    own.copy_(part)
    return whole


def sequence_without_sum() -> tuple[Any, Any]:
    """Keep the own positions in backward, without the others' part."""
    return function(_join, _own), function(_add_up, _join)


def sequence_alone() -> tuple[Any, Any]:
    """Fill the others' gradients with zeros."""
    return function(_join, _add_up), function(_add_up, _alone)


def sequence_not_summed() -> tuple[Any, Any]:
    """Keep the own positions of the own partial result."""
    return function(_join, _add_up), function(_own, _join)


def sequence_by_all_reduce() -> tuple[Any, Any]:
    """Sum everything everywhere and throw most of it away."""
    return function(_join, _sum_and_own), function(_sum_and_own, _join)


def sequence_of_means() -> tuple[Any, Any]:
    """Take the mean of gradients, as data parallelism does."""
    return function(_join, lambda g: _add_up(g) / dist.get_world_size()), function(_add_up, _join)


def sequence_cut() -> tuple[Callable[..., Any], Any]:
    """Join with dist.all_gather, through which no gradient comes."""
    return lambda x: _join(x.detach()), function(_add_up, _join)


def embed_rounded_down(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Look tokens up, with as many a rank as the vocabulary gives."""
    width = vocab_size // dist.get_world_size()
    index = tokens - dist.get_rank() * width
    here = (index >= 0) & (index < width)
    x = F.embedding(index.where(here, 0), weight) * here.unsqueeze(-1)
    return reduce_from_ranks(x)


def embed_unmasked(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Add the first row for every token that is not here."""
    index = tokens - dist.get_rank() * len(weight)
    here = (index >= 0) & (index < len(weight))
    return reduce_from_ranks(F.embedding(index.where(here, 0), weight))


def embed_alone(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Look up what is here, and leave it at that."""
    index = tokens - dist.get_rank() * len(weight)
    here = (index >= 0) & (index < len(weight))
    return F.embedding(index.where(here, 0), weight) * here.unsqueeze(-1)


def embed_cut(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Gather all rows first, through which no gradient comes."""
    return F.embedding(tokens, _join(weight.detach()))


def embed_summed_twice(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Sum the gradient too."""

    def add(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    index = tokens - dist.get_rank() * len(weight)
    here = (index >= 0) & (index < len(weight))
    return function(add, add)(F.embedding(index.where(here, 0), weight) * here.unsqueeze(-1))


def embed_rows_mixed(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Begin the region with f, though no rank holds another's rows."""
    index = tokens - dist.get_rank() * len(weight)
    here = (index >= 0) & (index < len(weight))
    return reduce_from_ranks(F.embedding(index.where(here, 0), copy_to_ranks(weight)) * here.unsqueeze(-1))


def sequence_swapped() -> tuple[Any, Any]:
    """Return the pair in the other order."""
    return function(_add_up, _join), function(_join, _add_up)
