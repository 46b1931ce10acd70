"""The whole state of a sharded model: the tensors that the module has without sharding, by the same names.

For one file that anything can read: another number of ranks, one process, another program. It is put together a unit at
a time, in host memory, since a rank that needs shards has no room for the whole on its device.

These functions are collective: every rank of the group calls them, also where only one keeps the result. A program that
calls them on rank 0 alone makes rank 0 wait for the others; the wait ends with the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import agree
from distlab.comm.agree import group_device
from distlab.plan import FlatLayout
from distlab.sharding.calls import gather_into
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.state.model_state import (
    Optimizer,
    aliases,
    check_buffers,
    expected_tensors,
    kept_by,
    prepare_optimizer,
    saved_buffers,
    split,
    together,
)


def full_state_dict(model: FullyShard, *, to_rank: int | None = None) -> dict[str, Tensor]:
    """Return the whole module's state, with the names of `module.state_dict()`, in host memory.

    Tied names share a tensor. Buffers are those of this rank.

    Args:
        model: every rank of its group calls this.
        to_rank: the only rank of the group that keeps the result; the others get {}. None: all keep it.

    Cost: one all-gather a unit; beside the result, one unit on the device.
    Error: exact.

    Raises:
        ValueError: on every rank: ranks call it with other options, or there is no such rank.
    """
    keeps = _who_keeps(model, "full_state_dict", to_rank)
    found: dict[str, Tensor] = {}
    for unit in model.units:
        found |= _gather(model, unit.layout, unit.shard.detach(), keeps=keeps)
    if not keeps:
        return {}
    buffers = {name: value.detach().to("cpu", copy=True) for name, value in saved_buffers(model).items()}
    return {name: found[same] if same in found else buffers[name] for name, same in aliases(model).items()}


def full_optimizer_state(model: FullyShard, optimizer: Optimizer, *, to_rank: int | None = None) -> dict[str, Any]:
    """Return the optimizer's state for whole tensors, by their names, in host memory; every rank of the group calls it.

    Returns:
        {"state": {name: {"exp_avg": whole tensor, "step": number}}, "groups": [{options, "names": [...]}], "once":
        ["step"]}; "once" has the keys of which there is one value a tensor.

    Cost: one all-gather a unit and moment.

    Raises:
        ValueError: on every rank: the optimizer is of another model, or keeps what belongs to no element.
    """
    keeps = _who_keeps(model, "full_optimizer_state", to_rank)
    kept = together(model, "gather the optimizer's state", lambda: _split_all(model, optimizer))
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [
        {**{key: value for key, value in group.items() if key != "params"}, "names": []}
        for group in optimizer.param_groups
    ]
    for unit in model.units:
        if unit.name not in kept:
            continue
        index, values, numbers = kept[unit.name]
        groups[index]["names"] += unit.layout.names
        for key in sorted(values):
            for name, whole in _gather(model, unit.layout, values[key], keeps=keeps).items():
                state.setdefault(name, {})[key] = whole
        for name in unit.layout.names if values or numbers else ():
            state.setdefault(name, {}).update(numbers)
    once = sorted({key for _, _, numbers in kept.values() for key in numbers})
    return {"state": state, "groups": groups, "once": once} if keeps else {}


def load_full_state_dict(
    model: FullyShard,
    state: Mapping[str, Tensor] | None,
    *,
    from_rank: int | None = None,
    convert: bool = False,
) -> None:
    """Take up a whole module's state; every rank of the group calls it.

    Args:
        model: nothing of it has changed when an error is raised.
        state: with the names of `module.state_dict()`; with `from_rank` only that rank's counts.
        from_rank: the rank of the group that has the state and gives it to the others, a unit at a time; None: each
            rank was given it.
        convert: round values of another type to the model's.

    Cost: with `from_rank` one broadcast a unit; without, only the outcome of the checks is exchanged.
    Error: exact where the types are the same.

    Raises:
        ValueError: on every rank: the state is of another model or another precision.
    """
    _check_rank(model, "load_full_state_dict", from_rank, options=[convert])
    gives = from_rank is None or dist.get_rank(model.group) == from_rank

    def check() -> None:
        if gives:
            _check_full(model, state, convert=convert)

    together(model, "load the whole state", check)
    mine = state or {}
    with torch.no_grad():
        for unit in model.units:
            unit.shard.copy_(_own_part(model, unit.layout, mine, unit.shard.dtype, from_rank))
        names = set(expected_tensors(model))
        for name, same in aliases(model).items():
            if same not in names:
                here = saved_buffers(model)[name]
                here.copy_(_from(model, mine.get(name), here, from_rank))


def load_full_optimizer_state(model: FullyShard, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take up what `full_optimizer_state` returned, on every rank.

    Raises:
        ValueError: on every rank: the state is of another model, or the optimizer has other groups.
    """
    agree(["load_full_optimizer_state"], model.group, what="load_full_optimizer_state")
    together(model, "load the optimizer's state", lambda: _cut_optimizer_state(model, optimizer, state))()


