"""Right answers to lesson 8, written in other ways than the reference."""

import functools
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


def heads_by_slices(weight, num_heads, num_shared, num_ranks, rank):
    if num_shared % num_ranks != 0 or num_heads % num_ranks != 0:
        raise ValueError("heads must divide")
    unit = len(weight) // (num_heads + num_shared * 2)

    def part(first, count):
        start = first + rank * (count // num_ranks)
        return weight.narrow(0, start * unit, count // num_ranks * unit)

    return torch.vstack((part(0, num_heads), part(num_heads, num_shared), part(num_heads + num_shared, num_shared)))


def entropy_by_one_hot(logits, targets, vocab_size):
    width, rank = logits.shape[1], dist.get_rank()
    names = torch.arange(rank * width, (rank + 1) * width)
    logits = torch.where(names < vocab_size, logits, -torch.inf)
    top = logits.detach().max(dim=1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = reduce_from_ranks(torch.exp(logits - top[:, None]).sum(-1))
    is_target = names[None] == targets[:, None]
    own = torch.where(is_target, logits, 0.0).sum(1)
    return torch.mean(torch.log(total) + top - reduce_from_ranks(own))


def entropy_one_sum(logits, targets, vocab_size):
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


def entropy_from_the_last_axis(logits, targets, vocab_size):
    width = logits.size(-1)
    begin = dist.get_rank() * width
    columns = torch.arange(width) + begin
    scores = logits.masked_fill((columns >= vocab_size).expand_as(logits), torch.finfo(logits.dtype).min)
    largest = scores.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    scores = scores - largest
    parts = reduce_from_ranks(scores.exp().sum(-1, keepdim=True))
    mine = (targets - begin).clamp(0, width - 1)[:, None]
    mask = (targets[:, None] >= begin) & (targets[:, None] < begin + width)
    picked = reduce_from_ranks(torch.where(mask, scores.gather(-1, mine), torch.zeros_like(largest)))
    return (parts.log() - picked).sum() / len(targets)


def drop_by_bernoulli(x, p, seed, is_split):
    rank, purpose = (dist.get_rank(), "each its own") if is_split else (0, "all the same")
    own = torch.Generator()
    own.manual_seed(derive_seed(seed, rank, purpose))
    keep = torch.empty(x.shape, dtype=torch.float64).bernoulli_(1 - p, generator=own)
    return x * (keep / (1 - p)).to(x.dtype)


def drop_by_where(x, p, seed, is_split):
    place = dist.get_rank() + 1 if is_split else 0
    generator = torch.Generator().manual_seed(derive_seed(seed, place, "dropout"))
    dropped = torch.rand(x.shape, generator=generator, dtype=torch.float64) < p
    return torch.where(dropped, torch.zeros_like(x), x / (1 - p))


class Drop:
    def __call__(self, x, p, seed, is_split):
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


def clip_copies_divided(split, whole, partial, max_norm):
    for one in partial:
        total = one.clone()
        dist.all_reduce(total)
        one.copy_(total)
    square = torch.zeros(1, dtype=torch.float64)
    for gradients, copies in ((split, 1), (whole, dist.get_world_size()), (partial, dist.get_world_size())):
        for one in gradients:
            square += one.pow(2).sum().double() / copies
    dist.all_reduce(square)
    norm = square.sqrt().squeeze()
    for one in (*split, *whole, *partial):
        if norm > max_norm:
            one.mul_(max_norm / norm)
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


def embed_by_mask(tokens, weight, vocab_size):
    first = dist.get_rank() * len(weight)
    x = torch.zeros(*tokens.shape, weight.shape[1], dtype=weight.dtype)
    here = (tokens >= first) & (tokens < first + len(weight))
    return reduce_from_ranks(x.masked_scatter(here[..., None], weight[tokens[here] - first]))


def embed_by_one_hot(tokens, weight, vocab_size):
    rows = weight.shape[0]
    names = torch.arange(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    return reduce_from_ranks((tokens[..., None] == names).to(weight.dtype) @ weight)


def embed_with_a_row_of_zeros(tokens, weight, vocab_size):
    width = math.ceil(vocab_size / dist.get_world_size())
    local = tokens - width * dist.get_rank()
    local = torch.where((local >= 0) & (local < width), local, width)
    padded = F.pad(weight, (0, 0, 0, 1))
    return reduce_from_ranks(F.embedding(local, padded))


ANSWERS = {
    "08.cut": [cut_with_the_bias_on_the_last_rank, cut_by_slices, cut_with_zeros_for_no_bias],
    "08.mlp": [mlp_with_functional, mlp_flat, mlp_bias_inside],
    "08.heads": [heads_by_view, heads_by_index, functools.partial(heads_by_slices)],
    "08.cross_entropy": [entropy_by_one_hot, entropy_one_sum, entropy_from_the_last_axis],
    "08.dropout": [drop_by_bernoulli, drop_by_where, Drop()],
    "08.clip": [clip_partial_in_one_sum, clip_copies_divided, clip_copies_on_the_first],
    "08.repair": [embed_by_mask, embed_by_one_hot, embed_with_a_row_of_zeros],
}
