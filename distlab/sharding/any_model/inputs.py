"""A unit's inputs: cast them, learn when backward has passed them, see what forward leaves in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from distlab.modules.structures import EMPTY, find, replace
from distlab.sharding.any_model.freed import FreedParameter


def cast_inputs(inputs: tuple[Any, Any], dtype: torch.dtype) -> Any:
    """Return positional and keyword inputs with floating point tensors of this type."""
    return replace(inputs, lambda one: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one)


def kept_in(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors in containers among the inputs: forward may put others there (a cache, a list of states)."""
    holders = [one for one in (*args, *kwargs.values()) if not isinstance(one, (Tensor, *EMPTY))]
    return find(holders)[0] if holders else []


def watch_inputs(on_passed: Callable[[], None], inputs: tuple[Any, Any]) -> bool:
    """Call a function once backward has computed the gradients of all inputs; return False where none wants one.

    Hooks on the tensors themselves: a copy could not be changed in place, as many models do with their inputs.
    """
    found = [one for one in find(inputs)[0] if one.requires_grad and not isinstance(one, FreedParameter)]
    if not found:
        return False

    def passed(gradients: Any) -> None:
        handle.remove()  # an input may be a leaf, which lives on and would keep the hooks of all steps
        on_passed()

    handle = register_multi_grad_hook(found, passed)
    return True
