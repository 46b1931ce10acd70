"""Redistribute: from one layout to a different one, by the route that sends the fewest bytes.

Backward is a redistribution too. What a rank's gradient means follows from its tensor. Of a part it is the gradient of
that part. Of a summand it is the gradient of the sum, the same on all ranks: so the gradient of a `Partial` is
`Replicate`. And of a copy it is what this rank's use of the copy adds: the gradient of a `Replicate` is `Partial`. With
this exchange of R and P (`gradient_layout`) backward goes from the gradient's layout after to that before. It
differentiates the sum over ranks of what `backward()` is called on: a loss that all ranks have counts once for each
rank, so divide it by their number, or make a Partial of it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.collectives import DirectGather, DirectScatter
from distlab.comm import agree
from distlab.comm.together import together
from distlab.placements.layout import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    check_layout,
    local_shape,
    shard_sizes,
    words,
)
from distlab.placements.route import Move, route


def gradient_layout(layout: Sequence[Placement]) -> Layout:
    """Return the layout of a tensor's gradient: R and P change places."""
    swapped: dict[Placement, Placement] = {Replicate(): Partial(), Partial(): Replicate()}
    return tuple(swapped.get(one, one) for one in layout)


def redistribute(
    local: Tensor,
    shape: Sequence[int],
    before: Sequence[Placement],
    after: Sequence[Placement],
    groups: Sequence[ProcessGroup | None],
) -> Tensor:
    """Return what this rank holds in a different layout; all ranks of the mesh call this.

    Args:
        local: what it holds now.
        shape: of the whole tensor.
        before: its layout, a placement for each axis of the mesh.
        after: the wanted one.
        groups: this rank's group on each axis, slowest first: `list(mesh_groups(Mesh(...)).values())`.

    Shapes: local_shape(shape, before, ...) -> local_shape(shape, after, ...); `local` itself where nothing changes
    Cost: the bytes of `route(shape, before, after, mesh)`. The first time with a shape and two layouts, an `agree` on
        each axis.
    Error: exact where nothing is summed; sums are added in the order of the ranks, in the dtype of `local`.

    Raises:
        ValueError: on every rank, the first time: on one of them `local` has not the shape that the layout gives it,
            or ranks want different things. Later the recorder tells that their calls differ.
    """
    its = tuple(dist.group.WORLD if group is None else group for group in groups)
    _agree(tuple(local.shape), str(local.dtype), tuple(shape), tuple(before), tuple(after), its)
    if tuple(before) == tuple(after):
        return local
    moves = route(shape, before, after, _place(its)[0], itemsize=local.element_size())
    made: Tensor = _Redistribute.apply(local, tuple(shape), moves, its)  # type: ignore[no-untyped-call]
    return made


def _place(groups: Sequence[ProcessGroup | None]) -> tuple[tuple[int, ...], int]:
    """Return the mesh of some groups, and this process's rank in it."""
    mesh = tuple(dist.get_world_size(group) for group in groups)
    return mesh, sum(dist.get_rank(group) * math.prod(mesh[axis + 1 :]) for axis, group in enumerate(groups))


@lru_cache(4096)
def _agree(
    local: tuple[int, ...],
    dtype: str,
    shape: tuple[int, ...],
    before: Layout,
    after: Layout,
    groups: tuple[ProcessGroup | None, ...],
) -> None:
    """Refuse, on every rank, what one rank cannot do; kept where it is right."""
    mesh, rank = _place(groups)
    known = {f"{dtype} {shape} from ({words(before)}) to ({words(after)})"}
    refused: set[str] = set()
    try:
        check_layout(shape, after, mesh)
        wanted = local_shape(shape, before, mesh, rank)
        if local != wanted:
            refused.add(
                f"rank {dist.get_rank()}: the local tensor is {local} in place of {wanted}, which is ({words(before)}) "
                f"of {shape} on {mesh}; pass what cut(whole, layout, mesh, rank) gives"
            )
    except ValueError as error:
        refused.add(str(error))
    alike = True
    for group in groups:  # what differs on one axis goes along the others, and so to all
        try:
            agree([*known, *refused, alike], group)
        except ValueError:
            alike = False
    for group in () if alike else groups:
        told = together(partial(tuple, (known, refused)), group, what="redistribute")
        known, refused = (set().union(*sets) for sets in zip(*told, strict=True))
    if refused or len(known) > 1:
        raise ValueError("; ".join(sorted(refused)) or f"ranks redistribute different things: {sorted(known)}")


