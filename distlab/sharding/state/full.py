"""The whole state of a sharded model: the tensors that the module has without sharding, by the same names.

For one file that anything can read: another number of ranks, one process, another program. It is put together one unit
at a time, in host memory, because a rank that needs shards has no room for the whole model on its device.

These functions are collective: every rank of the group calls them, also where only one keeps the result. A program that
calls them on rank 0 alone makes rank 0 wait for the others; the wait ends with the group's timeout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import agree
from distlab.comm.agree import group_device
from distlab.modules.every_parameter import every_parameter
from distlab.modules.named_parts import PARAMETER
from distlab.sharding.fsdp.flat_unit import Unit
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.state.model_tensors import (
    aliases,
    check_buffers,
    copied_buffers,
    expected_tensors,
    extra_states,
    refuse_together,
    saved_buffers,
    shared_buffer,
)
from distlab.sharding.state.optimizer_parts import (
    Optimizer,
    as_one_shard,
    assemble_rows,
    gather_whole,
    prepare_optimizer,
    save_parts,
)
from distlab.sharding.state.plain_state import by_names, kept_once


def full_state_dict(model: FullyShard, *, to_rank: int | None = None) -> dict[str, Tensor]:
    """Return the whole module's state, with the names of `module.state_dict()`, in host memory.

    Tied names share a tensor. Buffers are those of this rank. Layers that tensor parallelism cut are whole in it. There
    must be memory for the result, the shards and one unit.

    Args:
        model: every rank of its group calls this.
        to_rank: the only rank of the group that keeps the result; the others get {}. None: all keep it.

    Shapes: shards [padded elements / n] -> each tensor in its whole shape.
    Cost: one all-gather per unit, and of names; one of each part of a cut layer.
    Error: exact.

    Raises:
        ValueError: on every rank: ranks call it with other options, or `to_rank` is outside the group.
    """
    _check_rank(model, "full_state_dict", to_rank)
    keeps = to_rank in (None, dist.get_rank(model.group))
    shared = [shared_buffer(unit) for unit in model.units]
    parts, _ = save_parts(shared, None, parameters=True)
    state, _ = gather_whole(shared, parts, None, model.group, keeps=keeps)
    if not keeps:
        return {}
    found = {name: model.cut.whole(name, values[PARAMETER]) for name, values in state.items()} | copied_buffers(model)
    return {name: found[same] for name, same in aliases(model).items()}


def full_optimizer_state(model: FullyShard, optimizer: Optimizer, *, to_rank: int | None = None) -> dict[str, Any]:
    """Return the optimizer's state for whole tensors, by their names, in host memory; every rank of the group calls it.

    A plain optimizer of the same groups of the whole model loads it by its own `load_state_dict`.

    Returns:
        {"state": {name: {"exp_avg": whole tensor, "step": number}}, "param_groups": [{options, "params": [names]}]},
        with the names in the order of `module.parameters()`; {} for a tensor that was never updated.

    Cost: one all-gather per unit and moment; one of each moment of a cut layer.

    Raises:
        ValueError: on every rank: the optimizer is of a different model, or keeps what belongs to no element.
    """
    _check_rank(model, "full_optimizer_state", to_rank)
    keeps = to_rank in (None, dist.get_rank(model.group))
    shared = [shared_buffer(unit) for unit in model.units]
    parts, groups = refuse_together(
        model, "gather the optimizer's state", lambda: save_parts(shared, optimizer, parameters=False)
    )
    state, groups = gather_whole(shared, parts, groups, model.group, keeps=keeps)
    return model.cut.whole_state(state, groups, _in_order(model, groups)) if keeps else {}


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

    Cost: with `from_rank` one broadcast per unit; without, only the outcome of the checks is exchanged.
    Error: exact where the types are the same.

    Raises:
        ValueError: on every rank: the state is of a different model or a different precision.
    """
    _check_rank(model, "load_full_state_dict", from_rank, options=[convert])
    gives = from_rank in (None, dist.get_rank(model.group))
    if isinstance(state, Mapping):
        known = aliases(model)
        state = {name: model.cut.own(known.get(name, name), value) for name, value in state.items()}
    refuse_together(
        model, "load the whole state", lambda: _check_full(model, state, convert=convert) if gives else None
    )
    mine = (state or {}) if gives else {}
    for unit in model.units:
        unit.fill(_tensors_of(unit, mine, from_rank))
    own_buffers = saved_buffers(model)
    with torch.no_grad():
        for name in aliases(model):
            if name in own_buffers:
                own_buffers[name].copy_(_from(model, mine.get(name), own_buffers[name], from_rank))
    for name, one in extra_states(model).items():
        found = [mine.get(name)]
        if from_rank is not None:
            dist.broadcast_object_list(found, group_src=from_rank, group=model.group)
        one.set_extra_state(copy.deepcopy(found[0]))


