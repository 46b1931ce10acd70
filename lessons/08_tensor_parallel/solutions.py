"""Reference solutions of lesson 8: layers cut over ranks that work on the same samples.

All ranks of the process group are tensor ranks: t of them. The library's versions, for any group and with the exchange
during the products, are in `distlab.tensor_parallel`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distlab.rng import derive_seed
from distlab.sharding import gather_into, scatter_sum
from distlab.tensor_parallel import copy_to_ranks, reduce_from_ranks


def cut_linear(weight: Tensor, bias: Tensor, kind: str, num_ranks: int, rank: int) -> tuple[Tensor, Tensor | None]:
    """Return a rank's weight and bias of a linear layer, in memory of their own.

    kind "column": the rank makes some of the output features. kind "row": it takes some of the input features, and the
    ranks' results will be added up; then a rank whose bias must not count has None.

    Shapes: weight [O, I], bias [O] -> column: [O/t, I] and [O/t]; row: [O, I/t] and [O] or None
    """
    if kind == "column":
        return weight.chunk(num_ranks, 0)[rank].clone(), bias.chunk(num_ranks)[rank].clone()
    return weight.chunk(num_ranks, 1)[rank].clone(), bias.clone() if rank == 0 else None


def f_and_g() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return f and g, two functions of a tensor that autograd can go back through.

    f hands x on, and adds up the ranks' gradients of it in backward. g adds up the ranks' x, and hands the gradient on
    in backward. Neither changes what it is given.
    """

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            total = gradient.clone()
            dist.all_reduce(total)
            return total

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            total = x.clone()
            dist.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Copy.apply, Reduce.apply


def parallel_mlp(x: Tensor, widen: Tensor, widen_bias: Tensor, output: Tensor, output_bias: Tensor) -> Tensor:
    """Run two linear layers with a GeLU between them, of which each rank holds a part; every rank gets all of y.

    `widen` is cut by columns, `output` by rows. The bias of `output` is whole on every rank.

    Shapes: x [B, S, H], widen [4H/t, H], widen_bias [4H/t], output [H, 4H/t], output_bias [H] -> y [B, S, H]
    """
    hidden = F.gelu(F.linear(copy_to_ranks(x), widen, widen_bias))  # [B, S, 4H/t]
    return reduce_from_ranks(F.linear(hidden, output)) + output_bias


def heads_of(weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int) -> Tensor:
    """Return a rank's rows of the layer that makes query, key and value, of whole heads.

    The rows are all queries (num_heads heads), then all keys, then all values (num_shared heads each), a head's d rows
    together. Raise ValueError where heads do not divide.

    Shapes: weight [(A + 2 K) d, H] -> [(A + 2 K) d / t, H]
    """
    if num_heads % num_ranks or num_shared % num_ranks:
        raise ValueError(f"{num_heads} heads and {num_shared} of keys and values over {num_ranks} ranks: use a divisor")
    size = len(weight) // (num_heads + 2 * num_shared)
    sections = weight.split([num_heads * size, num_shared * size, num_shared * size])
    return torch.cat([section.chunk(num_ranks)[rank] for section in sections])


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy in nats, the same on every rank; no rank sees the scores of a different one.

    Rank r scores the tokens from r P to (r + 1) P, with P = ceil(V/t). Columns beyond the vocabulary hold anything.

    Shapes: logits [N, P], this rank's; targets [N], the same on all ranks -> []
    """
    width = logits.shape[1]
    first = dist.get_rank() * width
    beyond = torch.arange(first, first + width, device=logits.device) >= vocab_size
    logits = logits.masked_fill(beyond, -torch.inf)
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    total = reduce_from_ranks((logits - largest.unsqueeze(1)).exp().sum(1))
    here = (targets >= first) & (targets < first + width)
    index = (targets - first).where(here, 0)
    own = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
    return (total.log() + largest - reduce_from_ranks(own)).mean()


def sequence_pair() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return what takes the places of f and g where each rank holds a part of the sequence.

    The first joins the ranks' positions, and adds up the gradients and keeps the own positions in backward. The second
    adds up and keeps the own positions, and joins the gradients' in backward. The sequence is the first dim. What comes
    in may be cut from a larger tensor or transposed: torch and distlab send contiguous tensors only.

    Shapes: the first [S/t, B, H] -> [S, B, H]; the second [S, B, H] -> [S/t, B, H]
    """

    def join(part: Tensor) -> Tensor:
        whole = part.new_empty(part.shape[0] * dist.get_world_size(), *part.shape[1:])
        gather_into(whole, part.contiguous())
        return whole

    def add_up(whole: Tensor) -> Tensor:
        whole = whole.contiguous().clone()
        part = whole.new_empty(whole.shape[0] // dist.get_world_size(), *whole.shape[1:])
        scatter_sum(whole.view(-1), part.view(-1))
        return part

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return join(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return add_up(gradient)

    class ReduceScatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return add_up(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return join(gradient)

    return Gather.apply, ReduceScatter.apply


def drop(x: Tensor, p: float, seed: int, is_split: bool) -> Tensor:
    """Return x with each number dropped with probability p, and what stays divided by 1 - p.

    Where every rank holds the same x (is_split False), all drop the same numbers; where each holds a different part,
    masks are independent, of each other and of the common one. The same seed repeats a mask, a different seed draws a
    different one. torch's own generator is not touched.

    Shapes: x [...] -> [...]
    """
    own = derive_seed(seed, dist.get_rank(), "split") if is_split else derive_seed(seed, 0, "whole")
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(own)) >= p
    return x * kept.to(x.device) / (1 - p)


def clip_gradients(split: list[Tensor], whole: list[Tensor], partial: list[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their norm is at most max_norm; return the norm before, of the whole model.

    `split` are this rank's parts of gradients. `whole` are the same on every rank. `partial` are those of a norm layer
    with sequence parallelism: each rank's is of its own positions, and afterwards every rank has their sum.
    """
    for gradient in partial:
        dist.all_reduce(gradient)
    square = sum((gradient.square().sum() for gradient in split), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(square)
    square = sum((gradient.square().sum() for gradient in [*whole, *partial]), square)
    norm = square.sqrt()
    factor = (max_norm / norm).clamp(max=1.0)
    for gradient in [*split, *whole, *partial]:
        gradient *= factor
    return norm


def embed(tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Look tokens up in an embedding of which rank r holds the rows from r P to (r + 1) P, with P = ceil(V/t).

    Shapes: tokens [B, S], the same on all ranks; weight [P, H], this rank's -> [B, S, H]
    """
    width = -(-vocab_size // dist.get_world_size())
    index = tokens - dist.get_rank() * width
    here = (index >= 0) & (index < width)
    x = F.embedding(index.where(here, 0), weight) * here.unsqueeze(-1)
    return reduce_from_ranks(x)
