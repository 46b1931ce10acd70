"""Which parameters belong to which unit: decided once, alike on all ranks, before anything is sent.

A unit is a submodule whose parameters are gathered and freed together. A parameter belongs to the innermost unit that
holds it; one that two units share (tied weights) is needed by both, so it moves to the root, which is whole all the
time. Frozen parameters get a flat shard of their own, so that no optimizer touches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from distlab.blocks.flat import alignment
from distlab.blocks.modules.blocks import Choice, find_blocks, is_called

ROOT = ""


@dataclass(frozen=True)
class ModuleSlot:
    """Where a module looks for a parameter.

    Attributes:
        module: that has it.
        attribute: its name there.
        tensor: its index among the tensors of its unit.
    """

    module: nn.Module
    attribute: str
    tensor: int


@dataclass
class UnitMembers:
    """Parameters that lie in one flat shard.

    Attributes:
        names: as in `module.named_parameters()`.
        parameters: themselves.
        places: all modules that use them; a tied parameter has several.
    """

    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    places: list[ModuleSlot] = field(default_factory=list)

    @classmethod
    def joined(cls, each: Sequence[UnitMembers]) -> UnitMembers:
        """Put the members of several units into one."""
        made = cls()
        for one in each:
            made.places += [replace(place, tensor=place.tensor + len(made.names)) for place in one.places]
            made.names += one.names
            made.parameters += one.parameters
        return made


def automatic_units(module: nn.Module) -> list[str]:
    """Return the items of every ModuleList and Sequential, outermost first, that own a parameter.

    What stands in the model under several names counts under the first one.
    """
    shown = dict(module.named_modules())
    return [path for path, one in find_blocks(module).items() if path in shown and _owns(one)]


def chosen_units(module: nn.Module, choice: Choice) -> list[str]:
    """Return the names of the submodules that a caller chose; what owns no parameters is passed by.

    Args:
        module: the model.
        choice: names, classes, patterns and functions as in `modules.blocks.find_blocks`; [] chooses none.

    Raises:
        ValueError: a choice of nothing, of what owns no parameters, or of a module that has no forward.
    """
    each = choice if isinstance(choice, Sequence) and not isinstance(choice, str) else [choice]
    found = {name: part for one in each for name, part in find_blocks(module, one).items()}
    names = [name for name, part in found.items() if _owns(part)]
    if found and not names:
        raise ValueError(f"units: {[*found]} owns no parameters, so there is nothing to gather; leave it out")
    for name in names:
        if not is_called(found[name]):
            raise ValueError(
                f"units: {name!r} ({type(found[name]).__name__}) is never called, and a unit is gathered when it is; "
                f"name its items: '{name}.*'"
            )
    return names


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def assign(module: nn.Module, units: Sequence[str], *, automatic: bool) -> dict[tuple[str, bool], UnitMembers]:
    """Return the members of each (unit, is frozen), the root's first and then in the order of `units`.

    Args:
        module: the model.
        units: names of submodules.
        automatic: the units were not chosen by the caller: a parameter that two of them share moves to the root.

    Raises:
        ValueError: units that the caller named share a parameter.
    """
    owners: dict[nn.Parameter, list[str]] = {}
    uses: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    names = set(units)
    for path, one in module.named_modules():
        owner = _innermost(path, names)
        for attribute, parameter in one._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append(owner)
                uses.setdefault(parameter, []).append((one, attribute, f"{path}.{attribute}" if path else attribute))
    found = {(unit, frozen): UnitMembers() for unit in (ROOT, *units) for frozen in (False, True)}
    for parameter, users in sorted(owners.items(), key=lambda pair: -alignment(pair[0])):
        owner = users[0] if len(set(users)) == 1 else ROOT
        if owner == ROOT and ROOT not in users and not automatic:
            paths = " and ".join(path for _, _, path in uses[parameter])
            both = " and ".join(repr(user) for user in dict.fromkeys(users))
            raise ValueError(
                f"units: {paths} are one tied parameter, which the units {both} would both gather and free; leave "
                "one of the two out of units, and the parameter stays whole with the root while both use it"
            )
        members = found[owner, not parameter.requires_grad]
        for one, attribute, _ in uses[parameter]:
            members.places.append(ModuleSlot(one, attribute, len(members.names)))
        members.names.append(uses[parameter][0][2])
        members.parameters.append(parameter)
    return {key: members for key, members in found.items() if members.names}


def dtype_of(unit: str, members: UnitMembers) -> torch.dtype:
    """Return the type that all parameters of a unit have; a ValueError names two that differ."""
    first = members.parameters[0].dtype
    for name, parameter in zip(members.names, members.parameters, strict=True):
        if parameter.dtype != first:
            raise ValueError(
                f"unit {unit or 'root'!r}: {members.names[0]} is {first} and {name} {parameter.dtype}; a flat shard "
                "has one floating point type: convert the module with .to(dtype), or give them different units"
            )
    return first


def _innermost(path: str, units: set[str]) -> str:
    """Return the unit that a module belongs to: itself, or the nearest of those that hold it."""
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path
