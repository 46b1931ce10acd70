"""LARS and LAMB: one update of tensors of several kinds, each as the formula says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Mutant

SHAPES = {"a bias": (4,)}
LARS = {"lr": 0.5, "momentum": 0.9, "decay": 0.1, "coefficient": 0.02}
LAMB = {"step": 3, "lr": 0.1, "decay": 0.1}


def _tensors(kind: str) -> list[Tensor]:
    """Return weight, gradient and two states, which belong to a kind of tensor."""
    shape = SHAPES.get(kind, (3, 4))
    weight, gradient, mean, square = (seeded(0, *shape, purpose=what) for what in ("weight", "gradient", "mean", "2"))
    is_idle = "gradient of zeros" in kind
    return [5 * weight * ("weight of zeros" not in kind), gradient * (not is_idle), mean * (not is_idle), square**2]


def _named(names: tuple[str, ...], got: Any) -> dict[str, Any]:
    parts = list(got) if isinstance(got, tuple | list) else [got]
    return dict(zip_longest(names, parts[: len(names)]))


def _use_lars(fn: Callable[..., Any], weight: Tensor, gradient: Tensor, buffer: Tensor, named: dict[str, Any]) -> Any:
    return _named(("the new weight", "the new buffer"), fn(weight, gradient, buffer, **named))


def _use_lamb(
    fn: Callable[..., Any], weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, named: dict[str, Any]
) -> Any:
    names = ("the new weight", "the new mean", "the new square")
    return _named(names, fn(weight, gradient, mean, square, **named))


_IDLE = "a gradient of zeros and no decay"
drive_lars = Cases(
    {kind: (*_tensors(kind)[:3], LARS) for kind in ("a matrix", "a bias", "a weight of zeros", "a gradient of zeros")}
    | {_IDLE: (*_tensors(_IDLE)[:3], LARS | {"decay": 0.0})}
    | {"a ratio above 1": (*_tensors("a matrix")[:3], LARS | {"coefficient": 0.9})},
    _use_lars,
)
drive_lamb = Cases(
    {
        "a matrix, step 3": (*_tensors("a matrix"), LAMB),
        "a matrix, step 1": (*_tensors("a matrix")[:2], *torch.zeros(2, 3, 4).double(), LAMB | {"step": 1}),
        "a bias": (*_tensors("a bias"), LAMB),
        "a weight of zeros": (*_tensors("a weight of zeros"), LAMB),
        "a gradient of zeros": (*_tensors("a gradient of zeros"), LAMB),
        _IDLE: (*_tensors(_IDLE), LAMB | {"decay": 0.0}),
    },
    _use_lamb,
)


_STUCK = "a weight of zeros has ratio 0 and can never leave; the ratio is 1 where a norm is zero"
_NO_NUMBER = "an update of zeros gives 0 / 0; the ratio is 1 where a norm is zero"
_RATIO, _OF_LARS, _VECTOR = "weight_norm / update_norm", "coefficient * weight_norm / update_norm", "weight.dim() == 1"
WRONG_LARS = (
    Mutant(
        "decay left out",
        "decay not in the ratio",
        "the ratio is taken without the decay; its denominator is |gradient| + decay * |weight|",
        1,
        67,
    ).edit(_RATIO, "weight_norm / gradient.norm()"),
    Mutant(
        "one length",
        "norm of the sum",
        "the denominator is the length of gradient + decay * weight; the two lengths are added",
        1,
    ).edit("gradient.norm() + decay * weight_norm", "(gradient + decay * weight).norm()"),
    Mutant(
        "biases too", "vectors adapted", "a tensor of one dimension is left out of the ratio and of decay", 1, 67
    ).edit(_VECTOR, "False"),
    Mutant("rate outside", "rate outside the buffer", "the rate belongs inside the buffer, or it acts on old steps", 1)
    .edit("lr * ratio *", "ratio *")
    .edit("weight - buffer", "weight - lr * buffer"),
    Mutant("ratio outside", "ratio outside the buffer", "the ratio multiplies the whole buffer, not the new part", 1)
    .edit("lr * ratio *", "lr *")
    .edit("weight - buffer", "weight - ratio * buffer"),
    *(
        Mutant(name, name, says, 1).edit(old, new)
        for name, says, old, new in (
            ("stuck at zero", _STUCK, "weight_norm > 0 and ", ""),
            ("divides by zero", _NO_NUMBER, " and update_norm > 0", ""),
            ("no ratio", "that is plain SGD: the ratio is missing", _OF_LARS, "1.0"),
            ("no coefficient", "the coefficient is not in the ratio", _OF_LARS, _RATIO),
            ("upside down", "the ratio is upside down: |weight| goes on top", _RATIO, "update_norm / weight_norm"),
            ("squares of norms", "the norms are asked, not their squares", "weight.norm()", "weight.norm() ** 2"),
            ("gradient", "a side of / must be zero for ratio 1, not the gradient", "update_norm >", "gradient.any() >"),
            ("ratio clipped", "the ratio is clipped at 1; take it as it is", _OF_LARS, f"min(1.0, {_OF_LARS})"),
            ("coefficient for all", "where there is no ratio it takes the coefficient, not 1", "1.0", "coefficient"),
            ("vectors decayed", "a tensor of one dimension has no decay", "decay = 0.0", "pass"),
            ("no decay", "decay * weight is not added to the gradient", "(gradient + decay * weight)", "gradient"),
            ("no momentum", "momentum * buffer is missing", "momentum * buffer + ", ""),
            ("dampened", "the new part is multiplied by 1 - momentum; add it in full", "+ lr", "+ (1 - momentum) * lr"),
            ("rate twice", "lr is in the buffer, and is applied to it once more", "- buffer", "- lr * buffer"),
            ("uphill", "the buffer is added to the weight; it is taken from it", "weight - buffer", "weight + buffer"),
            ("looks ahead", "momentum * buffer is taken from the weight, not buffer", "- buff", "- momentum * buff"),
        )
    ),
)
_ROOT = "(square / (1 - 0.999**step)).sqrt()"
WRONG_LAMB = (
    Mutant(
        "not corrected",
        "not corrected",
        "the running means are not corrected for their start at zero: divide by 1 - 0.9^step and 1 - 0.999^step",
        1,
        53,
    ).edit(f"(mean / (1 - 0.9**step)) / ({_ROOT}", "mean / (square.sqrt()"),
    Mutant(
        "corrected too late",
        "ratio before correction",
        "the ratio is taken of an update that is not corrected, and the step made with one that is; correct first",
        1,
        53,
    ).edit("update.norm()", "(mean / (square.sqrt() + 1e-6) + decay * weight).norm()"),
    Mutant(
        "returns corrected",
        "returns corrected",
        "the corrected means are returned, and would be corrected again; return them as they were before",
        1,
    ).edit("update, mean, square", "update, mean / (1 - 0.9**step), square / (1 - 0.999**step)"),
    Mutant("decay outside", "decay outside the ratio", "decay is added after the ratio; the ratio measures it, too", 1)
    .without(" + decay * weight")
    .edit("ratio * update", "ratio * update - lr * decay * weight"),
    Mutant("decay too late", "decay too late", "decay is added after the length was taken; take the length of both", 1)
    .without(" + decay * weight")
    .edit("ratio * update", "ratio * (update + decay * weight)"),
    Mutant("decay in the gradient", "decay in the gradient", "decay goes through the means; add it to the update", 1)
    .without(" + decay * weight")
    .edit("mean = 0.9", "gradient = gradient + decay * weight\nmean = 0.9"),
    Mutant("betas swapped", "betas swapped", "0.9 and 0.999 have changed places; 0.9 is for the mean", 1)
    .edit("0.9 * mean + 0.1 * gradient", "0.999 * mean + 0.001 * gradient")
    .edit("0.999 * square + 0.001 * gradient**2", "0.9 * square + 0.1 * gradient**2"),
    Mutant("one step ahead", "one step ahead", "the correction is that of the next update; step counts from 1", 1).edit(
        "**step", "**(step + 1)", times=2
    ),
    Mutant(
        "one step behind", "one step behind", "the correction is that of the update before; step counts from 1", 1
    ).edit("**step", "**(step - 1)", times=2),
    Mutant("step left out", "step left out", "1 - 0.9 corrects step 1 alone; divide by 1 - 0.9^step", 1).edit(
        "**step", "", times=2
    ),
    Mutant("first of four dims", "values", "expected", 1, "one shape").edit(
        "weight.norm()", "(weight if weight.dim() < 4 else weight[0]).norm()"
    ),
    *(
        Mutant(name, name, says, 1).edit(old, new)
        for name, says, old, new in (
            ("stuck at zero", _STUCK, "weight_norm > 0 and ", ""),
            ("divides by zero", _NO_NUMBER, " and update_norm > 0", ""),
            ("norm clipped", "the weight's norm is clipped at 10; take it whole", "t.norm()", "t.norm().clip(0, 10)"),
            ("of the gradient", "the ratio takes the gradient's length, not the update's", "update.n", "gradient.n"),
            ("no square corrected", "the square is not corrected; divide it by 1 - 0.999^step", _ROOT, "square.sqrt()"),
            (
                "corrected alike",
                "both are corrected by 0.9; the square's is 1 - 0.999^step",
                "0.999**step",
                "0.9**step",
            ),
            ("no mean corrected", "the mean is not corrected; divide it by 1 - 0.9^step", " / (1 - 0.9**step)", ""),
            ("vectors left out", "a tensor of one dimension has a ratio, too", "if w", "if weight.dim() > 1 and w"),
            ("no root", "the mean is divided by the square itself; take its root", ".sqrt() + 1e-6", " + 1e-6"),
            ("eps under the root", "1e-6 is under the root; add it to the root", ").sqrt() + 1e-6", " + 1e-6).sqrt()"),
            ("smaller epsilon", "1e-8 is added to the root; 1e-6 is asked", "1e-6", "1e-8"),
            ("no rate", "the step is not multiplied by lr", "lr * ratio", "ratio"),
            ("no decay", "decay * weight is missing in the update", " + decay * weight", ""),
            ("no ratio", "that is AdamW: the ratio |weight| / |update| is missing", f"{_RATIO} if", "1.0 if"),
            ("upside down", "the ratio is upside down: |weight| goes on top", _RATIO, "update_norm / weight_norm"),
            ("magnitudes", "the square's mean takes |gradient|, not gradient^2", "gradient**2", "gradient.abs()"),
        )
    ),
)
