"""What the parts of a run hold, by the names that torch gives it, and back.

torch.distributed.checkpoint sees a run as nested dictionaries: `{"model": {name: tensor}, "optimizer": {"state": {name:
{"exp_avg": tensor, "step": number}}, "param_groups": [{"lr": ..., "params": [names]}]}}`, which is what its
`get_state_dict` returns. Our parts hold the same as named parts of tensors (`modules.named_parts`). This file goes from
one to the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distlab.checkpoint.parts import Parts, Sharded, is_hook
from distlab.modules.every_parameter import every_parameter
from distlab.modules.named_parts import PARAMETER, SavedPart, SavedShard

Path = tuple[str | int, ...]


class Roots(NamedTuple):
    """Where a layout has the model and where the optimizer; "" for no level of its own."""

    model: str = "model"
    optimizer: str = "optimizer"

    def of_model(self, *path: str | int) -> Path:
        """Return the place of something of the model."""
        return ((self.model,) if self.model else ()) + path

    def of_optimizer(self, *path: str | int) -> Path:
        """Return the place of something of the optimizer."""
        return ((self.optimizer,) if self.optimizer else ()) + path


class Box(NamedTuple):
    """A box of a tensor that this rank holds.

    Attributes:
        path: place of the tensor.
        shape: of the whole tensor.
        corner: where the box begins.
        values: the box.
    """

    path: Path
    shape: tuple[int, ...]
    corner: tuple[int, ...]
    values: Tensor


class Held(NamedTuple):
    """What this rank can write.

    Attributes:
        boxes: of tensors.
        values: plain values by their places.
        groups: of optimizers, by the optimizer's place; a rank may know the names of its own tensors alone.
        aliases: further places of tensors, each with the place that boxes use.
    """

    boxes: list[Box]
    values: dict[Path, Any]
    groups: dict[Path, list[dict[str, Any]]]
    aliases: dict[Path, Path]


def held_by(parts: Parts, roots: Roots, rank: int) -> Held:
    """Return the tensors and numbers of `parts` that this rank holds. Generators and hooks differ per rank: left out.

    Buffers may differ per rank, too: rank 0's are saved.

    Raises:
        ValueError: a sharded part saves in another format, or an optimizer updates what no module of `parts` has.
    """
    held = Held([], {}, {}, {})
    for name, part in parts.items():
        if isinstance(part, torch.Generator) or is_hook(part):
            continue
        if isinstance(part, Sharded):
            for shard in shards_in(part.shard_state(), name):
                _add_shard(held, shard, roots)
        elif isinstance(part, nn.Module):
            _add_shard(held, _module_as_shard(part, rank), roots._replace(model=name))
        elif isinstance(part, torch.optim.Optimizer):
            state = named_state(part, parts)
            _add_shard(held, _optimizer_as_shard(part, state, parts), roots._replace(optimizer=name))
        else:
            held.values.update(leaves((name,), part.state_dict()))
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


def leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield what stands at the ends of nested dictionaries, with its place."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from leaves((*path, str(key)), one)
    else:
        yield path, value


def _add_shard(held: Held, shard: SavedShard, roots: Roots) -> None:
    for name, part in shard.parts.items():
        place = {key: roots.of_optimizer("state", name, key) for key in [*part.values, *part.numbers]}
        place[PARAMETER] = roots.of_model(name)
        for corner, box in part.boxes():
            held.boxes.extend(Box(place[key], part.shape, corner, value) for key, value in box.items())
        for key, number in part.numbers.items():
            _add_value(held, place[key], number)
        if 0 in part.shape:
            for key, value in part.values.items():
                held.boxes.append(Box(place[key], part.shape, (0,) * len(part.shape), value.view(part.shape)))
    for name, buffer in (shard.buffers or {}).items() if shard.shard == 0 else ():
        _add_value(held, roots.of_model(name), buffer)
    if shard.groups is not None:
        own, known = [dict(group) for group in shard.groups], held.groups.get(roots.of_optimizer())
        held.groups[roots.of_optimizer()] = merge_names([known, own]) if known else own
    for other, name in (shard.aliases or {}).items():
        held.aliases[roots.of_model(other)] = roots.of_model(name)


def _add_value(held: Held, path: Path, value: Any) -> None:
    if isinstance(value, Tensor):
        held.boxes.append(Box(path, tuple(value.shape), (0,) * value.dim(), value.detach()))
    else:
        held.values[path] = value


def merge_names(everyone: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Make the groups of several holders one list: the options of the first, the names of all."""
    return [
        {**same[0], "names": list(dict.fromkeys(name for one in same for name in one["names"]))}
        for same in zip(*everyone, strict=True)
    ]


