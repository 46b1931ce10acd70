"""What the parts of a run hold, by the names that torch gives it, and back.

torch.distributed.checkpoint sees a run as nested dictionaries: `{"model": {name: tensor}, "optimizer": {"state": {name:
{"exp_avg": tensor, "step": number}}, "param_groups": [{"lr": ..., "params": [names]}]}}`, which is what its
`get_state_dict` returns. Our parts hold the same as named parts of tensors (`modules.named_parts`). This file goes from
one to the other. Plain optimizers and the rest are torch's own matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from distlab.checkpoint.parts import Parts, Sharded
from distlab.modules.named_parts import ELSEWHERE, PARAMETER, SavedShard, whole_shard

METADATA = ".metadata"  # of torch's layout: which box of which tensor lies where
Place = tuple[str | int, ...]
STATE: Place = ("optimizer", "state")
GROUPS: Place = ("optimizer", "param_groups")


class Box(NamedTuple):
    """A box of a tensor that this rank holds: the whole tensor's shape, where the box begins, and its values."""

    shape: tuple[int, ...]
    corner: tuple[int, ...]
    values: Tensor


class Held(NamedTuple):
    """What this rank can write, by places; a tied tensor has several. Of groups it may know its own tensors' names."""

    boxes: dict[Place, list[Box]]
    values: dict[Place, Any]
    groups: list[Sequence[Mapping[str, Any]]]


def held_by(parts: Parts) -> Held:
    """Return the tensors and numbers of `parts` that this rank holds.

    Raises:
        ValueError: a part is no module and saves no named parts of tensors.
    """
    held = Held({}, {}, [])
    for name, part in parts.items():
        if isinstance(part, Sharded):
            for shard in shards_in(part.shard_state(), name):
                _add_shard(held, shard)
        elif isinstance(part, nn.Module):
            for key, value in part.state_dict().items():
                _add_value(held, (name, key), value)
        else:
            raise ValueError(
                f"{name} is a {type(part).__name__}; pass models, ShardedState(model, optimizer), a ShardedOptimizer "
                "or a Hybrid. Of a plain optimizer and the rest torch's own dcp.save and dcp.load are writer and reader"
            )
    return held


def shards_in(state: Mapping[str, Any], name: str) -> list[SavedShard]:
    """Return the saved shards in a sharded part's state: the state is one, or has a list of them.

    Raises:
        ValueError: it is something else.
    """
    try:
        return [SavedShard.from_dict(one) for one in state.get("shards", [state])]
    except ValueError as error:
        raise ValueError(f"{name} does not save named parts of tensors, which other layouts need: {error}") from None


def _add_shard(held: Held, shard: SavedShard) -> None:
    others: dict[str, list[str]] = {}
    for other, name in (shard.aliases or {}).items():
        others.setdefault(name, []).append(other)
    for name, part in shard.parts.items():
        models: list[Place] = [("model", one) for one in (name, *others.get(name, ()))]
        for corner, box in part.boxes():
            for key, value in box.items():
                for place in models if key == PARAMETER else [(*STATE, name, key)]:
                    held.boxes.setdefault(place, []).append(Box(part.shape, corner, value))
        for key, number in part.numbers.items():
            _add_value(held, (*STATE, name, key), number)
        for key, value in part.values.items() if 0 in part.shape else ():
            for place in models if key == PARAMETER else [(*STATE, name, key)]:
                _add_value(held, place, value.view(part.shape))
    for name, buffer in (shard.buffers or {}).items() if shard.shard == 0 else ():
        _add_value(held, ("model", name), buffer)
    if shard.groups is not None:
        held.groups.append(shard.groups)


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


def unfold(tree: Mapping[Place, Any]) -> Any:
    """Return nested dictionaries from places; a dictionary whose keys are numbers is a list.

    Raises:
        ValueError: one thing stands inside another that is not a dictionary.
    """
    if () in tree:
        if len(tree) > 1:
            raise ValueError("one value stands inside of another; the layout is damaged")
        return tree[()]
    inside: dict[Any, dict[Place, Any]] = {}
    for place, value in tree.items():
        inside.setdefault(place[0], {})[place[1:]] = value
    if inside and all(isinstance(key, int) for key in inside):
        return [unfold(inside[key]) for key in sorted(inside)]
    return {key: unfold(one) for key, one in inside.items()}


def as_saved(part: Sharded, name: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is saved as the shard of one rank that held everything, for a sharded part to cut anew.

    Raises:
        ValueError: the part needs what is not there, or the checkpoint has more.
    """
    state = part.shard_state()
    own = shards_in(state, name)
    parts = {key: one for shard in own for key, one in shard.parts.items()}
    others = {name: other for shard in own for other, name in (shard.aliases or {}).items()}
    buffers = {key for shard in own for key in shard.buffers or {}}
    has_model = any(PARAMETER in one.values for shard in own for one in shard.parts.values())
    model, optimizer = tree.get("model", {}) if has_model else {}, tree.get("optimizer", {})
    whole: dict[str, dict[str, Any]] = {}
    for key in parts:
        names = (key, others.get(key, key))
        if has_model and not model.keys() & {*names}:
            raise ValueError(f"{key} is here and not in the checkpoint: {ELSEWHERE}")
        states = optimizer.get("state", {})
        whole[key] = dict(next((states[one] for one in names if one in states), {}))
        whole[key] |= next(({PARAMETER: model[one]} for one in names if one in model), {})
    extra = [key for key in model if key not in {*parts, *buffers, *others.values()}]
    if extra and "shards" not in state:  # a mesh, where each rank has some of the model's tensors
        raise ValueError(f"{extra[0]} is in the checkpoint and not here: {ELSEWHERE}")
    has_optimizer = any(shard.groups is not None for shard in own)
    groups = [_as_group(one) for one in optimizer.get("param_groups", ())] if has_optimizer else []
    shapes = {key: one.shape for key, one in parts.items()}
    saved = whole_shard(whole, groups or None, shapes)
    found = replace(saved, buffers={key: model[key] for key in buffers if key in model}).to_dict()
    return [{"shards": [found]} if "shards" in state else found]


def _as_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in group.items() if key != "params"}, "names": list(group["params"])}
