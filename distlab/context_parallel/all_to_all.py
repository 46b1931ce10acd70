"""All-to-all attention: trade positions for heads, attend to the whole sequence with some of the heads, trade back.

Heads know nothing of each other. So before attention each rank gives away most heads of its positions and gets all
positions of its heads, runs ordinary attention with torch's own kernel, and after it the ranks trade back. Fewer bytes
than a ring (each element moves once, not n-1 times), in four tensors that nothing hides; and no more ranks than heads.

Symbols: n ranks, B samples, A heads, S positions of the whole sequence, D size of a head, H = A D, g query heads a key
head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.context_parallel.placement import natural_order, rank_order, require_divisible
from distlab.context_parallel.ring import check_inputs


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
    counts = [tensor.shape[1] // num_ranks for tensor in (query, key, value)]
    parts = [tensor.unflatten(1, (num_ranks, -1)) for tensor in (query, key, value)]  # [B, n, heads, S/n, D]
    mine = trade(torch.cat(parts, dim=2).movedim(1, 0), group)  # [n, B, all heads / n, S/n, D]
    whole = natural_order(mine.movedim(3, 1)).movedim(0, 2)  # [B, all heads / n, S, D]
    query, key, value = whole.split(counts, dim=1)
    mixed = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=counts[0] != counts[1]
    )  # [B, A/n, S, D]
    back = rank_order(mixed.movedim(2, 0), num_ranks).movedim(1, 3)  # [n, B, A/n, S/n, D]
    return trade(back, group).movedim(0, 1).flatten(1, 2)  # [B, A, S/n, D]


def trade(parts: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Give part r to rank r and return what the ranks gave this one, in their order; gradients are traded back.

    Shapes: parts [n, ...] -> [n, ...]
    """
    out: Tensor = _Trade.apply(parts, group)  # type: ignore[no-untyped-call]
    return out


class _Trade(torch.autograd.Function):
    """An all-to-all of equal parts is its own inverse, and its own backward pass."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        if len(parts) == 1:
            return parts.clone()
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Trade.forward(ctx, gradient, ctx.group), None


def require_heads(num_heads: int, num_ranks: int, who: str) -> None:
    """Refuse heads that the ranks do not divide.

    Raises:
        ValueError: the number of heads is no multiple of the ranks.
    """
    if num_heads % num_ranks:
        raise ValueError(
            f"{who}: {num_heads} heads cannot be dealt out to {num_ranks} ranks evenly; use a number of ranks that "
            'divides them, or the ring (kind="ring"), which leaves heads whole'
        )