class _Redistribute(torch.autograd.Function):
    """The steps of a route; backward takes the route of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, shape: tuple[int, ...], moves: Sequence[Move], groups: tuple[ProcessGroup | None, ...]
    ) -> Tensor:
        ctx.shape, ctx.groups = shape, groups
        ctx.layouts = gradient_layout(moves[-1].after), gradient_layout(moves[0].before)
        made = local
        for move in moves:
            made = take_step(made, shape, move, groups)
        return made.clone() if made.untyped_storage().data_ptr() == local.untyped_storage().data_ptr() else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        before, after = ctx.layouts
        return redistribute(gradient.contiguous(), ctx.shape, before, after, ctx.groups), None, None, None


@torch.no_grad()
def take_step(local: Tensor, shape: Sequence[int], move: Move, groups: Sequence[ProcessGroup | None]) -> Tensor:
    """Make one step of a route.

    Shapes: local_shape(shape, move.before, ...) -> local_shape(shape, move.after, ...)
    """
    group, now, then = groups[move.axis], move.before[move.axis], move.after[move.axis]
    num_ranks, place = dist.get_world_size(group), dist.get_rank(group)
    if num_ranks == 1:
        return local
    dim = now.dim if isinstance(now, Shard) else then.dim if isinstance(then, Shard) else 0
    without = (*move.before[: move.axis], Replicate(), *move.before[move.axis + 1 :])
    lengths = local_shape(shape, without, *_place(groups))  # as this axis does not cut it: the same on all its ranks
    if move.collective == "all_reduce":
        made = local.clone(memory_format=torch.contiguous_format)
        if made.numel():
            dist.all_reduce(made, group=group)
        return made
    if move.collective == "keep on first":
        return torch.zeros_like(local) if place else local
    sizes = shard_sizes(lengths[dim], num_ranks)
    start = sum(sizes[:place])
    if move.collective == "slice":
        return local.narrow(dim, start, sizes[place]).contiguous()
    if move.collective == "pad with zeros":
        made = local.new_zeros(lengths)
        made.narrow(dim, start, sizes[place]).copy_(local)
        return made
    if move.collective == "all_gather":
        return _gather(local, dim, lengths[dim], group)
    if move.collective == "reduce_scatter":
        return _scatter_sum(local, dim, group)
    assert isinstance(then, Shard), "what is left is an all-to-all"
    return _exchange(local, dim, then.dim, sizes, group)


def _gather(local: Tensor, dim: int, length: int, group: ProcessGroup | None) -> Tensor:
    """Put the ranks' parts of a dim end to end; short ones are padded on the way."""
    num_ranks = dist.get_world_size(group)
    part = _padded(local, dim, shard_sizes(length, num_ranks)[0])
    rows = part.new_empty(num_ranks, *part.shape)
    if rows.numel():
        DirectGather(rows.view(-1), part.view(-1), group).finish()
    return rows.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, length).contiguous()


def _scatter_sum(local: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Sum over the ranks, and keep this rank's part of a dim."""
    num_ranks = dist.get_world_size(group)
    sizes = shard_sizes(local.shape[dim], num_ranks)
    rows = _padded(local, dim, num_ranks * sizes[0]).unflatten(dim, (num_ranks, sizes[0])).movedim(dim, 0).contiguous()
    made = DirectScatter(rows.view(-1), group, by_rank=True).finish().view_as(rows[0]) if rows.numel() else rows[0]
    return made.narrow(dim, 0, sizes[dist.get_rank(group)]).contiguous()


def _exchange(local: Tensor, dim: int, other: int, sizes: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Give each rank its part of the other dim, of what this rank has; put what arrives end to end."""
    cuts, shape = shard_sizes(local.shape[other], dist.get_world_size(group)), list(local.shape)
    send = torch.cat([part.reshape(-1) for part in local.split(cuts, other)])
    shape[other], shape[dim] = 1, 1
    each = math.prod(shape)  # elements of one index of both dims
    shape[other] = cuts[dist.get_rank(group)]
    counts = [each * shape[other] * size for size in sizes]
    arrived = send.new_empty(sum(counts))
    if each * local.shape[other] * sum(sizes):
        dist.all_to_all_single(arrived, send, counts, [each * local.shape[dim] * cut for cut in cuts], group=group)
    if math.prod(shape[:dim]) == 1:  # as they lie
        return arrived.view(*shape[:dim], sum(sizes), *shape[dim + 1 :])
    parts = zip(arrived.split(counts), sizes, strict=True)
    return torch.cat([part.view(*shape[:dim], size, *shape[dim + 1 :]) for part, size in parts], dim)


def _padded(local: Tensor, dim: int, length: int) -> Tensor:
    """Return a tensor whose dim has this length, with zeros at its end; contiguous."""
    if local.shape[dim] == length:
        return local.contiguous()
    made = local.new_zeros(*local.shape[:dim], length, *local.shape[dim + 1 :])
    made.narrow(dim, 0, local.shape[dim]).copy_(local)
    return made
