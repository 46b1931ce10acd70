"""Linear layers cut over ranks: by their output features (column-parallel), or by their input features (row-parallel).

The paper writes Y = X A; PyTorch keeps the transpose, so that "columns" of A are rows of `weight`. A column-parallel
layer needs all of X and makes some features of Y. A row-parallel one takes just those features, and each rank makes a
partial sum of all of Y. One after the other, with something in between that works on each feature alone, they need one
exchange at the end (g) and one at the beginning of backward (f):

    y = row(gelu(column(x)))       x [B, S, H] -> [B, S, 4H/t] -> [B, S, H]

Every layer is cut from a full one, that of rank 0: whatever its initialisation, the parts are the full layer's.

Symbols: t ranks; I and O features of the full layer.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from distlab.blocks.modules.split import Split, is_replaced
from distlab.blocks.replicate import broadcast_each, parameter_facts
from distlab.comm import agree
from distlab.comm.p2p import group_rank
from distlab.tensor_parallel import functions
from distlab.tensor_parallel.overlap import column_linear, row_linear


class _ParallelLinear(nn.Module):
    """The base of both layers: it holds this rank's part of a full layer's parameters, cut as `splits` say."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    local_kind: type[nn.Module] | None = nn.Linear

    def __init__(self, full: nn.Linear, group: ProcessGroup | None, splits: dict[str, Split]) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.overlap = group, False, True
        self.in_features, self.out_features = linear_sizes(full)
        self.transposed = is_conv1d(full)
        if self.transposed:
            splits |= {"weight": replace(splits["weight"], dim=1 - splits["weight"].dim)}
            self.local_kind = None  # its weight is not laid out as that of an nn.Linear
        self.splits = splits
        num_ranks = dist.get_world_size(group)
        uneven = [] if splits["weight"].padded else [size for size in splits["weight"].sections if size % num_ranks]
        if uneven:
            raise ValueError(
                f"rank {group_rank(group)}: {type(self).__name__}: {uneven[0]} features cannot be split over "
                f"{num_ranks} ranks; pass a size that is a multiple of {num_ranks}, or use fewer ranks"
            )
        take_parts(self, full, group=group, splits=splits)

    @property
    def _rows(self) -> Tensor:
        """The part of the weight with one row per output feature."""
        return self.weight.t() if self.transposed else self.weight

    def _check_input(self, x: Tensor, features: int) -> None:
        if x.shape[-1] != features:
            raise ValueError(
                f"rank {group_rank(self.group)}: {type(self).__name__} got {list(x.shape)}; expected {features} "
                f"features in the last dim (the full layer has {self.in_features})"
            )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank makes some output features.

    Shapes: x [..., I] -> [..., O/t], or [..., O] with join_output; with sequence_parallel x is [..., S/t, I]
    Cost: forward nothing, backward an all-reduce of x: 2 (t-1)/t of its bytes sent per rank. With sequence_parallel an
        all-gather forward and a reduce-scatter backward, each (t-1)/t of the whole x. join_output: (t-1)/t of the
        output's bytes forward.
    Error: exact forward; x's gradient is a sum over ranks, in a different order.

    `from_full` makes one.

    Attributes:
        splits: how its parameters are cut.
        sequence_parallel: x is a part of the sequence.
        join_output: give every rank all features.
        overlap: backward sums x's gradient during the weight's product; not where `local_compute` is replaced.
    """

    join_output = False

    @classmethod
    def from_full(
        cls,
        layer: nn.Linear,
        group: ProcessGroup | None = None,
        *,
        sections: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        join_output: bool = False,
        padded: bool = False,
    ) -> ColumnParallelLinear:
        """Cut a layer.

        Args:
            layer: rank 0's counts.
            group: the ranks.
            sections: parts of the output features that are each cut on their own; see `Split`.
            sequence_parallel: as the attribute.
            join_output: as the attribute.
            padded: fill the features up with zeros to a multiple of t; see `Split`.

        Raises:
            ValueError: t does not divide the features, or ranks disagree on the layer.
        """
        split = Split(0, tuple(sections or (linear_sizes(layer)[1],)), padded)
        made = cls(layer, group, {"weight": split, "bias": split})
        made.sequence_parallel, made.join_output = sequence_parallel, join_output
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Make this rank's features."""
        self._check_input(x, self.in_features)
        if self.overlap and not is_replaced(self):
            y = column_linear(x, self._rows, self.bias, self.group, sequence=self.sequence_parallel)
        else:
            begin = functions.gather_sequence if self.sequence_parallel else functions.copy_to_ranks
            y = self.local_compute(begin(x, self.group))  # [..., S, O/t]
        return functions.join_features(y, self.group)[..., : self.out_features] if self.join_output else y

    def local_compute(self, x: Tensor) -> Tensor:
        """Make this rank's features of what the ranks begin with; see `LocalCompute`."""
        return F.linear(x, self._rows, self.bias)


