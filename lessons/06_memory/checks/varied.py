"""How the calls of lesson 6's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from distlab_lesson_06.checks.halves import near_codes, use_master
from torch import Tensor, nn

from distlab.course.grading.variation.draw import Draw, Keywords, Vary
from distlab.grading import Mutant
from distlab.plan import Plan, Precision, Sharding

TAKES_NO_GROUP = "takes no group"
_FLOATS = ("float64", "float32")
_TYPES = ("float32", "bfloat16", "float16", "float64")


def _draw_states(draw: Draw) -> tuple[Any, ...]:
    replicas, shards = draw.one_of(1, draw.integer(2, 4)), draw.one_of(1, draw.integer(2, 9), draw.integer(10, 64))
    compute, master, gradients = draw.one_of(None, *_TYPES), draw.one_of(True, False), draw.one_of(*_TYPES)
    plan = Plan(
        replicas * shards,
        precision=None if compute is None else Precision(compute, master, gradients=gradients),
        sharding=Sharding(draw.one_of(3, 1, 2, 0), replicas=replicas),
    )
    num_parameters = draw.one_of(draw.integer(1, 20), draw.integer(10**3, 10**6), draw.integer(10**9, 10**12))
    return num_parameters, plan, draw.integer(0, 3)


def _draw_activations(draw: Draw) -> tuple[Any, ...]:
    tensor, heads_each = draw.one_of(1, 2, draw.integer(3, 8)), draw.integer(1, 9)
    heads = tensor * heads_each
    terms: dict[str, Any] = {"sequence": tensor * draw.integer(1, 300), "microbatch": draw.integer(1, 9)}
    if tensor > 1 or draw.integer(0, 1):  # what has a default may be left out
        terms["tensor"] = tensor
    if (parallel := draw.one_of(None, True, False)) is not None:
        terms["sequence_parallel"] = parallel
    if (recompute := draw.one_of("selective", None, "full", "none")) is not None:
        terms["recompute"] = recompute
    return heads * draw.integer(3, 40), heads, Keywords(terms)


class Block(nn.Module):
    """Multiply, and drop some of it."""

    def __init__(self, weight: Tensor, p: float) -> None:
        super().__init__()
        self.weight, self.p = nn.Parameter(weight), p

    def forward(self, x: Tensor) -> Tensor:
        """Return another value of each element."""
        return F.dropout(torch.tanh(x * self.weight), self.p, self.training) + x


def _draw_recompute(draw: Draw) -> tuple[Any, ...]:
    dtype, shape, p = draw.dtype("float64", "float32", "bfloat16"), draw.shape(), draw.one_of(0.25, 0.6)
    mode = draw.one_of("x needs a gradient", "x is data", "evaluation", "no grad")
    blocks = [Block(draw.tensor(dtype=dtype), p).train(mode != "evaluation") for _ in range(draw.integer(1, 3))]
    return blocks, draw.tensor(*shape, dtype=dtype, strided=True), draw.tensor(*shape, dtype=dtype), mode


def _use_recompute(
    fn: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], blocks: list[Block], x: Tensor, grad: Tensor, mode: str
) -> dict[str, Any]:
    """Go through a chain of blocks and back twice; return what came out and the next random number."""
    x = x.detach().requires_grad_(mode != "x is data")
    seen: dict[str, Any] = {}
    with torch.set_grad_enabled(mode != "no grad"):
        for number in ("first", "second"):
            y = x
            for block in blocks:
                y = fn(block, y)
            seen[f"the {number} output"] = y.detach()
            seen[f"has the {number} output a history"] = y.requires_grad
            if y.requires_grad:
                torch.autograd.backward(y, grad)
    return seen | {"the gradient of x": x.grad, "the next random number": torch.rand(())}


class TokenModel(nn.Module):
    """Score every next token."""

    def __init__(self, table: Tensor, scores: Tensor) -> None:
        super().__init__()
        self.table, self.scores = nn.Parameter(table), nn.Parameter(scores)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look tokens up; return scores [B, S, V]."""
        return torch.tanh(F.embedding(tokens, self.table)) @ self.scores


def _draw_accumulate(draw: Draw) -> tuple[Any, ...]:
    dtype, vocab_size, hidden = draw.dtype(*_FLOATS), draw.integer(2, 9), draw.integer(1, 4)
    table, scores = draw.tensor(vocab_size, hidden, dtype=dtype), draw.tensor(hidden, vocab_size, dtype=dtype)
    microbatches = []
    for _ in range(draw.one_of(3, 1, draw.integer(4, 6))):
        size, length = draw.integer(1, 4), draw.integer(1, 9)  # lengths differ too
        pair = (draw.tensor(size, length, dtype=torch.int64) for _ in range(2))
        inputs, targets = (tokens.remainder_(vocab_size) for tokens in pair)
        microbatches.append((inputs, targets))
    return TokenModel(table, scores), microbatches


