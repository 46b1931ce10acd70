"""What the parts of a run hold, by the names that torch gives it, and back.

torch.distributed.checkpoint sees a run as nested dictionaries: `{"model": {name: tensor}, "optimizer": {"state": {name:
{"exp_avg": tensor, "step": number}}, "param_groups": [{"lr": ..., "params": [names]}]}}`, which is what its
`get_state_dict` returns. Our parts hold the same as named parts of tensors (`modules.named_parts`). This file goes from
one to the other. Plain optimizers are torch's own matter: its `get_state_dict` names their state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.checkpoint.parts import Parts, Sharded, is_hook
from distlab.modules.named_parts import PARAMETER, SavedPart, SavedShard

Place = tuple[str | int, ...]
STATE: Place = ("optimizer", "state")
GROUPS: Place = ("optimizer", "param_groups")


class Box(NamedTuple):
    """A box of a tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        corner: where the box begins.
        values: the box.
    """

    shape: tuple[int, ...]
    corner: tuple[int, ...]
    values: Tensor


class Held(NamedTuple):
    """What this rank can write.

    Attributes:
        boxes: of tensors, by the tensor's place.
        values: plain values by their places.
        groups: of the optimizers; a rank may know the names of its own tensors alone.
        aliases: further places of tensors, each with the place that boxes use.
    """

    boxes: dict[Place, list[Box]]
    values: dict[Place, Any]
    groups: list[Sequence[Mapping[str, Any]]]
    aliases: dict[Place, Place]


def held_by(parts: Parts) -> Held:
    """Return the tensors and numbers of `parts` that this rank holds. Generators and hooks differ per rank: left out.

    Raises:
        ValueError: a sharded part saves in a different format, or a part is a plain optimizer.
    """
    held = Held({}, {}, [], {})
    for name, part in parts.items():
        if isinstance(part, torch.Generator) or is_hook(part):
            continue
        if isinstance(part, Sharded):
            for shard in shards_in(part.shard_state(), name):
                _add_shard(held, shard)
        elif isinstance(part, torch.optim.Optimizer):
            raise ValueError(_plain_optimizer(name))
        elif isinstance(part, nn.Module):
            first: dict[int, str] = {}
            for key, value in part.state_dict(keep_vars=True).items():
                if first.setdefault(id(value), key) == key:
                    _add_value(held, (name, key), value)
                else:
                    held.aliases[name, key] = (name, first[id(value)])
        else:
            held.values.update(_leaves((name,), part.state_dict()))
    return held


def _plain_optimizer(name: str) -> str:
    return (
        f"{name} is a plain optimizer, whose state torch names itself: use torch's dcp.save and dcp.load with "
        "get_state_dict(model, optimizer), or pass ShardedState(model, optimizer) or a ShardedOptimizer"
    )


def shards_in(state: Mapping[str, Any], name: str) -> list[SavedShard]:
    """Return the saved shards in a sharded part's state: the state is one, or has a list of them.

    Raises:
        ValueError: it is something else.
    """
    try:
        return [SavedShard.from_dict(one) for one in state.get("shards", [state])]
    except ValueError as error:
        raise ValueError(f"{name} does not save named parts of tensors, which other layouts need: {error}") from None


def _leaves(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """Yield what stands at the ends of nested dictionaries, with its place."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _leaves((*place, str(key)), one)
    else:
        yield place, value


def _add_shard(held: Held, shard: SavedShard) -> None:
    for name, part in shard.parts.items():
        places = {key: (*STATE, name, key) for key in [*part.values, *part.numbers]} | {PARAMETER: ("model", name)}
        for corner, box in part.boxes():
            for key, value in box.items():
                held.boxes.setdefault(places[key], []).append(Box(part.shape, corner, value))
        for key, number in part.numbers.items():
            _add_value(held, places[key], number)
        if 0 in part.shape:
            for key, value in part.values.items():
                _add_value(held, places[key], value.view(part.shape))
    for name, buffer in (shard.buffers or {}).items() if shard.shard == 0 else ():
        _add_value(held, ("model", name), buffer)
    if shard.groups is not None:
        held.groups.append(shard.groups)
    held.aliases.update({("model", other): ("model", name) for other, name in (shard.aliases or {}).items()})


