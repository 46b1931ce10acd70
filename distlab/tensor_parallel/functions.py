"""f and g: what the ranks exchange between two layers, as autograd functions in conjugate pairs.

Tensor parallelism cuts a layer's weight, and lets every rank compute with its part. Forward at one end of such a region
all ranks need the same input; at the other their partial results are added up. Backward runs the other way round, so
each end has two sides, and forgetting the second one gives wrong gradients without an error:

| function                    | forward                        | backward                       |
|-----------------------------|--------------------------------|--------------------------------|
| `copy_to_ranks` (f)         | nothing                        | all-reduce                     |
| `reduce_from_ranks` (g)     | all-reduce                     | nothing                        |
| `gather_sequence`           | all-gather                     | reduce-scatter                 |
| `reduce_scatter_sequence`   | reduce-scatter                 | all-gather                     |
| `split_sequence`            | keep the own part              | all-gather                     |
| `join_sequence`             | all-gather                     | keep the own part              |
| `join_features`             | all-gather                     | keep the own part              |
| `add_once`                  | zero on all ranks but the first| nothing                        |
| `sum_gradients`             | nothing                        | all-reduce of all of them      |

f and g begin and end a region between activations that every rank holds whole. With sequence parallelism ranks hold
parts of the sequence there, and `gather_sequence` and `reduce_scatter_sequence` take the places of f and g.

Symbols: t ranks; B samples, S positions, H features.

Source: Shoeybi et al. 2019, Megatron-LM, section 3 (f and g); Korthikanti et al. 2022, Reducing Activation
Recomputation in Large Transformer Models, section 4.2.2 (with sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.async_calls import SequenceGather, SequenceScatterSum, Sum, check_sequence


def copy_to_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Begin a region (f): every rank holds x whole and computes a part of what follows.

    Backward, each rank has the gradient that comes through its own part; x's is their sum.

    Shapes: x [...] -> [...]
    Cost: nothing forward; backward an all-reduce of x: 2 (t-1)/t of its bytes.
    """
    return _pair(x, group, forward=_nothing, backward=sum_of_ranks)


def reduce_from_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """End a region (g): add up the ranks' partial results.

    Shapes: x [...] -> [...]
    Cost: forward an all-reduce of x: 2 (t-1)/t of its bytes; nothing backward.
    Error: as a sum in a different order.
    """
    return _pair(x, group, forward=sum_of_ranks, backward=_nothing)


def gather_sequence(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Begin a region from parts of a sequence.

    Shapes: x [..., S/t, H] -> [..., S, H]
    Cost: an all-gather forward and a reduce-scatter backward, each (t-1)/t of the whole's bytes: together f's.
    """
    return _pair(x, group, forward=_gather, backward=_scatter_sum)


def reduce_scatter_sequence(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """End a region in parts of a sequence: add up the ranks' results, and keep the own positions.

    Shapes: x [..., S, H] -> [..., S/t, H]
    Cost: a reduce-scatter forward and an all-gather backward, each (t-1)/t of the whole's bytes: together g's.

    Raises:
        ValueError: the ranks do not divide S.
    """
    check_sequence(x, group, what="reduce_scatter_sequence")
    return _pair(x, group, forward=_scatter_sum, backward=_gather)


def split_sequence(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Keep this rank's part of the sequence; every rank has passed the whole sequence.

    Shapes: x [..., S, H] -> [..., S/t, H]
    Cost: nothing forward; an all-gather backward, (t-1)/t of the whole's bytes.

    Raises:
        ValueError: the ranks do not divide S.
    """
    check_sequence(x, group, what="split_sequence")
    return _pair(x, group, forward=own_positions, backward=_gather)


def join_sequence(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Give every rank the whole of a sequence, for something that every rank then computes alike.

    What follows must be the same on all ranks: then each has the whole gradient and keeps the own part. Where ranks go
    on with parts of the work, `gather_sequence` is right.

    Shapes: x [..., S/t, H] -> [..., S, H]
    Cost: an all-gather forward, (t-1)/t of the whole's bytes; nothing backward.
    """
    return _pair(x, group, forward=_gather, backward=own_positions)


def join_features(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Give every rank all features, for something that every rank then computes alike.

    Shapes: x [..., H/t] -> [..., H]
    Cost: an all-gather forward, (t-1)/t of the whole's bytes; nothing backward.
    """
    return join_sequence(x.unsqueeze(-1), group).squeeze(-1)  # features in the place of positions


def add_once(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Make x count once in a sum over ranks: a bias that is added before the sum, say.

    Backward each rank gets the whole gradient of the sum, and so does its copy of x.

    Shapes: x [...] -> [...]
    Cost: nothing is sent.
    """
    return _pair(x, group, forward=_zero_but_on_first, backward=_nothing)


def sum_gradients(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Let every rank use its copy of parameters on its own positions; their gradients are summed over ranks.

    Shapes: any
    Cost: backward one all-reduce of all of them; nothing in a group of one.
    """
    if dist.get_world_size(group) == 1 or not any(tensor.requires_grad for tensor in tensors):
        return tuple(tensors)
    same: tuple[Tensor, ...] = _SumGradients.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return same


Operation = Callable[[Tensor, ProcessGroup | None], Tensor]


def _pair(x: Tensor, group: ProcessGroup | None, *, forward: Operation, backward: Operation) -> Tensor:
    """Do one thing to an activation, and its conjugate to the gradient."""
    y: Tensor = _Pair.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]
    return y


class _Pair(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, forward: Operation, backward: Operation) -> Tensor:
        ctx.group, ctx.conjugate = group, backward
        y = forward(x, group)
        return x.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(gradient, ctx.group), None, None, None


def _nothing(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return x


def sum_of_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum in memory of its own: other code may hold the gradient or activation, too.

    Shapes: any; the same
    """
    return Sum(x.clone(memory_format=torch.contiguous_format), group, waits=True).finish()


def _gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return SequenceGather(x, group).finish()


def _scatter_sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return SequenceScatterSum(x, group).finish()


def _zero_but_on_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    return x.clone() if group_rank(group) == 0 else torch.zeros_like(x)


class _SumGradients(Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        flat = torch.cat([g.reshape(-1) for g, is_wanted in zip(gradients, wanted, strict=True) if is_wanted])
        total = Sum(flat, ctx.group, waits=True).finish()
        sizes = [g.numel() if is_wanted else 0 for g, is_wanted in zip(gradients, wanted, strict=True)]
        parts = zip(total.split(sizes), gradients, wanted, strict=True)
        return None, *(part.view_as(g) if is_wanted else None for part, g, is_wanted in parts)


def own_positions(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's part of a sequence, in memory of its own.

    Shapes: x [..., S, H] -> [..., S/t, H]
    """
    return x.chunk(dist.get_world_size(group), -2)[group_rank(group)].clone(memory_format=torch.contiguous_format)
