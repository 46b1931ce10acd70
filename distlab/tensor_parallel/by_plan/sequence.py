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

Symbols: t ranks; S positions, H features.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2. There the
column layers gather; here the norms do, since models that were not written for it count positions before their queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.gradient_hook import LinearHook
from distlab.tensor_parallel.async_calls import Sum
from distlab.tensor_parallel.functions import join_sequence, split_sequence
from distlab.tensor_parallel.linear import RowParallelLinear


class Stream:
    """The activations between a list's blocks, cut along the sequence.

    Args:
        name: the list's.
        group: the ranks.

    Attributes:
        is_cut: whether they are in this forward. Without gradients a length that the ranks do not divide stays whole,
            such as the single new token of `generate`.
    """

    def __init__(self, name: str, group: ProcessGroup | None) -> None:
        self.name, self.group, self.is_cut = name, group, False

    def enter(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the first block: keep the own positions of its first tensor."""
        at = next((at for at, one in enumerate(args) if isinstance(one, Tensor)), None)
        if at is None:
            raise ValueError(
                f"rank {group_rank(self.group)}: the first block of {self.name} got no tensor to cut along the "
                "sequence; leave style 'sequence' out of the plan"
            )
        divides = args[at].dim() >= 2 and args[at].shape[-2] % dist.get_world_size(self.group) == 0
        self.is_cut = divides or torch.is_grad_enabled()
        return (*args[:at], split_sequence(args[at], self.group), *args[at + 1 :]) if self.is_cut else args

    def leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Behind a norm or the last block: give every rank all positions of what it returns first."""
        if not self.is_cut:
            return output
        if isinstance(output, Tensor):
            return join_sequence(output, self.group)
        if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            return type(output)([join_sequence(output[0], self.group), *output[1:]])
        raise ValueError(
            f"rank {group_rank(self.group)}: a block of {self.name} returned a {type(output).__name__}; style "
            "'sequence' joins a tensor, or the first of a tuple: leave it out of the plan"
        )

    def before_row(self, row: nn.Module, _: Any) -> None:
        """Before a row layer: let it keep the own positions of its sum."""
        assert isinstance(row, RowParallelLinear), "a plan's rows are cut before its lists"
        row.sequence_parallel = self.is_cut


def cut_sequences(model: nn.Module, styles: Mapping[str, str], group: ProcessGroup | None) -> None:
    """Put the hooks of style "sequence" on the model, whose layers are cut."""
    named = [name for name, style in styles.items() if style == "sequence"]
    for place in (name for name in named if isinstance(model.get_submodule(name), nn.ModuleList | nn.Sequential)):
        stream, blocks = Stream(place, group), list(model.get_submodule(place).children())
        blocks[0].register_forward_pre_hook(stream.enter)
        blocks[-1].register_forward_hook(stream.leave)
        for name in (name for name in styles if name.startswith(place + ".")):
            module = model.get_submodule(name)
            if styles[name] == "row":
                module.register_forward_pre_hook(stream.before_row)
            elif styles[name] == "sequence":
                module.register_forward_hook(stream.leave)
                sum_over_ranks(module, group)


def sum_over_ranks(module: nn.Module, group: ProcessGroup | None) -> None:
    """Sum the gradients of a module that every rank uses on its own heads, features or positions."""

    def summed(gradient: Tensor) -> Tensor:
        return Sum(gradient.clone(memory_format=torch.contiguous_format), group, waits=True).finish()

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(LinearHook(summed))