def load_full_optimizer_state(model: FullyShard, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take up what `full_optimizer_state` returned, or a plain optimizer's `state_dict()`, on every rank.

    Raises:
        ValueError: on every rank: the state is of a different model, or the optimizer has other groups.
    """
    agree(["load_full_optimizer_state"], model.group, what="load_full_optimizer_state")
    refuse_together(model, "load the optimizer's state", lambda: _prepare_full(model, optimizer, state))()


def _prepare_full(model: FullyShard, optimizer: Optimizer, state: Mapping[str, Any]) -> Callable[[], None]:
    shared = [shared_buffer(unit) for unit in model.units]
    _, groups = save_parts(shared, optimizer, parameters=False)
    kept, its_groups = by_names(state, _in_order(model, groups or ()))
    shapes = {name: shape for name, (shape, _) in expected_tensors(model).items()}
    kept = {name: {key: model.cut.own(name, value) for key, value in one.items()} for name, one in kept.items()}
    per_element = {
        key for one in kept.values() for key, value in one.items() if isinstance(value, Tensor) and value.dim()
    }
    once = kept_once(kept, shapes) - per_element
    whole = as_one_shard(kept, its_groups, shapes, once)
    return prepare_optimizer(optimizer, shared, [whole], assemble_rows(shared, [whole]))


def _in_order(model: FullyShard, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names in each group of an optimizer, in the order of `module.parameters()`."""
    places = {name: place for place, (name, _) in enumerate(every_parameter(model.module))}
    return [sorted(group["names"], key=places.__getitem__) for group in groups]


def _check_rank(model: FullyShard, what: str, rank: int | None, *, options: Sequence[object] = ()) -> None:
    agree([what, rank, *options], model.group, what=f"the call of {what}")
    num_ranks = dist.get_world_size(model.group)
    if rank is not None and not 0 <= rank < num_ranks:
        raise ValueError(f"{what}: rank {rank!r} is none of the group's 0..{num_ranks - 1}")


def _check_full(model: FullyShard, state: Mapping[str, Tensor] | None, *, convert: bool) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is {type(state).__name__}; pass a module's state_dict(), or from_rank")
    known, expected = aliases(model), expected_tensors(model)
    for name in [*known, *state]:
        if name not in known or name not in state:
            here, there = ("nothing" if name not in one else "a tensor" for one in (known, state))
            raise ValueError(
                f"{name} is {there} in the state and {here} in the model: the state was "
                "saved from a different model; load one with the same tensors"
            )
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


def _tensors_of(unit: Unit, state: Mapping[str, Tensor], from_rank: int | None) -> list[Tensor]:
    """Return the whole tensors of a unit: those that this rank has, or those that one rank broadcasts."""
    group, layout = unit.options.group, unit.layout
    if from_rank is None:
        return [state[name] for name in layout.names]
    whole = torch.zeros(layout.num_elements, dtype=unit.shard.dtype, device=group_device(group))
    if state:
        torch.cat([state[name].detach().reshape(-1).to(whole) for name in layout.names], out=whole)
    dist.broadcast(whole, group_src=from_rank, group=group)
    return [*whole.split(list(layout.sizes))]


def _from(model: FullyShard, value: Tensor | None, like: Tensor, from_rank: int | None) -> Tensor:
    if from_rank is None:
        assert value is not None, "checked before"
        return value
    sent = torch.empty_like(like) if value is None else value.to(like)
    sent = sent.to(group_device(model.group)).contiguous()
    dist.broadcast(sent, group_src=from_rank, group=model.group)
    return sent
