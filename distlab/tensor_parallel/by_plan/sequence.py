"""Style "sequence": between the blocks' cut layers each rank holds some positions only.

Outside of attention and feed-forward a block works on each position alone: norms, dropout, residual additions. There
every rank would compute the same, and keep the same for backward. With this style it does so for S/t positions:

    [S] -> split -> [S/t] -> norm, join -> [S] -> heads ... row, reduce-scatter -> [S/t] -> + -> ... -> join -> [S]

The list of the blocks has the style: its first block splits what it gets, its last one joins what it returns. The norms
that a cut layer reads have it, too: each normalises the own positions and joins them. So attention sees whole
sequences, and what stands before and behind the blocks (positions, masks, scores) as well.

Outside of attention and feed-forward a block then keeps 1/t for backward. Forward sends as much as without the style,
and (t-1)/t of the blocks' output; backward sends (t-1)/t more for each row layer's output and for the blocks' input,
and 2 (t-1)/t of the norms' gradients.

The ranks must divide the positions of every forward, also without gradients: so `generate`, which goes on with one
token at a time, needs a model without the style.

Symbols: t ranks; S positions, H features.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2. There the
column layers gather; here the norms do, since models that were not written for it count positions before their queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.gradient_hook import LinearHook
from distlab.tensor_parallel.async_calls import Sum
from distlab.tensor_parallel.functions import join_sequence, split_sequence
from distlab.tensor_parallel.linear import RowParallelLinear


def cut_sequences(model: nn.Module, styles: Mapping[str, str], group: ProcessGroup | None) -> None:
    """Put the hooks of style "sequence" on the model, whose layers are cut."""
    named = [name for name, style in styles.items() if style == "sequence"]
    join = partial(_join, group=group)
    for place in (name for name in named if isinstance(model.get_submodule(name), nn.ModuleList | nn.Sequential)):
        blocks = list(model.get_submodule(place).children())
        blocks[0].register_forward_pre_hook(partial(_split, group=group))
        blocks[-1].register_forward_hook(join)
        for name in (name for name in styles if name.startswith(place + ".")):
            module = model.get_submodule(name)
            if isinstance(module, RowParallelLinear):
                module.sequence_parallel = True  # it keeps the own positions of its sum
            elif styles[name] == "sequence":
                module.register_forward_hook(join)
                sum_over_ranks(module, group)


def _split(_: nn.Module, args: tuple[Any, ...], group: ProcessGroup | None) -> tuple[Any, ...]:
    """Before the first block: keep the own positions of what it gets first."""
    if not args or not isinstance(args[0], Tensor):
        raise ValueError(
            f"rank {group_rank(group)}: the first block of a list of style 'sequence' takes no tensor as its first "
            "argument; leave the style out of the plan"
        )
    return split_sequence(args[0], group), *args[1:]


def _join(module: nn.Module, _: Any, output: Any, group: ProcessGroup | None) -> Any:
    """Behind a norm or the last block: give every rank all positions of what it returns first."""
    if isinstance(output, Tensor):
        return join_sequence(output, group)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return type(output)([join_sequence(output[0], group), *output[1:]])
    raise ValueError(
        f"rank {group_rank(group)}: a {type(module).__name__} returned a {type(output).__name__}; style 'sequence' "
        "joins a tensor, or the first of a tuple: leave it out of the plan"
    )


def sum_over_ranks(module: nn.Module, group: ProcessGroup | None) -> None:
    """Sum the gradients of a module that every rank uses on its own heads, features or positions."""

    def summed(gradient: Tensor) -> Tensor:
        return Sum(gradient.clone(memory_format=torch.contiguous_format), group, waits=True).finish()

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(LinearHook(summed))
