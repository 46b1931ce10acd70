"""All-to-all attention: trade positions for heads, attend to the whole sequence with some of the heads, trade back.

Heads do not depend on each other. So before attention each rank gives away most heads of its positions and gets all
positions of its heads. Then it runs ordinary attention with torch's own kernel, and afterwards the ranks trade back.
Fewer bytes than a ring (each element moves once, not n-1 times), in four tensors that nothing hides; and no more ranks
than heads.

Symbols: n ranks, B samples, A heads, S positions of the whole sequence, D size of a head, H = A D, g query heads per
key head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.context_parallel.placement import natural_order, rank_order, require_divisible
from distlab.context_parallel.ring import check_inputs

Trade: TypeAlias = Callable[[Sequence[Tensor], ProcessGroup | None], tuple[Tensor, ...]]


def all_to_all_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup | None = None,
    causal: bool = True,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend over a sequence whose positions lie on the ranks in the zig-zag order, with A/n heads on each.

    Every rank passes the same shapes and dtypes (`context_parallel` compares them), and runs backward or none does.

    Args:
        query: this rank's positions.
        key: this rank's; fewer heads than queries have are shared, each by g query heads in a row.
        value: as key.
        group: the ranks.
        causal: a position sees itself and those before.
        dropout: probability of dropping a weight; each rank draws for its heads from torch's generator.
        scale: factor of the scores; 1/sqrt(D) when None.

    Shapes: query [B, A, S/n, D], key, value [B, A/g, S/n, D] -> [B, A, S/n, D]
    Cost: two all-to-alls in forward, which move (n-1)/n of what a rank has: (n-1)/n (2 + 2/g) B S H/n elements sent;
        as many in backward. (8 (n-1)/n B S H/n in all for g = 1: less than a ring's for more than one rank.)
    Error: exact up to the order of additions.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an odd length (on several ranks), heads or key
            heads that the ranks do not divide, or no probability; before anything is sent.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.
    """
    rank, num_ranks = group_rank(group), dist.get_world_size(group)
    who = f"rank {rank}: all-to-all attention"
    check_inputs(query, key, value, dropout, who=who)
    require_divisible(num_ranks * query.shape[2], num_ranks, f"rank {rank}")
    require_heads(query.shape[1], num_ranks, f"{who}: query")
    require_heads(key.shape[1], num_ranks, f"{who}: key")
    grouped = query.shape[1] != key.shape[1]
    query, key, value = _Trade.apply(  # type: ignore[no-untyped-call]  # [B, A/n, S, D]
        to_heads, to_positions, group, query, key, value
    )
    mixed = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )  # [B, A/n, S, D]
    (out,) = _Trade.apply(to_positions, to_heads, group, mixed)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)  # [B, A, S/n, D]


class _Trade(torch.autograd.Function):
    """Trade positions for heads, or heads for positions; backward trades the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, there: Trade, back: Trade, group: ProcessGroup | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back, ctx.group = back, group
        return there(tensors, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(gradients, ctx.group)


def to_heads(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Give up this rank's positions of other ranks' heads; get all positions of its own heads. One exchange for all.

    It copies twice: into what is sent, and out of what arrived, into the order of the sequence. In both the heads of a
    position lie together, as they do in what a projection makes, so runs that are copied are long.

    Shapes: each [B, heads, S/n, D] -> [B, heads/n, S, D]
    """
    num_ranks = dist.get_world_size(group)
    parts = [x.unflatten(1, (num_ranks, -1)).permute(1, 3, 0, 2, 4) for x in tensors]  # [n, S/n, B, heads/n, D]
    whole = natural_order(trade(torch.cat(parts, dim=3), group))  # [S, B, all heads / n, D]
    found: tuple[Tensor, ...] = whole.permute(1, 2, 0, 3).split([part.shape[3] for part in parts], dim=1)
    return found


def to_positions(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Trade back: the inverse of `to_heads`.

    Shapes: each [B, heads/n, S, D] -> [B, heads, S/n, D]
    """
    num_ranks, counts = dist.get_world_size(group), [x.shape[1] for x in tensors]
    num_samples, _, length, size = tensors[0].shape
    leave = tensors[0].new_empty(num_ranks, length // num_ranks, num_samples, sum(counts), size)
    for part, x in zip(leave.split(counts, dim=3), tensors, strict=True):
        rank_order(x.permute(2, 0, 1, 3), num_ranks, out=part)
    parts = trade(leave, group).permute(2, 1, 0, 3, 4).split(counts, dim=3)  # each [B, S/n, n, heads/n, D]
    return tuple(part.flatten(2, 3).transpose(1, 2) for part in parts)


def trade(parts: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Send part r to rank r; return the parts received, in the order of ranks. Done twice it changes nothing.

    Shapes: parts [n, ...] -> [n, ...]
    """
    parts = parts.contiguous()
    if len(parts) == 1:
        return parts
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts, group=group)
    return got


def require_heads(num_heads: int, num_ranks: int, who: str) -> None:
    """Refuse heads that the ranks do not divide.

    Raises:
        ValueError: the number of heads is not a multiple of the ranks.
    """
    if num_heads % num_ranks:
        raise ValueError(
            f"{who}: {num_heads} heads cannot be dealt out to {num_ranks} ranks evenly; use a number of ranks that "
            'divides them, or the ring (kind="ring"), which leaves heads whole'
        )
