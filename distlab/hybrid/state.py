"""What a mesh saves: the whole model, as one process would; or each rank its own part, to go on bit for bit.

The whole state is put together axis by axis, in the reverse order of `build`: pieces of a sharded model along its
copies, parts of tensors along tensor, experts along expert, stages along pipeline. It loads into one process, and into
any other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab import tensor_parallel
from distlab.comm.agree import group_device
from distlab.hybrid.build import Built
from distlab.hybrid.gradients import GradientAveraging, WholeGradients
from distlab.hybrid.layout import Layout
from distlab.hybrid.shards import ShardedParameters, ShardedStates
from distlab.modules.named_parts import ELSEWHERE, PARAMETER, SavedShard, check_tensors
from distlab.plan import FlatLayout
from distlab.plan.sharding import Piece
from distlab.sharding import ShardedState
from distlab.sharding.cut_layers import CutLayers
from distlab.sharding.state.assemble import HeldRow, cut_anew, parts_by_name
from distlab.sharding.state.optimizer_parts import (
    SharedBuffer,
    assemble_rows,
    merge_groups,
    prepare_optimizer as prepare_moments,
    save_parts,
)
from distlab.sharding.state.sharded import prepare as prepare_shards


def full_state_dict(built: Built, layout: Layout, averaging: GradientAveraging) -> dict[str, Tensor]:
    """Return the whole model's state under its own names, on every rank.

    Cost: an all-gather of what is split along tensor, a broadcast of each expert and of each stage's parameters, and
        of sharded parameters a gather of them all.
    """
    state: dict[str, Tensor] = {}
    with _whole_stages(built, averaging) as stages:
        for module in stages.values():
            if layout.plan.tensor > 1:
                state |= tensor_parallel.full_state_dict(module, layout.groups["tensor"])
            else:
                state |= {name: value.detach().clone() for name, value in module.state_dict().items()}
    for axis in ("expert", "pipeline"):
        state = _pool(state, layout.groups[axis])
    return {name: state[name] for name in built.shapes}


def load_full_state_dict(
    built: Built, layout: Layout, averaging: GradientAveraging, state: Mapping[str, Tensor]
) -> None:
    """Take this rank's parts out of a whole state; every rank calls this, with the same one.

    What optimizers remember stays as it was.

    Cost: nothing is sent; where parameters are sharded, a gather of them all.

    Raises:
        ValueError: the same on every rank, and nothing is loaded: names or shapes that are not the model's.
    """
    for name in [*built.shapes, *state]:
        here, there = built.shapes.get(name), tuple(state[name].shape) if name in state else None
        if here != there:
            raise ValueError(
                f"{name} is {'nothing' if there is None else list(there)} in the state and "
                f"{'nothing' if here is None else list(here)} in the model; load the state of this model"
            )
    with _whole_stages(built, averaging, write=True) as stages:
        for module in stages.values():
            own = {name: state[name] for name in module.state_dict()}
            if layout.plan.tensor > 1:
                tensor_parallel.load_full_state_dict(module, own, layout.groups["tensor"])
            else:
                _copy_into(module, own)


@torch.no_grad()
def _copy_into(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    for name, value in module.state_dict().items():
        value.copy_(state[name])


@contextmanager
def _whole_stages(
    built: Built, averaging: GradientAveraging, *, write: bool = False
) -> Iterator[Mapping[int, nn.Module]]:
    """Give this rank's stages with all their parameters, also where copies hold a piece each."""
    if not isinstance(averaging, ShardedParameters):
        yield built.stages
        return
    with ExitStack() as stack:
        yield {number: stack.enter_context(model.summon(write=write)) for number, model in averaging.models.items()}


def _pool(state: dict[str, Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """Give every rank what any rank has; the first that has it sends it."""
    if dist.get_world_size(group) == 1:
        return state
    device = group_device(group)
    told: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, {n: (list(v.shape), v.dtype) for n, v in state.items()}, group=group)
    for name in dict.fromkeys(name for one in told for name in one):
        holders = [rank for rank, one in enumerate(told) if name in one]
        if len(holders) == len(told):
            continue
        shape, dtype = told[holders[0]][name]
        here = dist.get_rank(group) == holders[0]
        value = state[name].to(device).contiguous() if here else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, group=group, group_src=holders[0])
        state.setdefault(name, value)
    return state


