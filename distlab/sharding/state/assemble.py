"""Cut what a rank holds into named parts, and join parts that ranks of any other plan cut.

Whatever is saved or loaded goes this way: the shards of FullyShard and ZeRO, a mesh, and torch's own layout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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


def join(
    name: str, parts: Sequence[SavedPart], start: int, stop: int, into: Callable[..., Tensor] | None = None
) -> SavedPart:
    """Put elements [start, stop) of a tensor together, with all that belongs to them, from parts that lie in any way.

    `into` gives the memory for a key and a type; None: each gets its own.

    Shapes: parts [their stop - start] -> values [stop - start] each

    Raises:
        ValueError: some elements are in none of the parts.
    """
    _require_all(name, parts, start, stop)
    values = {}
    for key in dict.fromkeys(key for part in parts for key in part.values):
        held = [part for part in parts if key in part.values]
        _require_all(name, held, start, stop)
        dtype = held[0].values[key].dtype
        values[key] = torch.empty(stop - start, dtype=dtype) if into is None else into(key, dtype)
        for part in held:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                values[key][low - start : high - start] = part.values[key][low - part.start : high - part.start]
    known = [
        part for part in parts if part.stop > part.start or 0 in part.shape
    ]  # others may know nothing of its state
    numbers = {key: value for part in reversed(known) for key, value in part.numbers.items()}
    return SavedPart(parts[0].shape, start, stop, values, numbers)


def _require_all(name: str, parts: Sequence[SavedPart], start: int, stop: int) -> None:
    missing, at = 0, start
    for low, high in sorted((part.start, part.stop) for part in parts):
        missing, at = missing + max(0, min(low, stop) - at), max(at, min(high, stop))
    if missing + stop - at:
        raise ValueError(_missing(name, missing + stop - at))


def _missing(name: str, number: int) -> str:
    return f"{number} elements of {name} were not given; pass the saved shards of all ranks"


def whole_tensor(name: str, parts: Sequence[SavedPart]) -> SavedPart:
    """Put a whole tensor together from parts that were cut along any axes.

    Shapes: parts [stop - start] -> values [all elements] each

    Raises:
        ValueError: some elements are in none of the parts.
    """
    shape = parts[0].shape
    size = math.prod(shape)
    rows = {slab: in_slab(name, parts, slab) for slab in dict.fromkeys(part.slab for part in parts)}
    joined = {slab: join(name, row, 0, math.prod(row[0].shape)) for slab, row in rows.items()}
    if None in joined:
        return joined[None]
    values, first = {}, next(iter(joined.values()))
    for key, example in first.values.items():
        whole, num_missing = torch.zeros(shape, dtype=example.dtype), size
        for slab, one in joined.items():
            assert slab is not None, "looked at above"
            for here, there in slab.pairs(one.values[key].view(rows[slab][0].shape), whole):
                there.copy_(here)
                num_missing -= there.numel()
        if num_missing:
            raise ValueError(_missing(name, num_missing))
        values[key] = whole.view(-1)
    return SavedPart(shape, 0, size, values, first.numbers)


def in_slab(name: str, parts: Sequence[SavedPart], slab: Slab | None) -> list[SavedPart]:
    """Return what parts of a tensor hold of a slab of it, as parts of a tensor of its own; None: of all of it.

    Parts that were cut into other slabs are joined first.

    Shapes: parts [stop - start] -> the same, or one part of [elements of the slab]

    Raises:
        ValueError: some elements are in none of the parts.
    """
    alike = [replace(part, shape=part.row_shape, slab=None) for part in parts if part.slab == slab]
    if alike:
        return alike
    whole = whole_tensor(name, parts)
    if slab is None:
        return [whole]
    shape, values = slab.shape(whole.shape), {}
    for key, value in whole.values.items():
        own = torch.zeros(shape, dtype=value.dtype)
        for here, there in slab.pairs(own, value.view(whole.shape)):
            here.copy_(there)
        values[key] = own.view(-1)
    return [SavedPart(shape, 0, math.prod(shape), values, whole.numbers)]


def parts_by_name(saved: Sequence[SavedShard]) -> dict[str, list[SavedPart]]:
    """Return the parts that shards hold of each tensor."""
    held: dict[str, list[SavedPart]] = {}
    for one in saved:
        for name, part in one.parts.items():
            held.setdefault(name, []).append(part)
    return held


def assemble(parts: Mapping[str, Sequence[SavedPart]], row: HeldRow) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Put the values of one row together from parts of its tensors.

    Shapes: parts [stop - start] -> values [row elements] each; zero where it is padding, or was never updated

    Returns:
        The values by key: the parameter and the optimizer's moments; and what the optimizer keeps once per row. Where
        tensors of the row differ in that, `BY_TENSOR` has it by name: None for one that was never updated.

    Raises:
        ValueError: an element is in none of the parts, or the tensors of the row have different values.
    """
    pieces = row.pieces or tuple(Piece(index, 0, 0, 0) for index in range(len(row.names)))  # or padding alone
    names = [row.names[piece.tensor] for piece in pieces]
    values: dict[str, Tensor] = {}

    def place(piece: Piece, key: str, dtype: torch.dtype) -> Tensor:
        if key not in values:
            values[key] = torch.zeros(row.parameter.numel(), dtype=dtype)
        return values[key][piece.offset : piece.offset + piece.stop - piece.start]

    joined = [
        join(name, parts[name], one.start, one.stop, partial(place, one))
        for name, one in zip(names, pieces, strict=True)
    ]
    updated = {
        name: one for name, one in zip(names, joined, strict=True) if one.numbers or one.values.keys() - {PARAMETER}
    }
    keys = next(iter(updated.values()), joined[0]).values.keys()
    for name, one in updated.items():
        if one.values.keys() != keys:
            raise ValueError(
                f"{name} has {sorted(one.values)} and other tensors have {sorted(keys)}: "
                "tensors of one unit must have the same optimizer state"
            )
    if not row.pieces:
        return values, next((dict(one.numbers) for one in updated.values()), {})
    return values, of_row({name: dict(updated[name].numbers) if name in updated else None for name in names})


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
