"""What ranks of an expert-parallel group send each other: who gets how many rows, the rows, and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FIELDS = 4  # fault, dtype, gradients, training


class Condition(NamedTuple):
    """What a rank says of its input, in addition to the counts.

    Attributes:
        fault: what is wrong with it; "" for nothing.
        dtype: of the rows.
        gradients: whether a backward pass may follow.
        training: whether the layer is in training mode.
    """

    fault: str
    dtype: torch.dtype
    gradients: bool
    training: bool

    @classmethod
    def of(cls, x: Any, weight: Tensor, training: bool) -> Condition:
        """Look at an input [..., H] of a layer whose router has this weight [E, H]."""
        hidden_size, device = weight.shape[1], weight.device
        if not isinstance(x, Tensor):
            return cls(f"expected a tensor, got {type(x).__name__}", torch.float32, False, training)
        fault = ""
        if x.dim() == 0 or x.shape[-1] != hidden_size:
            fault = f"expected [..., {hidden_size}], got {list(x.shape)}"
        elif x.dtype not in _DTYPES:
            fault = f"expected one of {', '.join(map(str, _DTYPES))}, got {x.dtype}"
        elif x.device != device or (x.dtype != weight.dtype and not torch.is_autocast_enabled(device.type)):
            fault = f"the layer is {weight.dtype} on {device}, the input {x.dtype} on {x.device}; convert one of them"
        return cls(fault, x.dtype, torch.is_grad_enabled(), training)


def trade_counts(
    counts: Sequence[int],
    ends: Sequence[int],
    condition: Condition,
    *,
    device: torch.device,
    group: ProcessGroup | None,
) -> list[list[int]]:
    """Tell each rank how many rows its experts will get, and hear the same from all: [n][own experts].

    The condition travels along, so ranks that do not fit all hear of it now, and none waits for rows that never come.

    Args:
        counts: rows for each of the E experts; not read when the condition has a fault.
        ends: for each rank, the number after its last expert.
        condition: of this rank.
        device: whose tensors the group moves.
        group: the ranks.

    Cost: one all-to-all of 8 (E + 4 n) bytes per rank.

    Raises:
        ValueError: on every rank: one has an input that does not fit, or ranks differ in dtype or mode.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    said = [
        int(bool(condition.fault)),
        _DTYPES.index(condition.dtype) if condition.dtype in _DTYPES else -1,
        int(condition.gradients),
        int(condition.training),
    ]
    begins = [0, *ends[:-1]]
    outgoing: list[int] = []
    for begin, end in zip(begins, ends, strict=True):
        outgoing += [0] * (end - begin) if condition.fault else counts[begin:end]
        outgoing += said
    width = ends[rank] - begins[rank] + _FIELDS
    if num_ranks > 1:
        incoming = torch.empty(num_ranks * width, dtype=torch.int64, device=device)
        give = [end - begin + _FIELDS for begin, end in zip(begins, ends, strict=True)]
        dist.all_to_all_single(incoming, torch.tensor(outgoing, device=device), [width] * num_ranks, give, group=group)
        outgoing = incoming.tolist()
    heard = [outgoing[start : start + width] for start in range(0, num_ranks * width, width)]
    _judge(condition, [row[-_FIELDS:] for row in heard], group)
    return [row[:-_FIELDS] for row in heard]


def _judge(condition: Condition, said: list[list[int]], group: ProcessGroup | None) -> None:
    """Raise on every rank where one rank cannot go on.

    Raises:
        ValueError: see `trade_counts`.
    """
    names = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if condition.fault:
        raise ValueError(f"rank {dist.get_rank()}: ExpertParallel: {condition.fault}")
    for name, (fault, *_) in zip(names, said, strict=True):
        if fault:
            raise ValueError(f"rank {name} gave ExpertParallel an input that does not fit; see that rank's error")
    words = ("the rows' dtype", "whether gradients are on", "the mode (train or eval)")
    for field, what in enumerate(words, 1):
        values = [one[field] for one in said]
        if len(set(values)) > 1:
            shown = [str(_DTYPES[value]) if field == 1 else str(bool(value)) for value in values]
            listed = ", ".join(f"rank {name} {value}" for name, value in zip(names, shown, strict=True))
            raise ValueError(f"ExpertParallel: ranks disagree on {what}: {listed}. Give all ranks the same")


def exchange_rows(rows: Tensor, give: Sequence[int], take: Sequence[int], group: ProcessGroup | None = None) -> Tensor:
    """Send each rank its rows, and return those that arrive, in the order of the ranks; gradients travel back.

    Where gradients are on, the result requires them whether or not `rows` do: all ranks then take part in the backward
    exchange, as they must.

    Shapes: rows [sum(give), H] -> [sum(take), H]
    Cost: one all-to-all of the rows forward and one of the arrived rows backward; what stays here is part of both.
    Error: exact: bytes are copied.
    """
    arrived: Tensor = _TokenExchange.apply(rows, _anchor(rows), list(give), list(take), group)  # type: ignore[no-untyped-call]
    return arrived


def sum_over_ranks(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over ranks; as each rank goes on with the same sum, its gradient is the sum of the ranks' gradients.

    Shapes: any, the same on all ranks.
    Cost: one all-reduce forward, one backward.
    """
    total: Tensor = _SumOverRanks.apply(tensor, _anchor(tensor), group)  # type: ignore[no-untyped-call]
    return total


def _anchor(tensor: Tensor) -> Tensor:
    """Return what makes a result require gradients, so that all ranks meet again in backward."""
    return torch.zeros((), device=tensor.device, requires_grad=torch.is_grad_enabled())


def _send(rows: Tensor, give: list[int], take: list[int], group: ProcessGroup | None) -> Tensor:
    arrived = rows.new_empty(sum(take), rows.shape[1])
    if dist.get_world_size(group) == 1:
        return arrived.copy_(rows)
    dist.all_to_all_single(arrived, rows.contiguous(), take, give, group=group)
    return arrived


class _TokenExchange(torch.autograd.Function):
    """Rows forward, their gradients the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, give: list[int], take: list[int], group: ProcessGroup | None
    ) -> Tensor:
        ctx.settings = give, take, group
        return _send(rows.detach(), give, take, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        give, take, group = ctx.settings
        return _send(gradients[0], take, give, group), None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """Sum forward, sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # others may read what we were handed
        dist.all_reduce(total, group=ctx.group)
        return total, None, None
