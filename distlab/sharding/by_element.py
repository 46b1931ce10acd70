"""Whether an optimizer may be given a part of a tensor: found by trying it, since no name tells.

SGD and Adam look at one number, LAMB and Muon at a whole tensor, some at all. So an optimizer updates a few tensors:
together, each alone, and cut in two. All must agree. Limit: one that changes its way after many steps.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SMALL, LARGE = ((4, 2), (2, 3), (7,), (2, 2, 3), (3, 2, 1, 2)), ((130, 129),)
close = partial(torch.allclose, rtol=1e-5, atol=1e-5, equal_nan=True)
_NAMES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
KNOWN = frozenset(getattr(torch.optim, name) for name in _NAMES)  # torch's own that work by element
Optimizer = torch.optim.Optimizer


def what_it_needs(optimizer: Optimizer, groups: Sequence[dict[str, Any]] = ()) -> str:
    """Return "elements", "tensors" or "all": the smallest part that an optimizer updates as it does in one process.

    The optimizer itself is not touched: ones like it, with the options of each of its groups, update a few numbers.

    Raises:
        ValueError: it cannot be tried; the text says why.
    """
    needs = ["elements"]
    for group in (groups or optimizer.param_groups) if type(optimizer) not in KNOWN else ():
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        options |= {"lr": max(float(options["lr"]), 0.01)} if "lr" in options else {}  # 0 would show nothing
        for shapes, num_steps in ((SMALL, 100), (LARGE, 3)):
            starts = [torch.linspace(-1.5, 2.0 + len(one), math.prod(one)).reshape(one) for one in shapes]
            needs.append(_tried(partial(_updated, optimizer, options, num_steps), starts))
            if needs[-1] != "elements":
                break  # a large one shows no more, and may take minutes, as a row of Shampoo's
    return max(needs, key=("elements", "tensors", "all").index)


def _tried(update: Callable[[Sequence[Tensor]], list[Tensor]], starts: list[Tensor]) -> str:
    try:
        together = update(starts)
    except ValueError:  # Muon wants two dimensions
        together = update(starts := starts[:2])
    if not all(close(one, update([start])[0]) for one, start in zip(together, starts, strict=True)):
        return "all"
    try:
        parts = update([half for one in starts for half in one.flatten().tensor_split([one.numel() // 3])])
    except ValueError:
        return "tensors"
    joined = [torch.cat(pair, 1) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return "elements" if all(map(close, together, joined)) else "tensors"


def _updated(optimizer: Optimizer, options: dict[str, Any], num_steps: int, starts: Sequence[Tensor]) -> list[Tensor]:
    """Return what an optimizer like this one makes of some tensors: of each a row for each step."""
    parameters, rows = [nn.Parameter(one.clone()) for one in starts], [[one.flatten()] for one in starts]
    rises = torch.arange(num_steps)[:, None]
    slopes = [torch.cos(3 * one.flatten() + 2 * rises) * 10 ** torch.sin(rises) for one in starts]

    def again(step: int, by: float = 0.1) -> Tensor:  # gradients change sign and size; each depends on its number alone
        for one, slope in zip(parameters, slopes, strict=True):
            one.grad = slope[step].view(one.shape) + by * torch.sin(one.detach())
        return torch.zeros(())

    try:
        twin = _like(optimizer, options, parameters)
        takes_closure = "closure" in inspect.signature(twin.step).parameters
        for step in range(num_steps):
            again(step, by=0.0)
            with torch.enable_grad():
                type(optimizer).step(twin, *([partial(again, step)] if takes_closure else []))  # type: ignore[arg-type]
            for row, one in zip(rows, parameters, strict=True):
                row.append(one.detach().flatten().clone())
    except Exception as error:
        raise ValueError(
            f"{type(optimizer).__name__} could not be tried on a few numbers, to see whether it works by element "
            f"({type(error).__name__}: {error}); use one of {', '.join(_NAMES)}, or no sharding"
        ) from error
    return [torch.stack(row) for row in rows]


def _like(optimizer: Optimizer, options: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    try:
        twin = type(optimizer)(parameters, **optimizer.defaults)
        twin.param_groups[0].update(copy.deepcopy(options))
    except Exception:  # its arguments have other names than its options, or it wants groups of its own
        twin = copy.copy(optimizer)
        twin.state, twin.param_groups = defaultdict(dict), [{**copy.deepcopy(options), "params": parameters}]
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin
