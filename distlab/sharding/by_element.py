"""Whether an optimizer may be given a part of a tensor: found by trying it, since no name tells.

SGD and Adam update each number from its own gradient and state. LAMB, Adafactor and Muon look at a whole tensor (its
norm, its rows), and some look at all tensors at once. An optimizer of any class is tried on a few numbers: it
updates a tensor whole, and the same numbers cut in two, each part by an optimizer of its own. Both must agree.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distlab.sharding.askers import for_a_user
from distlab.sharding.shard_gradient import WHOLE, FlatShard
from distlab.sharding.zero.offload import OffloadedOptimizer

NUM_STEPS = 3
TOLERANCE = 1e-5
KNOWN = frozenset(  # torch's own that work by element
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)


def what_it_needs(optimizer: torch.optim.Optimizer) -> str:
    """Return "elements", "tensors" or "all": the smallest part that an optimizer updates as it does in one process.

    The optimizer itself is not touched: one like it, with the options of its first group, updates a few numbers.

    Raises:
        ValueError: it cannot be tried; the text says why.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer = optimizer.inner
    if type(optimizer) in KNOWN:
        return "elements"
    whole = [torch.linspace(-1.5, 2.0, 8).reshape(4, 2), torch.linspace(0.5, 5.0, 6).reshape(2, 3)]
    together = _updated(optimizer, whole)
    if not _agree(together, [_updated(optimizer, [one])[0] for one in whole]):
        return "all"
    try:
        halves = [_updated(optimizer, [half])[0] for half in (whole[0].flatten()[:3], whole[0].flatten()[3:])]
    except ValueError:  # Muon wants two dimensions
        return "tensors"
    return "elements" if _agree([together[0].flatten()], [torch.cat(halves)]) else "tensors"


def refuse_whole_tensor_optimizers(model: nn.Module, then: Callable[[torch.optim.Optimizer], None]) -> None:
    """While a model of flat shards lives, each optimizer of shards is tried before its first step.

    The step of one that does not work by element raises ValueError, on every rank; `then` is called before any other.
    """
    tried: set[type] = set()

    def check(optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        if kind in KNOWN or kind in tried or not _has_shards(optimizer):
            return
        if what_it_needs(optimizer) != "elements":
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise ValueError(
                f"rank {rank}: {kind.__name__} updates a part of a tensor in another way than the whole. It takes "
                "a norm of a shard (Adafactor, LAMB and LARS take one), looks at its shape, or at all parameters "
                f"seen as one long vector (LBFGS): {WHOLE}"
            )
        tried.add(kind)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        check(optimizer)
        then(optimizer)
        return _with_closure_of_a_user(args, kwargs) if _has_shards(optimizer) else None

    weakref.finalize(model, remove_hook, register_optimizer_step_pre_hook(before))


def remove_hook(hook: RemovableHandle) -> None:
    """Take a hook out of torch's list, unless the model dies in a step, which walks the list; the hook does no harm."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == torch_optimizer.__file__:
            return
    hook.remove()


def _with_closure_of_a_user(args: Any, kwargs: Any) -> Any:
    """Return a step's arguments, its closure such that shards refuse it what they refuse outside of a step."""
    optimizer, *rest = args
    rest = [for_a_user(one) if callable(one) else one for one in rest]
    return (optimizer, *rest), {key: for_a_user(one) if callable(one) else one for key, one in kwargs.items()}


def _has_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(one, FlatShard) for group in optimizer.param_groups for one in group["params"])


def _updated(optimizer: torch.optim.Optimizer, values: Sequence[Tensor]) -> list[Tensor]:
    """Return what an optimizer like this one makes of some tensors in a few steps.

    Raises:
        ValueError: it fails.
    """
    parameters = [nn.Parameter(one.clone()) for one in values]
    kind = type(optimizer).__name__
    closure: list[Any] = (
        [lambda: torch.zeros(())] if "closure" in inspect.signature(type(optimizer).step).parameters else []
    )
    try:
        twin = _like(optimizer, parameters)
        with torch.enable_grad():
            for step in range(NUM_STEPS):
                for parameter, start in zip(parameters, values, strict=True):
                    parameter.grad = (step + 1) * torch.cos(3 * start)  # a number's gradient depends on it alone
                type(optimizer).step(twin, *closure)
    except Exception as error:
        raise ValueError(
            f"{kind} could not be tried on a few numbers, to see whether it works by element ({type(error).__name__}: "
            f"{error}); use one of {', '.join(sorted(one.__name__ for one in KNOWN))}, or no sharding"
        ) from error
    return [parameter.detach() for parameter in parameters]


def _like(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    try:
        twin = type(optimizer)(parameters, **optimizer.defaults)
        twin.param_groups[0].update(copy.deepcopy(options))
    except TypeError:  # its arguments have other names than its options
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = [{**copy.deepcopy(options), "params": parameters}]
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(twin, hooks, OrderedDict())
    return twin


def _agree(expected: Sequence[Tensor], got: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(expected, got, strict=True))
