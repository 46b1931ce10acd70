"""What a rank's rows and their optimizer keep, by tensor names: cut into parts, taken up from parts, or gathered whole.

`FullyShard` has one row per unit, in which several tensors lie end to end. `ShardedOptimizer` has one row per tensor
that it owns a part of. Everything here serves both, and a mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.agree import group_device
from distlab.modules.named_parts import PARAMETER, SavedPart, SavedShard, check_tensors
from distlab.sharding.calls import gather_into
from distlab.sharding.cut_layers import CutLayers
from distlab.sharding.part import plain
from distlab.sharding.state.assemble import HeldRow, assemble, cut, in_slab, parts_by_name, whole_tensor

Optimizer = torch.optim.Optimizer
Assembled = tuple[dict[str, Tensor], dict[str, Any]]  # the values of a row, and what the optimizer keeps of it once
State = dict[str, dict[str, Any]]  # by tensor name, what an optimizer keeps of it
Groups = Sequence[Mapping[str, Any]]  # of an optimizer: options, and the names of tensors


class Rows(NamedTuple):
    """What a rank holds of a model.

    Attributes:
        held: its rows, as its optimizer updates them.
        shapes: by name, all tensors of which ranks hold parts, as this tensor rank has them.
        cut: what of the model tensor ranks hold parts of.
    """

    held: Sequence[HeldRow]
    shapes: Mapping[str, tuple[int, ...]]
    cut: CutLayers

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole model's tensors."""
        return {name: self.cut.whole_shape(name, shape) for name, shape in self.shapes.items()}


class Kept(NamedTuple):
    """What an optimizer keeps of one row.

    Attributes:
        group: index of the optimizer's group.
        values: shaped like the row: the moments.
        numbers: kept once per row, such as the number of steps.
    """

    group: int
    values: dict[str, Tensor]
    numbers: dict[str, Any]


def kept_by(optimizer: Optimizer, rows: Iterable[HeldRow]) -> dict[int, Kept]:
    """Return what an optimizer keeps of each row that it updates, by the id of the row's parameter.

    Raises:
        ValueError: the optimizer updates a different tensor, or keeps what cannot be cut.
    """
    known = {id(row.parameter): row for row in rows}
    state = optimizer.state_dict()
    found = {}
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if id(parameter) in known:
                found[id(parameter)] = Kept(index, *_split(known[id(parameter)], state["state"].get(number, {})))
            elif parameter.numel():  # an optimizer of a rank that owns nothing has an empty parameter
                raise ValueError(
                    f"the optimizer updates a parameter {list(parameter.shape)} that is not a shard of the model; "
                    "build it of model.parameters(), after FullyShard"
                )
    return found


