"""How the calls of lesson 5's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Mutant

TAKES_NO_GROUP = "takes no group"
ROW = "the text asks for one row, [L]"
ALIKE = "all ranks give tensors of one shape"
FLOAT32 = "the text asks for float32"
_ROW = {"dims": ROW, "sub-group": TAKES_NO_GROUP, "unequal ranks": ALIKE, "empty": "a gradient holds elements"}
_FLOATS = ("float64", "float32")


def _draw_top_k(draw: Draw) -> tuple[Any, ...]:
    length = draw.one_of(1, draw.integer(2, 9), draw.integer(10, 50))
    gradient = draw.tensor(length, dtype=draw.dtype(*_FLOATS), strided=True)
    return gradient, draw.one_of(1, length, draw.integer(1, length))


def _draw_random_k(draw: Draw) -> tuple[Any, ...]:
    gradient, k = _draw_top_k(draw)
    return gradient, k, draw.integer(0, 10**6)


def _use_random_k(fn: Callable[[Tensor, int, int], Any], gradient: Tensor, k: int, step: int) -> list[Any]:
    """Return what holds for every way to draw the places: how many, and what stands there for a gradient of ones."""
    ones = torch.ones_like(gradient)
    estimate = fn(ones, k, step)
    same = fn(ones, k, step)
    fn(gradient, k, step)
    return [estimate.sort().values, torch.equal(estimate, same)]


def _draw_outer(draw: Draw) -> tuple[Any, ...]:
    shape, dtype = draw.shape(), draw.dtype(*_FLOATS)
    agreed = draw.tensor(*shape, dtype=dtype, same=True)
    momentum = draw.tensor(*shape, dtype=dtype, same=True)
    rates = draw.one_of(0.7, draw.number(0.1, 2.0)), draw.one_of(0.9, 0.0, draw.number(0.1, 0.95))
    return draw.tensor(*shape, dtype=dtype), agreed, momentum, *rates


def _draw_quantize(draw: Draw) -> tuple[Any, ...]:
    length = draw.one_of(1, draw.integer(2, 9), draw.integer(10, 50))
    gradient = draw.tensor(length, dtype=torch.float32, strided=True)
    return torch.ones_like(gradient) if draw.own(0, 4) == 0 else gradient, draw.one_of(1, 2, 4, 8)


def _draw_signs(draw: Draw) -> tuple[Any, ...]:
    gradient, _ = _draw_quantize(draw)
    return (gradient.relu() if draw.one_of("zeros", "none") == "zeros" else gradient,)


def _first_half(x: Tensor) -> Tensor:
    return torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])


def _whole_numbers(x: Tensor) -> Tensor:
    return (4 * x).round() / 4


def _draw_memory(draw: Draw) -> tuple[Any, ...]:
    length, dtype = draw.one_of(1, draw.integer(2, 9), draw.integer(10, 50)), draw.dtype(*_FLOATS)
    compress = draw.one_of(_first_half, _whole_numbers, torch.zeros_like, torch.clone)
    gradient = draw.tensor(length, dtype=dtype, strided=True)
    return gradient, draw.tensor(length, dtype=dtype), compress


def _draw_low_rank(draw: Draw) -> tuple[Any, ...]:
    rows, columns, dtype = draw.integer(1, 7), draw.integer(1, 7), draw.dtype(*_FLOATS)
    num_factors = draw.integer(1, min(rows, columns))
    return draw.tensor(rows, columns, dtype=dtype), draw.tensor(columns, num_factors, dtype=dtype, same=True)


def _use_low_rank(fn: Callable[[Tensor, Tensor], Any], gradient: Tensor, q: Tensor) -> list[Tensor]:
    """Return the approximation, and q q^T: the columns of q may have either sign."""
    approximation, new = fn(gradient, q)
    return [approximation, new @ new.T]


vary_top_k = Vary(_draw_top_k, left_out=_ROW)
vary_random_k = Vary(_draw_random_k, use=_use_random_k, left_out=_ROW)
_ONE_TYPE = {axis: reason for axis, reason in _ROW.items() if axis != "unequal ranks"} | {"dtype": FLOAT32}
vary_quantize = Vary(_draw_quantize, left_out=_ONE_TYPE)
vary_repair = Vary(_draw_signs, left_out=_ONE_TYPE)
vary_powersgd = Vary(
    _draw_low_rank,
    use=_use_low_rank,
    scale=100.0,
    left_out=_ROW | {"dims": "a gradient of a matrix", "layout": "both factors are contiguous"},
)
vary_feedback = Vary(_draw_memory, left_out=_ROW)
vary_outer = Vary(
    _draw_outer,
    left_out={
        "sub-group": TAKES_NO_GROUP,
        "unequal ranks": ALIKE,
        "layout": "own values may be all-reduced where they lie",
    },
)

WRONG_TOP_K = (
    Mutant("float32 by default", "raised", "RuntimeError", 1, "one dtype").edit(
        "torch.zeros_like(gradient)", "torch.zeros(gradient.shape)"
    ),
)
WRONG_RANDOM_K = (
    Mutant("whole L/k", "scale", "too small", 1, "sizes that divide").edit(
        "(gradient.numel() / k)", "(gradient.numel() // k)"
    ),
)
WRONG_OUTER = (
    Mutant("one row", "raised", "0-d tensor", 1, "one row only").edit(
        "agreed.sub_(lr * (change + factor * momentum))",
        "for place in range(len(agreed)):\n    agreed[place] -= lr * (change[place] + factor * momentum[place])",
    ),
)
