"""LARS and LAMB: compare each update with those that the known mistakes would make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import compare, equal, seeded

NO_UPDATE = "a gradient of zeros and no decay"
LARS_RATES = (0.5, 0.5, 0.05)  # the last rate is lower: is it inside the buffer?


LARS_FAULTS: Mapping[str, Mapping[str, str]] = {
    "a matrix": {
        "decay not in the ratio": (
            "the ratio was taken without the decay: its denominator is |gradient| + decay * |weight|, or a large "
            "weight makes the step longer than was asked"
        ),
        "no ratio": "that is plain SGD: the ratio is missing",
        "upside down": "the ratio is upside down: a long weight takes long steps, |weight| goes on top",
        "no coefficient": "the coefficient is not in the ratio",
        "no decay": "decay is in the ratio but not in the update: add decay * weight to the gradient",
        "rate outside the buffer": (
            "the first updates are right, and the one after the rate fell is not: the rate belongs inside the buffer"
        ),
        "norm of the sum": (
            "the denominator is the length of gradient + decay * weight; the two lengths are added, |gradient| + "
            "decay * |weight|"
        ),
        "no momentum": "the first update is right, the second is not: momentum * buffer is missing",
        "dampened": "the new part of the buffer is multiplied by 1 - momentum; LARS adds it in full",
        "ratio outside the buffer": (
            "the ratio multiplies the whole buffer; it belongs to the new part only, as the rate does"
        ),
        "rate twice": "the rate is in the buffer and applied to it once more",
        "uphill": "the buffer is added to the weight; it is taken from it",
    },
    "a bias": {
        "vectors adapted": "a tensor of one dimension is left out of the ratio and of decay",
        "vectors decayed": "decay changes a bias: a tensor of one dimension has no decay",
    },
    "a weight of zeros": {
        "stuck at zero": "a weight of zeros has ratio 0 and can never leave: take 1 where a norm is zero",
    },
    "a gradient of zeros": {},
    NO_UPDATE: {},
}


LAMB_FAULTS: Mapping[str, Mapping[str, str]] = {
    "a matrix": {
        "not corrected": (
            "the running means are not corrected for their start at zero: divide by 1 - 0.9^step and 1 - 0.999^step"
        ),
        "ratio before correction": (
            "the ratio was taken of an update that is not corrected, and the step made with one that is: correct first"
        ),
        "decay outside the ratio": "decay was added after the ratio: it is part of the update that is measured",
        "returns corrected": (
            "the first update is right, the second is not: the corrected means were returned, and are corrected again"
        ),
        "one step ahead": "the correction is that of the next update: step counts from 1 already",
        "only the mean corrected": "the square is not corrected: divide it by 1 - 0.999^step, too",
        "no root": "the mean is divided by the square itself; take its root",
        "eps under the root": "1e-6 is added under the root; add it to the root instead",
        "no rate": "the step is not multiplied by lr",
        "no decay": "decay * weight is missing in the update",
        "no ratio": "that is AdamW: the ratio |weight| / |update| is missing",
        "ratio of the gradient": "the ratio was taken with the gradient's length; it is the update's that counts",
        "weight's norm clipped": "the weight's norm is clipped at 10, which the paper does not do",
    },
    "a weight of zeros": {
        "stuck at zero": "a weight of zeros has ratio 0 and can never leave: take 1 where a norm is zero",
    },
    "a gradient of zeros": {},
    NO_UPDATE: {},
}


def tensors(kind: str) -> tuple[Tensor, Tensor]:
    """Return a weight and a gradient of a kind."""
    shape = (4,) if kind == "a bias" else (3, 4)
    weight, gradient = 5 * seeded(0, *shape, purpose="weight"), seeded(0, *shape, purpose="gradient")
    if kind == "a weight of zeros":
        weight = torch.zeros_like(weight)
    if kind.startswith("a gradient of zeros"):
        gradient = torch.zeros_like(gradient)
    return weight, gradient


def drive_lars(fn: Callable[..., Any]) -> dict[str, Any]:
    """Make some updates of a tensor of each kind."""
    return {kind: lars_run(fn, kind) for kind in LARS_FAULTS}


def lars_run(fn: Callable[..., Any], kind: str) -> dict[str, Any]:
    """Return the weight after each update, and whether an argument was changed."""
    settings = {"momentum": 0.9, "decay": 0.0 if kind == NO_UPDATE else 0.1, "coefficient": 0.02}
    return _run(fn, kind, ("buffer",), [settings | {"lr": lr} for lr in LARS_RATES])


def drive_lamb(fn: Callable[..., Any]) -> dict[str, Any]:
    """Make some updates of a tensor of each kind."""
    return {kind: lamb_run(fn, kind) for kind in LAMB_FAULTS}


def lamb_run(fn: Callable[..., Any], kind: str) -> dict[str, Any]:
    """Return the weight after each update, and whether an argument was changed."""
    settings = {"lr": 0.1, "decay": 0.0 if kind == NO_UPDATE else 0.1}
    return _run(fn, kind, ("mean", "square"), [settings | {"step": step} for step in (1, 2, 3)])


def _run(
    fn: Callable[..., Any], kind: str, states: tuple[str, ...], updates: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Make updates; in those that have a step the gradient grows with it. States begin as zeros."""
    weight, gradient = tensors(kind)
    held: list[Any] = [torch.zeros_like(weight) for _ in states]
    weights, changed = [], ""
    for named in updates:
        given = [weight, gradient * (1 + named.get("step", 0)), *held]
        before = [tensor.clone() for tensor in given]
        result = fn(*given, **named)
        pairs = zip(("weight", "gradient", *states), given, before, strict=True)
        changed = changed or next((name for name, now, was in pairs if not _kept(now, was)), "")
        if not (isinstance(result, tuple | list) and len(result) == 1 + len(states)):
            return {"returned": repr(result), "weights": weights, "changed": changed}
        weight, *held = (tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in result)
        weights.append(weight)
    return {"weights": weights, "changed": changed}


