"""Right answers to lesson 7, written in other ways than the reference."""

import functools
import itertools
import math

import torch
import torch.distributed as dist

from distlab.sharding import gather_into, scatter_sum


def pieces_by_elements(sizes, num_shards, shard):
    length = math.ceil(sum(sizes) / num_shards)
    row = [(tensor, at) for tensor, size in enumerate(sizes) for at in range(size)]
    own = row[shard * length : (shard + 1) * length]
    return [(tensor, cut[0][1], cut[-1][1] + 1) for tensor, cut in _grouped(own)]


def _grouped(own):
    return [(tensor, list(those)) for tensor, those in itertools.groupby(own, key=lambda one: one[0])]


def pieces_by_ends(sizes, num_shards, shard):
    ends = list(itertools.accumulate(sizes))
    length = (sum(sizes) + num_shards - 1) // num_shards
    low, high = length * shard, length * (shard + 1)
    found = []
    for tensor, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        begin = end - size
        if end > low and begin < high and size > 0:
            found.append((tensor, max(low - begin, 0), min(high, end) - begin))
    return found


def step_on_a_copy(parameters, gradient, update):
    n, rank = dist.get_world_size(), dist.get_rank()
    length = parameters.numel() // n
    mean = parameters.new_empty(length)
    scatter_sum(gradient / n, mean)
    own = parameters[rank * length : (rank + 1) * length].clone()
    update(own, mean)
    gather_into(parameters, own)


def step_in_the_gradient(parameters, gradient, update):
    size, rank = dist.get_world_size(), dist.get_rank()
    mean = gradient.view(size, -1)[rank]
    scatter_sum(gradient, mean)
    mean.div_(size)
    own = parameters.view(size, -1)[rank]
    update(own, mean)
    gather_into(parameters, own, async_op=True).wait()


def forward_in_a_helper(shards, x, compute):
    def unit(x, numbered):
        index, shard = numbered
        whole = torch.empty(len(shard) * dist.get_world_size(), dtype=shard.dtype)
        gather_into(whole, shard)
        return compute(index, whole, x)

    return functools.reduce(unit, enumerate(shards), x)


def forward_recursive(shards, x, compute, index=0):
    if index == len(shards):
        return x
    whole = shards[index].repeat(dist.get_world_size())
    gather_into(whole, shards[index])
    x = compute(index, whole, x)
    del whole
    return forward_recursive(shards, x, compute, index + 1)


def ahead_in_turns(shards, x, compute):
    def begin(shard):
        whole = shard.new_empty(dist.get_world_size() * len(shard))
        return whole, gather_into(whole, shard, async_op=True)

    queue = [begin(shards[0])]
    for index in range(len(shards)):
        whole, work = queue.pop()
        work.wait()
        queue.extend(map(begin, shards[index + 1 : index + 2]))
        x = compute(index, whole, x)
        del whole
    return x


def ahead_with_a_generator(shards, x, compute):
    def gathered():
        for shard in shards:
            whole = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype)
            yield whole, gather_into(whole, shard, async_op=True)

    coming = gathered()
    now = next(coming)
    for index in range(len(shards)):
        now[1].wait()
        after = next(coming, None)
        x = compute(index, now[0], x)
        now = after
    return x


def backward_from_a_dict(shards, inputs, grad, compute):
    n, found = dist.get_world_size(), {}
    for index in range(len(shards) - 1, -1, -1):
        shard = shards[index]
        whole = shard.new_empty(n * shard.numel())
        gather_into(whole, shard)
        own, grad = compute(index, whole, inputs[index], grad)
        whole = None
        found[index] = torch.zeros_like(shard)
        scatter_sum(own, found[index])
        own = None
        found[index] /= n
    return [found[index] for index in range(len(shards))]


def backward_with_torch(shards, inputs, grad, compute):
    n = dist.get_world_size()
    means = [None] * len(shards)
    for index, shard in reversed(list(enumerate(shards))):
        whole = shard.new_empty(n * shard.numel())
        dist.all_gather_into_tensor(whole, shard)
        own, grad = compute(index, whole, inputs[index], grad)
        del whole
        means[index] = shard.new_empty(shard.shape)
        dist.reduce_scatter_tensor(means[index], own)
        del own
        means[index].div_(n)
    return means


def clip_with_norms(shards, replicated, max_norm):
    own = torch.tensor([float(one.double().norm()) ** 2 for one in shards], dtype=torch.float64).sum()
    dist.all_reduce(own)
    norm = (own + sum(float(one.double().norm()) ** 2 for one in replicated)).sqrt()
    if norm > max_norm:
        for one in itertools.chain(shards, replicated):
            one.mul_(max_norm / norm.item())
    return norm


def clip_replicas_on_the_first(shards, replicated, max_norm):
    counted = shards + (replicated if dist.get_rank() == 0 else [])
    square = sum([one.square().sum().double() for one in counted], torch.tensor(0.0, dtype=torch.float64))
    dist.all_reduce(square, async_op=True).wait()
    norm = torch.sqrt(square)
    scale = max_norm / torch.maximum(norm, torch.tensor(max_norm, dtype=torch.float64))
    for one in replicated + shards:
        one *= scale
    return norm


def repair_to_the_first(shards, shapes):
    rank, found = dist.get_rank(), {}
    for name, shard in shards.items():
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())] if rank == 0 else None
        dist.gather(shard, parts, dst=0)
        if parts is not None:
            found[name] = torch.cat(parts).narrow(0, 0, shapes[name].numel()).clone().view(shapes[name])
    return found


def repair_by_all_gather(shards, shapes):
    def whole(name):
        parts = [torch.empty_like(shards[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shards[name])
        return torch.cat(parts)[: shapes[name].numel()].clone().reshape(shapes[name])

    tensors = {name: whole(name) for name in sorted(shards)}
    return tensors if dist.get_rank() == 0 else {}


def repair_to_rank_0(shards, shapes):
    n, rank, state = dist.get_world_size(), dist.get_rank(), {}
    for name in shards:
        rows = [torch.empty_like(shards[name]) for _ in range(n)] if rank == 0 else None
        dist.gather(shards[name].contiguous(), rows, dst=0)
        if rank == 0:
            state[name] = torch.cat(rows)[: math.prod(shapes[name])].reshape(shapes[name])
    return state
