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
    """Name all parameters; refuse those that a flat shard cannot hold, or that torch cannot see (in plain lists).

    Raises:
        ValueError: a parameter without a shape, of complex numbers or integers, or kept in a plain list; the text
            names the module.
    """
    every = parameters_to_shard(module)
    named = list(nn.Module.named_parameters(module, remove_duplicate=False))
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, tensor in (*named, *module.named_buffers()):
        path, _, attribute = name.rpartition(".")
        where = f"{path or 'the module'} ({type(owners[path]).__name__}): {attribute}"
        if is_lazy(tensor):
            raise ValueError(
                f"{where} has no shape yet: lazy modules learn it from their first input. Call the module once on an "
                "example of the data before FullyShard is built"
            )
        if isinstance(tensor, nn.Parameter) and tensor.is_complex():
            raise ValueError(
                f"{where} is {tensor.dtype}, and a flat shard holds real numbers. Keep it as torch.view_as_real(...), "
                "and use torch.view_as_complex(...) in forward"
            )
        if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
            raise ValueError(
                f"{where} is {tensor.dtype}, and a flat shard holds floating point numbers. What is not trained is a "
                "buffer: register_buffer(...)"
            )
        hooks = {**(tensor._backward_hooks or {}), **(tensor._post_accumulate_grad_hooks or {})}.values()
        if isinstance(tensor, nn.Parameter) and not all(isinstance(hook, LinearHook) for hook in hooks):
            raise ValueError(
                f"{where} has a hook on its gradient, and a flat shard has the gradients of a unit end to end: no hook "
                "would run. Do the same to what the layer returns, or use ShardedOptimizer"
            )
    refuse_overlaps(named)
    registered = {id(parameter): name for name, parameter in named}
    for path, one in owners.items():
        if isinstance(one, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'the module'} was compiled by torch.jit, and its forward reads parameters in C++, where "
                "none can be gathered; shard the Python module that it was made from"
            )
        for attribute, parameter in one._parameters.items():
            if parameter is not None and not issubclass(type(parameter), nn.Parameter):
                raise ValueError(
                    f"{path or 'the module'} ({type(one).__name__}): {attribute} is a {type(parameter).__name__}, and "
                    "a flat shard is cut from plain tensors. Shard the whole model once, and before any other tool "
                    "replaces its parameters"
                )
        for attribute, value in vars(one).items():
            if attribute not in _OF_EVERY_MODULE and not (isinstance(one, nn.RNNBase) and attribute == "_flat_weights"):
                _check_attribute(f"{path or 'the module'} ({type(one).__name__}): {attribute}", value, registered)
    return every


def _check_attribute(where: str, value: object, registered: dict[int, str]) -> None:
    """Refuse trained parameters in an attribute that torch does not look into."""
    for parameter in find(value, (nn.Parameter,))[0]:
        name = registered.get(id(parameter))
        if parameter.requires_grad and name is not None:
            raise ValueError(
                f"{where} holds the parameter {name} outside of torch's lists of parameters. The parameter moves "
                "into a shard, and what the attribute holds would never train. Read it by its name in forward, or "
                "keep the parameters in an nn.ParameterList"
            )
        if parameter.requires_grad:
            raise ValueError(
                f"{where} holds a parameter of shape {list(parameter.shape)} that torch does not find, so it is in no "
                "shard, no optimizer and no state. Keep it in an nn.ParameterList, or set requires_grad=False if it is "
                "not to train"
            )


def check_place(name: str, thread: int | None) -> None:
    """Refuse a call of a unit from where it cannot be gathered.

    Args:
        name: of the unit.
        thread: in which the model's forward began; None outside of a forward.

    Raises:
        RuntimeError: it is called inside a transform of torch.func, or in a second thread.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"unit {name or 'root'!r} is called inside a transform of torch.func (vmap, grad, jvp, ...), where its "
            "parameters cannot be gathered. Name other units in units=[...]: the module that makes the transform, and "
            "not this part of it"
        )
    if thread is not None and thread != threading.get_ident():
        raise RuntimeError(
            f"unit {name or 'root'!r} is called in another thread than its model. Ranks gather units in the same "
            "order, and threads have none; call the parts of the model in one thread"
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
