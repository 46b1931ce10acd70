"""Name what is wrong in an update of LARS or LAMB: compare it with the update that each known mistake would make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from distlab_lesson_04 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.values import compare, equal

Updates = Callable[..., Any]


def lars(weight: Tensor, gradient: Tensor, buffer: Tensor, *, mistake: str = "", **named: float) -> tuple[Tensor, ...]:
    """Make an update of LARS, or one with a mistake."""
    lr, momentum, decay, coefficient = (named[name] for name in ("lr", "momentum", "decay", "coefficient"))
    w, g, ratio = float(weight.norm()), float(gradient.norm()), 1.0
    vector = weight.dim() == 1 and mistake != "vectors adapted"
    if vector and mistake != "vectors decayed":
        decay = 0.0
    in_ratio = 0.0 if mistake == "decay not in the ratio" else decay
    if not vector and w > 0 and g + in_ratio * w > 0:
        ratio = (1.0 if mistake == "no coefficient" else coefficient) * w / (g + in_ratio * w)
        ratio = {"upside down": coefficient / (w / (g + decay * w)), "no ratio": 1.0}.get(mistake, ratio)
    elif mistake == "stuck at zero" and not vector:
        ratio = 0.0 if w == 0 else coefficient * w / (g + in_ratio * w)
    if mistake == "norm of the sum" and not vector and w > 0 and g + decay * w > 0:
        ratio = coefficient * w / float((gradient + decay * weight).norm())
    inside = {"rate outside the buffer": 1.0, "dampened": (1 - momentum) * lr}.get(mistake, lr)
    in_update = 0.0 if mistake == "no decay" else decay
    kept = 0.0 if mistake == "no momentum" else momentum
    if mistake == "ratio outside the buffer":
        buffer = kept * buffer + gradient + in_update * weight
        return weight - lr * ratio * buffer, buffer
    buffer = kept * buffer + inside * ratio * (gradient + in_update * weight)
    outside = {"rate outside the buffer": lr, "rate twice": lr, "uphill": -1.0}.get(mistake, 1.0)
    return weight - outside * buffer, buffer


LARS_FAULTS: tuple[tuple[str, str, str], ...] = (
    (
        "a matrix",
        "decay not in the ratio",
        "the ratio was taken without the decay: its denominator is |gradient| + decay * |weight|, or a large weight "
        "makes the step longer than was asked",
    ),
    ("a matrix", "no ratio", "that is plain SGD: the ratio is missing"),
    ("a matrix", "upside down", "the ratio is upside down: a long weight takes long steps, |weight| goes on top"),
    ("a matrix", "no coefficient", "the coefficient is not in the ratio"),
    ("a matrix", "no decay", "decay is in the ratio but not in the update: add decay * weight to the gradient"),
    (
        "a matrix",
        "rate outside the buffer",
        "the first updates are right, and the one after the rate fell is not: the rate belongs inside the buffer",
    ),
    (
        "a matrix",
        "norm of the sum",
        "the denominator is the length of gradient + decay * weight; the two lengths are added, |gradient| + decay * "
        "|weight|",
    ),
    ("a matrix", "no momentum", "the first update is right, the second is not: momentum * buffer is missing"),
    ("a matrix", "dampened", "the new part of the buffer is multiplied by 1 - momentum; LARS adds it in full"),
    (
        "a matrix",
        "ratio outside the buffer",
        "the ratio multiplies the whole buffer; it belongs to the new part only, as the rate does",
    ),
    ("a matrix", "rate twice", "the rate is in the buffer and applied to it once more"),
    ("a matrix", "uphill", "the buffer is added to the weight; it is taken from it"),
    ("a bias", "vectors adapted", "a tensor of one dimension is left out of the ratio and of decay"),
    ("a bias", "vectors decayed", "decay pulls at a bias: a tensor of one dimension has none"),
    (
        "a weight of zeros",
        "stuck at zero",
        "a weight of zeros has ratio 0 and can never leave: take 1 where a norm is zero",
    ),
)


def lamb(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, mistake: str = "", **named: float
) -> tuple[Tensor, ...]:
    """Make an update of LAMB, or one with a mistake."""
    step, lr, decay = (named[name] for name in ("step", "lr", "decay"))
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    count = step + (mistake == "one step ahead")
    first, second = (1.0, 1.0) if mistake == "not corrected" else (1 - 0.9**count, 1 - 0.999**count)
    second = 1.0 if mistake == "only the mean corrected" else second
    denominator = {"no root": square / second + 1e-6, "eps under the root": (square / second + 1e-6).sqrt()}
    update = (mean / first) / denominator.get(mistake, (square / second).sqrt() + 1e-6)
    inside = {"decay outside the ratio": 0.0, "no decay": 0.0}.get(mistake, decay)
    update = update + inside * weight
    measured = {
        "ratio before correction": mean / (square.sqrt() + 1e-6) + inside * weight,
        "ratio of the gradient": gradient,
    }.get(mistake, update)
    w, u = float(weight.norm()), float(measured.norm())
    ratio = w / u if w > 0 and u > 0 else 1.0
    if mistake == "weight's norm clipped":
        ratio = min(w, 10.0) / u if w > 0 and u > 0 else 1.0
    if mistake == "no ratio":
        ratio = 1.0
    if mistake == "stuck at zero" and w == 0:
        ratio = 0.0
    moved = weight - (1.0 if mistake == "no rate" else lr) * ratio * update
    if mistake == "decay outside the ratio":
        moved = moved - lr * decay * weight
    return (moved, mean / first, square / second) if mistake == "returns corrected" else (moved, mean, square)


LAMB_FAULTS: tuple[tuple[str, str, str], ...] = (
    (
        "a matrix",
        "not corrected",
        "the running means are not corrected for their start at zero: divide by 1 - 0.9^step and 1 - 0.999^step",
    ),
    (
        "a matrix",
        "ratio before correction",
        "the ratio was taken of an update that is not corrected, and the step made with one that is: correct first",
    ),
    (
        "a matrix",
        "decay outside the ratio",
        "decay was added after the ratio: it is part of the update that is measured",
    ),
    (
        "a matrix",
        "returns corrected",
        "the first update is right, the second is not: the corrected means were returned, and are corrected again",
    ),
    ("a matrix", "one step ahead", "the correction is that of the next update: step counts from 1 already"),
    ("a matrix", "only the mean corrected", "the square is not corrected: divide it by 1 - 0.999^step, too"),
    ("a matrix", "no root", "the mean is divided by the square itself; take its root"),
    ("a matrix", "eps under the root", "1e-6 is added under the root; it belongs beside it"),
    ("a matrix", "no rate", "the step is not multiplied by lr"),
    ("a matrix", "no decay", "decay * weight is missing in the update"),
    ("a matrix", "no ratio", "that is AdamW: the ratio |weight| / |update| is missing"),
    (
        "a matrix",
        "ratio of the gradient",
        "the ratio was taken with the gradient's length; it is the update's that counts",
    ),
    ("a matrix", "weight's norm clipped", "the weight's norm is clipped at 10, which the paper does not do"),
    (
        "a weight of zeros",
        "stuck at zero",
        "a weight of zeros has ratio 0 and can never leave: take 1 where a norm is zero",
    ),
)


def judge_lars(evidence: Evidence) -> Iterator[Fault]:
    """Compare updates of every kind of tensor with the formula's."""
    yield from _judge(evidence.results[0], cases.LARS_KINDS, lars, cases.lars_run, LARS_FAULTS)


