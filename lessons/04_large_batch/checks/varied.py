"""How the calls of lesson 4's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading import Mutant
from distlab.grading.variation.draw import Draw, Keywords, Vary, lopsided_loss

TAKES_NO_GROUP = "takes no group"
_FLOATS = ("float64", "float32")


def _draw_rate(draw: Draw) -> tuple[Any, ...]:
    num_warmup = draw.one_of(0, 1, draw.integer(2, 20))
    step = draw.one_of(0, draw.integer(0, 20), draw.integer(0, 1000))
    batches = {"batch": draw.integer(1, 4096), "base_batch": draw.integer(1, 4096)}
    return step, draw.number(0.001, 3.0), Keywords(**batches, num_warmup=num_warmup)


def _draw_accumulate(draw: Draw) -> tuple[Any, ...]:
    dtype, num_features, num_outputs = draw.dtype(*_FLOATS), draw.integer(1, 4), draw.integer(1, 3)
    weight = draw.tensor(num_outputs, num_features, dtype=dtype, same=True)
    left, pairs = draw.integer(1, 9), []
    while left:
        size = min(left, draw.own(1, 4))
        inputs = draw.tensor(size, num_features, dtype=dtype, strided=True)
        pairs.append((inputs, draw.tensor(size, num_outputs, dtype=dtype)))
        left -= size
    return weight, pairs, draw.one_of(lopsided_loss, nn.functional.smooth_l1_loss)


def _use_accumulate(fn: Callable[..., Any], weight: Tensor, pairs: list[tuple[Tensor, Tensor]], loss_fn: Any) -> Any:
    """Return the gradient of a layer, and whether the weight is as it was."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    fn(layer, pairs, loss_fn)
    return [layer.weight.grad, layer.weight.detach(), layer.weight.requires_grad]


def _tensors(draw: Draw, num: int) -> list[Tensor]:
    dtype, shape = draw.dtype(*_FLOATS), draw.one_of((5,), (3, 4), (2, 3, 1, 2), (1, 1), (7, 2))
    return [draw.tensor(*shape, dtype=dtype, strided=True) for _ in range(num)]


def _draw_lars(draw: Draw) -> tuple[Any, ...]:
    weight, gradient, buffer = _tensors(draw, 3)
    zero = draw.one_of("none", "none", "weight", "gradient", "both")
    weight = torch.zeros_like(weight) if zero in ("weight", "both") else weight
    gradient = torch.zeros_like(gradient) if zero in ("gradient", "both") else gradient
    size = draw.one_of(1.0, 0.01)  # norms below and above 1
    weight, gradient = size * weight, size * gradient
    terms = {"lr": draw.number(0.01, 2.0), "momentum": draw.one_of(0.0, draw.number(0.1, 0.99))}
    terms |= {"decay": draw.one_of(0.0, draw.number(0.001, 0.3)), "coefficient": draw.number(0.001, 0.5)}
    return weight, gradient, buffer, Keywords(terms)


def _draw_lamb(draw: Draw) -> tuple[Any, ...]:
    weight, gradient, mean, square = _tensors(draw, 4)
    zero = draw.one_of("none", "none", "weight", "all but the weight")
    weight = torch.zeros_like(weight) if zero == "weight" else weight
    if zero == "all but the weight":
        gradient, mean, square = torch.zeros_like(gradient), torch.zeros_like(mean), torch.zeros_like(square)
    terms = {"step": draw.one_of(1, draw.integer(2, 500)), "lr": draw.number(0.01, 2.0)}
    terms |= {"decay": draw.one_of(0.0, draw.number(0.001, 0.3))}
    return weight, gradient, mean, square.abs(), Keywords(terms)


def _draw_warm_up(draw: Draw) -> tuple[Any, ...]:
    num_groups, num_warmup = draw.integer(1, 4), draw.one_of(1, draw.integer(2, 6), draw.integer(7, 12))
    return num_groups, draw.number(0.01, 2.0), num_warmup, draw.one_of(0, draw.integer(1, 15)), draw.integer(1, 9)


def _use_warm_up(
    fn: Callable[..., Callable[[], Any]], num_groups: int, peak_lr: float, num_warmup: int, first_step: int, steps: int
) -> list[list[float]]:
    """Return the rate of every group before each update; another warmup runs between the updates."""
    optimizers = []
    for peak in (peak_lr, 2 * peak_lr):
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 7.0 + index} for index in range(num_groups)]
        optimizer = torch.optim.SGD(groups)
        optimizers.append((optimizer, fn(optimizer, peak, num_warmup=num_warmup, first_step=first_step)))
    rates = []
    for _ in range(steps):
        for optimizer, before_update in optimizers:
            before_update()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


RATE = Vary(_draw_rate)
ACCUMULATE = Vary(
    _draw_accumulate,
    use=_use_accumulate,
    left_out={
        "sub-group": TAKES_NO_GROUP,
        "dims": "the text leaves the model open",
        "empty": "the mean loss of no sample is not a number",
    },
)
LARS = Vary(_draw_lars, left_out={"empty": "a weight holds elements"})
LAMB = Vary(_draw_lamb, left_out={"empty": "a weight holds elements"})
WARM_UP = Vary(_draw_warm_up, use=_use_warm_up)

WRONG_RATE = (
    Mutant("base batch of 256", "values", "expected", 1, "one set of arguments").edit("/ base_batch", "/ 256"),
    Mutant("warm-up of 5", "no warmup", "expected 0.1", 1, "one set of arguments").edit(
        "if step < num_warmup:", "num_warmup = min(num_warmup, 5)\nif step < num_warmup:"
    ),
)
WRONG_LARS = (
    Mutant("zero gradient", "stuck at zero", "where a norm is zero", 1, "zero gradients").edit(
        "if weight_norm > 0 and update_norm > 0:", "if weight_norm > 0 or update_norm > 0:"
    ),
    Mutant("buffer in place", "changed argument", "buffer", 1, "state").edit(
        "buffer = momentum * buffer +", "buffer *= momentum\nbuffer +="
    ),
)
WRONG_LAMB = (
    Mutant("first of four dims", "values", "expected", 1, "one shape").edit(
        "weight.norm()", "(weight if weight.dim() < 4 else weight[0]).norm()"
    ),
)
WRONG_WARM_UP = (
    Mutant("first group only", "values", "expected", 1, "one set of arguments").edit(
        "in optimizer.param_groups", "in optimizer.param_groups[:2]"
    ),
    Mutant("new defaults", "state left behind", "it changed optimizer.defaults['lr']", 1, "state").edit(
        "step = first_step", 'step, optimizer.defaults["lr"] = first_step, peak_lr'
    ),
    Mutant("one step for all", "scale", "too large", 1, "one call", preamble="_steps = {}")
    .edit("step = first_step", "_steps[0] = first_step")
    .edit("nonlocal step", "step = _steps[0]")
    .edit("step += 1", "_steps[0] += 1"),
)