def _module_as_shard(module: nn.Module, rank: int) -> SavedShard:
    parts: dict[str, SavedPart] = {}
    buffers: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    aliases = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} of the module's state is a {type(value).__name__}; other layouts take tensors")
        if id(value) in first:
            aliases[name] = first[id(value)]
            continue
        first[id(value)] = name
        if isinstance(value, nn.Parameter):
            parts[name] = SavedPart(tuple(value.shape), 0, value.numel(), {PARAMETER: value.detach().reshape(-1)}, {})
        else:
            buffers[name] = value
    return SavedShard(rank, rank + 1, parts, buffers=buffers, aliases=aliases)


def _optimizer_as_shard(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]], parts: Parts
) -> SavedShard:
    names = parameter_names(parts)
    saved = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = state.get(names[id(parameter)], {})
            shape = tuple(parameter.shape)
            per_element = {k: v.detach().reshape(-1) for k, v in kept.items() if is_per_element(k, v, shape)}
            numbers = {key: value for key, value in kept.items() if key not in per_element}
            saved[names[id(parameter)]] = SavedPart(shape, 0, parameter.numel(), per_element, numbers)
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [names[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return SavedShard(0, 1, saved, groups)


def is_per_element(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an optimizer's value has one number per element of its parameter (else it is kept once)."""
    return isinstance(value, Tensor) and tuple(value.shape) == shape and (bool(shape) or key != "step")


def named_state(optimizer: torch.optim.Optimizer, parts: Parts) -> dict[str, dict[str, Any]]:
    """Return what a plain optimizer keeps, by the names of its parameters in the modules of `parts`.

    Raises:
        ValueError: a parameter is in none of them.
    """
    names = parameter_names(parts)
    unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if unknown:
        raise ValueError(
            f"an optimizer updates a parameter {list(unknown[0].shape)} that is in no module of parts; other layouts "
            "go by names: pass the module too"
        )
    return {names[id(parameter)]: dict(kept) for parameter, kept in optimizer.state.items()}


def parameter_names(parts: Parts) -> dict[int, str]:
    """Return the name of each parameter in the modules of `parts`, by its id: the first, where modules share it."""
    names: dict[int, str] = {}
    for part in parts.values():
        if isinstance(part, nn.Module):
            for name, parameter in every_parameter(part):
                names.setdefault(id(parameter), name)
    return names


def unfold(tree: Mapping[Path, Any]) -> dict[str, Any]:
    """Return nested dictionaries from places; a dictionary whose keys are numbers is a list.

    Raises:
        ValueError: one thing stands inside another that is not a dictionary.
    """
    nested: dict[Any, Any] = {}
    for path, value in tree.items():
        at = nested
        for step in path[:-1]:
            at = at.setdefault(step, {})
            if not isinstance(at, dict):
                raise ValueError(f"{'.'.join(map(str, path))} stands inside of a value; the layout is damaged")
        at[path[-1]] = value
    return {str(key): _lists(value) for key, value in nested.items()}


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_lists(value[key]) for key in sorted(value)]
    return {key: _lists(one) for key, one in value.items()}
