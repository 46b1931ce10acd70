"""Whether an optimizer may be given a part of a tensor: found by trying it, since no name tells.

SGD and Adam update each number from its own gradient and state. LAMB, Adafactor and Muon look at a whole tensor (its
norm, its rows), and some look at all tensors at once. An optimizer of any class is tried on a few numbers: it
updates tensors together, each alone, and cut in two. All must agree. Limit: one that changes its way after many steps.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.sharding.zero.offload import OffloadedOptimizer

NUM_STEPS = 100
SMALL, LARGE = ((4, 2), (2, 3), (7,), (2, 2, 3), (3, 2, 1, 2)), ((130, 129),)
TOLERANCE = 1e-5
_NAMES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
KNOWN = frozenset(getattr(torch.optim, name) for name in _NAMES)  # torch's own that work by element
Shapes = Sequence[tuple[int, ...]]
Optimizer = torch.optim.Optimizer


def what_it_needs(optimizer: Optimizer) -> str:
    """Return "elements", "tensors" or "all": the smallest part that an optimizer updates as it does in one process.

    The optimizer itself is not touched: ones like it, with the options of each of its groups, update a few numbers.

    Raises:
        ValueError: it cannot be tried; the text says why.
    """
    optimizer = optimizer.inner if isinstance(optimizer, OffloadedOptimizer) else optimizer
    if type(optimizer) in KNOWN:
        return "elements"
    needs = ["elements"]
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        if "lr" in options:  # a schedule may begin at 0, and nothing would be seen
            options["lr"] = max(float(options["lr"]), 0.01)
        needs += [_tried(optimizer, options, *sizes) for sizes in ((SMALL, NUM_STEPS), (LARGE, 3))]
    return max(needs, key=("elements", "tensors", "all").index)


def _tried(optimizer: Optimizer, options: Mapping[str, Any], shapes: Shapes, num_steps: int) -> str:
    try:
        together = _updated(optimizer, options, shapes, num_steps)
    except ValueError:  # Muon wants two dimensions
        shapes = shapes[:2]
        together = _updated(optimizer, options, shapes, num_steps)
    if not _agree(together, [_updated(optimizer, options, [one], num_steps)[0] for one in shapes]):
        return "all"
    try:
        parts = _updated(optimizer, options, shapes, num_steps, cut=True)
    except ValueError:
        return "tensors"
    joined = [torch.cat(pair, 1) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return "elements" if _agree(together, joined) else "tensors"


def _updated(
    optimizer: Optimizer, options: Mapping[str, Any], shapes: Shapes, num_steps: int, *, cut: bool = False
) -> list[Tensor]:
    """Return what an optimizer like this one makes of some tensors, or of two parts of each: a row for each step."""
    # Tensors have one to four dimensions, and one is large; gradients change their sign and size.
    whole = [torch.linspace(-1.5, 2.0 + len(shape), math.prod(shape)).reshape(shape) for shape in shapes]
    starts = [half for one in whole for half in one.flatten().tensor_split([one.numel() // 3])] if cut else whole
    parameters, rows = [nn.Parameter(one.clone()) for one in starts], [[one.flatten()] for one in starts]
    rises = torch.arange(num_steps)[:, None]
    slopes = [torch.cos(3 * one.flatten() + 2 * rises) * 10 ** torch.sin(rises) for one in starts]
    takes_closure = "closure" in inspect.signature(type(optimizer).step).parameters

    def again(step: int, by: float = 0.1) -> Tensor:  # a number's gradient depends on it alone
        for one, slope in zip(parameters, slopes, strict=True):
            one.grad = slope[step].view(one.shape) + by * torch.sin(one.detach())
        return torch.zeros(())

    try:
        twin = _like(optimizer, options, parameters)
        for step in range(num_steps):
            again(step, by=0.0)
            with torch.enable_grad():
                closures: list[Any] = [partial(again, step)] if takes_closure else []
                type(optimizer).step(twin, *closures)
            for row, one in zip(rows, parameters, strict=True):
                row.append(one.detach().flatten().clone())
    except Exception as error:
        raise ValueError(
            f"{type(optimizer).__name__} could not be tried on a few numbers, to see whether it works by element "
            f"({type(error).__name__}: {error}); use one of {', '.join(_NAMES)}, or no sharding"
        ) from error
    return [torch.stack(row) for row in rows]


def _like(optimizer: Optimizer, options: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    try:
        twin = type(optimizer)(parameters, **optimizer.defaults)
        twin.param_groups[0].update(copy.deepcopy(dict(options)))
    except Exception:  # its arguments have other names than its options, or it wants groups of its own
        twin = copy.copy(optimizer)
        twin.state, twin.param_groups = defaultdict(dict), [{**copy.deepcopy(dict(options)), "params": parameters}]
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def _agree(expected: Sequence[Tensor], got: Sequence[Tensor]) -> bool:
    pairs = zip(expected, got, strict=True)
    return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) for a, b in pairs)
