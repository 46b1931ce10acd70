"""How the calls of lesson 4's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch
from distlab_lesson_04.checks.accumulation import use_accumulate
from distlab_lesson_04.checks.rates import use_warm_up
from torch import Tensor, nn

from distlab.course.grading.variation.draw import Draw, Keywords, Vary, lopsided_loss


def _draw_rate(draw: Draw) -> tuple[Any, ...]:
    num_warmup = draw.one_of(0, 1, draw.integer(2, 20))
    step = draw.one_of(0, draw.integer(0, 20), draw.integer(0, 1000))
    batches = {"batch": draw.integer(1, 4096), "base_batch": draw.integer(1, 4096)}
    return step, draw.number(0.001, 3.0), Keywords(**batches, num_warmup=num_warmup)


def _draw_warm_up(draw: Draw) -> tuple[Any, ...]:
    left = [7.0 + index for index in range(draw.integer(1, 4))]
    num_warmup = draw.one_of(1, draw.integer(2, 6), draw.integer(7, 12))
    return left, draw.number(0.01, 2.0), num_warmup, draw.one_of(0, draw.integer(1, 15)), draw.integer(1, 9)


def _draw_accumulate(draw: Draw) -> tuple[Any, ...]:
    dtype, num_features, num_outputs = draw.dtype("float64", "float32"), draw.integer(1, 4), draw.integer(1, 3)
    layer = nn.Linear(num_features, num_outputs, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(draw.tensor(num_outputs, num_features, dtype=dtype, same=True))
    left, pairs = draw.integer(1, 9), []
    while left:
        size = min(left, draw.own(1, 4))
        inputs = draw.tensor(size, num_features, dtype=dtype, strided=True)
        pairs.append((inputs, draw.tensor(size, num_outputs, dtype=dtype)))
        left -= size
    return layer, pairs, draw.one_of(lopsided_loss, nn.functional.smooth_l1_loss)


def _drawn(draw: Draw, num: int) -> list[Tensor]:
    dtype, shape = draw.dtype("float64", "float32"), draw.one_of((5,), (3, 4), (2, 3, 1, 2), (1, 1), (7, 2))
    return [draw.tensor(*shape, dtype=dtype, strided=True) for _ in range(num)]


def _draw_lars(draw: Draw) -> tuple[Any, ...]:
    weight, gradient, buffer = _drawn(draw, 3)
    zero = draw.one_of("none", "none", "weight", "gradient", "both")
    weight = torch.zeros_like(weight) if zero in ("weight", "both") else weight
    gradient = torch.zeros_like(gradient) if zero in ("gradient", "both") else gradient
    size, small = draw.one_of(1.0, 0.01), draw.one_of(1.0, 0.001)  # norms, and ratios, below and above 1
    weight, gradient = size * weight, size * small * gradient
    terms = {"lr": draw.number(0.01, 2.0), "momentum": draw.one_of(0.0, draw.number(0.1, 0.99))}
    terms |= {"decay": draw.one_of(0.0, draw.number(0.001, 0.3)), "coefficient": draw.number(0.001, 0.5)}
    return weight, gradient, buffer, Keywords(terms)


def _draw_lamb(draw: Draw) -> tuple[Any, ...]:
    weight, gradient, mean, square = _drawn(draw, 4)
    zero = draw.one_of("none", "none", "weight", "all but the weight")
    weight = torch.zeros_like(weight) if zero == "weight" else weight
    if zero == "all but the weight":
        gradient, mean, square = torch.zeros_like(gradient), torch.zeros_like(mean), torch.zeros_like(square)
    terms = {"step": draw.one_of(1, draw.integer(2, 500)), "lr": draw.number(0.01, 2.0)}
    terms |= {"decay": draw.one_of(0.0, draw.number(0.001, 0.3))}
    return weight, gradient, mean, square.abs(), Keywords(terms)


vary_rate, vary_repair = Vary(_draw_rate, num_calls=24), Vary(_draw_warm_up, use=use_warm_up)
vary_accumulate = Vary(
    _draw_accumulate,
    use=use_accumulate,
    left_out={
        "sub-group": "takes no group",
        "dims": "the text leaves the model open",
        "empty": "the mean loss of no sample is not a number",
    },
)
_HOLDS = {"empty": "a weight holds elements"}
vary_lars, vary_lamb = (Vary(one, num_calls=24, left_out=_HOLDS) for one in (_draw_lars, _draw_lamb))
