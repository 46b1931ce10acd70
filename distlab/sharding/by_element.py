"""Whether an optimizer may be given a part of a tensor: found by trying it, since no name tells.

SGD and Adam update each number from its own gradient and state. LAMB, Adafactor and Muon look at a whole tensor (its
norm, its rows), and some look at all tensors at once. An optimizer of any class is tried on a few numbers: it
updates tensors together, each alone, and cut in two. All must agree.

A trial sees what happens in it. So tensors have one to four dimensions, gradients change their sign and size, and
there are many steps, since some optimizers begin simply. One tensor is large: some treat small ones in another way.

Limit: an optimizer that works by element for `NUM_STEPS` steps, and in another way later, passes.
"""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.sharding.askers import for_a_user
from distlab.sharding.shard_gradient import WHOLE, AbsentGradient, FlatShard
from distlab.sharding.zero.offload import OffloadedOptimizer

NUM_STEPS, NUM_STEPS_OF_LARGE = 100, 3
SMALL = ((4, 2), (2, 3), (7,), (2, 2, 3), (3, 2, 1, 2))
LARGE = ((130, 129),)
LEAST_RATE = 0.01  # a schedule may begin at 0, and nothing would be seen
TOLERANCE = 1e-5
KNOWN = frozenset(  # torch's own that work by element
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)


def what_it_needs(optimizer: torch.optim.Optimizer) -> str:
    """Return "elements", "tensors" or "all": the smallest part that an optimizer updates as it does in one process.

    The optimizer itself is not touched: ones like it, with the options of each of its groups, update a few numbers.

    Raises:
        ValueError: it cannot be tried; the text says why.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer = optimizer.inner
    if type(optimizer) in KNOWN:
        return "elements"
    options = {str(one): one for one in map(_options, optimizer.param_groups)}.values()
    return max((_tried(optimizer, one) for one in options), key=("elements", "tensors", "all").index)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in group.items() if name != "params"}
    return {**found, "lr": max(float(found["lr"]), LEAST_RATE)} if "lr" in found else found


def _tried(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> str:
    """Return what an optimizer with these options needs."""
    shapes: tuple[tuple[int, ...], ...] = SMALL
    try:
        together = _updated(optimizer, options, shapes)
    except ValueError:  # Muon wants two dimensions
        shapes = SMALL[:2]
        together = _updated(optimizer, options, shapes)
    if not _agree(together, [_updated(optimizer, options, [one])[0] for one in shapes]):
        return "all"
    try:
        large = _updated(optimizer, options, LARGE, NUM_STEPS_OF_LARGE)
        for some, whole in ((shapes, together), (LARGE, large)):
            parts = _updated(optimizer, options, some, len(whole[0]) - 1, cut=True)
            if not _agree(whole, [torch.cat(pair, 1) for pair in zip(parts[::2], parts[1::2], strict=True)]):
                return "tensors"
    except ValueError:
        return "tensors"
    return "elements"


def refuse_whole_tensor_optimizers(
    then: Callable[[torch.optim.Optimizer], None], undo: Callable[[torch.optim.Optimizer], None]
) -> None:
    """From now on, each optimizer of shards is tried before its first step.

    The step of one that does not work by element, or has a group without parameters, raises ValueError on every rank. A
    step before `synchronize()` raises RuntimeError. Before any other step `then` is called. A closure that the step
    calls makes gradients anew: around it, what `then` did is undone and done again.

    The hook stays when a model goes. Another thread may free a model while an optimizer steps, and a hook that went
    with it would leave half of a step undone.
    """
    tried: set[tuple[type, str]] = set()
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(optimizer: torch.optim.Optimizer) -> None:
        _refuse_empty_groups(optimizer)
        kind = type(optimizer)
        as_it_is = kind, str([_options(group) for group in optimizer.param_groups])
        if kind not in KNOWN and as_it_is not in tried:
            if what_it_needs(optimizer) != "elements":
                rank = dist.get_rank() if dist.is_initialized() else 0
                raise ValueError(
                    f"rank {rank}: {kind.__name__} updates a part of a tensor in another way than the whole. It takes "
                    "a norm of a shard (Adafactor, LAMB and LARS take one), looks at its shape, or at all parameters "
                    f"seen as one long vector (LBFGS): {WHOLE}"
                )
            tried.add(as_it_is)
        seen.add(optimizer)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        undo(optimizer)  # what a step that an error ended has left
        if not _has_shards(optimizer):
            return None
        _refuse_coming(optimizer)
        if optimizer not in seen:
            check(optimizer)
        then(optimizer)
        return _with_closures(args, kwargs, around)

    def around(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        of_a_user = for_a_user(closure)  # shards refuse it what they refuse outside of a step

        def wrapped() -> Any:
            undo(optimizer)
            result = of_a_user()
            then(optimizer)
            return result

        return wrapped

    register_optimizer_step_pre_hook(before)


def _refuse_coming(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step before the gradients have come, before any shard is updated."""
    for one in (one for group in optimizer.param_groups for one in group["params"]):
        if isinstance(one.grad, AbsentGradient):
            raise RuntimeError(f"rank {dist.get_rank()}: {one.grad.why}")


