"""A unit's inputs: cast them, learn when backward has passed them, see what forward leaves in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.sharding.fsdp.structures import EMPTY, find, replace


def cast_inputs(inputs: tuple[Any, Any], dtype: torch.dtype) -> Any:
    """Return positional and keyword inputs with floating point tensors of this type."""
    return replace(inputs, lambda one: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one)


def kept_in(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors in containers among the inputs: forward may put others there (a cache, a list of states)."""
    holders = [one for one in (*args, *kwargs.values()) if not isinstance(one, (Tensor, *EMPTY))]
    return find(holders)[0] if holders else []


def watch_inputs(on_passed: Callable[[], None], inputs: tuple[Any, Any]) -> tuple[Any, bool]:
    """Call a function when backward has computed the gradients of all inputs.

    Returns:
        The inputs to compute with, and whether the function will be called: not where none wants a gradient, or where
        one lies in an object that must stay the caller's own.
    """
    found = [one for one in find(inputs)[0] if one.requires_grad]
    reached: list[Any] = []
    replace(inputs, reached.append)
    if not found or {*map(id, found)} - {*map(id, reached)}:
        return inputs, False
    watched = dict(zip(map(id, found), _Inputs.apply(on_passed, *found), strict=True))  # type: ignore[no-untyped-call]
    return replace(inputs, lambda one: watched.get(id(one), one)), True


class _Inputs(torch.autograd.Function):
    """Return the inputs unchanged, and say when backward has computed their gradients."""

    @staticmethod
    def forward(ctx: Any, on_passed: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.on_passed = on_passed
        return tuple(one.view_as(one) for one in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.on_passed()
        return None, *gradients
