"""What a mesh saves: the whole model, as one process would; or each rank its own part, to go on bit for bit.

The whole state is put together axis by axis, in the reverse order of `build`: pieces of a sharded model along its
copies, parts of tensors along tensor, experts along expert, stages along pipeline. It loads into one process, and into
any other plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from distlab.sharding import ShardedState


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

    Cost: no communication; each rank writes what it holds (equal copies too).
    """

    _built: Built
    _layout: Layout
    _averaging: GradientAveraging

    def shard_state(self) -> dict[str, Any]:
        """Return what this rank holds, and what its optimizers and compression remember of it."""
        state: dict[str, Any] = {"place": self._place()}
        if isinstance(self._averaging, ShardedParameters):
            return {**state, "shards": {str(number): one.shard_state() for number, one in self._sharded().items()}}
        stages = {str(number): dict(module.state_dict()) for number, module in self._built.stages.items()}
        return {**state, "stages": stages, "optimizers": [one.state_dict() for one in self._savers()]}

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what was saved by another plan or another rank; change nothing.

        Raises:
            ValueError: naming what differs.
        """
        if len(states) != 1:
            raise ValueError(
                f"it was saved by {len(states)} ranks with another layout (expected {dist.get_world_size()} here): run "
                f"{len(states)} ranks with the plan that it was saved with, or load full_state_dict() into this one"
            )
        saved, here = states[0]["place"], self._place()
        for what, value in here.items():
            if saved.get(what) != value:
                raise ValueError(
                    f"{what} is {value} here and {saved.get(what)} in the checkpoint; resume with the plan that it was "
                    "saved with, or load full_state_dict() into another one"
                )
        if isinstance(self._averaging, ShardedParameters):
            for number, one in self._sharded().items():
                one.check_shards([states[0]["shards"][str(number)]])

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what this rank saved."""
        if isinstance(self._averaging, ShardedParameters):
            for number, sharded in self._sharded().items():
                sharded.load_shards([states[0]["shards"][str(number)]])
            return
        for number, module in self._built.stages.items():
            _copy_into(module, states[0]["stages"][str(number)])
        for one, saved in zip(self._savers(), states[0]["optimizers"], strict=True):
            one.load_state_dict(saved)

    def _place(self) -> dict[str, Any]:
        """Return what must be the same for the saved tensors to fit."""
        shapes = {name: list(shape) for name, shape in self._built.shapes.items()}
        plan, mesh = self._layout.plan, self._layout.mesh
        coordinates = ", ".join(f"{axis} {place}" for axis, place in self._layout.coordinates.items())
        return {"the plan": str(plan), "the mesh": str(mesh), "the rank's place": coordinates, "the model": str(shapes)}

    def _savers(self) -> Sequence[Any]:
        if isinstance(self._averaging, ShardedStates):
            return self._averaging.sharded
        assert isinstance(self._averaging, WholeGradients), "there are three kinds"
        return [*self._averaging.optimizers, *self._averaging.hooks]

    def _sharded(self) -> dict[int, ShardedState]:
        averaging = self._averaging
        assert isinstance(averaging, ShardedParameters), "asked for by stage 3 alone"
        pairs = zip(averaging.models.items(), averaging.optimizers, strict=True)
        return {number: ShardedState(model, optimizer) for (number, model), optimizer in pairs}
