"""How one tensor lies on the ranks of a group: along which dim it is cut, and how the parts are put together again.

Pure functions of tensors, with nothing behind them that communicates; and the parameters of a model told apart into
those that are cut and those that every rank holds whole. Tensor parallelism cuts them; what shards a model that was cut
must know.

A tensor-parallel layer is a Linear or an Embedding with an exchange before or after it. A pipeline that computes weight
gradients later wants a different backward for that middle part. It need not know what is sent, and the layer need not
know about the pipeline. They meet in `LocalCompute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.modules.named_parts import Slab
from distlab.blocks.replicate import every_parameter


@dataclass(frozen=True)
class Split:
    """A tensor cut along one dim.

    Attributes:
        dim: the dim that is cut.
        sections: lengths along dim of what is cut apart: (H, H, H) for a fused query, key and value, of each of which a
            rank needs its own heads. One number for a tensor that is one piece.
        padded: fill up with zeros to a length that the ranks divide (a vocabulary); else sections must divide.
    """

    dim: int
    sections: tuple[int, ...]
    padded: bool = False

    def cut(self, full: Tensor, num_ranks: int, rank: int) -> Tensor:
        """Return this rank's part, in memory of its own.

        Shapes: full [..., D, ...] -> [..., D/t, ...]; D is the sum of the sections
        """
        slab = self.slab(num_ranks, rank)
        own = full.new_zeros(slab.shape(full.shape))
        for here, there in slab.pairs(own, full):
            here.copy_(there)
        return own

    def slab(self, num_ranks: int, rank: int) -> Slab:
        """Return which ranges of the whole tensor this rank's part is made of, and where it is filled up."""
        ranges, at = [], 0
        for size in self.sections:
            width = -(-size // num_ranks)
            low, high = min(rank * width, size), min((rank + 1) * width, size)
            ranges.append((at + low, at + high, width))
            at += size
        return Slab(self.dim, tuple(ranges))

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, given that of a part."""
        return (*part[: self.dim], sum(self.sections), *part[self.dim + 1 :])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo `cut`, given the parts of all ranks in order.

        Shapes: parts [..., D/t, ...] -> [..., D, ...]
        """
        whole = parts[0].new_empty(self.whole_shape(parts[0].shape))
        for rank, part in enumerate(parts):
            for here, there in self.slab(len(parts), rank).pairs(part, whole):
                there.copy_(here)
        return whole


def splits_of(model: nn.Module) -> dict[str, Split]:
    """Name the parameters of which each rank holds a part, and say how; every rank holds all others whole.

    A parallel layer keeps them in its `splits`, by the names that it uses itself. A tied parameter comes once.
    """
    by_id = {
        id(module._parameters[name]): split
        for module in model.modules()
        for name, split in getattr(module, "splits", {}).items()
        if module._parameters[name] is not None
    }
    return {name: by_id[id(parameter)] for name, parameter in every_parameter(model) if id(parameter) in by_id}


def group_of_parts(model: nn.Module) -> ProcessGroup | None:
    """Return the ranks that hold the parts of a model's cut layers; None where no layer is cut."""
    cut = next((module for module in model.modules() if getattr(module, "splits", None)), None)
    if cut is None:
        return None
    group: Any = cut.group
    return dist.group.WORLD if group is None else group


@runtime_checkable
class LocalCompute(Protocol):
    """A layer whose forward calls `self.local_compute`, once, and sends what it sends outside of that call.

    A caller may replace it (`layer.local_compute = ...`) by one that computes the same with a different backward.
    The layer asks `is_replaced` before it takes a shorter way that computes and sends at once.

    Attributes:
        local_kind: nn.Linear or nn.Embedding: `local_compute` computes what this kind of layer does, with the layer's
            own `weight` and `bias`. The bias' gradient is the sum of the output's, even where this rank's output leaves
            it out. None: this layer is not called; its parameters are used in a different way.
    """

    local_kind: type[nn.Module] | None

    def local_compute(self, x: Tensor) -> Tensor:
        """Compute the plain layer's output; nothing is sent."""


def is_replaced(layer: nn.Module) -> bool:
    """Return whether a layer's `local_compute` was replaced."""
    return "local_compute" in vars(layer)
