"""Right answers to lesson 7, written in other ways than the reference."""

import functools
import heapq
import itertools
import math

import numpy as np
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


def pieces_recursive(sizes, num_shards, shard):
    length = -(-sum(sizes) // num_shards)

    def rest(tensor, low, high):
        if tensor == len(sizes) or high <= 0:
            return []
        start, stop = max(low, 0), min(high, sizes[tensor])
        here = [(tensor, start, stop)] if start < stop else []
        return here + rest(tensor + 1, low - sizes[tensor], high - sizes[tensor])

    return rest(0, shard * length, (shard + 1) * length)


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


def step_with_torch(parameters, gradient, update):
    own = parameters.tensor_split(dist.get_world_size())[dist.get_rank()]
    mean = torch.empty_like(own)
    dist.reduce_scatter_tensor(mean, gradient)
    update(own, mean.mul_(1 / dist.get_world_size()))
    dist.all_gather_into_tensor(parameters, own.clone())


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


def forward_with_torch(shards, x, compute):
    n = dist.get_world_size()
    for index in range(len(shards)):
        row = shards[index].new_zeros(n, shards[index].numel())
        dist.all_gather_into_tensor(row.view(-1), shards[index])
        x = compute(index, row.view(-1), x)
        row = None
    return x


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


def owners_from_a_heap(shapes, num_ranks):
    heap, found = [(0, rank) for rank in range(num_ranks)], {}
    weighed = sorted(((min(a, b) ** 2 * (2 * max(a, b) + min(a, b)), at) for at, (a, b) in enumerate(shapes)))
    while weighed:
        work, at = weighed.pop()
        busy, found[at] = heapq.heappop(heap)
        heapq.heappush(heap, (busy + work, found[at]))
    return tuple(found[at] for at in range(len(shapes)))


def owners_by_differences(shapes, num_ranks):
    """Put the two most uneven partial assignments together, the busiest of one on the least busy of the other."""
    parts = []
    for at, (short, long) in enumerate(map(sorted, shapes)):
        parts.append([(0, [])] * (num_ranks - 1) + [(2 * short * short * long + short**3, [at])])
    while len(parts) > 1:
        parts.sort(key=lambda part: part[-1][0] - part[0][0])
        one, other = parts.pop(), parts.pop()
        both = zip(one, reversed(other), strict=True)
        parts.append(sorted((a + b, [*own, *more]) for (a, own), (b, more) in both))
    owner = {at: rank for part in parts for rank, (_, own) in enumerate(part) for at in own}
    return [owner[at] for at in range(len(shapes))]


def owners_by_numpy(shapes, num_ranks):
    short, long = np.sort(np.array(shapes, dtype=float).reshape(-1, 2)).T
    busy, owners = np.zeros(num_ranks), {}
    for at in np.argsort(-(short**2 * (2 * long + short)), kind="stable"):
        owners[at] = busy.argmin()
        busy[owners[at]] += short[at] ** 2 * (2 * long[at] + short[at])
    return [int(owners[at]) for at in range(len(shapes))]


def by_owners_in_one_exchange(pieces, owners, orthogonalize):
    n, rank = dist.get_world_size(), dist.get_rank()
    of = [[at for at, owner in enumerate(owners) if owner == one] for one in range(n)]
    give = [sum(pieces[at].numel() for at in own) for own in of]
    leaving = torch.cat([pieces[at].flatten() for own in of for at in own])
    arrived = leaving.new_empty(n, give[rank])
    dist.all_to_all_single(arrived.view(-1), leaving, [give[rank]] * n, give)
    rows = zip(of[rank], arrived.split([pieces[at].numel() for at in of[rank]], 1), strict=True)
    made = [orthogonalize(one.reshape(-1, pieces[at].shape[1])).view(n, -1) for at, one in rows]
    back = torch.cat(made, 1).flatten() if made else leaving[:0]
    dist.all_to_all_single(leaving, back, give, [give[rank]] * n)
    order = [at for own in of for at in own]
    found = dict(zip(order, leaving.split([pieces[at].numel() for at in order]), strict=True))
    return [found[at].view_as(piece) for at, piece in enumerate(pieces)]


def by_owners_with_messages(pieces, owners, orthogonalize):
    n, rank = dist.get_world_size(), dist.get_rank()
    others = [one for one in range(n) if one != rank]
    works = [dist.isend(piece, owner) for piece, owner in zip(pieces, owners, strict=True) if owner != rank]
    wholes = {at: [piece.clone() for _ in range(n)] for at, piece in enumerate(pieces) if owners[at] == rank}
    works += [dist.irecv(rows[one], one) for rows in wholes.values() for one in others]
    _ = [work.wait() for work in works]
    made = {at: orthogonalize(torch.cat(rows)).tensor_split(n) for at, rows in wholes.items()}
    works = [dist.isend(parts[one].contiguous(), one) for parts in made.values() for one in others]
    updates = [made[at][rank].clone() if at in made else torch.empty_like(piece) for at, piece in enumerate(pieces)]
    works += [dist.irecv(update, owner) for update, owner in zip(updates, owners, strict=True) if owner != rank]
    _ = [work.wait() for work in works]
    return updates


def by_owners_all_on_their_way(pieces, owners, orthogonalize):
    n, rank, works, wholes = dist.get_world_size(), dist.get_rank(), [], {}
    updates = [piece.clone() for piece in pieces]
    for at, owner in enumerate(owners):
        wholes[at] = pieces[at].new_empty(n, *pieces[at].shape)
        works.append(dist.gather(pieces[at], list(wholes[at]) if owner == rank else None, owner, async_op=True))
    for at, work in enumerate(works):
        work.wait()
        if owners[at] == rank:
            wholes[at] = orthogonalize(wholes[at].flatten(0, 1)).view_as(wholes[at])
    for at, owner in enumerate(owners):
        works.append(dist.scatter(updates[at], list(wholes[at]) if owner == rank else None, owner, async_op=True))
    _ = [work.wait() for work in works]
    return updates
