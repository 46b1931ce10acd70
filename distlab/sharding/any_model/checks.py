"""What is refused before anything is sent, alike on all ranks: modules and options that no units can be made of."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distlab.gradient_hook import LinearHook
from distlab.modules.structures import find
from distlab.plan import Precision
from distlab.sharding.fsdp.wrapping import ROOT
from distlab.sharding.overlap import parameters_to_shard, refuse_overlaps

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
PYTHON = "shard the Python module that it was made from"
SHAPE = "call the module once on an example of the data before FullyShard is built (lazy modules)"
FIRST = "shard the whole model once, and before any other tool replaces its parameters"


def check_units(module: nn.Module, units: Sequence[str]) -> None:
    """Refuse names that cannot be units.

    Raises:
        ValueError: a name that comes twice, that no submodule has, or whose submodule owns no parameter.
    """
    known = dict(module.named_modules())
    for name in units:
        if name == ROOT or name not in known:
            near = [one for one in known if one and one.split(".")[-1] == name.split(".")[-1]] or list(known)[1:6]
            raise ValueError(f"units: {name!r} is not a submodule; there are {', '.join(near)}, ...")
        if next(known[name].parameters(), None) is None:
            raise ValueError(
                f"units: {name!r} ({type(known[name]).__name__}) owns no parameters, so there is nothing to gather; "
                "leave it out"
            )
    twice = sorted({name for name in units if list(units).count(name) > 1})
    if twice:
        raise ValueError(f"units: {', '.join(twice)} named twice; name each submodule once")


def check_options(named: list[tuple[str, nn.Parameter]], prefetch: int, precision: Precision | None) -> None:
    """Refuse options and parameters that no units can be made of.

    Raises:
        ValueError: no parameters, parameters on several devices, a prefetch that is not a count, or types that clash.
    """
    if not named:
        raise ValueError("the module has no parameters; there is nothing to shard")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch is {prefetch!r}; pass a whole number of at least 0")
    devices = {str(parameter.device) for _, parameter in named}
    if len(devices) > 1:
        raise ValueError(f"parameters lie on {', '.join(sorted(devices))}; move the module to one device")
    if precision is None:
        return
    kept = "float32" if precision.master else precision.compute
    if precision.gradients != kept:
        raise ValueError(
            f"precision: gradients are kept as {precision.gradients} and shards as {kept}, and an optimizer wants one "
            f"type; pass gradients={kept!r} or another master"
        )


def check_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name all parameters; each that trains must come into exactly one flat shard, and nothing else may compute by it.

    Raises:
        ValueError: one that does not; the text names it and its module.
    """
    every = parameters_to_shard(module)
    for path, one in module.named_modules(remove_duplicate=False):
        where = f"{path or 'the module'} ({type(one).__name__})"
        if isinstance(one, torch.jit.ScriptModule):
            raise ValueError(f"{where} was compiled by torch.jit, where nothing can be gathered; {PYTHON}")
        for attribute, parameter in one._parameters.items():
            wrong = "" if parameter is None else _not_for_a_shard(parameter)
            if wrong:
                raise ValueError(f"{where}: {attribute} {wrong}")
        if any(is_lazy(buffer) for buffer in one._buffers.values() if buffer is not None):
            raise ValueError(f"{where}: a buffer has no shape yet; {SHAPE}")
        own = {key: value for key, value in vars(one).items() if key not in _OF_EVERY_MODULE}
        if isinstance(one, nn.RNNBase):
            own.pop("_flat_weights", None)
        for attribute, value in own.items():
            if any(parameter.requires_grad for parameter in find(value, (nn.Parameter,))[0]):
                raise ValueError(
                    f"{where}: {attribute} holds a parameter outside of torch's lists of parameters, which would never "
                    "train there. Read it by its name in forward, keep it in an nn.ParameterList, or set "
                    "requires_grad=False if it is not to train"
                )
    refuse_overlaps(nn.Module.named_parameters(module, remove_duplicate=False))
    return every


def _not_for_a_shard(parameter: nn.Parameter) -> str:
    """Say why a flat shard cannot hold a parameter; "" where it can."""
    if is_lazy(parameter):
        return f"has no shape yet; {SHAPE}"
    if not issubclass(type(parameter), nn.Parameter):
        return f"is a {type(parameter).__name__}, and a flat shard is cut from plain tensors: {FIRST}"
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


def check_place(name: str, thread: int | None) -> None:
    """Refuse a call of a unit from where it cannot be gathered.

    Args:
        name: of the unit.
        thread: in which the model's forward began; None outside of a forward.

    Raises:
        RuntimeError: it is called inside a transform of torch.func, or in a second thread.
    """
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    if inside or (thread is not None and thread != threading.get_ident()):
        where = (
            "inside a transform of torch.func (vmap, grad, jvp, ...)" if inside else "in another thread than its model"
        )
        raise RuntimeError(
            f"unit {name or 'root'!r} is called {where}, where it cannot be gathered in the order of all ranks. Name "
            "other units in units=[...], such as the module that does so and not this part of it"
        )


def check_buffers(module: nn.Module) -> None:
    """Refuse buffers without values, before the first forward.

    Raises:
        RuntimeError: the text names the buffer and its module.
    """
    for path, one in module.named_modules():
        for attribute, buffer in one._buffers.items():
            if buffer is not None and buffer.is_meta:
                state = (
                    "no state dict holds it" if attribute in one._non_persistent_buffers_set else "it was not loaded"
                )
                raise RuntimeError(
                    f"{path or 'the module'} ({type(one).__name__}): the buffer {attribute} is on the meta device and "
                    f"has no values; {state}. Build the model with build_sharded and a reset_parameters() that sets "
                    f"it, or set it before the first forward: model.module.get_submodule({path!r}).{attribute} = ..."
                )
