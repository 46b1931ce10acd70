"""What a sharded model and its optimizer are made of, seen by tensor names, and one answer of all ranks to a question.

`state_dict` (in shards) and `full_state` (whole) both stand on this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.sharding.fsdp.flat_unit import Unit
from distlab.sharding.fsdp.fully_shard import FullyShard

Result = TypeVar("Result")
Optimizer = torch.optim.Optimizer


def groups_of(model: FullyShard) -> list[ProcessGroup | None]:
    """Return the groups in which ranks must be of one mind: those that share shards, and the replicas."""
    return [model.group] if model.replicas is None else [model.group, model.replicas]


def together(model: FullyShard, what: str, action: Callable[[], Result]) -> Result:
    """Run an action that changes nothing on every rank; where it refuses on one, refuse on all with the same text.

    Raises:
        ValueError: on every rank, when the action raised ValueError on any.
    """
    problem, result = None, None
    try:
        result = action()
    except ValueError as error:
        problem = str(error)
    for group in groups_of(model):
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        ranks: dict[str, list[int]] = {}
        for rank, text in zip(dist.get_process_group_ranks(group or dist.group.WORLD), problems, strict=True):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        problem = "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items()) or None
    if problem is not None:
        raise ValueError(f"cannot {what}: {problem}")
    return result  # type: ignore[return-value]


def kept_by(optimizer: Optimizer, model: FullyShard) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return, by unit, the group of its shard and what the optimizer keeps of it.

    Raises:
        ValueError: the optimizer updates something that is no shard of the model.
    """
    names = {id(unit.shard): unit.name for unit in model.units}
    state = optimizer.state_dict()
    found = {}
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer updates a parameter {list(parameter.shape)} that is no shard of the model; build "
                    "it of model.parameters(), after FullyShard"
                )
            found[names[id(parameter)]] = (index, state["state"].get(number, {}))
    return found


def split(unit: Unit, kept: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tell what an optimizer keeps an element (cut like the shard) from what it keeps once.

    Raises:
        ValueError: something else than one value an element, or one in all.
    """
    values, numbers = {}, {}
    for key, value in kept.items():
        if isinstance(value, Tensor) and value.shape == unit.shard.shape and value.dim() == 1:
            values[key] = value
        elif not isinstance(value, Tensor) or value.numel() == 1:
            numbers[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value  # Adam counts in place
        else:
            raise ValueError(
                f"{key} of unit {unit.name} is {list(value.shape)}, neither one value for each of the shard's "
                f"{unit.shard.numel()} elements nor one in all; it cannot be cut anew for other ranks"
            )
    return values, numbers


def saved_buffers(model: FullyShard) -> dict[str, Tensor]:
    """Return the module's buffers that belong to its state, by name: each rank has its own."""
    return {
        name: buffer
        for path, one in model.module.named_modules(remove_duplicate=False)
        for name, buffer in _own_buffers(path, one)
    }


def _own_buffers(path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    kept = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
    return [(_join(path, key), buffer) for key in kept if (buffer := module._buffers[key]) is not None]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def expected_tensors(model: FullyShard) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of the model's tensors, as they are kept in shards."""
    return {
        name: (shape, unit.shard.dtype)
        for unit in model.units
        for name, shape in zip(unit.layout.names, unit.layout.shapes, strict=True)
    }


def check_buffers(model: FullyShard, saved: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of the module's buffers and their saved values.

    Raises:
        ValueError: other buffers, or other shapes.
    """
    pairs = []
    here = saved_buffers(model)
    for name in [*here, *saved]:
        mine, its = (str(list(one[name].shape)) if name in one else "nothing" for one in (here, saved))
        if mine != its:
            raise ValueError(f"buffer {name} is {mine} in the model and {its} in the saved state: of another model")
        pairs.append((here[name], saved[name]))
    return pairs


def prepare_optimizer(
    model: FullyShard,
    optimizer: Optimizer,
    kept: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]] | None,
) -> Callable[[], None]:
    """Check a saved optimizer's state, cut for this rank, against an optimizer; return what takes it up.

    Raises:
        ValueError: no optimizer was saved, or its groups were of other tensors.
    """
    if groups is None:
        raise ValueError("no optimizer was saved with these; load the model alone, or save both together")
    units = {id(unit.shard): unit for unit in model.units}
    kept_by(optimizer, model)  # refuses an optimizer of another model
    now = [[n for p in group["params"] for n in units[id(p)].layout.names] for group in optimizer.param_groups]
    then = [list(group["names"]) for group in groups]
    if [sorted(names) for names in now] != [sorted(names) for names in then]:
        raise ValueError(
            f"the optimizer has groups of {[len(names) for names in now]} tensors here and of "
            f"{[len(names) for names in then]} in the saved state, or of other tensors; build it in the same way"
        )
    state = optimizer.state_dict()
    taken: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, here, saved in zip(optimizer.param_groups, state["param_groups"], groups, strict=True):
        options = {key: value for key, value in saved.items() if key != "names"}
        taken["param_groups"].append({**here, **options})
        for parameter, number in zip(group["params"], here["params"], strict=True):
            if kept[units[id(parameter)].name]:
                taken["state"][number] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in kept[units[id(parameter)].name].items()
                }
    return lambda: optimizer.load_state_dict(taken)


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
    return names
