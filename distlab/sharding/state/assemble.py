"""Join parts of tensors that ranks of any other plan cut.

Whatever is loaded goes this way: the shards of FullyShard and ZeRO, a mesh, and torch's own layout.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace

import torch

from distlab.modules.named_parts import SavedPart, Slab


def join(name: str, parts: Sequence[SavedPart], start: int, stop: int, share: Container[str] = ()) -> SavedPart:
    """Put elements [start, stop) of a tensor together, with all that belongs to them, from parts that lie in any way.

    What one part holds whole is not copied for the keys in `share`: it is a view of the part.

    Shapes: parts [their stop - start] -> values [stop - start] each

    Raises:
        ValueError: some elements are in none of the parts.
    """
    _require_all(name, parts, start, stop)
    values = {}
    for key in dict.fromkeys(key for part in parts for key in part.values):
        held = [part for part in parts if key in part.values]
        _require_all(name, held, start, stop)
        whole = next((part for part in held if key in share and part.start <= start and stop <= part.stop), None)
        if whole is not None:
            values[key] = whole.values[key][start - whole.start : stop - whole.start]
            continue
        values[key] = torch.empty(stop - start, dtype=held[0].values[key].dtype)
        for part in held:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                values[key][low - start : high - start] = part.values[key][low - part.start : high - part.start]
    known = [part for part in parts if part.stop > part.start or 0 in part.shape]  # others know nothing of its state
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
