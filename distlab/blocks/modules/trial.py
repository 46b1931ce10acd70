"""Try a module's forward and leave no trace: a copy of the module runs, so the module itself stays as it was.

What shapes does a module make? One must run its forward to know. But a forward may do more than compute: it fills a
cache at its first call, counts its calls, updates running statistics, draws random numbers; or it raises in the middle
of all that. So `call_a_copy` copies the module first, by `copy.deepcopy`, which copies each object once, wherever it is
used. Only tensors are copied differently: without numbers (meta device), or as a clone outside of any graph. Process
groups are shared.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distlab.blocks.modules.every_parameter import layers_of
from distlab.blocks.modules.moved import NotHere
from distlab.rng import keep_random_state


def call_a_copy(module: nn.Module, arguments: Sequence[Any], device: torch.device) -> Any:
    """Call a copy of a module; the module and all random numbers stay as they were, also when the copy raises.

    What forward does to the outside world happens once more: it prints, counts in a global variable, fills a cache of
    its class, or calls a hook that remembers things in a closure.

    Args:
        module: any module that `copy.deepcopy` copies. Compiled parts run without their compiled code.
        arguments: of the call.
        device: "meta" computes no numbers and needs no memory; a real one needs a copy of all tensors.

    Raises:
        ValueError: the module cannot be copied.
        Exception: what the module raises.
    """
    known: dict[int, Any] = {id(one): _stand_in(one, device) for one in _tensors(module)}
    if dist.is_initialized():
        known |= {id(group): group for group in dist.distributed_c10d._world.pg_map}
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with keep_random_state(), eager:
        try:
            twin = copy.deepcopy(module, known)
        except Exception as error:
            raise ValueError(
                f"copy.deepcopy cannot copy {type(module).__name__} ({type(error).__name__}: {error}), and a copy of "
                "it must run first, for the shapes that it makes. Keep in the module what can be copied"
            ) from error
        return twin(*arguments)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules hold: parameters, buffers, and what they note as an attribute."""
    for _, layer in layers_of("", module, set()):
        for one in (*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()):
            if isinstance(one, Tensor) and not is_lazy(one):
                yield one


@torch.no_grad()
def _stand_in(one: Tensor, device: torch.device) -> Tensor:
    """Return what the copy has in a tensor's place.

    Shapes: [...]; the same
    """
    if device.type == "meta" or isinstance(one, NotHere):
        made = torch.zeros(one.shape, dtype=one.dtype, device=device)
    else:
        made = one.detach().clone()
    return nn.Parameter(made, one.requires_grad) if isinstance(one, nn.Parameter) else made