def _kept(now: Tensor, was: Tensor) -> bool:
    return torch.equal(now.nan_to_num(7.0), was.nan_to_num(7.0))


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


def judge_lars(evidence: Evidence) -> Iterator[Fault]:
    """Compare updates of every kind of tensor with the formula's."""
    yield from _judge(evidence.results[0], lars, lars_run, LARS_FAULTS)


def judge_lamb(evidence: Evidence) -> Iterator[Fault]:
    """Compare updates of every kind of tensor with the formula's."""
    yield from _judge(evidence.results[0], lamb, lamb_run, LAMB_FAULTS)


def _judge(
    results: dict[str, Any],
    formula: Callable[..., Any],
    run: Callable[..., dict[str, Any]],
    faults: Mapping[str, Mapping[str, str]],
) -> Iterator[Fault]:
    for kind, mistakes in faults.items():
        got = results[kind]
        if "returned" in got:
            yield Fault("returned", f"{kind}: expected a tuple of new tensors, got {got['returned'][:80]}")
        if got["changed"]:
            text = f"{kind}: the argument {got['changed']} was changed; the caller still needs it"
            yield Fault("changed argument", f"{text}: return new tensors")
        wanted = run(formula, kind)["weights"]
        if _same(got["weights"], wanted):
            continue
        for mistake, words in mistakes.items():
            wrong = run(functools.partial(formula, mistake=mistake), kind)["weights"]
            if _same(got["weights"], wrong):
                yield Fault(mistake, f"{kind}: {words}")
        yield _first_wrong(kind, got["weights"], wanted)


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


_UPDATE = "lr * ratio * (gradient + decay * weight)"
WRONG_LARS = (
    Mutant("decay left out", "decay not in the ratio", "its denominator is |gradient| + decay", 1, 67).edit(
        "weight_norm / update_norm", "weight_norm / gradient.norm()"
    ),
    Mutant("one length", "norm of the sum", "two lengths are added", 1, "common").edit(
        "gradient.norm() + decay * weight_norm", "(gradient + decay * weight).norm()"
    ),
    Mutant("biases too", "vectors adapted", "left out of the ratio", 1, 67).edit("weight.dim() == 1", "False"),
    Mutant("stuck at zero", "stuck at zero", "can never leave", 1, 55).without("weight_norm > 0 and "),
    Mutant("rate outside", "rate outside the buffer", "after the rate fell", 1, "SGD")
    .edit("lr * ratio *", "ratio *")
    .edit("weight - buffer", "weight - lr * buffer"),
    Mutant("upside down", "upside down", "|weight| goes on top", 1, "common").edit(
        "weight_norm / update_norm", "update_norm / weight_norm"
    ),
    Mutant("decays biases", "vectors decayed", "decay changes a bias", 1, 55).edit("decay = 0.0", "pass"),
    Mutant("in place", "changed argument", "the argument buffer was changed", 1, "common").edit(
        f"buffer = momentum * buffer + {_UPDATE}", f"buffer.mul_(momentum).add_({_UPDATE})"
    ),
)
WRONG_LAMBS = (
    Mutant("not corrected", "not corrected", "divide by 1 - 0.9^step", 1, 53).edit(
        "(mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt()", "mean / (square.sqrt()"
    ),
    Mutant("corrected too late", "ratio before correction", "correct first", 1, 53).edit(
        "weight_norm, update_norm = weight.norm(), update.norm()",
        "weight_norm, update_norm = weight.norm(), (mean / (square.sqrt() + 1e-6) + decay * weight).norm()",
    ),
    Mutant("returns corrected", "returns corrected", "corrected again", 1, "common").edit(
        "update, mean, square", "update, mean / (1 - 0.9**step), square / (1 - 0.999**step)"
    ),
    Mutant("decay outside", "decay outside the ratio", "after the ratio", 1, "AdamW")
    .without(" + decay * weight")
    .edit("ratio * update", "ratio * update - lr * decay * weight"),
    Mutant("clipped", "weight's norm clipped", "clipped at 10", 1, 54).edit(
        "= weight.norm()", "= weight.norm().clamp(0, 10)"
    ),
    Mutant("stuck at zero", "stuck at zero", "can never leave", 1, 55).without("weight_norm > 0 and "),
    Mutant("divides by zero", "nan", "0 / 0", 1, 54).without(" and update_norm > 0"),
    Mutant("of the gradient", "ratio of the gradient", "it is the update's", 1, "LARS").edit(
        "update.norm()", "gradient.norm()"
    ),
)
