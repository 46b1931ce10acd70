"""The bubble in closed form, and the backward pass in two halves that fills it: values, and when products are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import compare, describe, equal, numbers_differ, seeded

BUBBLE_CASES = ((4, 1, 1), (4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 32, 4), (1, 4, 1))
SPLIT_SIZES = ((3, 5, 4), (1, 3, 2))  # layers, width, samples


def drive_bubble(fn: Callable[[int, int, int], Any]) -> list[Any]:
    """Ask for the bubble of each case."""
    return [fn(*case) for case in BUBBLE_CASES]


def judge_bubble(evidence: Evidence) -> Iterator[Fault]:
    """Idle over total, with stages that get smaller when a rank has several."""
    for (p, m, v), got in zip(BUBBLE_CASES, evidence.results[0], strict=True):
        asked = f"{p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}, {v} stage{'s' * (v > 1)} per rank"
        if isinstance(got, bool) or not isinstance(got, Real):
            yield Fault("returned", f"{asked}: expected a number, got {describe(got)}")
        number, want = float(got), (p - 1) / (v * m + p - 1)
        if abs(number - want) > 1e-9:
            text = f"{asked}: {numbers_differ(number, want)}"
            for code, (wrong, words) in _wrong_forms(p, m, v).items():
                if abs(number - wrong) <= 1e-9:
                    yield Fault(code, f"{text}: {words}")
            yield Fault("values", text)


def _wrong_forms(p: int, m: int, v: int) -> dict[str, tuple[float, str]]:
    """Return what other formulas give, and what to say of each."""
    want, grows = (p - 1) / (v * m + p - 1), "idle time does not grow with stages per rank, it shrinks"
    return {
        "idle over busy": ((p - 1) / (v * m), "that is idle time over busy time; divide by the sum of both"),
        "busy": (1 - want, "that is the part which is busy"),
        "stages per rank": ((p - 1) / (m + p - 1), "several stages per rank divide the idle time: a stage is smaller"),
        "old total": ((p - 1) / v / (m + p - 1), "less idle time makes the total shorter too: divide by the new total"),
        "off by one": (p / (v * m + p), "from the first of p ranks to the last there are p - 1 hand-overs"),
        "stages as ranks": ((v * p - 1) / (m + v * p - 1), grows),
        "stages as ranks too": ((v * p - 1) / (v * m + v * p - 1), grows),
        "naive": (1 - 1 / p, "that is one micro-batch; with more, ranks work at the same time"),
        "per cent": (100 * want, "that is per cent; return a part of 1"),
    }


def budget_bubble(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{len(BUBBLE_CASES)} cases; 4 ranks and 1 micro-batch idle {float(evidence.results[0][0]):.0%}"]


class Products(TorchDispatchMode):
    """Count products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        self.count += name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
        return func(*args, **(kwargs or {}))