def _add_value(held: Held, place: Place, value: Any) -> None:
    if isinstance(value, Tensor):
        held.boxes[place] = [Box(tuple(value.shape), (0,) * value.dim(), value.detach())]
    else:
        held.values[place] = value


def named_groups(everyone: Iterable[Sequence[Mapping[str, Any]]]) -> dict[Place, Any]:
    """Return the groups of several holders as plain values: the options of the first, the names of all."""
    found: dict[Place, Any] = {}
    for number, same in enumerate(zip(*everyone, strict=True)):
        names = dict.fromkeys(name for one in same for name in one["names"])
        options = {key: value for key, value in same[0].items() if key != "names"} | {"params": [*names]}
        found |= {(*GROUPS, number, key): value for key, value in options.items()}
    return found


def unfold(tree: Mapping[Place, Any]) -> dict[str, Any]:
    """Return nested dictionaries from places; a dictionary whose keys are numbers is a list.

    Raises:
        ValueError: one thing stands inside another that is not a dictionary.
    """
    nested: dict[Any, Any] = {}
    for place, value in tree.items():
        at = nested
        for step in place[:-1]:
            at = at.setdefault(step, {})
            if not isinstance(at, dict):
                raise ValueError(f"{'.'.join(map(str, place))} stands inside of a value; the layout is damaged")
        at[place[-1]] = value
    return {str(key): _lists(value) for key, value in nested.items()}


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_lists(value[key]) for key in sorted(value)]
    return {key: _lists(one) for key, one in value.items()}


def as_saved(part: Sharded, name: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is saved as the shards of one rank that held everything, for a sharded part to cut anew.

    Raises:
        ValueError: the part needs what is not there, or the checkpoint has more.
    """
    state = part.shard_state()
    own = shards_in(state, name)
    model, optimizer = tree.get("model", {}), tree.get("optimizer", {})
    saved = [_as_shard(one, model, optimizer).to_dict() for one in own]
    if "shards" in state:  # a mesh, where each rank has some of the model's tensors
        return [{"shards": saved}]
    used = {n for one in own for n in [*one.parts, *(one.buffers or {}), *(one.aliases or {})]}
    extra = [key for key in model if key not in used]
    if extra and _has_model(own[0]):
        raise ValueError(f"{extra[0]} is in the checkpoint and not here: it was saved from a different model")
    return saved


def _has_model(shard: SavedShard) -> bool:
    return any(PARAMETER in part.values for part in shard.parts.values())


def _as_shard(own: SavedShard, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> SavedShard:
    """Return everything that is saved of the tensors of a shard."""
    kept = optimizer.get("state", {}) if own.groups is not None else {}
    model = model if _has_model(own) else {}
    names = {name: name for name in own.parts} | {name: other for other, name in (own.aliases or {}).items()}
    parts = {}
    for name, part in own.parts.items():
        both = (name, names[name])
        values = next(({PARAMETER: model[one]} for one in both if one in model), {})
        if not values and _has_model(own):
            raise ValueError(f"{name} is here and not in the checkpoint: it was saved from a different model")
        state: Mapping[str, Any] = next((kept[one] for one in both if one in kept), {})
        values |= {key: value for key, value in state.items() if _is_per_element(key, value, part.shape)}
        for key, value in values.items():
            if tuple(value.shape) != part.shape:
                there, here = list(value.shape), list(part.shape)
                raise ValueError(f"{key} of {name} is {there} in the checkpoint, {here} here; build the same model")
        flat = {key: value.reshape(-1) for key, value in values.items()}
        numbers = {key: value for key, value in state.items() if key not in values}
        parts[name] = SavedPart(part.shape, 0, math.prod(part.shape), flat, numbers)
    buffers = {key: model[key] for key in own.buffers or {} if key in model}
    groups = None if own.groups is None else [_as_group(one) for one in optimizer.get("param_groups", ())]
    return SavedShard(0, 1, parts, groups or None, buffers, aliases=own.aliases)


def _as_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in group.items() if key != "params"}, "names": list(group["params"])}


def _is_per_element(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an optimizer's value has one number per element of its parameter (else it is kept once)."""
    return isinstance(value, Tensor) and tuple(value.shape) == shape and (bool(shape) or key != "step")
