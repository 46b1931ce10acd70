"""Wrong versions that are made of any reference alike: they test the check, not the lesson, so no lesson writes them.

Each wraps a right answer, so that its results are right and something else is wrong with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Answer = Callable[..., Any]


class Kind(NamedTuple):
    """A mechanical mistake.

    Attributes:
        name: what is wrong, in a few words.
        codes: of the faults that a check may name.
        says: what its message must contain.
        make: makes the wrong version of a right answer.
        fits: whether an exercise with these drawn arguments can show it.
    """

    name: str
    codes: frozenset[str]
    says: str
    make: Callable[[Answer], Answer]
    fits: Callable[[tuple[Any, ...]], bool]


def _as_if_written_anew(right: Answer) -> Callable[[Answer], Answer]:
    """Give a function a right answer's name and signature, and nothing that leads to it."""

    def named(wrong: Answer) -> Answer:
        wrong.__name__ = wrong.__qualname__ = right.__name__
        wrong.__signature__ = inspect.signature(right)  # type: ignore[attr-defined]
        return wrong

    return named


def _seeds_the_world(right: Answer) -> Answer:
    @_as_if_written_anew(right)
    def wrong(*arguments: Any, **named: Any) -> Any:
        torch.manual_seed(0)
        return right(*arguments, **named)

    return wrong


def _no_grad_for_all(right: Answer) -> Answer:
    @_as_if_written_anew(right)
    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        torch.set_grad_enabled(False)
        return result

    return wrong


def _changed_argument(right: Answer) -> Answer:
    @_as_if_written_anew(right)
    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        with torch.no_grad():
            for one in arguments:
                if _is_float(one):
                    one.add_(1.0)
        return result

    return wrong


def _same_memory(right: Answer) -> Answer:
    kept: dict[Any, Tensor] = {}

    @_as_if_written_anew(right)
    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        if not isinstance(result, Tensor) or result.requires_grad:
            return result
        buffer = kept.setdefault((result.shape, result.dtype), torch.empty_like(result))
        return buffer.copy_(result)

    return wrong


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _always(_: tuple[Any, ...]) -> bool:
    return True


def _takes_floats(arguments: tuple[Any, ...]) -> bool:
    return any(map(_is_float, arguments))


_LEFT = frozenset({"state left behind"})
_ARGUMENT = frozenset({"argument changed", "changed argument"})
KINDS = (
    Kind("seeds the world", _LEFT, "torch's random state", _seeds_the_world, _always),
    Kind("no grad for all", _LEFT | {"values"}, "grad", _no_grad_for_all, _always),
    Kind("changes an argument", _ARGUMENT, "", _changed_argument, _takes_floats),
    Kind("keeps its result's memory", frozenset({"kept"}), "same memory", _same_memory, _takes_floats),
)