class RowParallelLinear(_ParallelLinear):
    """A linear layer that takes some input features on each rank; the ranks' results are added up.

    The bias counts once: rank 0 adds it before the sum. Its gradient needs no exchange, since behind the sum every rank
    has the whole gradient.

    Shapes: x [..., I/t] -> [..., O], or [..., S/t, O] with sequence_parallel
    Cost: forward an all-reduce of the output: 2 (t-1)/t of its bytes sent per rank; nothing backward. With
        sequence_parallel a reduce-scatter forward and an all-gather backward, each (t-1)/t of the whole output.
    Error: a sum over ranks, in a different order than the full product's; gradients are exact.

    `from_full` makes one.

    Attributes:
        splits: how its parameters are cut; the bias is not.
        sequence_parallel: give each rank a part of the sequence.
        num_parts: without sequence_parallel, sum in this many parts, each during the product of the next.
        overlap: off, or where `local_compute` is replaced, each exchange is a function of its own: see `functions`.
    """

    num_parts = 1

    @classmethod
    def from_full(
        cls, layer: nn.Linear, group: ProcessGroup | None = None, *, sequence_parallel: bool = False, num_parts: int = 1
    ) -> RowParallelLinear:
        """Cut a layer; rank 0's counts. The options are the attributes of these names.

        Raises:
            ValueError: num_parts is less than 1; t does not divide the features, or ranks disagree on the layer.
        """
        if num_parts < 1:
            raise ValueError(f"num_parts is {num_parts}; pass at least 1")
        made = cls(layer, group, {"weight": Split(1, (linear_sizes(layer)[0],))})
        made.sequence_parallel, made.num_parts = sequence_parallel, num_parts
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Make all features of the sum."""
        self._check_input(x, self.in_features // dist.get_world_size(self.group))
        if self.overlap and not self.sequence_parallel and not is_replaced(self):
            return row_linear(x, self._rows, self.bias, self.group, num_parts=self.num_parts)
        end = functions.reduce_scatter_sequence if self.sequence_parallel else functions.reduce_from_ranks
        return end(self.local_compute(x), self.group)

    def local_compute(self, x: Tensor) -> Tensor:
        """Make this rank's summand of all features; see `LocalCompute`."""
        return F.linear(x, self._rows, None if self.bias is None else functions.add_once(self.bias, self.group))


def is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is a Conv1D of Hugging Face: a linear layer that stores its weight as [I, O]."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def linear_sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer: an nn.Linear or a Conv1D."""
    rows, columns = cast(Tensor, layer.weight).shape
    return (rows, columns) if is_conv1d(layer) else (columns, rows)


def agree_on(what: str, group: ProcessGroup | None, **values: object) -> None:
    """Refuse, on every rank, what differs between ranks; the ValueError has ranks and values. A group of one agrees."""
    if dist.get_world_size(group) > 1:
        agree(values, group, what=what)


def agree_on_inputs(inputs: Any, group: ProcessGroup | None, what: str = "inputs") -> None:
    """Refuse, by a ValueError on every rank, inputs of a forward that differ: ranks work on the same samples.

    Two exchanges of 40 bytes; nothing in a group of one.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if dist.get_world_size(group) > 1:
        agree([list(tensor.shape) for tensor in tensors], group, what=f"the shapes of the {what} of tensor ranks")
        same = f"the {what} of tensor ranks, which work on the same samples (sha256)"
        agree([digest(tensor) for tensor in tensors], group, what=same)


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


@torch.no_grad()
def take_parts(
    module: nn.Module, full: nn.Module, *, group: ProcessGroup | None, splits: Mapping[str, Split] | None = None
) -> None:
    """Give a layer rank 0's parameters of the full layer: cut as `splits` say, and whole where they say nothing.

    Raises:
        ValueError: ranks disagree on the parameters.
    """
    num_ranks, rank = dist.get_world_size(group), group_rank(group)
    facts = parameter_facts(full.named_parameters())
    agree_on(f"the layer that a {type(module).__name__} is cut from", group, parameters=facts)
    for name, parameter in list(full._parameters.items()):
        if parameter is None:
            module.register_parameter(name, None)
            continue
        values = parameter.detach().clone(memory_format=torch.contiguous_format)
        broadcast_each([values], group)
        if splits and name in splits:
            values = splits[name].cut(values, num_ranks, rank)
        module.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))
    if splits and num_ranks > 1:
        module.register_state_dict_pre_hook(_refuse_to_save_a_part)


def _refuse_to_save_a_part(layer: Any, prefix: str, keep_vars: bool) -> None:
    """Let a cut layer give its state to those alone who ask for the parameters themselves, not for values to save."""
    if not keep_vars:
        num_parts = dist.get_world_size(layer.group)
        raise ValueError(
            f"rank {dist.get_rank()}: this rank holds one of {num_parts} parts of {prefix}weight, and state_dict() "
            "would save it as the whole. Save what full_state_dict(model, group) of distlab.tensor_parallel returns, "
            "called on all ranks; to a checkpoint pass a Hybrid, or of a pipeline a StageState. "
            "state_dict(keep_vars=True) is the part"
        )
