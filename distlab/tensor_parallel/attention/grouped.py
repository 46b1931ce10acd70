"""Query, key and value where there are fewer heads of keys and values than ranks: some ranks then need the same head.

Queries are split as ever. Keys and values are few, so every rank keeps their whole weight, and makes the one head that
its queries read. A head's gradient is then spread over the ranks that read it: it is summed, as a norm's is between two
parts of a sequence, and the weight stays the same on all.

Symbols: t ranks; A heads of queries and K of keys and values, K divides t; d features per head; H input features.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.functions import sum_gradients
from distlab.tensor_parallel.linear import ColumnParallelLinear, take_parts
from distlab.tensor_parallel.overlap import Region, column_linear


class SharedKeyValueLinear(nn.Module):
    """Makes A/t heads of queries on each rank, and the head of keys and of values that they read.

    Shapes: x [..., H] -> [..., (A/t + 2) d]; with sequence_parallel x is [..., S/t, H]
    Cost: as a `ColumnParallelLinear`, and backward an all-reduce of the gradients of key and value, 2 K d (H + 1)
        elements: 2 (t-1)/t of them sent per rank. Each rank keeps all 2 K d H weights of key and value, where 2 d H
        would do: up to t/2 heads more.
    Error: as a ColumnParallelLinear's; gradients of key and value are sums over ranks, in another order.

    Args:
        layer: the full layer, of (A + 2 K) d features; rank 0's counts.
        num_heads: A; a multiple of t.
        num_shared: K; t is a multiple.
        group: the ranks.
        sequence_parallel: ranks hold parts of the sequence before.

    Raises:
        ValueError: ranks disagree on the layer.
    """

    def __init__(
        self,
        layer: nn.Linear,
        num_heads: int,
        num_shared: int,
        group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.head_size = layer.out_features // (num_heads + 2 * num_shared)
        queries = num_heads * self.head_size
        first, rest = _rows_of(layer, slice(queries)), _rows_of(layer, slice(queries, None))
        self.query = ColumnParallelLinear.from_full(first, group)
        self.query.local_kind = None  # it keeps the weight, and is not called
        self.key_value = _Whole(rest, group)
        self.own_head = group_rank(group) * num_shared // dist.get_world_size(group)

    def forward(self, x: Tensor) -> Tensor:
        """Make the own heads of queries, then the head of keys, then that of values."""
        # Each rank uses its own rows of key and value, so their gradients are summed over ranks.
        key_value = sum_gradients(_present(self.key_value.weight, self.key_value.bias), self.group)
        mine = [self._own_rows(parameter) for parameter in key_value]
        of_queries = _present(self.query.weight, self.query.bias)
        weight, *bias = (torch.cat(both) for both in zip(of_queries, mine, strict=True))
        region = Region(self.group, self.sequence_parallel, False)
        return column_linear(x, weight, bias[0] if bias else None, region)

    def _own_rows(self, parameter: Tensor) -> Tensor:
        """Take the rows of this rank's head: [2 K d, ...] -> [2 d, ...]."""
        keys_and_values: Tensor = parameter.unflatten(0, (2, -1, self.head_size))  # [2, K, d, ...]
        return keys_and_values[:, self.own_head].flatten(0, 1)


class _Whole(nn.Module):
    """Parameters of a linear layer that every rank holds whole."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, group: ProcessGroup | None) -> None:
        super().__init__()
        take_parts(self, layer, group=group)


def _present(*parameters: Tensor | None) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter is not None]


def _rows_of(layer: nn.Linear, rows: slice) -> nn.Linear:
    """Return some output features of a layer as a layer."""
    weight = layer.weight[rows].detach().clone()
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias[rows].detach().clone(), requires_grad=layer.bias.requires_grad)
    return part
