"""How the calls of lesson 8's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading.variation.draw import Draw, Vary

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
    return weight, bias, draw.one_of("column", "row"), num_ranks, draw.integer(0, 71) % num_ranks


def _use_cut(
    fn: Callable[..., tuple[Tensor, Tensor | None]], weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int
) -> dict[str, Any]:
    """Return a rank's part; of a row layer's biases their sum, for any one rank may have it."""
    own, own_bias = fn(weight, bias, kind, num_ranks, rank)
    if kind == "column":
        return {"weight": own, "bias": own_bias}
    biases = [fn(weight, bias, kind, num_ranks, other)[1] for other in range(num_ranks)]
    return {"weight": own, "the sum of the ranks' biases": sum(one for one in biases if one is not None)}


def _draw_heads(draw: Draw) -> tuple[Any, ...]:
    num_ranks, dtype = draw.one_of(2, 1, draw.integer(3, 6)), draw.dtype(*_TYPES)
    num_shared = draw.integer(1, 3) * (num_ranks if draw.one_of(True, True, False) else 1)
    num_heads = num_shared * draw.integer(1, 3)
    weight = draw.tensor(
        (num_heads + 2 * num_shared) * draw.integer(1, 4), draw.integer(1, 5), dtype=dtype, strided=True
    )
    return weight, num_heads, num_shared, num_ranks, draw.integer(0, 59) % num_ranks


def _use_heads(
    fn: Callable[..., Tensor], weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int
) -> Any:
    """Return the rows, or that heads which do not divide were refused."""
    try:
        return fn(weight, num_heads, num_shared, num_ranks, rank)
    except ValueError:
        return "a ValueError"


def _there_and_back(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Return the output of a function and the gradient of its input."""
    x = x.detach().requires_grad_()
    out = function(x)
    torch.autograd.backward(out, grad)
    return [out.detach(), x.grad]


def _cut(draw: Draw, *shape: int, dtype: Any, same: bool = False) -> Tensor:
    """Return a tensor whose clone is contiguous, though every second one of these is not: torch sends no other."""
    whole = draw.tensor(*shape, 2, dtype=dtype, same=same)
    return whole[..., 0] if (draw.seed + draw.call) % 2 else whole[..., 0].contiguous()


def _draw_pair(draw: Draw) -> tuple[Any, ...]:
    dtype, of_f, of_g = draw.dtype(*_TYPES), draw.shape(), draw.shape()
    x, grad_of_f = _cut(draw, *of_f, dtype=dtype, same=True), _cut(draw, *of_f, dtype=dtype)
    return x, grad_of_f, _cut(draw, *of_g, dtype=dtype), _cut(draw, *of_g, dtype=dtype, same=True)


def _use_pair(
    fn: Callable[[], tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]],
    x: Tensor,
    grad_of_f: Tensor,
    partial: Tensor,
    grad_of_g: Tensor,
) -> dict[str, Any]:
    """Go through f and through g and back."""
    f, g = fn()
    there, back = _there_and_back(f, x, grad_of_f), _there_and_back(g, partial, grad_of_g)
    return {"f and the gradient of its input": there, "g and the gradient of its input": back}


def _draw_mlp(draw: Draw) -> tuple[Any, ...]:
    dtype, n = draw.dtype(*_FLOATS), draw.world_size
    hidden = draw.integer(1, 3) * (3 if n == 3 else 1)
    wide, shape = 4 * hidden // n, (draw.one_of(2, 0, 1, draw.integer(1, 4)), draw.integer(1, 5), hidden)
    x, grad = (draw.tensor(*shape, dtype=dtype, strided=True, same=True) for _ in range(2))
    widen, output = draw.tensor(wide, hidden, dtype=dtype), draw.tensor(hidden, wide, dtype=dtype, strided=True)
    return x, widen, draw.tensor(wide, dtype=dtype), output, draw.tensor(hidden, dtype=dtype, same=True), grad


