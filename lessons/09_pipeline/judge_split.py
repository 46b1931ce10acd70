"""Name what is wrong with a backward pass in two halves: values, and products of matrices in the wrong half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distlab_lesson_09 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.values import compare, describe, equal

SLIPS: tuple[tuple[str, Callable[[Tensor, Tensor], Any], bool, str], ...] = (
    ("no tanh", lambda x, y: 1.0, True, "leaves tanh out: multiply by 1 - activation^2 in each"),
    ("wrong activation", lambda x, y: 1 - x.square(), True, "takes tanh' from a layer's input; use activations[k + 1]"),
    ("tanh twice", lambda x, y: 1 - y.tanh().square(), True, "takes tanh of activations that have been through it"),
    ("not transposed", lambda x, y: 1 - y.square(), False, "is multiplied by weights[k]; back through x @ w goes w.T"),
)


def true_gradients(sizes: tuple[int, int, int]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the input and of the weights, as autograd finds them."""
    weights, activations, grad = cases.split_stage(*sizes)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    first = activations[0].clone().requires_grad_()
    x = first
    for leaf in leaves:
        x = (x @ leaf).tanh()
    x.backward(grad)  # type: ignore[no-untyped-call]
    assert first.grad is not None, "it took part"
    return first.grad, [leaf.grad for leaf in leaves if leaf.grad is not None]


def judge_split(evidence: Evidence) -> Iterator[Fault]:
    """Right gradients; the input's now, the weights' later, one product a layer each."""
    for sizes, result in zip(cases.SPLIT_SIZES, evidence.results[0], strict=True):
        layers, what = sizes[0], f"{sizes[0]} layer{'s' * (sizes[0] > 1)}"
        if not result["callable"]:
            text = f"{what}: expected the input's gradient and a function to call later"
            yield Fault("returned", f"{text}; got {describe(result['weights'])} in its place")
            return
        if not result["kept"]:
            yield Fault("changed argument", f"{what}: weights, activations or grad were changed; make new tensors")
            return
        want, wanted = true_gradients(sizes)
        if (fault := compare(result["input"], want, f"{what}: the input's gradient")) is not None:
            yield _named(fault, result["input"], sizes, what)
            return
        yield from _judge_weights(result["weights"], wanted, sizes, what)
        now, later = result["products"]
        if later == 0:
            text = f"{what}: right result, but all {now} products are made before the function returns: nothing is left"
            yield Fault(
                "nothing deferred", f"{text} to fill a bubble with; keep what W needs, multiply when it is called"
            )
        elif now > layers >= later:
            text = f"{what}: right result, but {now} products are made before the function returns, where {layers} are"
            yield Fault("too much now", f"{text} enough: those of the weights belong into the function, all of them")
        elif now + later > 2 * layers:
            text = f"{what}: right result, but {now} products now and {later} later, where {layers} each are enough"
            yield Fault(
                "chain twice", f"{text}: W goes through the chain again; keep each layer's inner gradient from I"
            )


def _named(fault: Fault, got: Any, sizes: tuple[int, int, int], what: str) -> Fault:
    for code, slope, is_turned, words in SLIPS:
        weights, activations, grad = cases.split_stage(*sizes)
        for k in reversed(range(len(weights))):
            grad = grad * slope(activations[k], activations[k + 1]) @ (weights[k].T if is_turned else weights[k])
        if _same(got, grad):
            return Fault(code, f"{what}: the input's gradient {words}")
    return fault


def _same(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and equal(got, want)


def _slip_of_weights(got: list[Tensor], sizes: tuple[int, int, int]) -> Fault | None:
    """Name what the last layer's gradient was made from, if it was not its input and the gradient behind tanh."""
    _, activations, grad = cases.split_stage(*sizes)
    inner = grad * (1 - activations[-1].square())
    if _same(got[-1], activations[-2].T @ grad):
        return Fault("before tanh", "it was kept before the gradient went through tanh; keep it after")
    if _same(got[-1], activations[-1].T @ inner):
        return Fault("output for input", "it is made from the layer's output; what a weight needs is activations[k]")
    return None


def _judge_weights(got: Any, wanted: list[Tensor], sizes: tuple[int, int, int], what: str) -> Iterator[Fault]:
    if not isinstance(got, list | tuple) or len(got) != len(wanted):
        yield Fault("returned", f"{what}: expected a list of {len(wanted)} gradients, got {describe(got)}")
        return
    if len(wanted) > 1 and all(
        isinstance(one, Tensor) and one.shape == two.shape and equal(one, two)
        for one, two in zip(got, reversed(wanted), strict=True)
    ):
        yield Fault("reversed", f"{what}: the weights' gradients are those of backward's order; return layer 0's first")
        return
    for layer, (one, want) in enumerate(zip(got, wanted, strict=True)):
        if layer and any(isinstance(other, Tensor) and _same(one, other) for other in got[:layer]):
            text = f"{what}: layers share one gradient; keep a pair (input, gradient) for each"
            yield Fault("same for all", f"{text} (a function made in a loop sees the loop's last values)")
            return
        fault = compare(one, want, f"{what}: the gradient of weights[{layer}]")
        if fault is not None:
            slip = _slip_of_weights(list(got), sizes)
            if slip is not None:
                fault = Fault(slip.code, f"{fault.message}: {slip.message}")
            elif layer == 0 and len(wanted) > 1 and isinstance(one, Tensor) and equal(got[-1], wanted[-1]):
                text = f"{fault.message}. Layer {len(wanted) - 1} is right and an earlier one is not:"
                fault = Fault("gradient kept too late", f"{text} each needs the gradient at its own place in the chain")
            yield fault
            return


def budget_split(evidence: Evidence) -> list[str]:
    """Say where the products are."""
    now, later = evidence.results[0][0]["products"]
    return [f"{cases.SPLIT_SIZES[0][0]} layers: {now} products of matrices now (I), {later} later (W)"]
