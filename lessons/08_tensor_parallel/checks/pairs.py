"""f and g, through which a region of cut layers is entered and left, and two layers between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab_lesson_08.checks.shared import (
    ACTIVATION,
    CUT,
    HIDDEN,
    JOIN,
    WIDE,
    activation,
    reduce_bytes,
    there_and_back,
    use_two,
)
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

MLP_SHAPES = {"widen": (WIDE, HIDDEN), "widen_bias": (WIDE,), "output": (HIDDEN, WIDE), "output_bias": (HIDDEN,)}


def _pair_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    of_f = activation(-1, "x"), activation(rank, "gradient of f")
    return {"": (*of_f, activation(rank, "partial"), activation(-1, "gradient of g"))}


def use_pair(fn: Callable[..., Any], x: Tensor, grad_of_f: Tensor, partial: Tensor, grad_of_g: Tensor) -> Any:
    """Go through f and through g and back."""
    return use_two(fn, ("f", "g"), (x, grad_of_f), (partial, grad_of_g))


def _mlp_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    widen, widen_bias, output, output_bias = (seeded(-1, *shape, purpose=name) for name, shape in MLP_SHAPES.items())
    parts = widen.chunk(n)[rank], widen_bias.chunk(n)[rank], output.chunk(n, 1)[rank].contiguous()
    return {"": (activation(-1, "x"), *parts, output_bias, activation(-1, "gradient"))}


def use_mlp(
    fn: Callable[..., Any],
    x: Tensor,
    widen: Tensor,
    widen_bias: Tensor,
    output: Tensor,
    output_bias: Tensor,
    grad: Tensor,
) -> dict[str, Any]:
    """Return the output and the gradients of everything that went in."""
    parts = {"widen": widen, "widen_bias": widen_bias, "output": output, "output_bias": output_bias}
    return there_and_back(fn, "y", grad, x=x, **parts)


drive_f_and_g = Cases(_pair_cases, use_pair, needs="one all-reduce in f's backward and one in g's forward")
drive_mlp = Cases(_mlp_cases, use_mlp, needs="one all-reduce of x's size forward and one backward")


def budget_f_and_g(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    return [sent_line(evidence, 2 * reduce_bytes(ACTIVATION, evidence.world_size), "an all-reduce each way")]


def budget_mlp(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = 2 * reduce_bytes(ACTIVATION, evidence.world_size)
    return [sent_line(evidence, wanted, "one all-reduce of x forward and one backward")]


_GATHERED_SUM = """
parts = [torch.empty_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(parts, total.contiguous())
total = torch.stack(parts).sum(0)
"""
_CUT = """
    class Cut(torch.autograd.Function):
        forward, backward = staticmethod(Join.backward), staticmethod(Join.forward)
"""
_SUM_OF_GRADIENTS = "total = gradient.clone()\ndist.all_reduce(total)\nreturn total"
_SUM_OF_X = "total = x.clone()\ndist.all_reduce(total)\nreturn total"
_FUNCTION = f"{CUT}; write forward and backward of an autograd Function"
_F_BACK = "every layer below trains on a part: sum the gradients over ranks in backward"
_OUT, _BIAS = "F.linear(hidden, output)", "output)) + output_bias"

WRONG_F_AND_G = (
    Mutant("no f", "missing f", f"the gradient of f's input is this rank's own part, and {_F_BACK}", 2, 35).edit(
        _SUM_OF_GRADIENTS, "return gradient"
    ),
    Mutant("plain call", "graph cut", f"through g {_FUNCTION}", 1, 32).edit(
        "Reduce.apply", "lambda x: Reduce.apply(x.detach())"
    ),
    Mutant("plain f", "graph cut", f"through f {_FUNCTION}", 1, 32).edit(
        "Copy.apply", "lambda x: Copy.apply(x.detach())"
    ),
    Mutant(
        "two sums", "gradient t times", "g's backward adds up what every rank has: hand the gradient on", 2, 33
    ).edit("return gradient", _SUM_OF_GRADIENTS),
    Mutant("in place", "changed argument", "work on a copy", 2).edit(".clone()", "", times=2),
    Mutant("swapped", "swapped", "f begins a region, and g, which adds up forward, ends it: return (f, g)", 2).edit(
        "Copy.apply, Reduce.apply", "Reduce.apply, Copy.apply"
    ),
    Mutant("f sums", "f sums forward", "f adds up what every rank holds; forward it hands x on", 2).edit(
        "return x.view_as(x)", _SUM_OF_X
    ),
    Mutant("g does not sum", "g does not sum", "g hands on this rank's partial result; the output is the sum", 2).edit(
        _SUM_OF_X, "return x.view_as(x)"
    ),
    Mutant(
        "by gathering", "gathered", "all ranks' tensors are gathered and then added up: all_reduce sends less", 3
    ).edit("dist.all_reduce(total)", _GATHERED_SUM, times=2),
    Mutant("three dims", "raised", "not enough values").edit(
        "return x.view_as(x)", "samples, positions, features = x.shape\nreturn x.view_as(x)"
    ),
    Mutant("sum kept", "kept", "make a new tensor", preamble="_kept = {}").edit(
        "total = x.clone()", "total = _kept.setdefault((x.shape, x.dtype), x.clone()).copy_(x)"
    ),
)
WRONG_MLP = (
    Mutant(
        "bias inside", "bias counted t times", "every rank adds output_bias before the sum: add it once, after", 2, 34
    ).edit(_BIAS, "output, output_bias))"),
    Mutant(
        "bias on one",
        "bias on some ranks",
        "output_bias gets a gradient on some ranks alone: its copies drift apart; every rank adds it, after the sum",
        2,
    ).edit(_BIAS, "output, output_bias if dist.get_rank() == 0 else None))"),
    Mutant(
        "bias divided", "bias divided", "output_bias is divided before the sum, and so is its gradient: add it after", 2
    ).edit(_BIAS, "output, output_bias / dist.get_world_size()))"),
    Mutant("bias forgotten", "bias forgotten", "y lacks output_bias").without(" + output_bias"),
    Mutant(
        "no f", "missing f", f"x's gradient is that of its own features alone; {_F_BACK} (copy_to_ranks)", 2, 35
    ).edit("copy_to_ranks(x)", "x"),
    Mutant("no g", "not summed", "y is made of its own features alone: g (reduce_from_ranks) adds them up", 2).edit(
        "return reduce_from_ranks(", "return ("
    ),
    Mutant(
        "features gathered",
        "features gathered",
        "the wide layer's features travel, 4 times as many as x has; the row layer takes those that this rank has made",
        2,
    )
    .setup(f"{JOIN}\n{_CUT}")
    .edit("F.gelu(", "Cut.apply(F.gelu(Join.apply(")
    .edit("widen_bias))", "widen_bias))))"),
    Mutant("plain all-gather", "graph cut", CUT, 1, 32).edit(_OUT, f"{_OUT}.detach()"),
    Mutant(
        "two sums", "gradient t times", "g's backward adds up what every rank has whole; it hands it on", 2, 33
    ).edit(_OUT, f"copy_to_ranks({_OUT})"),
    Mutant("no gelu", "no gelu", "there is no GeLU between the two layers").edit("F.gelu(", "("),
    Mutant("bias after", "bias after GeLU", "widen_bias is added behind GeLU: it belongs to the first layer").edit(
        "widen, widen_bias))", "widen)) + widen_bias"
    ),
    Mutant("gelu last", "GeLU last", "GeLU comes after the second layer: it belongs between the two")
    .edit("F.gelu(", "(")
    .edit("return reduce", "return F.gelu(reduce")
    .edit(_BIAS, f"{_BIAS})"),
    Mutant("ReLU", "ReLU", "there is a ReLU between the layers; GeLU is asked").edit("F.gelu(", "F.relu("),
    Mutant("tanh's GeLU", "GeLU by tanh", "GeLU is approximated by tanh; F.gelu's default is asked").edit(
        "widen, widen_bias))", 'widen, widen_bias), approximate="tanh")'
    ),
    Mutant("rows by view", "raised", "view size").edit(
        "copy_to_ranks(x)", "copy_to_ranks(x.view(-1, x.shape[-1])).view(x.shape)"
    ),
    Mutant("averaged", "averaged", "the ranks' parts of y are averaged: they are summands", 2).edit(
        _OUT, f"{_OUT} / dist.get_world_size()"
    ),
    Mutant("f inside", "f inside", "f stands before the second layer: x enters the region before the first", 2)
    .edit("copy_to_ranks(x)", "x")
    .edit("linear(hidden", "linear(copy_to_ranks(hidden)"),
)
