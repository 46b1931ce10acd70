"""An optimizer of a rank's own pieces, built as if of whole parameters: its groups, its options and its saved state.

`ShardedOptimizer` and `WholeTensorOptimizer` both are one: the caller makes an optimizer of whole parameters, alike on
all ranks, and then it gets what this rank updates in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.modules.moved import NotCopied
from distlab.blocks.modules.named_parts import SavedShard, apart, per_element, whole_shard
from distlab.comm import agree
from distlab.plan import assign_owners, newton_schulz_flops
from distlab.sharding.by_element import Optimizer, needs_of_group
from distlab.sharding.cut_layers import CutLayers, OwnPieces
from distlab.sharding.part import SCALER, OwnPiece
from distlab.sharding.state.parts import SavedInShards, by_names, prepare, save_parts

Named = Sequence[tuple[str, nn.Parameter]]


class OptimizerOfPieces(NotCopied, SavedInShards, Optimizer):
    """What a sharded optimizer shows of the one inside, and how its state is saved and loaded.

    Attributes:
        optimizer: of this rank's pieces. Schedules of the learning rate take it, or the sharded optimizer itself.
        group: ranks that own the other pieces.
        group_names: the names of all parameters in each group, the same on all ranks.
    """

    optimizer: Optimizer
    group: ProcessGroup | None
    group_names: list[list[str]]

    def own_pieces(self) -> OwnPieces:
        """Return what this rank updates."""
        raise NotImplementedError

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of this rank's pieces, with their learning rates."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Options that a group has where it sets none."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What the optimizer keeps of this rank's pieces."""
        return self.optimizer.state

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Refuse torch.amp.GradScaler on every rank, also on one that owns no gradient: it asks for this first."""
        raise ValueError(f"rank {dist.get_rank()}: torch.amp.GradScaler on shards: {SCALER}")

    def add_param_group(self, param_group: Mapping[str, Any]) -> NoReturn:
        """Refuse, by a ValueError: pieces are fixed."""
        raise ValueError(f"{type(self).__name__} has fixed pieces, and takes no further parameters; build it again")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, in host memory; every rank saves its own, and nothing is sent."""
        return SavedShard.from_dict(self.shard_state()).copied().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on this rank.

        Raises:
            ValueError: it is of a different model, or does not hold this rank's elements.
        """
        self.load_shards([state_dict])

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's shard, for a checkpoint: views, to save or copy before the next update."""
        parts, groups = save_parts(self.own_pieces(), self.optimizer, parameters=False)
        return SavedShard(dist.get_rank(self.group), dist.get_world_size(self.group), parts, groups).to_dict()

    def prepare_shards(self, saved: Sequence[SavedShard]) -> Callable[[], None]:
        """Assemble this rank's pieces from saved shards; return a function that loads them. Nothing changes yet.

        Raises:
            ValueError: they do not fit, or shards are missing.
        """
        return prepare(self.own_pieces(), self.optimizer, saved, parameters=False)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a whole optimizer's state by names, such as `distlab.checkpoint.read_dcp` returns under "optimizer".

        Raises:
            ValueError: it does not fit; nothing has changed.
        """
        shapes = {name: shape for name, (shape, _) in self.own_pieces().tensors.items()}
        self.load_shards([whole_shard(*by_names(state), shapes).to_dict()])


def names_of_groups(optimizer: Optimizer, named: Named, group: ProcessGroup | None) -> list[list[str]]:
    """Return the names of each group's parameters; a ValueError refuses others', and ranks that made different ones."""
    known = {id(parameter): name for name, parameter in named}
    groups = [one["params"] for one in optimizer.param_groups]
    if any(id(parameter) not in known for its in groups for parameter in its):
        raise ValueError(
            "make_optimizer made an optimizer of other parameters; build it of those that it is called with, or of "
            "the module's own that require a gradient"
        )
    names = [[known[id(parameter)] for parameter in its] for its in groups]
    options = sorted(f"{key}={value}" for key, value in optimizer.defaults.items())
    agree([type(optimizer).__name__, options, names], group, what="optimizer")
    return names


def needs_by_name(optimizer: Optimizer, names: Sequence[Sequence[str]], cut: CutLayers) -> dict[str, str]:
    """Return whether each tensor is updated by "elements" or whole, "tensors".

    Raises:
        ValueError: the optimizer looks at all at once, or at whole tensors of which tensor ranks have parts.
    """
    needs, kind = [needs_of_group(optimizer, group) for group in optimizer.param_groups], type(optimizer).__name__
    if "all" in needs:
        raise ValueError(f"{kind} looks at all parameters at once, and each rank has some; use it without sharding")
    found = {name: need for need, its in zip(needs, names, strict=True) for name in its}
    for name in (name for name in cut.splits if found.get(name) == "tensors"):
        raise ValueError(f"{kind} looks at whole tensors, and tensor parallelism has cut {name}; update it by element")
    return found


def owners_of(optimizer: Optimizer, needs: Mapping[str, str], named: Named, num_ranks: int) -> dict[str, int]:
    """Give each tensor to a rank, so that the busiest one has little to do.

    The work of a matrix is that of its Newton-Schulz iterations, where its group has any (`ns_steps`, as that of
    torch.optim.Muon) and needs whole tensors; of all other tensors it is their elements.
    """
    steps = {id(one): group.get("ns_steps") for group in optimizer.param_groups for one in group["params"]}

    def work(name: str, parameter: nn.Parameter) -> float:
        its = steps.get(id(parameter))
        if its is None or needs.get(name) != "tensors":
            return parameter.numel()
        return newton_schulz_flops(parameter.shape, its)

    owners = assign_owners([work(name, one) for name, one in named], num_ranks)
    return {name: owner for (name, _), owner in zip(named, owners, strict=True)}


def give_pieces(optimizer: Optimizer, named: Named, names: Sequence[Sequence[str]], pieces: Sequence[OwnPiece]) -> None:
    """Put this rank's pieces in the place of whole parameters, with what the optimizer keeps of them.

    Shapes: parameters of any shape -> pieces of [stop - start], or of the parameter's shape
    """
    own, shapes = {piece.name: piece for piece in pieces}, {name: parameter.shape for name, parameter in named}
    early = {name: optimizer.state.pop(one) for name, one in named if one in optimizer.state}  # Adagrad's, once built
    keys = per_element(early, shapes)
    for name, state in early.items():
        if name in own:
            piece, (rows, numbers) = own[name], apart(state, shapes[name], keys)
            cut = {key: row[piece.start : piece.stop].view_as(piece.parameter).clone() for key, row in rows.items()}
            optimizer.state[piece.parameter] = cut | numbers
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [own[name].parameter for name in members if name in own]
        group.pop("param_names", None)