def _use_mlp(
    fn: Callable[..., Tensor],
    x: Tensor,
    widen: Tensor,
    widen_bias: Tensor,
    output: Tensor,
    output_bias: Tensor,
    grad: Tensor,
) -> dict[str, Any]:
    """Return the output and the gradients of everything that went in."""
    given = {"x": x, "widen": widen, "widen_bias": widen_bias, "output": output, "output_bias": output_bias}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    y = fn(*leaves.values())
    torch.autograd.backward(y, grad)
    return {"y": y.detach()} | {f"the gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def _draw_entropy(draw: Draw) -> tuple[Any, ...]:
    dtype, n, num_targets = draw.dtype(*_FLOATS), draw.world_size, draw.integer(1, 12)
    vocab_size = draw.one_of(draw.integer(10, 60), draw.integer(2, 5), 1)
    size = draw.one_of(1.0, 400.0) if dtype == torch.float64 else 1.0  # exp of a large score overflows
    logits = size * draw.tensor(num_targets, -(-vocab_size // n), dtype=dtype, strided=True)
    targets = draw.tensor(num_targets, dtype=torch.int64, same=True) * 7 % vocab_size
    return logits, targets, vocab_size, draw.tensor(dtype=dtype, same=True)


def _use_entropy(
    fn: Callable[..., Tensor], logits: Tensor, targets: Tensor, vocab_size: int, grad: Tensor
) -> dict[str, Any]:
    """Return the loss and the gradient of the own scores, for a gradient of the loss that is not 1."""
    loss, gradient = _there_and_back(lambda own: fn(own, targets, vocab_size), logits, grad)
    return {"the loss": loss, "the gradient of the scores": gradient}


def _draw_sequence(draw: Draw) -> tuple[Any, ...]:
    dtype, n, layout = draw.dtype(*_TYPES), draw.world_size, draw.one_of("cut from a larger one", "transposed")
    length, samples, hidden = draw.integer(1, 4), draw.integer(1, 4), draw.integer(1, 5)

    def one(positions: int) -> Tensor:
        if layout == "transposed":
            return draw.tensor(samples, positions, hidden, dtype=dtype).transpose(0, 1)
        return draw.tensor(positions, samples, hidden, dtype=dtype, strided=True)

    return one(length), one(length * n), one(length * n), one(length)


def _use_sequence(
    fn: Callable[[], tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]],
    part: Tensor,
    grad_of_whole: Tensor,
    whole: Tensor,
    grad_of_part: Tensor,
) -> dict[str, Any]:
    """Go through both functions and back."""
    first, second = fn()
    there, back = _there_and_back(first, part, grad_of_whole), _there_and_back(second, whole, grad_of_part)
    return {"the first and its input's gradient": there, "the second and its input's gradient": back}


_SHARES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)


def _draw_drop(draw: Draw) -> tuple[Any, ...]:
    p, is_split = draw.one_of(0.5, *_SHARES), draw.one_of(True, False)
    x = draw.tensor(*draw.shape(), dtype=draw.dtype(*_TYPES), strided=True, same=not is_split)
    return x, p, draw.integer(0, 10**6), is_split


def _use_drop(fn: Callable[[Tensor, float, int, bool], Tensor], x: Tensor, p: float, seed: int, is_split: bool) -> Any:
    """Return what holds for every right mask: what stays, how many are dropped, and who drops the same."""
    got, ones = fn(x, p, seed, is_split), torch.ones(2000, dtype=x.dtype)
    of_ones = fn(ones, p, seed, is_split)
    mask = (of_ones != 0).double()
    total = mask.clone()
    dist.all_reduce(total)
    near = min(_SHARES, key=lambda share: abs(share - (1 - float(mask.mean()))))
    stays = x * (got != 0) / (1 - p)
    return {
        "the share that is dropped, in steps": near,
        "what stays less x / (1 - p)": torch.where(got != 0, got - stays, torch.zeros_like(stays)),
        "the same call drops the same": torch.equal(of_ones, fn(ones, p, seed, is_split)),
        "all ranks drop the same": torch.equal(total, mask * dist.get_world_size()),
        "another seed drops the same": torch.equal(of_ones, fn(ones, p, seed + 1, is_split)),
    }


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


def _use_clip(
    fn: Callable[..., Any], split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float
) -> dict[str, Any]:
    """Return the norm in the gradients' type; what was scaled in 32 bits at most, for 1e-6 may be added to the norm."""
    lists = {"split": split, "whole": whole, "partial": partial}
    kept = {name: [*gradients] for name, gradients in lists.items()}
    dtype = next((gradient.dtype for gradients in kept.values() for gradient in gradients), torch.float32)
    norm = torch.tensor(float(fn(split, whole, partial, max_norm)), dtype=torch.float64).to(dtype)
    scaled = {
        name: [one.float() if one.dtype == torch.float64 else one.clone() for one in gradients]
        for name, gradients in kept.items()
    }
    return {"norm": norm, **scaled, "lengths": [len(gradients) for gradients in lists.values()]}


def _draw_embed(draw: Draw) -> tuple[Any, ...]:
    dtype, n, hidden = draw.dtype(*_FLOATS), draw.world_size, draw.integer(1, 5)
    vocab_size, samples = draw.one_of(draw.integer(6, 60), draw.integer(2, 5), 1), draw.one_of(2, 0, draw.integer(1, 4))
    length = draw.integer(1, 6)
    tokens = draw.tensor(samples, length, dtype=torch.int64, strided=True, same=True) * 7
    weight = draw.tensor(-(-vocab_size // n), hidden, dtype=dtype, strided=True)
    grad = draw.tensor(samples, length, hidden, dtype=dtype, same=True)
    return tokens.remainder_(vocab_size), weight, vocab_size, grad


def _use_embed(
    fn: Callable[..., Tensor], tokens: Tensor, weight: Tensor, vocab_size: int, grad: Tensor
) -> dict[str, Any]:
    """Return the embedded tokens and the gradient of the own rows."""
    out, gradient = _there_and_back(lambda own: fn(tokens, own, vocab_size), weight, grad)
    return {"the embedded tokens": out, "the gradient of the own rows": gradient}


CUT = Vary(_draw_cut, use=_use_cut, left_out={"dims": MATRIX, "empty": HOLDS})
HEADS = Vary(_draw_heads, use=_use_heads, left_out={"dims": MATRIX, "empty": HOLDS})
_PARTS = {"sub-group": TAKES_NO_GROUP, "unequal ranks": ALIKE}
PAIR = Vary(_draw_pair, use=_use_pair, left_out=_PARTS)
MLP = Vary(_draw_mlp, use=_use_mlp, left_out=_PARTS)
ENTROPY = Vary(
    _draw_entropy,
    use=_use_entropy,
    least_bytes=0.6,
    left_out={"bytes": "on 2 ranks, gathering two numbers a row sends less than three sums"}
    | _PARTS
    | {"empty": "the mean loss of no target is not a number"},
)
SEQUENCE = Vary(
    _draw_sequence,
    use=_use_sequence,
    left_out=_PARTS | {"dims": "activations are [S, B, H]", "empty": "activations hold elements"},
)
DROP = Vary(_draw_drop, use=_use_drop, left_out=_PARTS)
CLIP = Vary(
    _draw_clip,
    use=_use_clip,
    scale=0.0,
    scratch=frozenset({"split", "whole", "partial"}),
    least_bytes=0.5,
    left_out={"bytes": "a square may travel as float32", "sub-group": TAKES_NO_GROUP},
)
EMBED = Vary(_draw_embed, use=_use_embed, left_out=_PARTS | {"dims": "tokens are [B, S], a weight has two dims"})
