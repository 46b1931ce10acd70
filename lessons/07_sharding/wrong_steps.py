"""Wrong versions of cutting a row into shards, of the ZeRO-1 step, of the norm and of the state dict."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sharding import gather_into, scatter_sum

Update = Callable[[Tensor, Tensor], None]


def _cut(sizes: list[int], length: int, shard: int) -> list[tuple[int, int, int]]:
    low, high = shard * length, (shard + 1) * length
    pieces, begin = [], 0
    for tensor, size in enumerate(sizes):
        start, stop = max(begin, low), min(begin + size, high)
        if start < stop:
            pieces.append((tensor, start - begin, stop - begin))
        begin += size
    return pieces


def pieces_rounded_down(sizes: list[int], num_shards: int, shard: int) -> list[tuple[int, int, int]]:
    """Lose what does not divide."""
    return _cut(sizes, sum(sizes) // num_shards, shard)


def pieces_in_the_row(sizes: list[int], num_shards: int, shard: int) -> list[tuple[int, int, int]]:
    """Count places in the row."""
    found = _cut(sizes, -(-sum(sizes) // num_shards), shard)
    return [(tensor, sum(sizes[:tensor]) + start, sum(sizes[:tensor]) + stop) for tensor, start, stop in found]


def pieces_of_whole_tensors(sizes: list[int], num_shards: int, shard: int) -> list[tuple[int, int, int]]:
    """Deal out whole tensors, each to the rank with the fewest elements."""
    held, found = [0] * num_shards, []
    for tensor, size in enumerate(sizes):
        least = held.index(min(held))
        held[least] += size
        if least == shard and size:
            found.append((tensor, 0, size))
    return found


def pieces_with_empty(sizes: list[int], num_shards: int, shard: int) -> list[tuple[int, int, int]]:
    """Name every tensor, also where nothing of it is here."""
    length = -(-sum(sizes) // num_shards)
    low, high, begin, found = shard * length, (shard + 1) * length, 0, []
    for tensor, size in enumerate(sizes):
        start, stop = max(begin, low), min(begin + size, high)
        found.append((tensor, start - begin, max(start, stop) - begin))
        begin += size
    return found


def pieces_with_padding(sizes: list[int], num_shards: int, shard: int) -> list[tuple[int, int, int]]:
    """Let the last tensor have what the row was filled up with."""
    length = -(-sum(sizes) // num_shards)
    return _cut([*sizes[:-1], sizes[-1] + length * num_shards - sum(sizes)], length, shard)


def step_with_all_reduce(parameters: Tensor, gradient: Tensor, update: Update) -> None:
    """Bring the whole mean to everybody."""
    n, rank = dist.get_world_size(), dist.get_rank()
    dist.all_reduce(gradient)
    own = parameters.chunk(n)[rank]
    update(own, gradient.chunk(n)[rank] / n)
    gather_into(parameters, own)


def step_on_everything(parameters: Tensor, gradient: Tensor, update: Update) -> None:
    """Shard the sum and nothing else."""
    mean = torch.empty(gradient.numel() // dist.get_world_size(), dtype=gradient.dtype)
    scatter_sum(gradient, mean)
    whole = torch.empty_like(gradient)
    gather_into(whole, mean / dist.get_world_size())
    update(parameters, whole)


def step_without_gather(parameters: Tensor, gradient: Tensor, update: Update) -> None:
    """Forget the others' shards."""
    own = parameters.chunk(dist.get_world_size())[dist.get_rank()]
    mean = torch.empty_like(own)
    scatter_sum(gradient, mean)
    update(own, mean / dist.get_world_size())


def step_with_sum(parameters: Tensor, gradient: Tensor, update: Update) -> None:
    """Forget to divide."""
    own = parameters.chunk(dist.get_world_size())[dist.get_rank()]
    mean = torch.empty_like(own)
    scatter_sum(gradient, mean)
    update(own, mean)
    gather_into(parameters, own)


def step_on_own_gradient(parameters: Tensor, gradient: Tensor, update: Update) -> None:
    """Never add up."""
    n, rank = dist.get_world_size(), dist.get_rank()
    own = parameters.chunk(n)[rank]
    update(own, gradient.chunk(n)[rank])
    gather_into(parameters, own)


def step_on_a_copy(parameters: Tensor, gradient: Tensor, update: Update) -> None:
    """Gather into a new row, which nobody keeps."""
    own = parameters.chunk(dist.get_world_size())[dist.get_rank()].clone()
    mean = torch.empty_like(own)
    scatter_sum(gradient, mean)
    update(own, mean / dist.get_world_size())
    gather_into(torch.empty_like(parameters), own)


def step_on_the_last_shard(parameters: Tensor, gradient: Tensor, update: Update) -> None:
    """Count shards from the end."""
    n, rank = dist.get_world_size(), dist.get_rank()
    own = parameters.chunk(n)[n - 1 - rank]
    mean = torch.empty_like(own)
    scatter_sum(gradient, mean)
    update(own, mean / n)
    gather_into(parameters, own.clone())


def _squares(gradients: list[Tensor]) -> Tensor:
    return sum((gradient.square().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64))


def _scale(gradients: list[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    factor = (max_norm / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient *= factor
    return norm


def clip_own(shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Do what one process does, on each rank."""
    everything = [*shards, *replicated]
    return _scale(everything, _squares(everything).sqrt(), max_norm)


def clip_replicated_n_times(shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Add up what all ranks hold as if it were parts."""
    everything = [*shards, *replicated]
    square = _squares(everything)
    dist.all_reduce(square)
    return _scale(everything, square.sqrt(), max_norm)


def clip_sum_of_norms(shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Add lengths."""
    norm = _squares([*shards, *replicated]).sqrt()
    dist.all_reduce(norm)
    return _scale([*shards, *replicated], norm, max_norm)


def clip_mean_square(shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Average, out of habit."""
    square = _squares(shards)
    dist.all_reduce(square)
    square /= dist.get_world_size()
    return _scale([*shards, *replicated], (square + _squares(replicated)).sqrt(), max_norm)


def clip_and_stretch(shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Bring every gradient to the same length."""
    square = _squares(shards)
    dist.all_reduce(square)
    norm = (square + _squares(replicated)).sqrt()
    for gradient in [*shards, *replicated]:
        gradient *= max_norm / norm
    return norm


def clip_shards_only(shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Scale a part of the gradients."""
    square = _squares(shards)
    dist.all_reduce(square)
    norm = (square + _squares(replicated)).sqrt()
    return _scale(shards, norm, max_norm)


def clip_gathered(shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Put all gradients together first."""
    square = _squares(replicated)
    for shard in shards:
        whole = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype)
        gather_into(whole, shard)
        square += whole.square().sum()
    return _scale([*shards, *replicated], square.sqrt(), max_norm)


def state_padded(shards: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Keep what the rows were filled up with."""
    state = {}
    for name, shard in shards.items():
        row = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype)
        gather_into(row, shard)
        state[name] = row
    return state if dist.get_rank() == 0 else {}


def state_flat(shards: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Forget the shapes."""
    return {name: row[: shapes[name].numel()] for name, row in state_padded(shards, shapes).items()}


def state_everywhere(shards: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Keep the whole model on every rank."""
    state = {}
    for name, shard in shards.items():
        row = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype)
        gather_into(row, shard)
        state[name] = row[: shapes[name].numel()].view(shapes[name])
    return state


def state_of_own(shards: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Save what is here."""
    return {name: shard.clone() for name, shard in shards.items()} if dist.get_rank() == 0 else {}
