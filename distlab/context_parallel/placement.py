"""Which positions of a sequence a rank holds: two chunks each, one early and one late, so that causal work is even.

Under a causal mask the last position looks at everything and the first at itself alone. Cut a sequence of 8 positions
for 2 ranks in the middle, and rank 1 has 26 of the 36 pairs to work on. So cut it into 2n chunks and deal them out in a
zig-zag, chunk r and chunk 2n-1-r to rank r:

    chunk    0   1   2   3
    rank     0   1   1   0        positions of rank 0: 0 1 6 7, of rank 1: 2 3 4 5; 18 pairs each

On each rank the positions ascend, so that its own part under its own causal mask is an ordinary causal attention.

Symbols: n ranks, S positions of the whole sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single
from distlab.comm.p2p import group_rank, require_same


def zigzag_positions(length: int, num_ranks: int, rank: int) -> Tensor:
    """Return the positions that a rank holds, ascending; pure arithmetic, nothing is sent.

    Shapes: -> [S/n]

    Raises:
        ValueError: the length is not a multiple of 2n (one rank takes any), or there is no such rank.
    """
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks} ranks; pass a rank from 0 to {max(num_ranks - 1, 0)}")
    require_divisible(length, num_ranks, f"rank {rank}")
    if num_ranks == 1:
        return torch.arange(length)
    size = length // (2 * num_ranks)
    late = 2 * num_ranks - 1 - rank
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (rank, late)])


def position_ids(length: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the positions of the whole sequence that this rank holds: what a position embedding must look up.

    Shapes: -> [S/n]

    Raises:
        ValueError: as `zigzag_positions`.
    """
    return zigzag_positions(length, dist.get_world_size(group), group_rank(group))


def scatter_sequence(x: Tensor, group: ProcessGroup | None = None, *, dim: int = 1) -> Tensor:
    """Keep this rank's positions of a value that every rank has whole, such as a batch of tokens.

    Its gradient is whole again on every rank: backward gathers the parts.

    Shapes: x [B, S, ...] -> [B, S/n, ...], for dim 1
    Cost: nothing in forward; in backward one all-gather, (n-1)/n of x's bytes sent per rank.

    Raises:
        ValueError: no such dim, or its length is not a multiple of 2n.
    """
    length = _length(x, dim, group)
    require_divisible(length, dist.get_world_size(group), f"rank {group_rank(group)}")
    out: Tensor = _Scatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def gather_sequence(x: Tensor, group: ProcessGroup | None = None, *, dim: int = 1) -> Tensor:
    """Put the ranks' positions together in their natural order; every rank gets the whole.

    Each rank is taken to use the whole alike (the same loss on each): backward keeps this rank's part of the gradient
    and adds nothing up.

    Shapes: x [B, S/n, ...] -> [B, S, ...], for dim 1
    Cost: one all-gather, n-1 times x's bytes sent per rank, and 40 bytes that compare shapes; nothing in
        backward.

    Raises:
        ValueError: no such dim, an odd length, or shapes that differ between ranks (on every rank).
    """
    length, num_ranks = _length(x, dim, group), dist.get_world_size(group)
    require_divisible(num_ranks * length, num_ranks, f"rank {group_rank(group)}")
    require_same(x, group, what="part of the sequence")
    out: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def natural_order(parts: Tensor) -> Tensor:
    """Put the ranks' parts, stacked in the first dim, into the order of the whole sequence.

    Shapes: parts [n, S/n, ...] -> [S, ...]
    """
    if len(parts) == 1:
        return parts[0]
    chunks = parts.unflatten(1, (2, -1)).flatten(0, 1)  # [2n, S/2n, ...]: rank 0's two, rank 1's two, ...
    whole: Tensor = chunks.index_select(0, _places(len(parts)).to(parts.device)).flatten(0, 1)
    return whole


def rank_order(whole: Tensor, num_ranks: int, out: Tensor | None = None) -> Tensor:
    """Cut a sequence into the ranks' parts: the inverse of `natural_order`.

    Args:
        whole: of all ranks.
        num_ranks: n.
        out: where to put them, perhaps some columns of a larger tensor.

    Shapes: whole [S, ...] -> [n, S/n, ...]
    """
    parts = whole.new_empty(num_ranks, len(whole) // num_ranks, *whole.shape[1:]) if out is None else out
    if num_ranks == 1:
        parts[0].copy_(whole)
    else:
        chunks = parts.view(2 * num_ranks, -1, *whole.shape[1:])
        chunks.index_copy_(0, _places(num_ranks).to(whole.device), whole.unflatten(0, (2 * num_ranks, -1)))
    return parts


def _places(num_ranks: int) -> Tensor:
    """Return where each chunk of a sequence lies among the ranks': early ones ascend with the rank, late ones descend.

    Shapes: -> [2n]
    """
    early = torch.arange(0, 2 * num_ranks, 2)
    return torch.cat([early, early.flip(0) + 1])


def require_divisible(length: int, num_ranks: int, who: str) -> None:
    """Refuse a sequence that cannot be cut into two equal chunks per rank.

    Raises:
        ValueError: the length is not a multiple of twice the number of ranks (a single rank takes any length).
    """
    if num_ranks > 1 and length % (2 * num_ranks):
        fewer = max(length - length % (2 * num_ranks), 2 * num_ranks)
        raise ValueError(
            f"{who}: a sequence of {length} cannot be cut into 2 equal chunks for each of {num_ranks} ranks; "
            f"use a multiple of {2 * num_ranks}, such as {fewer} or {fewer + 2 * num_ranks}"
        )


def _length(x: Tensor, dim: int, group: ProcessGroup | None) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"rank {group_rank(group)}: dim {dim} of a tensor of shape {list(x.shape)}; pass one it has")
    return x.shape[dim]


def _own_part(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    keep = position_ids(x.shape[dim], group).to(x.device)
    return x.index_select(dim, keep)


def _all_parts(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    mine = x.movedim(dim, 0).contiguous()
    parts = mine.new_empty(dist.get_world_size(group), *mine.shape)
    all_gather_single(parts, mine[None], group=group)
    return natural_order(parts).movedim(0, dim)


class _Scatter(torch.autograd.Function):
    """Keep a part; backward gathers the parts' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_parts(gradient, ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    """Gather the parts; backward keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_parts(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(gradient, ctx.dim, ctx.group), None, None
