"""Attention with its heads split over ranks: each rank attends with its own heads, as if there were no others.

The layer that makes query, key and value is column-parallel and the output layer row-parallel, so attention itself
exchanges nothing. Query, key and value come out of one fused layer, whose features are [queries, keys, values]: cut it
as one piece and rank 0 of two gets all queries and half of the keys. Each of the three is cut on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.models import Attention
from distlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, agree_on
from distlab.tensor_parallel.sequence import own_random


class ParallelAttention(nn.Module):
    """Causal attention with A/t heads on each rank.

    With fewer heads of keys and values than of queries (grouped queries), head i of the queries reads head
    i // (A/K) of the keys; a rank has A/t and K/t of them, and those fit.

    Shapes: x [B, S, H] -> [B, S, H]; with sequence_parallel both [B, S/t, H]
    Cost: an all-reduce of [B, S, H] forward and one backward: 4 (t-1)/t B S H elements sent per rank; as much with
        sequence_parallel.
    Error: as the two layers'.

    Args:
        query_key_value: the full layer, H -> (A + 2 K) d features: all queries, then all keys, then all values.
        output: the full layer, A d -> H.
        num_heads: A.
        group: the ranks.
        num_key_value_heads: K; None for as many as A.
        dropout: probability of dropping an attention weight while training; each rank draws for its own heads.
        sequence_parallel: ranks hold parts of the sequence before and after.

    Raises:
        ValueError: t does not divide the heads, or the layers' features are not those of the heads.
    """

    def __init__(
        self,
        query_key_value: nn.Linear,
        output: nn.Linear,
        num_heads: int,
        group: ProcessGroup | None = None,
        *,
        num_key_value_heads: int | None = None,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        num_shared = num_heads if num_key_value_heads is None else num_key_value_heads
        agree_on("the heads of a ParallelAttention", group, heads=num_heads, key_value_heads=num_shared)
        check_heads(num_heads, num_shared, group)
        num_ranks, self.group, self.dropout = dist.get_world_size(group), group, dropout
        self.mix: Callable[..., Tensor] | None = None
        self.head_size = output.in_features // num_heads
        wanted = (num_heads + 2 * num_shared) * self.head_size
        if output.in_features % num_heads or query_key_value.out_features != wanted:
            raise ValueError(
                f"rank {group_rank(group)}: {num_heads} heads of queries and {num_shared} of keys and values need an "
                f"output layer whose inputs {num_heads} divides (got {output.in_features}), and a layer of {wanted} "
                f"features for query, key and value (got {query_key_value.out_features})"
            )
        self.num_heads, self.num_shared = num_heads // num_ranks, num_shared // num_ranks  # of this rank
        sections = [count * self.head_size for count in (num_heads, num_shared, num_shared)]
        self.query_key_value = ColumnParallelLinear.from_full(
            query_key_value, group, sections=sections, sequence_parallel=sequence_parallel
        )
        self.output = RowParallelLinear.from_full(output, group, sequence_parallel=sequence_parallel)

    @classmethod
    def from_full(
        cls, attention: Attention, group: ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> ParallelAttention:
        """Split the attention of a GPT; rank 0's weights count.

        Raises:
            ValueError: t does not divide the heads, or ranks disagree.
        """
        return cls(
            attention.query_key_value,
            attention.output,
            attention.num_heads,
            group,
            dropout=attention.dropout,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally with the own heads, and add up what all ranks' heads found."""
        made = self.query_key_value(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, (A + 2K)/t, S, d]
        query, key, value = made.split([self.num_heads, self.num_shared, self.num_shared], dim=1)
        y: Tensor = self.output(self._mix(query, key, value).transpose(1, 2).flatten(-2))  # [B, S, H] or [B, S/t, H]
        return y

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the mixed values, [B, A/t, S, d]."""
        dropout = self.dropout if self.training else 0.0
        with own_random(query.device, self.group) if dropout else nullcontext():
            if self.mix is not None:
                return self.mix(query, key, value, dropout=dropout)
            grouped = self.num_shared != self.num_heads
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=grouped, dropout_p=dropout
            )


def check_heads(num_heads: int, num_shared: int, group: ProcessGroup | None) -> None:
    """Refuse heads that cannot be shared out.

    Raises:
        ValueError: naming them.
    """
    num_ranks, rank = dist.get_world_size(group), group_rank(group)
    if num_shared < 1 or num_heads % num_shared:
        raise ValueError(
            f"rank {rank}: {num_heads} heads cannot share {num_shared} of keys and values; pass a number that divides"
        )
    if num_heads % num_ranks:
        raise ValueError(
            f"rank {rank}: {num_heads} heads cannot be split over {num_ranks} ranks; use a number of ranks that "
            f"divides {num_heads}, or a multiple of {num_ranks} heads"
        )
    if num_shared % num_ranks:
        raise ValueError(
            f"rank {rank}: {num_shared} heads of keys and values cannot be split over {num_ranks} ranks; use a number "
            f"of ranks that divides {num_shared}"
        )