def _use_accumulate(fn: Callable[..., float], model: TokenModel, microbatches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean as a number of the model's type: right answers add up in other orders."""
    return torch.tensor(float(fn(model, microbatches)), dtype=model.table.dtype)


def _draw_master(draw: Draw) -> tuple[Any, ...]:
    dtype, masters, gradients = draw.dtype("bfloat16", "float16"), [], []
    for _ in range(draw.one_of(2, 1, draw.integer(3, 5))):
        shape = draw.shape()
        masters.append(draw.tensor(*shape, dtype=torch.float32, strided=True))
        gradients.append(draw.tensor(*shape, dtype=torch.float32, strided=True).to(dtype))
    weights = [master.to(dtype) for master in masters]
    return weights, masters, gradients, draw.one_of(draw.number(0.0005, 0.01), draw.number(0.1, 2.0))


def _draw_eight(draw: Draw) -> tuple[Any, ...]:
    shape, largest = (
        (draw.integer(1, 9), draw.integer(1, 9)),
        draw.one_of(draw.number(0.5, 4.0), 2.0 ** draw.integer(-20, 20)),
    )
    codes = (draw.tensor(*shape, dtype=torch.float64).abs() * 1e6).long() % 256
    part = near_codes(codes.to(torch.uint8), largest, draw.tensor(*shape, dtype=torch.float32))
    owner = draw.integer(0, 9) % draw.world_size
    if draw.rank == owner:
        part[-1, -1] = largest * draw.one_of(-1, 1)
    elif draw.one_of(True, False):
        part = part * 0
    return (part,)


vary_states = Vary(_draw_states, num_calls=24)  # a call costs nothing
vary_activations = Vary(_draw_activations, num_calls=24)
vary_recompute = Vary(_draw_recompute, use=_use_recompute)
vary_repair = Vary(
    _draw_accumulate,
    use=_use_accumulate,
    left_out={
        "dims": "tokens are [B, S]",
        "empty": "the mean loss of no token is not a number",
        "layout": "a right answer may flatten targets with view(-1), as most training loops do",
    },
)
vary_master = Vary(_draw_master, use=use_master)
vary_eight = Vary(
    _draw_eight,
    num_calls=16,
    left_out={
        "dtype": "a weight is float32",
        "dims": "a weight is a matrix",
        "empty": "a part has a row at least",
        "layout": "a weight is whole in memory",
        "unequal ranks": "parts are equal",
        "sub-group": TAKES_NO_GROUP,
    },
)

WRONG_STATES = (
    Mutant("two kinds of numbers", "values", "precision=Precision(compute='float64'", 1, "one set of arguments").edit(
        "DTYPE_BYTES[precision.compute], 3", '2 if "16" in precision.compute else 4, 3'
    ),
)
WRONG_ACTIVATIONS = (
    Mutant("whole units", "values", "expected", 1, "sizes that divide").edit("sequence / hidden", "sequence // hidden"),
)
WRONG_RECOMPUTE = (
    Mutant("rows only", "raised", "not enough values", 1, "one shape").edit(
        "ctx.save_for_backward(x)", "rows, columns = x.shape\nctx.save_for_backward(x)"
    ),
    Mutant("always records", "values", "output a history", 1, "state").edit(
        "return Recompute.apply(x, anchor)", "with torch.enable_grad():\n    return Recompute.apply(x, anchor)"
    ),
)
WRONG_REPAIR = (
    Mutant("one length", "values", "the result", 1, "one size").edit(
        "sum(targets.numel() for _, targets in microbatches)",
        "sum(len(targets) for _, targets in microbatches) * microbatches[0][1].shape[1]",
    ),
    Mutant("left in evaluation", "argument changed", "model.training", 1, "state").edit(
        "mean = 0.0", "model.eval()\nmean = 0.0"
    ),
)
WRONG_MASTER = (
    Mutant("bfloat16 written down", "values", "its master, rounded", 1, "one dtype").edit(
        "copy_(master)", "copy_(master.bfloat16())"
    ),
)
WRONG_EIGHT = (
    Mutant("one shape", "raised", "is invalid for input of size", 1, "one shape").edit(
        "torch.cat(parts)", "torch.cat(parts).view(-1, 7)"
    ),
)