def _split(row: HeldRow, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Divide an optimizer's state: tensors with one number per element (cut like the row), and values kept once."""
    values, numbers = {}, {}
    is_whole = row.shapes == (tuple(row.parameter.shape),)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == row.parameter.shape:
            values[key] = value
        elif not isinstance(value, Tensor) or value.numel() == 1 or is_whole:
            numbers[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value  # Adam counts in place
        else:
            raise ValueError(
                f"{key} of {', '.join(row.names)} is {list(value.shape)}, neither one value for each of the shard's "
                f"{row.parameter.numel()} elements nor one in all; it cannot be divided among other ranks"
            )
    return values, numbers


def save_parts(
    rows: Rows, optimizer: Optimizer | None, *, parameters: bool
) -> tuple[dict[str, SavedPart], list[dict[str, Any]] | None]:
    """Return this rank's part of every tensor, as views, and the optimizer's groups; nothing is sent.

    Args:
        rows: what this rank holds.
        optimizer: updates these rows; None saves parameters alone.
        parameters: save the parameters' own values too.

    Raises:
        ValueError: the optimizer updates a different tensor, or keeps what cannot be cut.
    """
    kept = {} if optimizer is None else kept_by(optimizer, rows.held)
    parts = {name: SavedPart(shape, 0, 0, {}, {}) for name, shape in rows.shapes.items()}
    for row in rows.held:
        of_row = kept.get(id(row.parameter), Kept(-1, {}, {}))
        own = {PARAMETER: plain(row.parameter)} if parameters else {}
        parts |= cut(row, {**own, **of_row.values}, of_row.numbers)
    return rows.cut.for_all(parts), None if optimizer is None else _groups(optimizer, rows.held, kept)


def _groups(optimizer: Optimizer, rows: Sequence[HeldRow], kept: Mapping[int, Kept]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: their options, and the names of their tensors."""
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    for row in rows:
        if id(row.parameter) in kept:
            names[kept[id(row.parameter)].group] += row.names
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "names": own}
        for group, own in zip(optimizer.param_groups, names, strict=True)
    ]


def prepare(
    rows: Rows, optimizer: Optimizer | None, saved: Sequence[SavedShard], *, parameters: bool
) -> Callable[[], None]:
    """Assemble a rank's rows from saved shards; return a function that loads them. Nothing changes yet.

    Args:
        rows: what this rank holds.
        optimizer: updates these rows; None loads parameters alone.
        saved: by any number of ranks, with layers that any number of tensor ranks cut.
        parameters: load the parameters' own values too.

    Raises:
        ValueError: a different model or type, elements that no shard has, or an optimizer of other groups.
    """
    parts, types = parts_by_name(saved), {name: row.parameter.dtype for row in rows.held for name in row.names}
    shapes = rows.whole_shapes().items()
    check_tensors(parts, {name: (shape, types[name] if parameters else None) for name, shape in shapes})

    def wanted(part: SavedPart) -> SavedPart:
        keys = [key for key in part.values if (parameters if key == PARAMETER else optimizer is not None)]
        return replace(part, values={key: part.values[key] for key in keys})

    names = [name for row in rows.held for name in row.names]
    own = {name: in_slab(name, [*map(wanted, parts[name])], rows.cut.slab(name)) for name in names}
    found = {id(row.parameter): assemble(own, row) for row in rows.held}
    take = None if optimizer is None else _prepare_optimizer(optimizer, rows.held, saved, found)

    @torch.no_grad()
    def load() -> None:
        for row in rows.held if parameters else ():
            row.parameter.copy_(found[id(row.parameter)][0][PARAMETER].view(row.parameter.shape))
        if take is not None:
            take()

    return load


def _prepare_optimizer(
    optimizer: Optimizer, rows: Sequence[HeldRow], saved: Sequence[SavedShard], assembled: Mapping[int, Assembled]
) -> Callable[[], None]:
    groups = [one.groups for one in saved if one.groups is not None]
    if not groups:
        raise ValueError("no optimizer was saved with these; load the model alone, or save both together")
    held = {name for row in rows for name in row.names}
    now = [group["names"] for group in _groups(optimizer, rows, kept_by(optimizer, rows))]
    then = [{name for one in same for name in one["names"]} & held for same in zip(*groups, strict=True)]
    if [sorted(names) for names in now] != [sorted(names) for names in then]:
        raise ValueError(
            f"the optimizer's groups have {[len(names) for names in now]} tensors here and "
            f"{[len(names) for names in then]} in the saved state (where these are equal, names differ); build it "
            "as it was when the state was saved"
        )
    state = optimizer.state_dict()
    taken: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, here, options in zip(optimizer.param_groups, state["param_groups"], groups[0], strict=True):
        taken["param_groups"].append({**here, **{key: value for key, value in options.items() if key != "names"}})
        for parameter, number in zip(group["params"], here["params"], strict=True):
            values, numbers = assembled.get(id(parameter), ({}, {}))
            moments = {key: value.view(parameter.shape) for key, value in values.items() if key != PARAMETER}
            if moments or numbers:
                taken["state"][number] = {**moments, **copy.deepcopy(numbers)}  # an optimizer counts in place
    return lambda: optimizer.load_state_dict(taken)


def gather_parts(
    parts: Mapping[str, SavedPart], names: Iterable[str], groups: Iterable[ProcessGroup | None], *, keeps: bool
) -> dict[str, SavedPart]:
    """Put the parts of all ranks together as whole tensors, in host memory; every rank of the groups calls this.

    Args:
        parts: this rank's, of `save_parts`.
        names: of the tensors: the same on all ranks.
        groups: first the ranks that share out what this rank holds a part of, then those that cut the whole of it.
        keeps: this rank wants the whole tensors, and so do all ranks of its later groups; others get nothing.

    Cost: per group one all-gather of as many bytes as the rank has that holds the most, and one of names and types.

    Raises:
        ValueError: a part of a tensor is on none of the ranks.
    """
    held = [(name, parts[name]) for name in names if name in parts]
    for group in groups:
        held = _exchanged(held, group)
        if not keeps:
            return {}
    by_name: dict[str, list[SavedPart]] = {}
    for name, part in held:
        by_name.setdefault(name, []).append(part)
    return {name: whole_tensor(name, its) for name, its in by_name.items()}


def _exchanged(held: Sequence[tuple[str, SavedPart]], group: ProcessGroup | None) -> list[tuple[str, SavedPart]]:
    """Return the parts of all ranks, with values that are views of one buffer."""
    told: list[list[tuple[str, SavedPart, dict[str, torch.dtype]]]] = [[]] * dist.get_world_size(group)
    own = [(n, replace(p, values={}), {key: value.dtype for key, value in p.values.items()}) for n, p in held]
    dist.all_gather_object(told, own, group=group)

    def places(its: Sequence[tuple[str, SavedPart, dict[str, torch.dtype]]]) -> list[tuple[int, int]]:
        """Return where each value begins and ends, in bytes: 16 apart, which any type may begin at."""
        sizes = [(part.stop - part.start) * dtype.itemsize for _, part, kinds in its for dtype in kinds.values()]
        starts = [0, *accumulate(-(-size // 16) * 16 for size in sizes)]
        return [*zip(starts, map(sum, zip(starts, sizes, strict=False)), strict=False), (starts[-1], starts[-1])]

    longest = max(places(its)[-1][1] for its in told)
    mine = torch.zeros(longest, dtype=torch.uint8)
    values = (value for _, part in held for value in part.values.values())
    for (start, stop), value in zip(places(own), values, strict=False):
        mine[start:stop] = value.detach().cpu().contiguous().view(torch.uint8)
    everyone = torch.empty((len(told), longest), dtype=torch.uint8, device=group_device(group))
    gather_into(everyone.view(-1), mine.to(everyone.device), group)
    found = []
    for its, row in zip(told, everyone.cpu(), strict=True):
        ends = iter(places(its))
        for name, part, kinds in its:
            here = {key: row[slice(*next(ends))].view(dtype) for key, dtype in kinds.items()}
            found.append((name, replace(part, values=here)))
    return found


def optimizer_state(whole: Mapping[str, SavedPart], groups: Groups, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state by the names of whole tensors, as a plain optimizer loads it.

    Args:
        whole: of `gather_parts`.
        groups: the optimizer's options.
        names: of the tensors of each group, in the order of one process.
    """
    state = {name: {key: value.view(one.shape) for key, value in one.values.items()} for name, one in whole.items()}
    return {
        "state": {name: state[name] | copy.deepcopy(dict(whole[name].numbers)) for own in names for name in own},
        "param_groups": [
            {**{key: value for key, value in one.items() if key != "names"}, "params": list(own)}
            for one, own in zip(groups, names, strict=True)
        ],
    }


def by_names(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> tuple[State, list[dict[str, Any]]]:
    """Return an optimizer's state and its groups by the names of parameters.

    Args:
        state_dict: of a plain optimizer (parameters by numbers), or of a sharded one (by names already).
        names: of the parameters in each group, in the order in which the plain optimizer was given them.

    Raises:
        ValueError: the state has other groups, groups of other sizes, or lacks a name.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is not an optimizer's state (no 'state' and 'param_groups'); pass its state_dict()")
    groups = state_dict["param_groups"]
    sizes, expected = [len(group["params"]) for group in groups], [len(group) for group in names]
    if sizes != expected:
        raise ValueError(
            f"the saved optimizer has groups of {sizes} parameters, and this one of {expected}; build it as it was "
            "when the state was saved"
        )
    places: dict[Any, str] = {}
    named = []
    for group, own in zip(groups, names, strict=True):
        here = [one if isinstance(one, str) else name for one, name in zip(group["params"], own, strict=True)]
        places |= dict(zip(group["params"], here, strict=True))
        for given in group["params"]:
            if isinstance(given, str) and given not in state_dict["state"]:
                raise ValueError(f"the full state has nothing for {given}; load the state of this model")
        named.append({**{key: group[key] for key in group if key not in ("params", "param_names")}, "names": here})
    return {places.get(key, str(key)): dict(kept) for key, kept in state_dict["state"].items()}, named
