"""CutLayers: what sharding must know of a model whose layers tensor parallelism has cut.

A part of a layer is a layer to a shard. Two things are not so. A norm of gradients counts each element of the whole
model once: parts of all tensor ranks, and what all of them hold whole on one. And what is saved has the names of the
whole model, so it says which part of a tensor it holds.

Symbols: t tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.clip import Gradient, clip_counted_, clip_gradients_
from distlab.comm.agree import group_device
from distlab.modules.named_parts import SavedPart, SavedShard, Slab, check_one_save
from distlab.modules.split import Split, group_of_parts, splits_of
from distlab.sharding.part import FlatShard, plain
from distlab.sharding.state.assemble import cut_anew, parts_by_name
from distlab.sharding.state.optimizer_parts import merge_groups


class CutLayers(NamedTuple):
    """The parameters of a model that are parts of whole ones.

    Attributes:
        splits: how each is cut, by its name; a parameter that is not here is whole on all tensor ranks.
        group: the tensor ranks; None where nothing is cut.
    """

    splits: Mapping[str, Split]
    group: ProcessGroup | None

    def whole(self, name: str, part: Any) -> Any:
        """Put the parts of all tensor ranks together; what is not cut stays as it is.

        Shapes: part [..., D/t, ...] -> [..., D, ...], in host memory
        Cost: an all-gather of the part.
        """
        split = self.splits.get(name)
        if split is None or not isinstance(part, Tensor) or part.dim() <= split.dim:
            return part
        mine = part.to(group_device(self.group)).contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine, group=self.group)
        return split.join(parts).to(part.device)

    def own(self, name: str, whole: Any) -> Any:
        """Cut this rank's part out of a whole tensor; what does not fit stays, for a check of shapes to refuse.

        Shapes: whole [..., D, ...] -> [..., D/t, ...]
        """
        split = self.splits.get(name)
        is_cut = split is not None and isinstance(whole, Tensor) and whole.dim() > split.dim
        if split is None or not is_cut or whole.shape[split.dim] != sum(split.sections):
            return whole
        return split.cut(whole.detach(), dist.get_world_size(self.group), dist.get_rank(self.group))

    def slab(self, name: str) -> Slab | None:
        """Return which ranges of the whole tensor this rank's part is."""
        split = self.splits.get(name)
        return None if split is None else split.slab(dist.get_world_size(self.group), dist.get_rank(self.group))

    def whole_state(
        self,
        state: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        names: Sequence[Sequence[str]],
    ) -> dict[str, Any]:
        """Return an optimizer's state by the names of whole tensors, as a plain optimizer loads it.

        Args:
            state: of each tensor here, by name.
            groups: the optimizer's options.
            names: of the tensors of each group, in the order of one process.
        """
        return {
            "state": {name: {k: self.whole(name, v) for k, v in state[name].items()} for own in names for name in own},
            "param_groups": [
                {**{key: value for key, value in one.items() if key != "names"}, "params": list(own)}
                for one, own in zip(groups, names, strict=True)
            ],
        }

    def named_for_all(self, parts: Mapping[str, SavedPart]) -> dict[str, SavedPart]:
        """Say of each saved part what it holds of the whole model's tensor."""
        return {
            name: replace(part, shape=self.splits[name].whole_shape(part.shape), slab=self.slab(name))
            if name in self.splits
            else part
            for name, part in parts.items()
        }

    def of_this_rank(self, saved: Sequence[SavedShard], shapes: Mapping[str, tuple[int, ...]]) -> Sequence[SavedShard]:
        """Return the shards of this rank's parts, of those that all tensor ranks saved; or cut these parts out of all.

        Args:
            saved: by any number of tensor ranks.
            shapes: of the tensors here, by name.

        Raises:
            ValueError: elements that this takes are in no shard.
        """
        if all(p.slab is None and p.shape == shapes.get(name) for one in saved for name, p in one.parts.items()):
            return saved
        local = [one for one in saved if all(p.slab == self.slab(name) for name, p in one.parts.items())]
        if local:
            return [
                replace(one, parts={n: replace(p, shape=p.row_shape, slab=None) for n, p in one.parts.items()})
                for one in local
            ]
        parts = {name: cut_anew(name, held, self.slab(name)) for name, held in parts_by_name(saved).items()}
        groups = merge_groups([one.groups for one in saved if one.groups is not None]) or None
        return [replace(saved[0], shard=0, num_shards=1, parts=parts, groups=groups, digests=())]


def cut_layers_of(model: nn.Module) -> CutLayers:
    """Return what is cut in a model; ask before its parameters move."""
    return CutLayers(splits_of(model), group_of_parts(model))


def check_saves(saved: Sequence[SavedShard]) -> None:
    """Refuse shards that were not saved together, or that changed since; each tensor rank's are a save of their own.

    Raises:
        ValueError: as `check_one_save`.
    """
    of_rank: dict[str, list[SavedShard]] = {}
    for one in saved:
        of_rank.setdefault(str({name: part.slab for name, part in one.parts.items()}), []).append(one)
    for same in of_rank.values() or [[]]:
        check_one_save(same)


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
    ranks = dist.group.WORLD if group is None else group  # None in clip_gradients_ means that no other rank has a part
    assert ranks is not None, "ranks run"
    if cut.group is None:
        return clip_gradients_(named, max_norm, group=ranks, check_finite=check_finite)
    counts = dist.get_rank(cut.group) == 0
    found = [Gradient(own, one, own in cut.splits or counts) for given in named for own, one in _by_tensor(*given)]
    return clip_counted_(found, max_norm, (ranks, cut.group), check_finite=check_finite)


def _by_tensor(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of each tensor that has a piece in a shard."""
    if parameter.grad is None:
        return
    gradient = plain(parameter.grad)
    if not isinstance(parameter, FlatShard):
        yield name, gradient
        return
    for piece in parameter.parts.pieces:
        yield parameter.parts.names[piece.tensor], gradient[piece.offset :][: piece.stop - piece.start]
