"""Try a module's forward on a copy of the module, so that the module itself stays as it was.

What shapes does a module make? One must run its forward to know. But a forward may do more than compute: it fills a
cache at its first call, counts its calls, updates running statistics, draws random numbers; or it raises in the middle
of all that. On the meta device a cache would even be filled with tensors without numbers.

So `call_a_copy` calls a deep copy, in which each tensor is one without numbers (meta device) or a clone. Process groups
are shared. What forward does outside of the module (it prints, counts in a global variable) happens once more.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from distlab.modules.structures import find
from distlab.rng import keep_random_state

SHARED = (dist.ProcessGroup, dist.Work, DeviceMesh, torch.Stream, torch.Event)


def call_a_copy(module: nn.Module, arguments: Sequence[Any], device: torch.device) -> Any:
    """Call a copy of a module; the module and all random numbers stay as they were, also when the copy raises.

    Args:
        module: any module that can be copied. Compiled parts run without their compiled code.
        arguments: of the call.
        device: "meta" computes no numbers and needs no memory; a real one needs a copy of all tensors.

    Raises:
        ValueError: the module cannot be copied.
        Exception: what the module raises.
    """
    with keep_random_state(), warnings.catch_warnings(), _eager():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copying counters (itertools)
        return copy_of(module, device)(*arguments)


def copy_of(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a deep copy of a module.

    Args:
        module: any.
        device: "meta": its tensors have no numbers; else they are clones.

    Raises:
        ValueError: it holds what cannot be copied; the text says what.
    """
    held = [value for one in module.modules() for value in vars(one).values()]
    found = find(held, (Tensor, torch.Generator, *SHARED))[0]
    memo = {id(one): one if isinstance(one, SHARED) else _twin(one, device) for one in found}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever an object does when it is copied
        raise ValueError(
            f"{type(module).__name__} is tried out on a copy, and it cannot be copied: {type(error).__name__}: "
            f"{error}. Keep what cannot be copied outside of the module, or give it a __deepcopy__"
        ) from error


def _twin(one: Any, device: torch.device) -> Any:
    if isinstance(one, torch.Generator):
        return torch.Generator(one.device).set_state(one.get_state())
    place = device if device.type == "meta" else one.device
    if is_lazy(one):
        kind: Any = type(one)
        return kind(requires_grad=one.requires_grad, device=place, dtype=one.dtype)
    values = one.detach()
    values = torch.empty_like(values, device=place) if device.type == "meta" or _is_freed(values) else values.clone()
    if isinstance(one, nn.Parameter):
        return nn.Parameter(values, requires_grad=one.requires_grad)
    return values.requires_grad_(one.requires_grad)


def _is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's memory was given back (parameters of a sharded module); reading it would crash."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size()


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled functions without their compiled code; only where the compiler is in use."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
