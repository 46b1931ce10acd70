"""What an optimizer keeps of a rank's rows, by tensor names: cut into parts, taken up from parts, or gathered whole.

`FullyShard` has one row per unit, in which several tensors lie end to end. `ShardedOptimizer` has one row per tensor
that it owns a part of. Everything here serves both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.agree import group_device
from distlab.modules.named_parts import PARAMETER, SavedPart, SavedShard
from distlab.plan import FlatLayout
from distlab.sharding.calls import gather_into
from distlab.sharding.part import plain
from distlab.sharding.state.assemble import HeldRow, assemble, cut, holders

Optimizer = torch.optim.Optimizer
Assembled = tuple[dict[str, Tensor], dict[str, Any]]  # the values of a row, and what the optimizer keeps of it once


class SharedBuffer(NamedTuple):
    """Named tensors end to end in one buffer, of which each rank of a group holds a part.

    Attributes:
        layout: where each tensor lies.
        edges: where each rank's part of the buffer begins, and the end of the last.
        rows: what this rank holds, as its optimizer updates it.
    """

    layout: FlatLayout
    edges: Sequence[int]
    rows: Sequence[HeldRow]


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
        ValueError: the optimizer updates another tensor, or keeps what cannot be cut.
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
    buffers: Sequence[SharedBuffer], optimizer: Optimizer | None, *, parameters: bool
) -> tuple[dict[str, SavedPart], list[dict[str, Any]] | None]:
    """Return this rank's part of every tensor, as views, and the optimizer's groups; nothing is sent.

    Args:
        buffers: what the ranks share.
        optimizer: updates this rank's rows; None saves parameters alone.
        parameters: save the parameters' own values too.

    Raises:
        ValueError: the optimizer updates another tensor, or keeps what cannot be cut.
    """
    rows = [row for buffer in buffers for row in buffer.rows]
    kept = {} if optimizer is None else kept_by(optimizer, rows)
    parts = {
        name: SavedPart(shape, 0, 0, {}, {})
        for buffer in buffers
        for name, shape in zip(buffer.layout.names, buffer.layout.shapes, strict=True)
    }
    for row in rows:
        of_row = kept.get(id(row.parameter), Kept(-1, {}, {}))
        own = {PARAMETER: plain(row.parameter)} if parameters else {}
        parts |= cut(row, {**own, **of_row.values}, of_row.numbers)
    return parts, None if optimizer is None else _groups(optimizer, rows, kept)


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


def merge_groups(everyone: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Make the groups of several ranks one list: the options of the first, the names of all."""
    return [
        {**same[0], "names": list(dict.fromkeys(name for one in same for name in one["names"]))}
        for same in zip(*everyone, strict=True)
    ]


def assemble_rows(buffers: Sequence[SharedBuffer], saved: Sequence[SavedShard]) -> dict[int, Assembled]:
    """Build this rank's rows (one per unit, or per owned tensor) from saved shards: a dict by `id(row.parameter)`.

    Raises:
        ValueError: parts are missing, or cannot share a row.
    """
    return {id(row.parameter): assemble(saved, row) for buffer in buffers for row in buffer.rows}


def prepare_optimizer(
    optimizer: Optimizer,
    buffers: Sequence[SharedBuffer],
    saved: Sequence[SavedShard],
    assembled: Mapping[int, Assembled],
) -> Callable[[], None]:
    """Check the result of `assemble_rows` against an optimizer; return a function that loads it. Nothing changes yet.

    Raises:
        ValueError: no optimizer was saved, or its groups were of other tensors.
    """
    if any(one.groups is None for one in saved):
        raise ValueError("no optimizer was saved with these; load the model alone, or save both together")
    rows = [row for buffer in buffers for row in buffer.rows]
    held = {name for row in rows for name in row.names}
    now = [group["names"] for group in _groups(optimizer, rows, kept_by(optimizer, rows))]
    then = [[n for n in one["names"] if n in held] for one in merge_groups([one.groups or () for one in saved])]
    if [sorted(names) for names in now] != [sorted(names) for names in then]:
        raise ValueError(
            f"the optimizer's groups have {[len(names) for names in now]} tensors here and "
            f"{[len(names) for names in then]} in the saved state (where these are equal, names differ); build it "
            "as it was when the state was saved"
        )
    state = optimizer.state_dict()
    taken: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, here, options in zip(optimizer.param_groups, state["param_groups"], saved[0].groups or (), strict=True):
        taken["param_groups"].append({**here, **{key: value for key, value in options.items() if key != "names"}})
        for parameter, number in zip(group["params"], here["params"], strict=True):
            values, numbers = assembled.get(id(parameter), ({}, {}))
            moments = {key: value.view(parameter.shape) for key, value in values.items() if key != PARAMETER}
            if moments or numbers:
                taken["state"][number] = {**moments, **_copies(numbers)}
    return lambda: optimizer.load_state_dict(taken)


