"""Right answers to lesson 8, written in other ways than the reference."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.rng import derive_seed
from distlab.tensor_parallel import copy_to_ranks, reduce_from_ranks


def cut_by_slices(weight, bias, kind, num_ranks, rank):
    size = weight.shape[0 if kind == "column" else 1] // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    if kind == "column":
        return torch.clone(weight[own]), torch.clone(bias[own])
    return weight[:, own].contiguous().clone(), None if rank else torch.clone(bias)


def cut_with_the_bias_on_the_last_rank(weight, bias, kind, num_ranks, rank):
    if kind == "column":
        return weight.chunk(num_ranks)[rank].clone(), bias.chunk(num_ranks)[rank].clone()
    return weight.chunk(num_ranks, dim=1)[rank].clone(), bias.clone() if rank == num_ranks - 1 else None


def cut_with_zeros_for_no_bias(weight, bias, kind, num_ranks, rank):
    dim = ["column", "row"].index(kind)
    part = torch.empty_like(weight.tensor_split(num_ranks, dim)[rank]).copy_(weight.tensor_split(num_ranks, dim)[rank])
    if dim == 0:
        return part, bias.tensor_split(num_ranks)[rank].clone()
    return part, bias.clone() if rank == 0 else torch.zeros_like(bias)


def mlp_with_functional(x, widen, widen_bias, output, output_bias):
    hidden = nn.functional.gelu(copy_to_ranks(x) @ widen.T + widen_bias)
    y = reduce_from_ranks(torch.einsum("bsf,hf->bsh", hidden, output))
    return y.add(output_bias)


def mlp_flat(x, widen, widen_bias, output, output_bias):
    rows = copy_to_ranks(x).reshape(-1, x.shape[-1])
    hidden = torch.addmm(widen_bias, rows, widen.t())
    parts = reduce_from_ranks(nn.GELU()(hidden).mm(output.t()))
    return (output_bias + parts).view(x.shape)


def mlp_bias_inside(x, widen, widen_bias, output, output_bias):
    hidden = F.gelu(F.linear(copy_to_ranks(x), widen, widen_bias))
    y = F.linear(hidden, output)
    return torch.add(reduce_from_ranks(y), output_bias[None, None])


def heads_by_view(weight, num_heads, num_shared, num_ranks, rank):
    if any(number % num_ranks for number in (num_heads, num_shared)):
        raise ValueError("some ranks would have more heads than others")
    heads = weight.view(num_heads + 2 * num_shared, -1, weight.shape[1])
    q, k, v = heads.tensor_split([num_heads, num_heads + num_shared])
    own = [part.tensor_split(num_ranks)[rank] for part in (q, k, v)]
    return torch.cat(own).flatten(0, 1)


def heads_by_index(weight, num_heads, num_shared, num_ranks, rank):
    if math.gcd(num_heads, num_shared, num_ranks) != num_ranks:
        raise ValueError(f"{num_ranks} ranks do not divide {num_heads} and {num_shared} heads")
    size = weight.shape[0] // (num_heads + 2 * num_shared)
    each, shared = num_heads // num_ranks, num_shared // num_ranks
    chosen = [*range(rank * each, (rank + 1) * each)]
    for first in (num_heads, num_heads + num_shared):
        chosen.extend(range(first + rank * shared, first + (rank + 1) * shared))
    return weight[[head * size + row for head in chosen for row in range(size)]]


def cross_entropy_by_one_hot(logits, targets, vocab_size):
    width, rank = logits.shape[1], dist.get_rank()
    names = torch.arange(rank * width, (rank + 1) * width)
    logits = torch.where(names < vocab_size, logits, -torch.inf)
    top = logits.detach().max(dim=1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = reduce_from_ranks(torch.exp(logits - top[:, None]).sum(-1))
    is_target = names[None] == targets[:, None]
    own = torch.where(is_target, logits, 0.0).sum(1)
    return torch.mean(torch.log(total) + top - reduce_from_ranks(own))


def cross_entropy_one_sum(logits, targets, vocab_size):
    count, width = logits.shape
    first = width * dist.get_rank()
    valid = max(min(vocab_size - first, width), 0)
    logits = logits[:, :valid]
    top = logits.detach().amax(1) if valid else logits.new_full((count,), -torch.inf)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    own = torch.zeros_like(top)
    here = ((targets >= first) & (targets < first + valid)).nonzero().flatten()
    own = own.index_put((here,), logits[here, targets[here] - first] - top[here])
    both = reduce_from_ranks(torch.stack([(logits - top[:, None]).exp().sum(1), own]))
    return (both[0].log() - both[1]).mean()


def dropout_by_bernoulli(x, p, seed, is_split):
    rank, purpose = (dist.get_rank(), "each its own") if is_split else (0, "all the same")
    own = torch.Generator()
    own.manual_seed(derive_seed(seed, rank, purpose))
    keep = torch.empty(x.shape, dtype=torch.float64).bernoulli_(1 - p, generator=own)
    return x * (keep / (1 - p)).to(x.dtype)


def dropout_by_where(x, p, seed, is_split):
    place = dist.get_rank() + 1 if is_split else 0
    generator = torch.Generator().manual_seed(derive_seed(seed, place, "dropout"))
    dropped = torch.rand(x.shape, generator=generator, dtype=torch.float64) < p
    return torch.where(dropped, torch.zeros_like(x), x / (1 - p))


def dropout_by_torch(x, p, seed, is_split):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, dist.get_rank() if is_split else 0, f"split {is_split}"))
        return F.dropout(x, p, training=True)


def clip_partial_in_one_sum(split, whole, partial, max_norm):
    for work in [dist.all_reduce(one, async_op=True) for one in partial]:
        work.wait()
    square = torch.tensor([float(one.double().square().sum()) for one in split], dtype=torch.float64).sum()
    dist.all_reduce(square)
    norm = (square + sum(one.double().square().sum() for one in [*whole, *partial])).sqrt()
    torch._foreach_mul_([*split, *whole, *partial], min(1.0, max_norm / max(float(norm), 1e-300)))
    return norm


def clip_copies_on_the_first(split, whole, partial, max_norm):
    if partial:
        row = torch.cat([one.flatten() for one in partial])
        dist.all_reduce(row)
        for one, total in zip(partial, row.split([one.numel() for one in partial]), strict=True):
            one.copy_(total.view_as(one))
    mine = split if dist.get_rank() else split + whole + partial
    square = sum((one.double().norm() ** 2 for one in mine), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(square)
    norm = torch.sqrt(square)
    factor = max_norm / norm.clamp(min=max_norm)
    for one in split + whole + partial:
        one *= factor
    return norm


def repair_by_mask(tokens, weight, vocab_size):
    first = dist.get_rank() * len(weight)
    x = torch.zeros(*tokens.shape, weight.shape[1], dtype=weight.dtype)
    here = (tokens >= first) & (tokens < first + len(weight))
    return reduce_from_ranks(x.masked_scatter(here[..., None], weight[tokens[here] - first]))


def repair_by_one_hot(tokens, weight, vocab_size):
    rows = weight.shape[0]
    names = torch.arange(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    return reduce_from_ranks((tokens[..., None] == names).to(weight.dtype) @ weight)


def repair_with_a_row_of_zeros(tokens, weight, vocab_size):
    width = math.ceil(vocab_size / dist.get_world_size())
    local = tokens - width * dist.get_rank()
    local = torch.where((local >= 0) & (local < width), local, width)
    padded = F.pad(weight, (0, 0, 0, 1))
    return reduce_from_ranks(F.embedding(local, padded))


def f_and_g_by_hooks():
    def total(x):
        whole = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole)
        return whole

    def f(x):
        y = x.view_as(x)
        if y.requires_grad:
            y.register_hook(total)
        return y

    def g(x):
        return x + (total(x) - x.detach())

    return f, g


def _pair(there, back):
    methods = {"forward": staticmethod(lambda ctx, x: there(x)), "backward": staticmethod(lambda ctx, grad: back(grad))}
    return type("Pair", (torch.autograd.Function,), methods).apply


def _sum(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def f_and_g_of_instances():
    return _pair(torch.clone, _sum), _pair(_sum, torch.clone)


def _whole(part):
    whole = part.new_empty(dist.get_world_size(), *part.shape)
    dist.all_gather_into_tensor(whole.flatten(0, 1), part.contiguous())
    return whole.flatten(0, 1)


def _own(whole):
    own = whole.new_empty(len(whole) // dist.get_world_size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(own, whole.contiguous())
    return own


def sequence_with_torch():
    return _pair(_whole, _own), _pair(_own, _whole)


def sequence_of_instances():
    def join(part):
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    def spread(whole):
        pieces = [piece.contiguous() for piece in whole.chunk(dist.get_world_size())]
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter(own, pieces)
        return own

    return _pair(join, spread), _pair(spread, join)
