"""Tensors in what a model takes and returns: lists, named tuples, dicts, dataclasses, attributes of other objects.

Backward reaches a unit through a tensor that its forward made. So all of them must be found, or it must be known that
some may be hidden.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_OBJECTS = 10_000
_PLAIN = (bool, int, float, complex, str, bytes, range, slice, type, type(None), type(Ellipsis), type(NotImplemented))
_OF_LIBRARIES = (np.ndarray, np.generic, Enum, ModuleType, BuiltinFunctionType, nn.Module)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator)
EMPTY = (*_PLAIN, *_OF_LIBRARIES, *_OF_TORCH)  # holds no tensor that forward made; modules are looked at elsewhere


def find(value: object) -> tuple[list[Tensor], bool]:
    """Find the tensors in a value, which is not changed; each once.

    Returns:
        What was found, and whether there may be more: in an iterator, a function, an object of a class of its own.
    """
    found: list[Tensor] = []
    is_hidden = False
    seen: dict[int, object] = {}  # keeps what it has seen, so that no number is used twice
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            found.append(one)
        elif not isinstance(one, EMPTY):
            parts, are_all = _parts_of(one)
            is_hidden |= not are_all or len(seen) > MAX_OBJECTS
            waiting.extend(reversed(parts) if len(seen) <= MAX_OBJECTS else [])
    return found, is_hidden


def _parts_of(one: Any) -> tuple[list[Any], bool]:
    """Return the objects inside an object, and whether these are all."""
    own = [*getattr(one, "__dict__", {}).values()]
    if isinstance(one, Mapping):
        return [*one.values(), *own], True
    if isinstance(one, (list, tuple, set, frozenset, deque)):
        return [*one, *own], True
    if is_dataclass(one):
        return [getattr(one, field.name) for field in fields(one)], True
    return own, False


def replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change what lists, tuples, named tuples and dicts hold; return the same objects where nothing changed.

    Objects of other classes stay as they are: a copy of a cache would not be the cache that the caller goes on to use.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        items = {key: replace(item, change) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else kind(items)
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [replace(item, change) for item in value]
        if all(one is other for one, other in zip(parts, value, strict=True)):
            return value
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    return change(value)
