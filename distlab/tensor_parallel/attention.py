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

from distlab.blocks.models import Attention
from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, agree_on
from distlab.tensor_parallel.sequence import own_random


class ParallelAttention(nn.Module):
    """The causal attention of a GPT with A/t heads on each rank.

    Shapes: x [B, S, H] -> [B, S, H]; with sequence_parallel both [B, S/t, H]
    Cost: an all-reduce of [B, S, H] forward and one backward: 4 (t-1)/t B S H elements sent per rank; as much with
        sequence_parallel.
    Error: as the two layers'.

    While training, each rank draws which attention weights of its own heads it drops.

    Args:
        attention: the full module; rank 0's weights count.
        group: the ranks.
        sequence_parallel: ranks hold parts of the sequence before and after.

    Attributes:
        mix: in the place of `scaled_dot_product_attention`, where a rank has some positions only.

    Raises:
        ValueError: t does not divide the heads, or ranks disagree.
    """

    def __init__(
        self, attention: Attention, group: ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        agree_on("the heads of a ParallelAttention", group, heads=attention.num_heads)
        check_heads(attention.num_heads, group)
        self.group, self.dropout = group, attention.dropout
        self.num_heads = attention.num_heads // dist.get_world_size(group)  # of this rank
        self.mix: Callable[..., Tensor] | None = None
        self.query_key_value = ColumnParallelLinear.from_full(
            attention.query_key_value,
            group,
            sections=[attention.output.in_features] * 3,
            sequence_parallel=sequence_parallel,
        )
        self.output = RowParallelLinear.from_full(attention.output, group, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally with the own heads, and add up what all ranks' heads found."""
        made = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [B, S, 3, A/t, d]
        query, key, value = made.permute(2, 0, 3, 1, 4)  # each [B, A/t, S, d]
        y: Tensor = self.output(self._mix(query, key, value).transpose(1, 2).flatten(-2))  # [B, S, H] or [B, S/t, H]
        return y

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the mixed values, [B, A/t, S, d]."""
        dropout = self.dropout if self.training else 0.0
        with own_random(query.device, self.group) if dropout else nullcontext():
            if self.mix is not None:
                return self.mix(query, key, value, dropout=dropout)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)


def check_heads(num_heads: int, group: ProcessGroup | None) -> None:
    """Refuse heads that cannot be shared out.

    Raises:
        ValueError: naming them.
    """
    num_ranks = dist.get_world_size(group)
    if num_heads % num_ranks:
        raise ValueError(
            f"rank {group_rank(group)}: {num_heads} heads cannot be split over {num_ranks} ranks; use a number of "
            f"ranks that divides {num_heads}, or a multiple of {num_ranks} heads"
        )
