"""A unit's inputs and outputs: cast them, find the tensors in them, learn when backward has passed the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from distlab.modules.moved import NotHere
from distlab.modules.structures import EMPTY, find, replace


def cast_inputs(inputs: tuple[Any, Any], dtype: torch.dtype) -> Any:
    """Return positional and keyword inputs with floating point tensors of this type."""
    return replace(inputs, lambda one: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one)


def made_by(output: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], bool]:
    """Return the tensors in what a forward returns, or has left in its inputs' containers (a cache, a list of states).

    Returns:
        The tensors, with those that they are views of, and whether some may be hidden.
    """
    found, is_hidden = find(output)
    holders = [one for one in (*args, *kwargs.values()) if not isinstance(one, (Tensor, *EMPTY))]
    made = [one for one in (*found, *(find(holders)[0] if holders else ())) if not isinstance(one, NotHere)]
    return [*made, *(one._base for one in made if one._base is not None)], is_hidden


def watch_inputs(on_passed: Callable[[], None], inputs: tuple[Any, Any]) -> bool:
    """Call a function once backward has computed the gradients of all inputs; return False where none wants one.

    Hooks on the tensors themselves: a copy could not be changed in place, as many models do with their inputs.
    """
    found = [one for one in find(inputs)[0] if one.requires_grad and not isinstance(one, NotHere)]
    if not found:
        return False

    def passed(gradients: Any) -> None:
        handle.remove()  # an input may be a leaf, which lives on and would keep the hooks of all steps
        on_passed()

    handle = register_multi_grad_hook(found, passed)
    return True