def _cut_optimizer_state(model: FullyShard, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    if not isinstance(state, Mapping) or not {"state", "groups", "once"} <= state.keys():
        raise ValueError("this is no optimizer's state (no 'state' and 'once'); pass full_optimizer_state()'s result")
    shapes = {name: shape for name, (shape, _) in expected_tensors(model).items()}
    for name in state["state"]:
        if name not in shapes:
            raise ValueError(f"{name} is in the optimizer's saved state and not in the model: it is of another model")
    shard, kept = dist.get_rank(model.group), {}
    for unit in model.units:
        first = state["state"].get(unit.layout.names[0], {})
        taken: dict[str, Any] = {}
        for key, example in first.items():
            if key in state["once"]:
                taken[key] = example
                continue
            flat = torch.zeros(unit.layout.shard_size, dtype=example.dtype)
            for piece in unit.layout.pieces(shard):
                name = unit.layout.names[piece.tensor]
                whole = state["state"].get(name, {}).get(key)
                if whole is None or tuple(whole.shape) != shapes[name]:
                    its = "nothing" if whole is None else list(whole.shape)
                    raise ValueError(f"{key} of {name} is {its} in the saved state and {list(shapes[name])} here")
                flat[piece.offset : piece.offset + piece.stop - piece.start] = whole.flatten()[piece.start : piece.stop]
            taken[key] = flat
        kept[unit.name] = taken
    return prepare_optimizer(model, optimizer, kept, state["groups"])


def _split_all(model: FullyShard, optimizer: Optimizer) -> dict[str, tuple[int, dict[str, Tensor], dict[str, Any]]]:
    units = {unit.name: unit for unit in model.units}
    return {name: (index, *split(units[name], kept)) for name, (index, kept) in kept_by(optimizer, model).items()}


def _who_keeps(model: FullyShard, what: str, to_rank: int | None) -> bool:
    _check_rank(model, what, to_rank, options=[])
    return to_rank is None or dist.get_rank(model.group) == to_rank


def _check_rank(model: FullyShard, what: str, rank: int | None, *, options: list[object]) -> None:
    agree([what, rank, *options], model.group, what=f"the call of {what}")
    num_ranks = dist.get_world_size(model.group)
    if rank is not None and not 0 <= rank < num_ranks:
        raise ValueError(f"{what}: rank {rank!r} is none of the group's 0..{num_ranks - 1}")


@torch.no_grad()
def _gather(model: FullyShard, layout: FlatLayout, shard: Tensor, *, keeps: bool) -> dict[str, Tensor]:
    """Gather one unit and cut it into its tensors, in host memory."""
    device = group_device(model.group)
    whole = torch.empty(layout.padded_size, dtype=shard.dtype, device=device)
    gather_into(whole, shard.to(device), model.group)
    if not keeps:
        return {}
    return {
        name: whole[offset : offset + size].view(shape).to("cpu", copy=True)
        for name, shape, offset, size in zip(layout.names, layout.shapes, layout.offsets, layout.sizes, strict=True)
    }


def _check_full(model: FullyShard, state: Mapping[str, Tensor] | None, *, convert: bool) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is {type(state).__name__}; pass a module's state_dict(), or from_rank")
    known, expected = aliases(model), expected_tensors(model)
    for name in [*known, *state]:
        if name not in known or name not in state:
            here, there = ("nothing" if name not in one else "a tensor" for one in (known, state))
            raise ValueError(f"{name} is {there} in the state and {here} in the model: the state is of another model")
    for name, same in known.items():
        if same not in expected:
            continue
        shape, dtype = expected[same]
        value = state[name]
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} is {list(value.shape)} in the state and {list(shape)} in the model")
        if value.dtype != dtype and not convert:
            raise ValueError(
                f"{name} is {value.dtype} in the state and {dtype} in the model; pass convert=True to round the values"
            )
        if name != same and not torch.equal(value, state[same]):
            raise ValueError(f"{name} and {same} are one parameter in the model and have two values in the state")
    check_buffers(model, {name: state[name] for name, same in known.items() if same not in expected})


def _own_part(
    model: FullyShard, layout: FlatLayout, state: Mapping[str, Tensor], dtype: torch.dtype, from_rank: int | None
) -> Tensor:
    """Return this rank's shard of a unit, from tensors that it has, or that one rank broadcasts."""
    start, stop = layout.bounds(dist.get_rank(model.group))
    if from_rank is None:
        own = torch.zeros(layout.shard_size, dtype=dtype)
        for piece in layout.pieces(dist.get_rank(model.group)):
            row = state[layout.names[piece.tensor]].detach().flatten()[piece.start : piece.stop]
            own[piece.offset : piece.offset + piece.stop - piece.start] = row
        return own
    whole = torch.zeros(layout.padded_size, dtype=dtype, device=group_device(model.group))
    if dist.get_rank(model.group) == from_rank:
        for name, offset, size in zip(layout.names, layout.offsets, layout.sizes, strict=True):
            whole[offset : offset + size] = state[name].detach().flatten()
    dist.broadcast(whole, group_src=from_rank, group=model.group)
    return whole[start:stop]


def _from(model: FullyShard, value: Tensor | None, like: Tensor, from_rank: int | None) -> Tensor:
    if from_rank is None:
        assert value is not None, "checked before"
        return value
    sent = torch.empty_like(like) if value is None else value.to(like)
    sent = sent.to(group_device(model.group)).contiguous()
    dist.broadcast(sent, group_src=from_rank, group=model.group)
    return sent
