"""Reference solutions of lesson 7: each byte of a model's state on one rank only, and whole where it is needed.

A *unit* is a part of the model whose parameters lie end to end in one row; each rank keeps an equal shard of the row.
The library's versions, made fit for any module and optimizer, are in `distlab.sharding`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sharding import gather_into, scatter_sum


def pieces_of(sizes: list[int], num_shards: int, shard: int) -> list[tuple[int, int, int]]:
    """Return which parts of which tensors lie in a shard: a list of (tensor, start, stop).

    Tensors of these sizes lie end to end in one row. The row is filled up at its end until all shards are equally
    long, and cut. `start` and `stop` count elements of the tensor. What was filled up belongs to no tensor.
    """
    length = -(-sum(sizes) // num_shards)
    low, high = shard * length, (shard + 1) * length
    pieces, begin = [], 0
    for tensor, size in enumerate(sizes):
        start, stop = max(begin, low), min(begin + size, high)
        if start < stop:
            pieces.append((tensor, start - begin, stop - begin))
        begin += size
    return pieces


def step_on_shard(parameters: Tensor, gradient: Tensor, update: Callable[[Tensor, Tensor], None]) -> None:
    """Make one update in which each rank updates its own shard only (ZeRO-1), in place.

    `update(shard, mean_gradient)` changes a shard in place; it keeps optimizer state for what it is given.

    Shapes: parameters [n L], the same on all ranks; gradient [n L], this rank's own, may be overwritten
    """
    own = parameters.chunk(dist.get_world_size())[dist.get_rank()]  # a view
    mean = torch.empty_like(own)
    scatter_sum(gradient, mean)
    mean /= dist.get_world_size()
    update(own, mean)
    gather_into(parameters, own)


def forward_units(shards: list[Tensor], x: Tensor, compute: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """Run all units, in order, each on the output of the one before; hold one whole unit at a time.

    `compute(i, whole, x)` runs unit i with its whole row of parameters.

    Shapes: shards [L_i], this rank's; whole [n L_i]
    """
    for index, shard in enumerate(shards):
        whole = shard.new_empty(shard.numel() * dist.get_world_size())
        gather_into(whole, shard)
        x = compute(index, whole, x)
        del whole
    return x


def forward_ahead(shards: list[Tensor], x: Tensor, compute: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """Run all units, in order, and gather the next one while this one computes; hold at most two whole units.

    Shapes: shards [L_i], this rank's; whole [n L_i]
    """

    def start(shard: Tensor) -> tuple[Tensor, dist.Work]:
        whole = shard.new_empty(shard.numel() * dist.get_world_size())
        return whole, gather_into(whole, shard, async_op=True)

    coming = start(shards[0])
    for index in range(len(shards)):
        whole, work = coming
        work.wait()
        coming = start(shards[index + 1]) if index + 1 < len(shards) else None
        x = compute(index, whole, x)
        del whole
    return x


def backward_units(
    shards: list[Tensor],
    inputs: list[Tensor],
    grad: Tensor,
    compute: Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """Run backward through all units; return this rank's shard of each unit's mean gradient.

    Unit i had the input inputs[i]. `grad` is the gradient of the last unit's output.
    `compute(i, whole, x, grad)` returns the gradients of unit i's parameters and of its input. Hold one whole unit and
    its gradient at a time.

    Shapes: shards [L_i] -> gradients [L_i]; whole [n L_i]
    """
    world_size = dist.get_world_size()
    means = [torch.empty_like(shard) for shard in shards]
    for index in reversed(range(len(shards))):
        whole = shards[index].new_empty(shards[index].numel() * world_size)
        gather_into(whole, shards[index])
        whole_grad, grad = compute(index, whole, inputs[index], grad)
        del whole
        scatter_sum(whole_grad, means[index])
        means[index] /= world_size
        del whole_grad
    return means


def assign_owners(shapes: list[tuple[int, int]], num_ranks: int) -> list[int]:
    """Return an owner for each matrix: the slowest rank has at most 4/3 of the least work that it could have.

    To orthogonalise a matrix takes work in proportion to 2 m^2 k + m^3: m is its shorter side and k its longer one.
    """
    work = [2 * min(shape) ** 2 * max(shape) + min(shape) ** 3 for shape in shapes]
    owners, busy = [0] * len(shapes), [0] * num_ranks
    for index in sorted(range(len(shapes)), key=lambda index: -work[index]):
        owners[index] = busy.index(min(busy))
        busy[owners[index]] += work[index]
    return owners


def update_by_owners(
    pieces: list[Tensor], owners: list[int], orthogonalize: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return this rank's rows of orthogonalize(matrix) for each matrix, which its owner alone computes.

    pieces[i] are this rank's rows of matrix i; the rows of all ranks, one below the other, are the matrix.

    Shapes: pieces [m_i / n, k_i] -> the same
    Cost: each piece goes to the owner, and comes back; owners compute at the same time.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    changed, updates = {}, [torch.empty_like(piece) for piece in pieces]
    for index, (piece, owner) in enumerate(zip(pieces, owners, strict=True)):
        rows = [torch.empty_like(piece) for _ in range(n)] if rank == owner else None
        dist.gather(piece, rows, dst=owner)
        if rank == owner:
            changed[index] = torch.cat(rows)
    changed = {index: orthogonalize(matrix) for index, matrix in changed.items()}
    for index, owner in enumerate(owners):
        rows = list(changed[index].chunk(n)) if rank == owner else None
        dist.scatter(updates[index], rows, src=owner)
    return updates


def full_state(shards: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Return all tensors, whole and in their shapes, on rank 0, and an empty dict on the others.

    A tensor's row was filled up at its end until all shards were equally long.

    Shapes: shards [L_i], this rank's part of tensor i
    """
    state = {}
    for name, shard in shards.items():
        row = shard.new_empty(shard.numel() * dist.get_world_size())
        gather_into(row, shard)
        if dist.get_rank() == 0:
            state[name] = row[: shapes[name].numel()].view(shapes[name]).clone()
    return state