def gather_whole(
    buffers: Sequence[SharedBuffer],
    parts: Mapping[str, SavedPart],
    groups: Sequence[Mapping[str, Any]] | None,
    group: ProcessGroup | None,
    *,
    keeps: bool,
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Put the parts of all ranks together; every rank of the group calls this.

    There is one all-gather per buffer and key, as long as the largest part, and one of names, types and numbers.

    Args:
        buffers: what the ranks share.
        parts: this rank's, of `save_parts`.
        groups: this rank's, of `save_parts`.
        group: the ranks that hold a part each.
        keeps: this rank wants the whole tensors.

    Returns:
        By tensor name its whole tensors and its numbers, by their keys; and the optimizer's groups with the names of
        all their tensors.

    Shapes: parts of [stop - start] -> tensors of their whole shapes, in host memory.
    """
    own = {
        name: ({key: value.dtype for key, value in part.values.items()}, part.numbers)
        for name, part in parts.items()
        if holders([(0, part)]) and (part.values or part.numbers)
    }
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (own, groups or ()), group=group)
    known: dict[str, Any] = {name: one for its, _ in reversed(everyone) for name, one in its.items()}
    names = [name for buffer in buffers for name in buffer.layout.names]
    state: dict[str, dict[str, Any]] = {name: _copies(known[name][1]) if name in known else {} for name in names}
    for buffer in buffers:
        kinds = {kind for name in buffer.layout.names if name in known for kind in known[name][0].items()}
        for key, dtype in sorted(kinds, key=str):
            for name, whole in _gather_key(buffer, parts, key, dtype, group, keeps=keeps):
                if name in known and key in known[name][0]:
                    state[name][key] = whole
    return state, merge_groups([its_groups for _, its_groups in everyone])


def _copies(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers of one tensor's own: a plain optimizer counts its steps in place."""
    return copy.deepcopy(dict(numbers))


def _gather_key(
    buffer: SharedBuffer,
    parts: Mapping[str, SavedPart],
    key: str,
    dtype: torch.dtype,
    group: ProcessGroup | None,
    *,
    keeps: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Gather one value of all tensors of a buffer, and cut it into the tensors; nothing where `keeps` is False."""
    layout, start = buffer.layout, buffer.edges[dist.get_rank(group)]
    sizes = [stop - begin for begin, stop in zip(buffer.edges[:-1], buffer.edges[1:], strict=True)]
    own = torch.zeros(max(sizes), dtype=dtype)
    for name, offset in zip(layout.names, layout.offsets, strict=True):
        if key in parts[name].values:
            own[offset + parts[name].start - start : offset + parts[name].stop - start] = parts[name].values[key]
    everyone = torch.empty((len(sizes), max(sizes)), dtype=dtype, device=group_device(group))
    gather_into(everyone.view(-1), own.to(everyone.device), group)
    if not keeps:
        return
    equal = min(sizes) == max(sizes)
    whole = everyone.view(-1) if equal else torch.cat([one[:size] for one, size in zip(everyone, sizes, strict=True)])
    for name, shape, offset, size in zip(layout.names, layout.shapes, layout.offsets, layout.sizes, strict=True):
        yield name, whole[offset : offset + size].view(shape).to("cpu", copy=True)


def as_one_shard(
    state: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    once: Iterable[str],
) -> SavedShard:
    """Read an optimizer's state of whole tensors as a save of one shard.

    Args:
        state: what belongs to each tensor, by name.
        groups: options, and the names of tensors.
        shapes: of the model's tensors.
        once: keys of which there is one value per tensor.

    Raises:
        ValueError: the state has a tensor that the model has not, or one of another shape.
    """
    parts = {}
    for name in [*state, *shapes]:
        if name not in shapes:
            raise ValueError(f"{name} is in the optimizer's saved state and not here: it is of a different model")
        values, shape = state.get(name, {}), shapes[name]
        moments = {key: value for key, value in values.items() if key not in once}
        for key, value in moments.items():
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"{key} of {name} is {list(value.shape)} in the saved state and {list(shape)} here; load the "
                    "state of this model"
                )
        numbers = {key: value for key, value in values.items() if key in once}
        flat = {key: value.detach().reshape(-1) for key, value in moments.items()}
        parts[name] = SavedPart(shape, 0, math.prod(shape), flat, numbers)
    return SavedShard(0, 1, parts, groups)
