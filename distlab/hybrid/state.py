"""What a mesh saves: the whole model, as one process would; or each rank its own part, to go on bit for bit.

Each rank names what it holds as parts of the whole model's tensors (`modules.named_parts`): pieces of a sharded model
along its copies, parts of tensors along tensor, experts along expert, stages along pipeline. Joined, these are the
whole state; cut anew, they are what a rank of any other plan holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distlab.blocks.modules.named_parts import PARAMETER, SavedShard, whole_shard
from distlab.hybrid.build import Built, counts_here
from distlab.hybrid.gradients import GradientAveraging, WholeGradients
from distlab.hybrid.layout import Layout
from distlab.hybrid.shards import ShardedParameters, ShardedStates
from distlab.sharding import ShardedState
from distlab.sharding.cut_layers import CutLayers, OwnPieces
from distlab.sharding.part import OwnPiece
from distlab.sharding.state.of_model import pieces_of
from distlab.sharding.state.parts import gather_parts, prepare, save_parts


class HybridState:
    """A mesh as a part of a checkpoint of which each rank holds a shard: `parts = {"training": hybrid}`.

    Each rank writes what it holds, by the names of the whole model's tensors. So any other plan can load it by
    `load(..., reshard=True)`, on any number of ranks. The same plan goes on bit for bit.

    Cost: no communication; each rank writes what it holds (equal copies too).
    """

    _built: Built
    _layout: Layout
    _averaging: GradientAveraging

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's state under its own names, as one process would save it, on every rank.

        Cost: an all-gather over all ranks, in which each element comes from one rank that holds it.
        """
        built, layout, averaging = self._built, self._layout, self._averaging
        is_sharded = isinstance(averaging, ShardedParameters)
        models = averaging.models.values() if isinstance(averaging, ShardedParameters) else ()
        parts = {
            name: part
            for own in ([pieces_of(model) for model in models] if is_sharded else [self._whole_pieces()])
            for name, part in save_parts(own, None, parameters=True)[0].items()
            if counts_here(built, layout, name, sharded=is_sharded)
        }
        whole = gather_parts(parts, [parts], [layout.everyone])
        state = {name: one.values[PARAMETER].view(one.shape) for name, one in whole.items()}
        return {name: state[built.aliases.get(name, name)] for name in built.shapes}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's parts out of what one process, or any plan, saved; every rank calls this, with the same.

        What optimizers remember stays as it was.

        Cost: nothing is sent.

        Raises:
            ValueError: the same on every rank, and nothing is loaded: names or shapes that are not the model's.
        """
        shapes, aliases = self._built.shapes, self._built.aliases
        for name in [*shapes, *state]:
            here, there = shapes.get(name), tuple(state[name].shape) if name in state else None
            if here != there:
                raise ValueError(
                    f"{name} is {'nothing' if there is None else list(there)} in the state and "
                    f"{'nothing' if here is None else list(here)} in the model; load the state of this model"
                )
        own = {name: {PARAMETER: value} for name, value in state.items() if name not in aliases}
        whole = whole_shard(own, None, {name: shapes[name] for name in own})
        for take in self._taking([whole], optimizers=False):
            take()

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's parameters with the states of its optimizers and of its compression."""
        averaging = self._averaging
        if isinstance(averaging, ShardedParameters):
            pairs = zip(averaging.models.values(), averaging.optimizers, strict=True)
            shards = [ShardedState(*pair).shard_state() for pair in pairs]
        else:
            one = averaging.optimizers[0] if isinstance(averaging, WholeGradients) else None
            parts, groups = save_parts(self._whole_pieces(), one, parameters=True)
            place = dist.get_rank(), dist.get_world_size()
            shards = [SavedShard(*place, parts, groups, aliases=self._built.aliases).to_dict()]
            shards += [each.shard_state() for each in self._sharded()]
        return {"place": self._place(), "shards": shards, "hooks": [hook.state_dict() for hook in self._hooks()]}

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a different model, and without the shards of all ranks also a different plan; change nothing.

        Raises:
            ValueError: naming what differs.
        """
        self._prepare(states)

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what this rank saved, or its part of what all ranks of any plan saved."""
        for take in self._prepare(states):
            take()

    def _place(self) -> dict[str, Any]:
        """Return what must be the same to go on bit for bit."""
        model = {name: self._built.aliases.get(name, list(shape)) for name, shape in self._built.shapes.items()}
        plan, mesh = self._layout.plan, self._layout.mesh
        coordinates = ", ".join(f"{axis} {place}" for axis, place in self._layout.coordinates.items())
        return {
            "the number of ranks": str(mesh.size),
            "the plan": str(plan),
            "the mesh": str(mesh),
            "the rank's place": coordinates,
            "the model": model,
        }

    def _prepare(self, states: Sequence[Mapping[str, Any]]) -> list[Callable[[], object]]:
        """Check saved states and assemble this rank's; return the functions that load it."""
        here, saved = self._place(), [state.get("place", {}) for state in states]
        for its in (one["the model"] for one in saved if one):
            for name, shape in {**its, **here["the model"]}.items():
                if its.get(name) != shape or name not in here["the model"]:
                    mine = here["the model"].get(name, "nothing")
                    raise ValueError(f"{name} is {mine} here and {its.get(name, 'nothing')} in the checkpoint")
        if saved != [here] and saved[0] and saved[0]["the number of ranks"] != str(len(states)):
            what = next((key for key, value in here.items() if saved[0].get(key) != value), "the number of ranks")
            raise ValueError(
                f"{what} is {here[what]} here and {saved[0].get(what)} in the checkpoint; resume with the plan that it "
                "was saved with, or pass reshard=True to cut the shards of all ranks anew"
            )
        hooks = zip(self._hooks(), states[0]["hooks"], strict=True) if saved == [here] else ()
        taking = self._taking([SavedShard.from_dict(one) for state in states for one in state["shards"]])
        return [*taking, *(partial(hook.load_state_dict, state) for hook, state in hooks)]

    def _taking(self, saved: Sequence[SavedShard], *, optimizers: bool = True) -> list[Callable[[], object]]:
        """Assemble all that this rank holds from saved shards; return functions that load it."""
        averaging = self._averaging
        if isinstance(averaging, ShardedParameters):
            pairs = zip(averaging.models.values(), averaging.optimizers, strict=True)
            return [
                ShardedState(model, optimizer if optimizers else None).prepare_shards(
                    _of(pieces_of(model).tensors, saved)
                )
                for model, optimizer in pairs
            ]
        one = averaging.optimizers[0] if optimizers and isinstance(averaging, WholeGradients) else None
        own = self._whole_pieces()
        taking: list[Callable[[], object]] = [prepare(own, one, _of(own.tensors, saved), parameters=True)]
        for each in self._sharded() if optimizers else ():
            names = {name for own in each.group_names for name in own}
            taking.append(each.prepare_shards(_of(names, saved)))
        return taking

    def _sharded(self) -> Sequence[Any]:
        return self._averaging.sharded if isinstance(self._averaging, ShardedStates) else ()

    def _whole_pieces(self) -> OwnPieces:
        """Return the parameters that are here whole."""
        assert isinstance(self._averaging, WholeGradients | ShardedStates), "FullyShard has pieces of its own"
        named = self._averaging.named
        pieces = [OwnPiece(name, 0, 0, one.numel(), one, one) for name, one in named.items()]
        tensors = {name: (tuple(one.shape), one.dtype) for name, one in named.items()}
        return OwnPieces(pieces, tensors, CutLayers(self._built.splits, self._layout.groups["tensor"]))

    def _hooks(self) -> Sequence[Any]:
        return self._averaging.hooks if isinstance(self._averaging, WholeGradients) else ()


def _of(names: Collection[str], saved: Iterable[SavedShard]) -> list[SavedShard]:
    """Return what shards hold of some tensors; they are those of a model's stages, and of several optimizers."""
    return [replace(one, parts={name: part for name, part in one.parts.items() if name in names}) for one in saved]
