"""Cut what a rank holds into named parts, and put rows together again from parts that were cut in any other way."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.modules.named_parts import PARAMETER, SavedPart, SavedShard, Slab
from distlab.plan.sharding import Piece

BY_TENSOR = "of single tensors"  # key of what an optimizer counts by tensor, where those of one row differ


class HeldRow(NamedTuple):
    """One tensor that this rank holds and an optimizer updates: elements of named tensors, end to end.

    Attributes:
        parameter: the tensor; elements that no piece covers are padding.
        names: of the tensors that the row belongs to.
        shapes: of those tensors.
        pieces: which elements of which tensor lie where in the row.
    """

    parameter: Tensor
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece, ...]


def cut(row: HeldRow, values: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Iterator[tuple[str, SavedPart]]:
    """Cut values that are shaped like a row into parts of named tensors: views, which training goes on to change.

    A tensor that was never updated has its values, and nothing of an optimizer. This rank cannot know about those of
    which it holds no element.

    Shapes: values [row elements] each -> parts of [stop - start] each.
    """
    held = {piece.tensor: piece for piece in row.pieces}
    of_tensor = numbers.get(BY_TENSOR, {})
    of_others = {key: value for key, value in numbers.items() if key != BY_TENSOR}
    flat = {key: value.detach().reshape(-1) for key, value in values.items()}
    for index, (name, shape) in enumerate(zip(row.names, row.shapes, strict=True)):
        _, start, stop, offset = held.get(index, Piece(index, 0, 0, 0))
        own = of_tensor.get(name, of_others) if index in held or 0 in shape else None
        keys = flat if own is not None else flat.keys() & {PARAMETER}
        here = {key: flat[key][offset : offset + stop - start] for key in keys}
        yield name, SavedPart(shape, start, stop, here, dict(own or {}))


def covering(start: int, stop: int, held: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Cover elements [start, stop) of a tensor from pieces that hold [low, high) of it each, with the fewest copies.

    Yields:
        (piece, first element, one past the last) of each copy.

    Raises:
        ValueError: some elements are in no piece; the text says which.
    """
    while start < stop:
        reach = [(min(high, stop), -index) for index, (low, high) in enumerate(held) if low <= start < high]
        if not reach:
            until = min((low for low, high in held if start < low < high), default=stop)
            raise ValueError(f"elements {start} to {min(until, stop)}")
        end, index = max(reach)
        yield -index, start, end
        start = end


def assemble(saved: Sequence[SavedShard], row: HeldRow) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Put the values of one row together from shards that were cut in any way.

    Shapes: saved parts [stop - start] -> values [row elements] each; zero where it is padding, or was never updated

    Returns:
        The values by key: the parameter and the optimizer's moments; and what the optimizer keeps once per row. Where
        tensors of the row differ in that, `BY_TENSOR` has it by name: None for one that was never updated.

    Raises:
        ValueError: a part is in none of the saved shards, or the tensors of the row have different values.
    """
    parts = {name: holders([(one.shard, one.parts[name]) for one in saved]) for name in row.names}
    own = {row.names[piece.tensor] for piece in row.pieces} or {*row.names}  # all, where the row is padding alone
    updated = [(name, *one) for name in row.names if name in own for one in parts[name] if _was_updated(one[1])]
    example = updated[0][2] if updated else next((found[0][1] for found in parts.values() if found), None)
    kinds = {} if example is None else {key: value.dtype for key, value in example.values.items()}
    if not updated:  # other tensors of the row may have been
        kinds = {key: dtype for key, dtype in kinds.items() if key == PARAMETER}
    for name, shard, part in updated:
        if part.values.keys() != kinds.keys():
            raise ValueError(
                f"{name} has {sorted(part.values)} in shard {shard} and other tensors have {sorted(kinds)}: "
                "tensors of one unit must have the same optimizer state"
            )
    values = {key: torch.zeros(row.parameter.numel(), dtype=dtype) for key, dtype in kinds.items()}
    for piece in row.pieces:
        name = row.names[piece.tensor]
        try:
            copies = [*covering(piece.start, piece.stop, [(part.start, part.stop) for _, part in parts[name]])]
        except ValueError as gap:
            have = sorted({one.shard for one in saved})
            missing = [index for index in range(saved[0].num_shards) if index not in have]
            which = f"shards {missing} of {saved[0].num_shards} are missing" if missing else "no shard has them"
            raise ValueError(f"{name}: {gap} were not given: {which}; pass the saved shards of all ranks") from None
        for source, low, high in copies:
            part, at = parts[name][source][1], piece.offset + low - piece.start
            for key in part.values.keys() & values.keys():
                values[key][at : at + high - low] = part.values[key][low - part.start : high - part.start]
    numbers = {name: dict(part.numbers) for name, _, part in reversed(updated)}
    if not row.pieces:
        return values, next(iter(numbers.values()), {})
    return values, of_row({name: numbers.get(name) for name in row.names if name in own})


def of_row(by_name: Mapping[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Return what an optimizer keeps once of a row: of any tensor, and of each under `BY_TENSOR` where these differ.

    Args:
        by_name: what it keeps of each tensor; None of one that was never updated.
    """
    updated = [numbers for numbers in by_name.values() if numbers is not None]
    if not updated:
        return {}
    exact = {str(numbers and {key: _number(value) for key, value in numbers.items()}) for numbers in by_name.values()}
    return {**copy.deepcopy(updated[0]), **({BY_TENSOR: dict(by_name)} if len(exact) > 1 else {})}


