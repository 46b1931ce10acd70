"""How the calls of lesson 8's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch
from distlab_lesson_08.checks.clip import use_clip
from distlab_lesson_08.checks.embedding import use_embed
from distlab_lesson_08.checks.entropy import use_entropy
from distlab_lesson_08.checks.linear import use_cut, use_heads
from distlab_lesson_08.checks.pairs import use_mlp, use_pair
from distlab_lesson_08.checks.sequence import SHARES, use_drop, use_sequence
from torch import Tensor

from distlab.course.grading.variation.draw import Draw, Vary

CONTIGUOUS = "torch.distributed sends contiguous tensors only"
TAKES_NO_GROUP = "takes no group"
ALIKE = "all ranks hold parts of one size"
MATRIX = "a weight has two dims"
HOLDS = "a weight holds elements"
_FLOATS = ("float64", "float32")
_TYPES = (*_FLOATS, "bfloat16")


def _draw_cut(draw: Draw) -> tuple[Any, ...]:
    num_ranks, dtype = draw.one_of(2, draw.integer(3, 5), 1, draw.integer(6, 9)), draw.dtype(*_TYPES)
    rows, columns = num_ranks * draw.integer(1, 4), num_ranks * draw.integer(1, 4)
    weight, bias = draw.tensor(rows, columns, dtype=dtype, strided=True), draw.tensor(rows, dtype=dtype)
    return weight, bias, draw.one_of("column", "row"), num_ranks


def _draw_heads(draw: Draw) -> tuple[Any, ...]:
    num_ranks, dtype = draw.one_of(2, 1, draw.integer(3, 6)), draw.dtype(*_TYPES)
    num_shared = draw.integer(1, 3) * (num_ranks if draw.one_of(True, True, False) else 1)
    num_heads = num_shared * draw.integer(1, 3)
    weight = draw.tensor(
        (num_heads + 2 * num_shared) * draw.integer(1, 4), draw.integer(1, 5), dtype=dtype, strided=True
    )
    return weight, num_heads, num_shared, num_ranks, draw.integer(0, 59) % num_ranks


def _cut(draw: Draw, *shape: int, dtype: Any, same: bool = False) -> Tensor:
    """Return a tensor whose clone is contiguous, though every second one of these is not: torch sends no other."""
    whole = draw.tensor(*shape, 2, dtype=dtype, same=same)
    return whole[..., 0] if (draw.seed + draw.call) % 2 else whole[..., 0].contiguous()


def _draw_pair(draw: Draw) -> tuple[Any, ...]:
    dtype, of_f, of_g = draw.dtype(*_TYPES), draw.shape(), draw.shape()
    x, grad_of_f = _cut(draw, *of_f, dtype=dtype, same=True), _cut(draw, *of_f, dtype=dtype)
    return x, grad_of_f, _cut(draw, *of_g, dtype=dtype), _cut(draw, *of_g, dtype=dtype, same=True)


def _draw_mlp(draw: Draw) -> tuple[Any, ...]:
    dtype, n = draw.dtype(*_FLOATS), draw.world_size
    hidden = draw.integer(1, 3) * (3 if n == 3 else 1)
    wide, shape = 4 * hidden // n, (draw.one_of(2, 0, 1, draw.integer(1, 4)), draw.integer(1, 5), hidden)
    x, grad = (draw.tensor(*shape, dtype=dtype, strided=True, same=True) for _ in range(2))
    widen, output = draw.tensor(wide, hidden, dtype=dtype), draw.tensor(hidden, wide, dtype=dtype, strided=True)
    return x, widen, draw.tensor(wide, dtype=dtype), output, draw.tensor(hidden, dtype=dtype, same=True), grad


def _draw_entropy(draw: Draw) -> tuple[Any, ...]:
    dtype, n, num_targets = draw.dtype(*_FLOATS), draw.world_size, draw.integer(1, 12)
    vocab_size = draw.one_of(draw.integer(10, 60), draw.integer(2, 5), 1)
    size = draw.one_of(1.0, 400.0) if dtype == torch.float64 else 1.0  # exp of a large score overflows
    logits = size * draw.tensor(num_targets, -(-vocab_size // n), dtype=dtype, strided=True)
    targets = draw.tensor(num_targets, dtype=torch.int64, same=True) * 7 % vocab_size
    return logits, targets, vocab_size, draw.tensor(dtype=dtype, same=True)


def _draw_sequence(draw: Draw) -> tuple[Any, ...]:
    dtype, n, layout = draw.dtype(*_TYPES), draw.world_size, draw.one_of("cut from a larger one", "transposed")
    length, samples, hidden = draw.integer(1, 4), draw.integer(1, 4), draw.integer(1, 5)

    def one(positions: int) -> Tensor:
        if layout == "transposed":
            return draw.tensor(samples, positions, hidden, dtype=dtype).transpose(0, 1)
        return draw.tensor(positions, samples, hidden, dtype=dtype, strided=True)

    return one(length), one(length * n), one(length * n), one(length)


def _draw_drop(draw: Draw) -> tuple[Any, ...]:
    p, is_split = draw.one_of(0.5, *SHARES), draw.one_of(True, False)
    x = draw.tensor(*draw.shape(), dtype=draw.dtype(*_TYPES), strided=True, same=not is_split)
    seed = draw.integer(0, 10**6)
    return x, p, [seed, seed + 1], is_split


def _draw_clip(draw: Draw) -> tuple[Any, ...]:
    dtype, zero = draw.dtype("float64", "bfloat16", "float32"), draw.one_of("none", "none", "all", "one rank")
    max_norm = draw.one_of(draw.number(0.1, 2.0), draw.number(1e5, 1e6))
    kind = draw.one_of("any", "nothing split on one rank", "any")
    counts = draw.integer(0 if kind == "any" else 1, 2), draw.integer(0, 2)  # each rank has one gradient at least
    size = 1 if dtype == torch.bfloat16 else 100  # squares of a few small whole numbers are exact in 16 bits

    def one(*, same: bool, strided: bool = True) -> Tensor:
        shape = draw.shape()
        shape = (draw.integer(1, 3),) if dtype == torch.bfloat16 else shape
        return size * draw.tensor(*shape, dtype=dtype, strided=strided, same=same)

    whole = [one(same=True) for _ in range(counts[0])]
    partial = [one(same=False, strided=False) for _ in range(counts[1])]  # they are sent
    is_chosen = draw.rank == draw.integer(0, 11) % draw.world_size
    count = 0 if kind == "nothing split on one rank" and is_chosen else draw.own(1, 3)
    split = [one(same=False) for _ in range(count)]
    if zero == "all" or (zero == "one rank" and is_chosen):
        split, partial = [torch.zeros_like(t) for t in split], [torch.zeros_like(t) for t in partial]
    if zero == "all":
        whole = [torch.zeros_like(gradient) for gradient in whole]
    return split, whole, partial, max_norm


def _draw_embed(draw: Draw) -> tuple[Any, ...]:
    dtype, n, hidden = draw.dtype(*_FLOATS), draw.world_size, draw.integer(1, 5)
    vocab_size, samples = draw.one_of(draw.integer(6, 60), draw.integer(2, 5), 1), draw.one_of(2, 0, draw.integer(1, 4))
    length = draw.integer(1, 6)
    tokens = draw.tensor(samples, length, dtype=torch.int64, strided=True, same=True) * 7
    weight = draw.tensor(-(-vocab_size // n), hidden, dtype=dtype, strided=True)
    grad = draw.tensor(samples, length, hidden, dtype=dtype, same=True)
    return tokens.remainder_(vocab_size), weight, vocab_size, grad


vary_cut = Vary(_draw_cut, use=use_cut, left_out={"dims": MATRIX, "empty": HOLDS})
vary_heads = Vary(_draw_heads, use=use_heads, left_out={"dims": MATRIX, "empty": HOLDS})
_PARTS = {"sub-group": TAKES_NO_GROUP, "unequal ranks": ALIKE}
vary_f_and_g = Vary(_draw_pair, use=use_pair, left_out=_PARTS)
vary_mlp = Vary(_draw_mlp, use=use_mlp, left_out=_PARTS)
vary_cross_entropy = Vary(
    _draw_entropy,
    use=use_entropy,
    least_bytes=0.6,
    left_out={"bytes": "on 2 ranks, gathering two numbers a row sends less than three sums"}
    | _PARTS
    | {"empty": "the mean loss of no target is not a number"},
)
vary_sequence = Vary(
    _draw_sequence,
    use=use_sequence,
    left_out=_PARTS | {"dims": "activations are [S, B, H]", "empty": "activations hold elements"},
)
vary_dropout = Vary(_draw_drop, use=use_drop, left_out=_PARTS)
vary_clip = Vary(
    _draw_clip,
    use=use_clip,
    scale=0.0,
    scratch=frozenset({"split", "whole", "partial"}),
    least_bytes=0.5,
    left_out={"bytes": "a square may travel as float32", "sub-group": TAKES_NO_GROUP},
)
vary_repair = Vary(_draw_embed, use=use_embed, left_out=_PARTS | {"dims": "tokens are [B, S], a weight has two dims"})