class HybridState:
    """A mesh as a part of a checkpoint of which each rank holds a shard: `parts = {"training": hybrid}`.

    Each rank writes what it holds, as named parts of the whole model's tensors (`modules.named_parts`). So any other
    plan can load it by `load(..., reshard=True)`, on any number of ranks. The same plan goes on bit for bit.

    Cost: no communication; each rank writes what it holds (equal copies too).
    """

    _built: Built
    _layout: Layout
    _averaging: GradientAveraging

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's parameters with the states of its optimizers and of its compression."""
        shards = [self._for_all(one).to_dict() for one in self._own_shards()]
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
        if any(not isinstance(state.get("shards"), list) for state in states):
            raise ValueError("an earlier distlab saved it, or a different kind of training; load its full_state_dict()")
        for its in (one["the model"] for one in saved if one):
            for name, shape in {**its, **here["the model"]}.items():
                if its.get(name) != shape or name not in here["the model"]:
                    mine = here["the model"].get(name, "nothing")
                    raise ValueError(f"{name} is {mine} here and {its.get(name, 'nothing')} in the checkpoint")
        if saved == [here]:
            own = [self._from_all(SavedShard.from_dict(one)) for one in states[0]["shards"]]
            hooks = zip(self._hooks(), states[0]["hooks"], strict=True)
            return [*self._taking(own), *(partial(hook.load_state_dict, state) for hook, state in hooks)]
        if len(states) == 1 and saved[0] and saved[0].get("the number of ranks") != "1":
            what = next(key for key, value in here.items() if saved[0].get(key) != value)
            raise ValueError(
                f"{what} is {here[what]} here and {saved[0].get(what)} in the checkpoint; resume with the plan that it "
                "was saved with, or pass reshard=True to cut the shards of all ranks anew"
            )
        return self._taking(self._cut_anew([SavedShard.from_dict(one) for state in states for one in state["shards"]]))

    def _own_shards(self) -> list[SavedShard]:
        """Return one shard per optimizer, by this rank's own names of parameters; the model is in the first."""
        averaging = self._averaging
        if isinstance(averaging, ShardedParameters):
            pairs = zip(averaging.models.values(), averaging.optimizers, strict=True)
            return [SavedShard.from_dict(ShardedState(*pair).shard_state()) for pair in pairs]
        one = averaging.optimizers[0] if isinstance(averaging, WholeGradients) else None
        parts, groups = save_parts([self._whole_buffer()], one, parameters=True)
        buffers = {name: value.detach().clone() for name, value in self._buffers().items()}
        model = SavedShard(dist.get_rank(), dist.get_world_size(), parts, groups, buffers)
        optimizers = averaging.sharded if isinstance(averaging, ShardedStates) else []
        return [model, *(SavedShard.from_dict(each.shard_state()) for each in optimizers)]

    def _taking(self, own: Sequence[SavedShard]) -> list[Callable[[], object]]:
        """Check shards like those of `_own_shards`; return functions that load them."""
        averaging = self._averaging
        if isinstance(averaging, ShardedParameters):
            three = zip(averaging.models.values(), averaging.optimizers, own, strict=True)
            return [prepare_shards(model, [saved.to_dict()], optimizer) for model, optimizer, saved in three]
        buffer = self._whole_buffer()
        check_tensors(own[:1], {row.names[0]: (row.shapes[0], row.parameter.dtype) for row in buffer.rows})
        found = assemble_rows([buffer], own[:1])
        pairs = [(row.parameter.detach(), found[id(row.parameter)][0][PARAMETER]) for row in buffer.rows]
        pairs += [(value, (own[0].buffers or {})[name]) for name, value in self._buffers().items()]
        taking: list[Callable[[], object]] = [partial(_fill, *pair) for pair in pairs]
        if isinstance(averaging, WholeGradients):
            return [*taking, prepare_moments(averaging.optimizers[0], [buffer], own[:1], found)]
        assert isinstance(averaging, ShardedStates), "there are three kinds"
        for one, saved in zip(averaging.sharded, own[1:], strict=True):
            one.check_shards([saved.to_dict()])
            taking.append(partial(one.load_shards, [saved.to_dict()]))
        return taking

    def _whole_buffer(self) -> SharedBuffer:
        """Return the parameters that are here whole, each a row of its own."""
        assert isinstance(self._averaging, WholeGradients | ShardedStates), "FullyShard has rows of its own"
        named = self._averaging.named
        shapes = tuple(tuple(parameter.shape) for parameter in named.values())
        rows = [
            HeldRow(parameter, (name,), (tuple(parameter.shape),), (Piece(0, 0, parameter.numel(), 0),))
            for name, parameter in named.items()
        ]
        layout = FlatLayout(tuple(named), shapes, 1)
        return SharedBuffer(layout, [0, layout.padded_size], rows)

    def _buffers(self) -> dict[str, Tensor]:
        return {
            name: value
            for module in self._built.stages.values()
            for name, value in module.state_dict(keep_vars=True).items()
            if not isinstance(value, nn.Parameter)
        }

    def _hooks(self) -> Sequence[Any]:
        return self._averaging.hooks if isinstance(self._averaging, WholeGradients) else ()

    def _name_for_all(self, name: str) -> str:
        return self._built.aliases.get(name, name)

    def _cut_layers(self) -> CutLayers:
        return CutLayers(self._built.splits, self._layout.groups["tensor"])

    def _for_all(self, own: SavedShard) -> SavedShard:
        """Say what a shard holds of the whole model, by the names that every plan uses."""
        parts = {self._name_for_all(name): part for name, part in self._cut_layers().named_for_all(own.parts).items()}
        groups = own.groups and [{**one, "names": [*map(self._name_for_all, one["names"])]} for one in own.groups]
        return replace(own, parts=parts, groups=groups, aliases=self._built.aliases)

    def _from_all(self, saved: SavedShard) -> SavedShard:
        """Undo `_for_all` of a shard of this very rank."""
        names = self._own_names()
        parts = {names[name]: replace(part, shape=part.row_shape, slab=None) for name, part in saved.parts.items()}
        groups = saved.groups and [{**one, "names": [names[name] for name in one["names"]]} for one in saved.groups]
        return replace(saved, parts=parts, groups=groups, aliases=None)

    def _own_names(self) -> dict[str, str]:
        """Return, by the name that every plan uses, the name that a tensor has here."""
        return {self._name_for_all(name): name for one in self._own_shards() for name in one.parts}

    def _cut_anew(self, saved: Sequence[SavedShard]) -> list[SavedShard]:
        """Make this rank's shards from those of all ranks of a different plan."""
        held = parts_by_name(saved)
        groups = merge_groups([one.groups for one in saved if one.groups is not None])
        buffers = {name: value for one in saved for name, value in (one.buffers or {}).items()}
        names, cut = self._own_names(), self._cut_layers()
        made = []
        for own in self._own_shards():
            parts = {}
            for name, part in own.parts.items():
                everywhere = self._name_for_all(name)
                if everywhere not in held:
                    raise ValueError(f"{name} is in the model and not in the saved shards: {ELSEWHERE}")
                mine = cut_anew(name, held[everywhere], cut.slab(name))
                wanted = PARAMETER in part.values or isinstance(self._averaging, ShardedParameters)
                values = {key: value for key, value in mine.values.items() if wanted or key != PARAMETER}
                parts[name] = replace(mine, values=values)
            local = [{**one, "names": [names.get(name, name) for name in one["names"]]} for one in groups]
            kept = {name: buffers[name] for name in own.buffers or {}}
            made.append(SavedShard(0, 1, parts, None if own.groups is None else local, kept))
        return made


@torch.no_grad()
def _fill(here: Tensor, saved: Tensor) -> None:
    here.copy_(saved.view(here.shape))
