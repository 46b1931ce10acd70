"""What a rank holds of a model; CutLayers: what sharding must know where tensor parallelism has cut layers.

A part of a layer is a layer to a shard. Two things are not so. A norm of gradients counts each element of the whole
model once: parts of all tensor ranks, and what all of them hold whole on one. And what is saved has the names of the
whole model, so it says which part of a tensor it holds.

Symbols: t tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.clip import Gradient, clip_counted_
from distlab.blocks.modules.named_parts import SavedPart, Slab
from distlab.blocks.modules.split import Split, group_of_parts, splits_of
from distlab.plan import FlatLayout
from distlab.sharding.part import FlatShard, OwnPiece, plain

Kind = tuple[tuple[int, ...], torch.dtype]


class CutLayers(NamedTuple):
    """The parameters of a model that are parts of whole ones.

    Attributes:
        splits: how each is cut, by its name; a parameter that is not here is whole on all tensor ranks.
        group: the tensor ranks; None where nothing is cut.
    """

    splits: Mapping[str, Split]
    group: ProcessGroup | None

    @classmethod
    def of(cls, model: nn.Module) -> CutLayers:
        """Return what is cut in a model; ask before its parameters move."""
        return cls(splits_of(model), group_of_parts(model))

    def slab(self, name: str) -> Slab | None:
        """Return which ranges of the whole tensor this rank's part is; None: all of it."""
        split = self.splits.get(name)
        return None if split is None else split.slab(dist.get_world_size(self.group), dist.get_rank(self.group))

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, given that of this rank's part."""
        return self.splits[name].whole_shape(shape) if name in self.splits else shape

    def for_all(self, parts: Mapping[str, SavedPart]) -> dict[str, SavedPart]:
        """Say of each part what it holds of the whole model's tensor."""
        return {
            name: replace(part, shape=self.whole_shape(name, part.shape), slab=self.slab(name))
            for name, part in parts.items()
        }


class OwnPieces(NamedTuple):
    """What a rank holds of a model.

    Attributes:
        pieces: as its optimizer updates them; at most one of a tensor.
        tensors: by name, shape and type of all tensors of which ranks hold pieces, as this tensor rank has them.
        cut: what of the model tensor ranks hold parts of.
        group: ranks that hold the other pieces of the same tensors.
        together: the names of tensors that are sent together, where all are gathered.
    """

    pieces: Sequence[OwnPiece]
    tensors: Mapping[str, Kind]
    cut: CutLayers
    group: ProcessGroup | None = None
    together: Sequence[Sequence[str]] = ()

    @classmethod
    def of(
        cls,
        held: Sequence[tuple[FlatLayout, torch.dtype, Sequence[OwnPiece]]],
        cut: CutLayers,
        group: ProcessGroup | None,
    ) -> OwnPieces:
        """Describe buckets or units: the layout and the type of each, and what of it is here."""
        tensors = {
            name: (shape, dtype)
            for layout, dtype, _ in held
            for name, shape in zip(layout.names, layout.shapes, strict=True)
        }
        pieces = [piece for *_, own in held for piece in own]
        return cls(pieces, tensors, cut, group, [layout.names for layout, *_ in held])


def clip_shards_(
    named: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    group: ProcessGroup | None,
    cut: CutLayers,
    *,
    check_finite: bool = True,
) -> Tensor:
    """Clip the gradients of shards, or of pieces of parameters, by the norm of all; return it.

    Args:
        named: this rank's, with gradients.
        max_norm: the norm to keep.
        group: ranks with other shards of the same.
        cut: what of the model tensor ranks hold parts of.
        check_finite: refuse a norm that is not finite.

    Cost: an all-reduce of 8 bytes over `group`, and one over the tensor ranks.

    Raises:
        NotFiniteError: on every rank: a gradient is NaN or infinite.
    """
    counts = cut.group is None or dist.get_rank(cut.group) == 0
    found = [Gradient(own, one, own in cut.splits or counts) for given in named for own, one in _by_tensor(*given)]
    groups = (group,) if cut.group is None else (group, cut.group)
    return clip_counted_(found, max_norm, groups, check_finite=check_finite)


def _by_tensor(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of each tensor that has a piece in a shard."""
    if parameter.grad is None:
        return
    gradient = plain(parameter.grad.detach())  # which a mark refuses: the gradient is not there yet
    if not isinstance(parameter, FlatShard):
        yield name, gradient
        return
    for piece, its in zip(parameter.pieces, parameter.cut(gradient), strict=True):
        yield piece.name, its