def _number(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value  # a tensor prints few digits


def holders(parts: Sequence[tuple[int, SavedPart]]) -> list[tuple[int, SavedPart]]:
    """Return the parts that hold elements; all, where the tensor has none. Others may know nothing of its state."""
    return [one for one in parts if one[1].stop > one[1].start or 0 in one[1].shape]


def _was_updated(part: SavedPart) -> bool:
    return bool(part.numbers) or bool(part.values.keys() - {PARAMETER})


def whole_tensor(name: str, parts: Sequence[SavedPart]) -> SavedPart:
    """Put a whole tensor together, with all that belongs to it, from parts that were cut along any axes.

    Shapes: saved parts [stop - start] -> values [all elements] each

    Raises:
        ValueError: some elements are in none of the parts.
    """
    shape = parts[0].shape
    values = {}
    for key in dict.fromkeys(key for part in parts for key in part.values):
        seen = torch.zeros(shape, dtype=torch.bool)
        of_slab: dict[Slab | None, list[SavedPart]] = {}
        for part in parts:
            if key in part.values:
                of_slab.setdefault(part.slab, []).append(part)
        whole = torch.zeros(shape, dtype=next(part.values[key].dtype for part in parts if key in part.values))
        for slab, held in of_slab.items():
            size = math.prod(held[0].row_shape)
            row, has = torch.zeros(size, dtype=whole.dtype), torch.zeros(size, dtype=torch.bool)
            for part in held:
                row[part.start : part.stop], has[part.start : part.stop] = part.values[key], True
            _put(row.view(held[0].row_shape), whole, slab)
            _put(has.view(held[0].row_shape), seen, slab)
        if not bool(seen.all()):
            raise ValueError(
                f"{key} of {name}: {int((~seen).sum())} elements were not given; pass the saved shards of all ranks"
            )
        values[key] = whole.reshape(-1)
    known = [part for _, part in holders([*enumerate(parts)])]
    numbers = {key: value for part in reversed(known) for key, value in part.numbers.items()}
    return SavedPart(shape, 0, math.prod(shape), values, numbers)


def parts_by_name(saved: Sequence[SavedShard]) -> dict[str, list[SavedPart]]:
    """Return the parts that shards hold of each tensor."""
    held: dict[str, list[SavedPart]] = {}
    for one in saved:
        for name, part in one.parts.items():
            held.setdefault(name, []).append(part)
    return held


def cut_anew(name: str, parts: Sequence[SavedPart], slab: Slab | None) -> SavedPart:
    """Put a whole tensor together from parts that were cut along any axes, and cut this rank's part out of it.

    Shapes: saved parts [stop - start] -> values [elements of the slab] each; all elements where slab is None

    Raises:
        ValueError: some elements are in none of the parts.
    """
    whole = whole_tensor(name, parts)
    return whole if slab is None else cut_slab(whole, slab)


def _put(own: Tensor, whole: Tensor, slab: Slab | None) -> None:
    for here, there in [(own, whole)] if slab is None else slab.pairs(own, whole):
        there.copy_(here)


def cut_slab(part: SavedPart, slab: Slab) -> SavedPart:
    """Cut one tensor-parallel rank's part out of a whole tensor, as a tensor of its own.

    Shapes: values [all elements] -> [elements of the slab]
    """
    shape, values = slab.shape(part.shape), {}
    for key, value in part.values.items():
        own = torch.zeros(shape, dtype=value.dtype)
        for here, there in slab.pairs(own, value.view(part.shape)):
            here.copy_(there)
        values[key] = own.view(-1)
    return SavedPart(shape, 0, math.prod(shape), values, part.numbers)
