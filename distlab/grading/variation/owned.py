"""What belongs to the caller: the arguments with all that is in them, and the state of the process."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.launch.worker import environment


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and a copy of every plain value in an argument: numbers, texts, tensors, gradients, weights."""
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
        if value.requires_grad or value.grad is not None:
            yield f"{name}.requires_grad", value.requires_grad
            yield f"{name}.grad", None if value.grad is None else value.grad.detach().clone()
    elif isinstance(value, nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from leaves(f"{name}.{key}", tensor)
        yield f"{name}.training", value.training
    elif isinstance(value, torch.optim.Optimizer):
        yield from leaves(f"{name}.state", [list(state.values()) for state in value.state.values()])
    elif isinstance(value, dict):
        yield f"names of {name}", [str(key) for key in value]
        for key, item in value.items():
            yield from leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        yield f"length of {name}", len(value)
        for index, item in enumerate(value):
            yield from leaves(f"{name}[{index}]", item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, value
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, np.ndarray):
        yield name, value.tolist()
    elif isinstance(value, set):
        yield name, sorted(map(repr, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(f"{name}.{field.name}", getattr(value, field.name))


def marks(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield in words what values do not show of an argument, and its size: hooks, and options of optimizers."""
    if isinstance(value, Tensor):
        hooks = [getattr(value, each, None) or () for each in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        yield f"the number of hooks on {name}", sum(map(len, hooks))
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            of_module = [
                each for key, each in vars(module).items() if key.endswith("_hooks") and isinstance(each, dict)
            ]
            yield f"the number of hooks on {name}{'.' * bool(path)}{path}", sum(map(len, of_module))
        for path, tensor in value.named_parameters():
            yield from marks(f"{name}.{path}", tensor)
    elif isinstance(value, torch.optim.Optimizer):
        groups = {f"{name}.param_groups[{index}]": group for index, group in enumerate(value.param_groups)}
        for place, group in {**groups, f"{name}.defaults": value.defaults}.items():
            yield from ((f"{place}[{key!r}]", repr(option)) for key, option in group.items() if key != "params")
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from marks(f"{name}[{key!r}]", item)


def left_on(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Return words for each mark that differs."""
    differ = (what for what, value in after.items() if before.get(what, value) != value)
    return {what: f"it changed {what} from {before[what]} to {after[what]}" for what in differ}


def named(fn: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names that the reference gives them."""
    try:
        return dict(inspect.signature(fn).bind(*arguments, **keywords).arguments)
    except (TypeError, ValueError):  # `use` takes other arguments than the function itself
        return {f"argument {index}": value for index, value in enumerate(arguments)} | keywords


def state() -> dict[str, Any]:
    """Return what every function must leave as it found it, by name, each as a plain value."""
    found: dict[str, Any] = {
        "torch's random state": hash(torch.get_rng_state().numpy().tobytes()),
        "Python's random state": hash(random.getstate()),
        "numpy's random state": hash(pickle.dumps(np.random.get_state(legacy=False)["state"])),
        "the environment": hash(environment()),
    }
    if dist.is_initialized():
        found["the number of process groups"] = len(dist.distributed_c10d._world.pg_map)
    return found


def said(value: Any) -> str:
    """Say in a few words what an argument is."""
    if isinstance(value, Tensor):
        layout = "" if value.is_contiguous() else ", not contiguous"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{layout}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        inner = ", ".join(said(item) for item in value[:3])
        more = ", ..." if len(value) > 3 else ""
        return f"[{inner}{more}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {said(item)}" for key, item in list(value.items())[:5]) + "}"
    if isinstance(value, dist.ProcessGroup):
        return f"the group of ranks {dist.get_process_group_ranks(value)}"
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        chosen = [item.name for item in dataclasses.fields(value) if getattr(value, item.name) != item.default]
        return f"{type(value).__name__}({', '.join(f'{name}={said(getattr(value, name))}' for name in chosen)})"
    return getattr(value, "__name__", f"a {type(value).__name__}")
