"""The bubble in closed form, and the backward pass in two halves that fills it: values, and when products are made."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import describe, seeded
from distlab.course.grading.exercise import Refused
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant

BUBBLES = ((4, 1, 1), (4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 32, 4), (1, 4, 1))
MADE_NOW, MADE_LATER = "products of matrices before it returns", "products of matrices when W is called"


def _draw_bubble(draw: Draw) -> tuple[int, ...]:
    case = draw.one_of(1, draw.integer(2, 9), draw.integer(10, 500)), draw.one_of(1, draw.integer(2, 99))
    return (*case, draw.integer(2, 9)) if draw.one_of("given", "default") == "given" else case


def _use_bubble(fn: Callable[..., Any], num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Any:
    """Return a float: any kind of number serves."""
    got = fn(num_ranks, num_microbatches, *[stages_per_rank] * (stages_per_rank > 1))
    return float(got) if isinstance(got, Real) and not isinstance(got, bool) else got


def budget_bubble(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    first = next(iter(evidence.results[0].values()))["result"]
    return [f"{len(BUBBLES)} cases; 4 ranks and 1 micro-batch idle {first:.0%}"]


class Products(TorchDispatchMode):
    """Count products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        self.count += name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
        return func(*args, **(kwargs or {}))


def _passes(weights: list[Tensor], *given: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Return the weights, and for each pair of an input and a gradient the activations and this gradient."""
    passes: list[Any] = []
    for x, grad in zip(given[::2], given[1::2], strict=True):
        activations = [x]
        for weight in weights:
            activations.append(torch.tanh(activations[-1] @ weight))
        passes += [[x.to(dtype) for x in activations], grad.to(dtype)]
    return ([weight.to(dtype) for weight in weights], *passes)


def _split_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    found = {}
    for layers, width, samples in ((3, 5, 4), (1, 3, 2)):
        weights = [seeded(k, width, width, purpose="split") / width**0.5 for k in range(layers)]
        given = [seeded(one, samples, width, purpose="split") for one in (-1, -2, -3, -4)]
        found[f"{layers} layer{'s' * (layers > 1)}"] = _passes(weights, *given)
    return found


def _draw_split(draw: Draw) -> tuple[Any, ...]:
    dtype, width, num_layers = draw.dtype("float64", "float32", "bfloat16"), draw.integer(1, 5), draw.integer(1, 4)
    samples = draw.one_of(draw.integer(2, 4), 1, 0, draw.integer(1, 6))
    if dtype == torch.float64:  # only there lost precision shows
        samples = max(samples, 1)
    weights = [draw.tensor(width, width, strided=True) / width**0.5 for _ in range(num_layers)]
    return _passes(weights, *(draw.tensor(samples, width, strided=True) for _ in range(4)), dtype=dtype)


def _use_split(
    fn: Callable[..., Any],
    weights: list[Tensor],
    activations: list[Tensor],
    grad: Tensor,
    next_activations: list[Tensor],
    next_grad: Tensor,
) -> dict[str, Any]:
    """Go back through two micro-batches before the weights' gradients of the first are asked for."""
    with Products() as now:
        got = fn(weights, activations, grad)
    if not isinstance(got, tuple | list) or len(got) != 2 or not callable(got[1]):
        raise Refused("returned", f"expected the input's gradient and a function to call later, got {describe(got)}")
    next_input, next_later = fn(weights, next_activations, next_grad)
    with Products() as after:
        later = got[1]()
    gradients = list(later) if isinstance(later, tuple | list) else later
    return {
        "the input's gradient": got[0],
        "the weights' gradients": gradients,
        "the next micro-batch": [next_input, next_later()],
        MADE_NOW: max(now.count, len(weights)),
        MADE_LATER: max(after.count, len(weights)),
    }


def budget_split(evidence: Evidence) -> list[str]:
    """Say where the products are."""
    name, made = next(iter(evidence.results[0].items()))
    now, later = made["result"][MADE_NOW], made["result"][MADE_LATER]
    return [f"{name}: {now} products of matrices now (I), {later} later (W)"]


drive_bubble = Cases(
    {
        f"{p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}, {v} stage{'s' * (v > 1)} per rank": (p, m, v)
        for p, m, v in BUBBLES
    },
    _use_bubble,
)
vary_bubble = Vary(_draw_bubble, use=_use_bubble)
drive_split = Cases(_split_cases, _use_split)
vary_split = Vary(_draw_split, use=_use_split, left_out={"dims": "the text asks for [B, H]"})

_SHARE, _IDLE = "idle / (busy + idle)", "idle = num_ranks - 1"
_SHRINKS = "it lets idle time grow with the stages per rank; it shrinks, since a stage is that much smaller"
WRONG_BUBBLE = (
    Mutant("over busy", "idle over busy", "it is idle time over busy time; divide by the sum of both", 1).edit(
        "(busy + idle)", "busy"
    ),
    Mutant("busy", "busy", "it is the part which is busy; the bubble is the rest", 1).edit("idle / (", "busy / ("),
    Mutant(
        "one stage", "stages per rank", "stages_per_rank is not used: with several of them, a rank is idle for less", 1
    ).without("stages_per_rank * "),
    Mutant("old total", "old total", "less idle time makes the total shorter too; divide by the new total", 1)
    .without("stages_per_rank * ")
    .edit("idle / (", "idle / stages_per_rank / ("),
    Mutant(
        "p", "off by one", "a micro-batch is handed over p - 1 times until the last of p ranks has it, not p", 1
    ).edit("num_ranks - 1", "num_ranks"),
    Mutant(
        "one micro-batch", "naive", "it is right for one micro-batch; with more, ranks work at the same time", 1
    ).edit(_SHARE, "1 - 1 / num_ranks"),
    Mutant("per cent", "per cent", "it is in per cent; return a part of 1", 1).edit(_SHARE, f"100 * {_SHARE}"),
    Mutant("stages as ranks", "stages as ranks too", _SHRINKS, 1).edit(_IDLE, "idle = stages_per_rank * num_ranks - 1"),
    Mutant("stages for ranks", "stages as ranks", _SHRINKS, 1)
    .edit(_IDLE, "idle = stages_per_rank * num_ranks - 1")
    .edit("busy = stages_per_rank * num", "busy = num"),
    Mutant(
        "there and back", "twice idle", "idle time is counted for forward and for backward; a stage's time has both", 1
    ).edit(_IDLE, "idle = 2 * (num_ranks - 1)"),
    Mutant(
        "stages twice", "stages twice", "it divides by stages_per_rank twice; the busy part alone grows with it", 1
    ).edit(_IDLE, "idle = (num_ranks - 1) / stages_per_rank"),
    Mutant("eight ranks", "values", "expected", 1, "one set of arguments").edit(
        "num_ranks - 1", "min(num_ranks, 8) - 1"
    ),
)

_PRODUCTS = "[x.T @ inner for x, inner in reversed(later)]"
_TANH, _KEEP = "grad = grad * (1 - activations[k + 1].square())", "later.append((activations[k], grad))"
_SLOPE = "(1 - activations[k + 1].square())"
_BACK = "grad = grad @ weights[k].T"
_SHARED = "layers share one gradient: a function sees a variable's last value; keep a pair (input, gradient) for each"
WRONG_SPLIT = (
    Mutant(
        "now",
        "nothing deferred",
        "all products are made before the function returns, and nothing is left to fill a bubble with; keep what W "
        "needs, multiply when it is called",
        1,
    )
    .edit("(activations[k], grad)", "activations[k].T @ grad")
    .edit(_PRODUCTS, "later[::-1]"),
    Mutant("one now", "too much now", "a weight's product is made before the function returns; all belong into W", 1)
    .edit("def weight_gradients", "x, inner = later.pop(0)\nlast = x.T @ inner\n\ndef weight_gradients")
    .edit(_PRODUCTS, f"{_PRODUCTS} + [last]"),
    Mutant(
        "loop variable",
        "same for all",
        _SHARED,
        1,
    )
    .edit(_KEEP, "x, inner = activations[k], grad\nlater.append(lambda: x.T @ inner)")
    .edit(_PRODUCTS, "[multiply() for multiply in reversed(later)]"),
    Mutant("last inner", "same for all", _SHARED, 1).edit(_PRODUCTS, "[x.T @ later[-1][1] for x, _ in later[::-1]]"),
    Mutant("behind the weight", "behind", "W keeps the gradient behind the product with weights[k]; keep it before", 1)
    .without(_KEEP)
    .edit(_BACK, f"{_BACK}\n{_KEEP}"),
    Mutant(
        "before tanh", "before tanh", "what W needs was kept before the gradient went through tanh; keep it after", 1
    ).edit(f"{_TANH}\n{_KEEP}", f"{_KEEP}\n{_TANH}"),
    Mutant(
        "product first",
        "product first",
        "it goes back through x @ w, then through tanh; a layer ends with tanh, so begin with it",
        1,
    )
    .edit(f"{_TANH}\n{_KEEP}", _KEEP)
    .edit(_BACK, f"{_BACK} * {_SLOPE}"),
    Mutant("twice", "chain twice", "W goes through the chain again; keep each layer's inner gradient from I", 1)
    .edit("later = []", "later, last = [], grad")
    .without(_KEEP)
    .edit(
        f"return {_PRODUCTS}",
        f"""
        grad = last
        for k in reversed(range(len(weights))):
            {_TANH}
            {_KEEP}
            {_BACK}
        return {_PRODUCTS}
        """,
    ),
    Mutant("reversed", "reversed", "the weights' gradients are in backward's order; return layer 0's first", 1).edit(
        "reversed(later)", "later"
    ),
    Mutant("no tanh", "no tanh", "tanh is left out; multiply by 1 - activation^2 in each layer", 1).without(_TANH),
    Mutant(
        "last gradient", "one gradient", "every weight gets the last layer's gradient; keep each layer's own", 1
    ).edit("x.T @ inner", "x.T @ later[0][1]"),
    Mutant("of the input", "wrong activation", "tanh' is taken of a layer's input; use activations[k + 1]", 1).edit(
        _SLOPE, "(1 - activations[k].square())"
    ),
    Mutant(
        "tanh again", "tanh twice", "tanh is taken of activations that have been through it; they are tanh(z)", 1
    ).edit(_SLOPE, "(1 - activations[k + 1].tanh().square())"),
    Mutant("not squared", "not squared", "tanh' is taken for 1 - y; it is 1 - y^2, with the square", 1).without(
        ".square()"
    ),
    Mutant("no transpose", "not transposed", "it multiplies by weights[k]; back through x @ w goes w.T", 1).edit(
        "weights[k].T", "weights[k]"
    ),
    Mutant(
        "output for input", "output for input", "W multiplies a layer's output; what it needs is activations[k]", 1
    ).edit("(activations[k], grad)", "(activations[k + 1], grad)"),
    Mutant("sigmoid", "sigmoid", "it takes the derivative of the sigmoid, y (1 - y); that of tanh is 1 - y^2", 1).edit(
        _SLOPE, "activations[k + 1] * (1 - activations[k + 1])"
    ),
    Mutant("list kept", "values", "the weights' gradients", 1, "one call", preamble="_later = []").edit(
        "later = []", "later = _later\nlater.clear()"
    ),
    Mutant("default dtype", "dtype", "take the dtype from the argument", 1, "one dtype").edit(
        "return [x.T @ inner for", "return [x.T.double() @ inner.double() for"
    ),
    Mutant("one tanh", "one tanh", "the gradient goes through one tanh alone: each layer ends with one", 1).edit(
        _TANH, f"grad = grad * {_SLOPE} if k == len(weights) - 1 else grad"
    ),
)
