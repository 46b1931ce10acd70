"""Averaging in hooks, the function to repair: two backward passes, after which gradients must be means."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_03.checks.averages import SAME_MODEL, gradient_of, state_of
from torch import Tensor, nn

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import seeded
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Mutant


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    weights = [seeded(rank, *shape, purpose=f"hooks {shape}") for shape in ((3, 4), (4,), (4, 2), (2,))]
    return {"": (weights, [False, True, False, False], list(seeded(rank, 2, purpose="hooks")))}


def _use(
    fn: Callable[[nn.Module], Any], weights: list[Tensor], frozen: list[bool], inputs: list[Tensor]
) -> dict[str, Any]:
    """Run a backward pass for each input; return the gradients after each, and the weights."""
    module, seen = nn.Module(), dict[str, Any]()
    for index, (weight, is_frozen) in enumerate(zip(weights, frozen, strict=True)):
        module.register_parameter(f"weight_{index}", nn.Parameter(weight.clone(), requires_grad=not is_frozen))
    fn(module)
    for step, x in enumerate(inputs):
        module.zero_grad()
        sum(((parameter * x).square().sum() for parameter in module.parameters()), torch.zeros_like(x)).backward()
        dist.barrier()
        time.sleep(0.005)  # what nobody waited for comes to an end: that is told, whatever the luck
        seen |= {f"step {step}, gradient of {name}": gradient_of(one) for name, one in module.named_parameters()}
    return {"backward": seen} | state_of(module)


def _draw(draw: Draw) -> tuple[Any, ...]:
    dtype = draw.dtype("float64", "float32")
    weights = [draw.tensor(*draw.shape(), dtype=dtype, same=True) for _ in range(draw.integer(1, 4))]
    frozen = [index > 0 and draw.integer(0, 2) == 0 for index in range(len(weights))]
    return weights, frozen, [draw.tensor(dtype=dtype) for _ in range(2)]


drive_repair = Cases(_cases, _use, most_bytes=0)
vary_repair = Vary(_draw, use=_use, left_out=SAME_MODEL)


_DIVIDE, _SEND = "parameter.grad /= dist.get_world_size()", "dist.all_reduce(parameter.grad)"
WRONG_REPAIR = (
    Mutant("weights, not gradients", "weights", "the hook averages the parameter; average parameter.grad", 2, 10)
    .edit("parameter: nn.Parameter", "gradient: torch.Tensor")
    .edit("parameter.grad /=", "gradient /=")
    .edit("all_reduce(parameter.grad)", "all_reduce(gradient)"),
    Mutant("divides later", "sum not mean", "divide by world_size (2)", 2, 63).without(_DIVIDE),
    Mutant("returns nothing", "lost", "the mean does not come into parameter.grad; write it there", 2, 63)
    .edit("parameter: nn.Parameter", "gradient: torch.Tensor")
    .edit("parameter.grad /=", "mean = gradient /")
    .edit("all_reduce(parameter.grad)", "all_reduce(mean)")
    .edit("register_post_accumulate_grad_hook", "register_hook"),
    Mutant("another module", "no call", "nothing is sent in backward: no parameter has a hook that does", 2, 12)
    .setup("import copy")
    .edit("in module.parameters()", "in copy.deepcopy(module).parameters()"),
    Mutant(
        "a hook that does not send",
        "unsent",
        "each gradient is divided, and none is sent; all_reduce it in the hook",
        2,
    ).without(_SEND),
    Mutant("never waits", "not waited", "half summed", 2, 63).edit(
        "all_reduce(parameter.grad)", "all_reduce(parameter.grad, async_op=True)"
    ),
    Mutant("frozen too", "raised", "doesn't require gradient", 2).edit("if parameter.requires_grad:", "if True:"),
    Mutant("divides twice", "divided twice", "once too often", 2).edit(_DIVIDE, f"{_DIVIDE} ** 2"),
)