def _refuse_empty_groups(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what groups by name make: the names of shards tell nothing of the parameters in them."""
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise ValueError(
            f"rank {rank}: group {empty[0]} of the optimizer has no parameters. Was it made by names? FullyShard's are "
            "shards, 'shards.0', in which parameters of several names lie: all are in one group now. Use "
            "ShardedOptimizer, whose groups are made of whole parameters; or groups of whole units, by "
            "model.units[i].name and .shard; or leave the empty group out"
        )


def _with_closures(args: Any, kwargs: Any, around: Callable[..., Callable[[], Any]]) -> Any:
    """Return a step's arguments, with `around` what is called in it."""
    optimizer, *rest = args
    rest = [around(optimizer, one) if callable(one) else one for one in rest]
    return (optimizer, *rest), {key: around(optimizer, one) if callable(one) else one for key, one in kwargs.items()}


def _has_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(one, FlatShard) for group in optimizer.param_groups for one in group["params"])


def _updated(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    num_steps: int = NUM_STEPS,
    *,
    cut: bool = False,
) -> list[Tensor]:
    """Return what an optimizer like this one makes of some tensors, or of two parts of each: a row for each step.

    Raises:
        ValueError: it fails.
    """
    whole = [torch.linspace(-1.5, 2.0 + len(shape), math.prod(shape)).reshape(shape) for shape in shapes]
    halves = [part for one in whole for part in one.flatten().tensor_split([one.numel() // 3])]
    starts = halves if cut else whole
    parameters = [nn.Parameter(one.clone()) for one in starts]

    rises = torch.arange(num_steps)[:, None]
    slopes = [torch.cos(3 * one.flatten() + 2 * rises) * 10 ** torch.sin(rises) for one in starts]

    def again(step: int) -> Tensor:  # a number's gradient depends on it alone
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope[step].view(parameter.shape) + 0.1 * torch.sin(parameter.detach())
        return torch.zeros(())

    kind, rows = type(optimizer).__name__, [[one.flatten()] for one in starts]
    takes_closure = "closure" in inspect.signature(type(optimizer).step).parameters
    try:
        twin = _like(optimizer, options, parameters)
        with torch.enable_grad():
            for step in range(num_steps):
                for parameter, slope in zip(parameters, slopes, strict=True):
                    parameter.grad = slope[step].view(parameter.shape).clone()
                closure: list[Any] = [partial(again, step)] if takes_closure else []
                type(optimizer).step(twin, *closure)
                for row, parameter in zip(rows, parameters, strict=True):
                    row.append(parameter.detach().flatten().clone())
    except Exception as error:
        raise ValueError(
            f"{kind} could not be tried on a few numbers, to see whether it works by element ({type(error).__name__}: "
            f"{error}); use one of {', '.join(sorted(one.__name__ for one in KNOWN))}, or no sharding"
        ) from error
    return [torch.stack(row) for row in rows]


def _like(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    try:
        twin = type(optimizer)(parameters, **optimizer.defaults)
        twin.param_groups[0].update(copy.deepcopy(dict(options)))
    except Exception:  # its arguments have other names than its options, or it wants groups of its own
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = [{**copy.deepcopy(dict(options)), "params": parameters}]
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(twin, hooks, OrderedDict())
    return twin


def _agree(expected: Sequence[Tensor], got: Sequence[Tensor]) -> bool:
    pairs = zip(expected, got, strict=True)
    return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) for a, b in pairs)
