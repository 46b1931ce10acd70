"""Tensors in whatever a model takes and returns: lists, named tuples, dataclasses, caches, objects of any class.

Backward reaches a unit through a tensor that its forward made. So all of them must be found, wherever they are kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

MAX_OBJECTS = 10_000
_PLAIN = (bool, int, float, complex, str, bytes, range, slice, type, type(None), type(Ellipsis), type(NotImplemented))
_OF_LIBRARIES = (np.ndarray, np.generic, Enum, ModuleType, BuiltinFunctionType, nn.Module)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator)
EMPTY = (*_PLAIN, *_OF_LIBRARIES, *_OF_TORCH)  # holds no tensor that forward made; modules are looked at elsewhere


def find(value: object, kinds: tuple[type, ...] = (Tensor,)) -> tuple[list[Any], bool]:
    """Find everything of some kinds in a value, each once.

    Args:
        value: anything; it is not changed.
        kinds: what to look for; nothing is looked for inside what was found.

    Returns:
        What was found, and whether something (an iterator, an object of C++) could not be looked into.
    """
    if isinstance(value, kinds):
        return [value], False
    found: list[Any] = []
    is_hidden = False
    seen: dict[int, object] = {}  # keeps what it has seen, so that no number is used twice
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, kinds):
            found.append(one)
        elif not isinstance(one, EMPTY):
            parts = _parts_of(one)
            is_hidden |= parts is None or len(seen) > MAX_OBJECTS
            waiting.extend(reversed(parts or []) if len(seen) <= MAX_OBJECTS else [])
    return found, is_hidden


def _parts_of(one: Any) -> list[Any] | None:
    """Return the objects inside an object; None where they cannot be seen."""
    parts: list[Any] = []
    is_known = True
    if isinstance(one, Mapping):
        parts += one.values()
    elif isinstance(one, (list, tuple, set, frozenset, deque)):
        parts += one
    elif isinstance(one, partial):
        parts += [one.func, *one.args, *one.keywords.values()]
    elif isinstance(one, MethodType):
        parts.append(one.__self__)
    elif isinstance(one, FunctionType):
        parts += [*(one.__closure__ or ()), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    elif isinstance(one, CellType):
        parts += _cell(one)
    else:
        below = tree_leaves(one, is_leaf=lambda part: part is not one)  # a class that is registered with torch's pytree
        is_known = not (len(below) == 1 and below[0] is one)
        parts += below if is_known else []
    attributes = [*_attributes(one)]
    return parts + attributes if is_known or attributes or hasattr(one, "__dict__") else None


def _cell(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing is in it yet
        return []


def _attributes(one: object) -> Iterator[object]:
    yield from getattr(one, "__dict__", {}).values()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                yield getattr(one, name)


def replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change what lists, tuples, named tuples and dicts hold; return the same objects where nothing changed.

    Objects of other classes stay as they are: a copy of a cache would not be the cache that the caller goes on to use.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        items = {key: replace(item, change) for key, item in value.items()}
        return value if _same(items.values(), value.values()) else kind(items)
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [replace(item, change) for item in value]
        return value if _same(parts, value) else kind(*parts) if hasattr(value, "_fields") else kind(parts)
    return change(value)


def _same(some: Collection[Any], others: Collection[Any]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))
