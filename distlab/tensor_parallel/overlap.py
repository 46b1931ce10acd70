"""The same linear layers, with the exchange during a matrix product.

Backward of a column-parallel layer makes two products: the input's gradient, which the ranks must add up, and the
weight's, which stays here. So make the input's first, send it off, and make the weight's meanwhile. Nothing is lost by
that and f's copy is saved, since the product is memory of our own.

Forward of a row-parallel layer has one product, and all of it is sent. Cut in parts by rows, the sum of one travels
during the product of the next. Smaller products and more calls cost something too, so it is one part unless asked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.async_calls import SequenceGather, SequenceScatterSum, Sum


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None = None, *, sequence: bool = False
) -> Tensor:
    """Compute x w^T + b with this rank's rows of w and b; backward sums x's gradient during w's product.

    sequence: x is a part of the sequence. What is gathered is kept for backward.

    Shapes: x [..., I] (with sequence [..., S/t, I]), weight [O/t, I], bias [O/t] -> [..., O/t]
    Cost: backward an all-reduce of x's gradient, 2 (t-1)/t of x's bytes. With sequence an all-gather forward and a
        reduce-scatter backward, each (t-1)/t of the whole x.
    """
    y: Tensor = _ColumnLinear.apply(*_cast(x, weight, bias), group, sequence)  # type: ignore[no-untyped-call]
    return y


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None = None, *, num_parts: int = 1
) -> Tensor:
    """Compute x w^T summed over ranks, plus b once; sums of the first parts travel during the last parts' products.

    Shapes: x [..., I/t], weight [O, I/t], bias [O] -> [..., O]
    Cost: forward num_parts all-reduces, together 2 (t-1)/t of the output's bytes; nothing backward.
    """
    y: Tensor = _RowLinear.apply(*_cast(x, weight, bias), group, num_parts)  # type: ignore[no-untyped-call]
    return y


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, sequence: bool
    ) -> Tensor:
        whole = SequenceGather(x, group).finish() if sequence else x  # [..., S, I]
        ctx.save_for_backward(whole, weight)
        ctx.group, ctx.start_sum = group, SequenceScatterSum if sequence else Sum
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        summing = None
        if for_x:
            partial = gradient @ weight  # [..., S, I], of this rank's features
            summing = ctx.start_sum(partial, ctx.group)  # travels during the next product
        weight_gradient = _rows(gradient).t() @ _rows(x) if for_weight else None  # [O/t, I]
        bias_gradient = _rows(gradient).sum(0) if for_bias else None
        return None if summing is None else summing.finish(), weight_gradient, bias_gradient, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, num_parts: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = _rows(x)
        y = rows.new_empty(len(rows), len(weight))  # [N, O]
        once = bias if group_rank(group) == 0 else None  # each rank would add one more
        sums: list[Sum] = []
        for part, made in zip(rows.chunk(num_parts), y.chunk(num_parts), strict=True):
            if once is None:
                torch.mm(part, weight.t(), out=made)
            else:
                torch.addmm(once, part, weight.t(), out=made)
            is_last = len(sums) == num_parts - 1
            sums.append(Sum(made, group, waits=is_last))  # the others travel during the next part's product
        for one in sums:
            one.finish()
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        return (
            gradient @ weight if for_x else None,  # [..., I/t]: complete, for each rank has the whole gradient
            _rows(gradient).t() @ _rows(x) if for_weight else None,
            _rows(gradient).sum(0) if for_bias else None,  # the same on every rank
            None,
            None,
        )


def _rows(x: Tensor) -> Tensor:
    """View all dims but the last as one: [..., I] -> [N, I]."""
    return x.reshape(-1, x.shape[-1])


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do what autocast does for F.linear: it does not look into autograd functions."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
