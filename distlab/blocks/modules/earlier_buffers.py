"""EarlierBuffers: what a function's modules remembered before it ran, for a second run that must compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

from torch import nn

SMALL = 65_536  # elements of a buffer that is kept whether it was written or not


class EarlierBuffers:
    """The buffers of a function's modules as they were before its first run.

    A buffer that was written has a new version. Batch norm's kernel writes and gives no new version. So small buffers
    are kept in any case.

    Args:
        function: a module, one of its methods, or a function that names modules.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._before = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module in modules_of(function)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def forget_unwritten(self) -> None:
        """Drop the large buffers that the first run has not written."""
        self._before = [
            (module, name, buffer, value, version)
            for module, name, buffer, value, version in self._before
            if module._buffers.get(name) is not buffer or buffer._version != version or buffer.numel() <= SMALL
        ]

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Give the modules the buffers that the first run began with; put today's back afterwards."""
        today = {module: dict(module._buffers) for module, *_ in self._before}
        values = [(buffer, buffer.detach().clone()) for _, _, buffer, _, _ in self._before]
        try:
            for module, name, buffer, before, _ in self._before:
                buffer.data.copy_(before)  # .data: autograd need not hear of a change that is undone
                module._buffers[name] = buffer
            yield
        finally:
            for buffer, value in values:
                buffer.data.copy_(value)
            for module, buffers in today.items():
                module._buffers.clear()
                module._buffers.update(buffers)


def modules_of(function: Any) -> list[nn.Module]:
    """Return all modules that a function is, belongs to, is given in advance, or names; with those inside of them."""
    found: dict[nn.Module, None] = {}
    todo, seen = [function], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found |= dict.fromkeys(one.modules())
        elif isinstance(one, partial):
            todo += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            todo += [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            known: list[Any] = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            with suppress(ValueError):  # a name that has no value yet
                names = getclosurevars(one)
                known += [*names.nonlocals.values(), *names.globals.values()]
            todo += [value for value in known if isinstance(value, nn.Module | MethodType | partial)]
    return list(found)