def split_stage(layers: int, width: int, samples: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return weights, activations and the gradient of the last one."""
    weights = [seeded(k, width, width, purpose="split") / width**0.5 for k in range(layers)]
    activations = [seeded(-1, samples, width, purpose="split input")]
    for weight in weights:
        activations.append(torch.tanh(activations[-1] @ weight))
    return weights, activations, seeded(-1, samples, width, purpose="split grad")


def drive_split(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Split the backward pass of two stages; count products before and after the call of the deferred part."""
    results = []
    for sizes in SPLIT_SIZES:
        weights, activations, grad = split_stage(*sizes)
        kept = [tensor.clone() for tensor in (*weights, *activations, grad)]
        with Products() as now:
            got = fn(weights, activations, grad)
        grad_input, later = got if isinstance(got, tuple | list) and len(got) == 2 else (got, None)
        with Products() as after:
            gradients = later() if callable(later) else later
        results.append(
            {
                "input": grad_input,
                "callable": callable(later),
                "weights": gradients,
                "products": (now.count, after.count),
                "kept": all(map(torch.equal, kept, (*weights, *activations, grad))),
            }
        )
    return results


SLIPS: tuple[tuple[str, Callable[[Tensor, Tensor], Any], bool, str], ...] = (
    ("no tanh", lambda x, y: 1.0, True, "leaves tanh out: multiply by 1 - activation^2 in each"),
    ("wrong activation", lambda x, y: 1 - x.square(), True, "takes tanh' from a layer's input; use activations[k + 1]"),
    ("tanh twice", lambda x, y: 1 - y.tanh().square(), True, "takes tanh of activations that have been through it"),
    ("not transposed", lambda x, y: 1 - y.square(), False, "is multiplied by weights[k]; back through x @ w goes w.T"),
)


def _true_gradients(sizes: tuple[int, int, int]) -> list[Tensor]:
    """Return the gradients of the input and of the weights, as autograd finds them."""
    weights, activations, grad = split_stage(*sizes)
    leaves = [tensor.clone().requires_grad_() for tensor in (activations[0], *weights)]
    x = leaves[0]
    for leaf in leaves[1:]:
        x = (x @ leaf).tanh()
    return list(torch.autograd.grad(x, leaves, grad))


def judge_split(evidence: Evidence) -> Iterator[Fault]:
    """Right gradients; the input's now, the weights' later, one product per layer each."""
    for sizes, result in zip(SPLIT_SIZES, evidence.results[0], strict=True):
        layers, what = sizes[0], f"{sizes[0]} layer{'s' * (sizes[0] > 1)}"
        if not result["callable"]:
            text = f"{what}: expected the input's gradient and a function to call later"
            yield Fault("returned", f"{text}; got {describe(result['weights'])} in its place")
        if not result["kept"]:
            yield Fault("changed argument", f"{what}: weights, activations or grad were changed; make new tensors")
        want, *wanted = _true_gradients(sizes)
        if (fault := compare(result["input"], want, f"{what}: the input's gradient")) is not None:
            yield _named(fault, result["input"], sizes, what)
        yield from _judge_weights(result["weights"], wanted, sizes, what)
        now, later = result["products"]
        text = f"{what}: right result, but"
        if later == 0:
            text = f"{text} all {now} products are made before the function returns: nothing is left to fill a bubble"
            yield Fault("nothing deferred", f"{text} with; keep what W needs, multiply when it is called")
        elif now > layers >= later:
            text = f"{text} {now} products are made before the function returns, where {layers} are enough: those of"
            yield Fault("too much now", f"{text} the weights belong into the function, all of them")
        elif now + later > 2 * layers:
            text = f"{text} {now} products now and {later} later, where {layers} each are enough: W goes through the"
            yield Fault("chain twice", f"{text} chain again; keep each layer's inner gradient from I")


def _named(fault: Fault, got: Any, sizes: tuple[int, int, int], what: str) -> Fault:
    for code, slope, is_turned, words in SLIPS:
        weights, activations, grad = split_stage(*sizes)
        for k in reversed(range(len(weights))):
            grad = grad * slope(activations[k], activations[k + 1]) @ (weights[k].T if is_turned else weights[k])
        if _same(got, grad):
            return Fault(code, f"{what}: the input's gradient {words}")
    weights, activations, grad = split_stage(*sizes)
    for k in reversed(range(len(weights))):
        grad = grad @ weights[k].T * (1 - activations[k + 1].square())
    if _same(got, grad):
        text = f"{what}: the input's gradient goes back through x @ w and then through tanh"
        return Fault("product first", f"{text}; a layer ends with tanh, so the way back begins with it")
    return fault


def _same(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and equal(got, want)


def _judge_weights(got: Any, wanted: list[Tensor], sizes: tuple[int, int, int], what: str) -> Iterator[Fault]:
    if not isinstance(got, list | tuple) or len(got) != len(wanted):
        yield Fault("returned", f"{what}: expected a list of {len(wanted)} gradients, got {describe(got)}")
    if len(wanted) > 1 and all(map(_same, got, reversed(wanted))):
        yield Fault("reversed", f"{what}: the weights' gradients are those of backward's order; return layer 0's first")
    weights, activations, grad = split_stage(*sizes)
    for layer, (one, want) in enumerate(zip(got, wanted, strict=True)):
        if any(_same(one, other) for other in got[:layer]):
            text = f"{what}: layers share one gradient; keep a pair (input, gradient) for each"
            yield Fault("same for all", f"{text} (a function made in a loop sees the loop's last values)")
        fault = compare(one, want, f"{what}: the gradient of weights[{layer}]")
        if fault is None:
            continue
        if _same(got[-1], activations[-2].T @ grad):
            text = f"{fault.message}: it was kept before the gradient went through tanh; keep it after"
            yield Fault("before tanh", text)
        if _same(got[-1], activations[-2].T @ (grad * (1 - activations[-1].square()) @ weights[-1].T)):
            text = f"{fault.message}: it was kept after the gradient went on through weights[k]; keep it before"
            yield Fault("behind the weight", text)
        if _same(got[-1], activations[-1].T @ (grad * (1 - activations[-1].square()))):
            text = f"{fault.message}: it is made from the layer's output; what a weight needs is activations[k]"
            yield Fault("output for input", text)
        if layer == 0 and len(wanted) > 1 and isinstance(one, Tensor) and _same(got[-1], wanted[-1]):
            text = f"{fault.message}. Layer {len(wanted) - 1} is right and an earlier one is not:"
            yield Fault("gradient kept too late", f"{text} each needs the gradient at its own place in the chain")
        yield fault


def budget_split(evidence: Evidence) -> list[str]:
    """Say where the products are."""
    now, later = evidence.results[0][0]["products"]
    return [f"{SPLIT_SIZES[0][0]} layers: {now} products of matrices now (I), {later} later (W)"]


WRONG_BUBBLES = (
    Mutant("over busy", "idle over busy", "divide by the sum of both", 1).edit("(busy + idle)", "busy"),
    Mutant("busy", "busy", "the part which is busy", 1).edit("idle / (", "busy / ("),
    Mutant("one stage", "stages per rank", "a stage is smaller", 1).without("stages_per_rank * "),
    Mutant("old total", "old total", "divide by the new total", 1)
    .without("stages_per_rank * ")
    .edit("idle / (", "idle / stages_per_rank / ("),
    Mutant("p", "off by one", "p - 1 hand-overs", 1).edit("num_ranks - 1", "num_ranks"),
    Mutant("one micro-batch", "naive", "ranks work at the same time", 1).edit(
        "idle / (busy + idle)", "1 - 1 / num_ranks"
    ),
    Mutant("per cent", "per cent", "a part of 1", 1).edit("idle / (busy + idle)", "100 * idle / (busy + idle)"),
    Mutant("stages as ranks", "stages as ranks too", "it shrinks", 1).edit(
        "idle = num_ranks - 1", "idle = stages_per_rank * num_ranks - 1"
    ),
)

_PRODUCTS = "[x.T @ inner for x, inner in reversed(later)]"
_THROUGH_TANH = "grad = grad * (1 - activations[k + 1].square())"
_KEEP = "later.append((activations[k], grad))"

WRONG_SPLITS = (
    Mutant("now", "nothing deferred", "to fill a bubble with", 1)
    .edit("(activations[k], grad)", "activations[k].T @ grad")
    .edit(_PRODUCTS, "later[::-1]"),
    Mutant("one now", "too much now", "4 products are made before", 1)
    .edit("def weight_gradients", "x, inner = later.pop(0)\nlast = x.T @ inner\n\ndef weight_gradients")
    .edit(_PRODUCTS, f"{_PRODUCTS} + [last]"),
    Mutant("loop variable", "same for all", "the loop's last values", 1)
    .edit(_KEEP, "x, inner = activations[k], grad\nlater.append(lambda: x.T @ inner)")
    .edit(_PRODUCTS, "[multiply() for multiply in reversed(later)]"),
    Mutant("behind the weight", "behind the weight", "keep it before", 1)
    .without("later.append((activations[k], grad))")
    .edit("grad = grad @ weights[k].T", "grad = grad @ weights[k].T\nlater.append((activations[k], grad))"),
    Mutant("before tanh", "before tanh", "went through tanh; keep it after", 1).edit(
        f"{_THROUGH_TANH}\n{_KEEP}", f"{_KEEP}\n{_THROUGH_TANH}"
    ),
    Mutant("product first", "product first", "the way back begins with it", 1)
    .edit(f"{_THROUGH_TANH}\n{_KEEP}", _KEEP)
    .edit("grad = grad @ weights[k].T", "grad = grad @ weights[k].T * (1 - activations[k + 1].square())"),
    Mutant("twice", "chain twice", "3 products now and 6 later", 1)
    .edit("later = []", "later, last = [], grad")
    .without(_KEEP)
    .edit(
        f"return {_PRODUCTS}",
        f"""
        grad = last
        for k in reversed(range(len(weights))):
            {_THROUGH_TANH}
            {_KEEP}
            grad = grad @ weights[k].T
        return {_PRODUCTS}
        """,
    ),
    Mutant("reversed", "reversed", "layer 0's first", 1).edit("reversed(later)", "later"),
    Mutant("no tanh", "no tanh", "leaves tanh out", 1).without(_THROUGH_TANH),
    Mutant("last gradient", "gradient kept too late", "its own place in the chain", 1).edit(
        "x.T @ inner", "x.T @ later[0][1]"
    ),
)
