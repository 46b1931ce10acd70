"""What shards cannot hold, refused at construction, alike on all ranks: one walk over a model's parameters.

Each parameter that trains must lie in exactly one shard: shown by the model, in memory of its own. `FullyShard` wants
it plain too: a real floating point parameter of a Python module, on the one device of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distlab.blocks.gradient_hook import LinearHook
from distlab.blocks.replicate import every_parameter, layers_of


def parameters_to_shard(module: nn.Module, *, plain: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Name all parameters; refuse what shards cannot hold.

    Args:
        module: the model.
        plain: whether flat shards are cut from them.

    Raises:
        ValueError: the text names the first parameter that no shard can hold.
    """
    named = every_parameter(module)
    shown = {*module.parameters()} & {parameter for _, parameter in module.named_parameters()}
    hidden = [name for name, parameter in named if parameter.requires_grad and parameter not in shown]
    if hidden:
        more = f" and {len(hidden) - 1} more" if hidden[1:] else ""
        raise ValueError(
            f"{type(module).__name__}.parameters() or named_parameters() leaves out {hidden[0]}{more}, which would "
            "train in shards and not in one process. Return it there, or freeze it with requires_grad_(False)"
        )
    if plain:
        _refuse_odd(module)
    _refuse_overlaps(named)
    devices = {str(parameter.device) for _, parameter in named}
    if plain and len(devices) != 1:
        where = f"parameters lie on {', '.join(sorted(devices))}; move the module to one device"
        raise ValueError(where if devices else "the module has no parameters; there is nothing to shard")
    return named


def _refuse_odd(module: nn.Module) -> None:
    for path, one in layers_of("", module, set()):
        where = f"{path or 'the module'} ({type(one).__name__})"
        if isinstance(one, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} was compiled by torch.jit, where nothing can be gathered; shard the Python module that it "
                "was made from"
            )
        for attribute, parameter in one._parameters.items():
            wrong = "" if parameter is None else _odd(parameter)
            if wrong:
                raise ValueError(f"{where}: {attribute} {wrong}")


def _odd(parameter: nn.Parameter) -> str:
    """Say why a flat shard cannot hold a parameter; "" where it can."""
    if is_lazy(parameter):
        return "has no shape yet; call the module once on an example of the data before FullyShard is built"
    if not issubclass(type(parameter), nn.Parameter):
        return (
            f"is a {type(parameter).__name__}, and a flat shard is cut from plain tensors: shard the whole model once, "
            "and before any other tool replaces its parameters"
        )
    if not parameter.is_floating_point():
        return (
            f"is {parameter.dtype}, and a flat shard holds real floating point numbers. Keep complex ones as "
            "torch.view_as_real(...), and what is not trained as a buffer: register_buffer(...)"
        )
    hooks = {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}.values()
    if not all(isinstance(hook, LinearHook) for hook in hooks):
        return (
            "has a hook on its gradient, and a flat shard has the gradients of a unit end to end: no hook would run. "
            "Do the same to what the layer returns, or use ShardedOptimizer"
        )
    return ""


def _refuse_overlaps(named: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse tensors whose places in one memory overlap; one tensor under two names is a tied one, and is right."""
    places = []
    for name, one in named:
        if one.device.type != "meta" and one.layout is torch.strided and one.numel():
            last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            places.append((str(one.device), one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size(), name))
    for (device, _, end, name), (other, begin, _, second) in pairwise(sorted(places)):
        if device == other and begin < end:
            raise ValueError(
                f"{name} and {second} lie in the same memory, and are two parameters: an update of one changes the "
                "other in one process, and shards hold them apart. Give the layers one parameter (tied: "
                "a.weight = b.weight), or each its own memory (.clone())"
            )
