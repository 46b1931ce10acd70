"""What a sharded model is made of, seen by tensor names: what this rank holds, buffers, and tied names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.together import together
from distlab.sharding.fsdp.flat_unit import Unit
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.state.assemble import HeldRow
from distlab.sharding.state.optimizer_parts import SharedBuffer

Result = TypeVar("Result")


def refuse_together(model: FullyShard, what: str, action: Callable[[], Result]) -> Result:
    """Run an action that changes nothing on every rank; where it refuses on one, refuse on all with the same text.

    Raises:
        ValueError: on every rank of the group and of its replicas, when the action raised ValueError on any.
    """
    kept: list[Result] = []

    def in_group() -> None:
        together(lambda: kept.append(action()), model.group, what=what)

    if model.replicas is None:
        in_group()
    else:
        together(in_group, model.replicas, what=what)
    return kept[0]


def shared_buffer(unit: Unit) -> SharedBuffer:
    """Return what the ranks share of a unit: its flat buffer, of which each holds a shard."""
    layout, rank = unit.layout, dist.get_rank(unit.options.group)
    edges = [shard * layout.shard_size for shard in range(layout.num_shards + 1)]
    return SharedBuffer(layout, edges, [HeldRow(unit.shard, layout.names, layout.shapes, layout.pieces(rank))])


def expected_tensors(model: FullyShard) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of the model's tensors, as they are kept in shards."""
    return {
        name: (shape, unit.shard.dtype)
        for unit in model.units
        for name, shape in zip(unit.layout.names, unit.layout.shapes, strict=True)
    }


def saved_buffers(model: FullyShard) -> dict[str, Tensor]:
    """Return the module's buffers that belong to its state, by name: each rank has its own."""
    return {
        name: buffer
        for path, one in model.module.named_modules(remove_duplicate=False)
        for name, buffer in _own_buffers(path, one)
    }


def extra_states(model: FullyShard) -> dict[str, nn.Module]:
    """Return the modules that save more than tensors (`get_extra_state`), by its name in the whole module's state."""
    return {
        _join(path, "_extra_state"): one
        for path, one in model.module.named_modules(remove_duplicate=False)
        if type(one).get_extra_state is not nn.Module.get_extra_state
    }


def copied_buffers(model: FullyShard) -> dict[str, Any]:
    """Return copies of the module's buffers in host memory, and of its extra states."""
    buffers = {name: value.detach().to("cpu", copy=True) for name, value in saved_buffers(model).items()}
    return buffers | {name: copy.deepcopy(one.get_extra_state()) for name, one in extra_states(model).items()}


def check_buffers(model: FullyShard, saved: Mapping[str, Any]) -> list[Callable[[], object]]:
    """Return what takes up the saved values of the module's buffers, and its extra states.

    Raises:
        ValueError: other buffers, or other shapes.
    """
    taking: list[Callable[[], object]] = []
    here, extra = saved_buffers(model), extra_states(model)
    for name in dict.fromkeys([*here, *extra, *saved]):
        mine, its = (_kind(one[name]) if name in one else "nothing" for one in (here | extra, saved))
        if mine != its and (name not in extra or name not in saved):
            raise ValueError(f"buffer {name} is {mine} in the model, {its} in the saved state of a different model")
        taking.append(partial(extra[name].set_extra_state if name in extra else here[name].copy_, saved[name]))
    return taking


def _kind(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else "an extra state"


def aliases(model: FullyShard) -> dict[str, str]:
    """Return every name of the module's state, with the one under which its shards know the tensor (tied: another)."""
    own: dict[nn.Module, list[tuple[str, str]]] = {}
    for unit in model.units:
        for place in unit.members.places:
            own.setdefault(place.module, []).append((place.attribute, unit.layout.names[place.tensor]))
    names: dict[str, str] = {}
    for path, one in model.module.named_modules(remove_duplicate=False):
        names |= {_join(path, attribute): name for attribute, name in own.get(one, ())}
        names |= {name: name for name, _ in _own_buffers(path, one)}
    return names | {name: name for name in extra_states(model)}


def _own_buffers(path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    kept = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
    return [(_join(path, key), buffer) for key in kept if (buffer := module._buffers[key]) is not None]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