def judge_lamb(evidence: Evidence) -> Iterator[Fault]:
    """Compare updates of every kind of tensor with the formula's."""
    yield from _judge(evidence.results[0], cases.LAMB_KINDS, lamb, cases.lamb_run, LAMB_FAULTS)


def _judge(
    results: dict[str, Any],
    kinds: Sequence[str],
    formula: Updates,
    run: Callable[..., dict[str, Any]],
    faults: Sequence[tuple[str, str, str]],
) -> Iterator[Fault]:
    for kind in kinds:
        got = results[kind]
        if "returned" in got:
            yield Fault("returned", f"{kind}: expected a tuple of new tensors, got {got['returned'][:80]}")
            return
        if got["changed"]:
            text = f"{kind}: the argument {got['changed']} was changed; the caller still needs it"
            yield Fault("changed argument", f"{text}: return new tensors")
            return
        wanted = run(formula, kind)["weights"]
        if _same(got["weights"], wanted):
            continue
        for where, mistake, words in faults:
            wrong = run(lambda *given, m=mistake, **named: formula(*given, **named, mistake=m), kind)["weights"]
            if where == kind and _same(got["weights"], wrong):
                yield Fault(mistake, f"{kind}: {words}")
                return
        yield _first_wrong(kind, got["weights"], wanted)
        return


def _same(some: Sequence[Any], others: Sequence[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(isinstance(a, Tensor) and a.shape == b.shape and equal(a.double(), b) for a, b in pairs)


def _first_wrong(kind: str, got: Sequence[Any], wanted: Sequence[Tensor]) -> Fault:
    for number, (weight, want) in enumerate(zip(got, wanted, strict=True), start=1):
        if isinstance(weight, Tensor) and bool(torch.isnan(weight).any()):
            text = f"{kind}: NaN after update {number}: 0 / 0?"
            if kind == "a matrix":  # whose lengths are not zero
                return Fault("nan", f"{text} Not in the ratio: is step, which counts from 1, taken one lower?")
            return Fault("nan", f"{text} The ratio is 1 where a norm is zero")
        fault = compare(weight, want, f"{kind}: the weight after update {number}")
        if fault is not None:
            return fault
    return Fault("values", f"{kind}: not the formula's updates")
