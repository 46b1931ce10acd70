"""Right answers in styles that few would choose: recursion, numpy, batches of messages, other numbers on the wire."""

import functools
import itertools
import math
import operator
import os
import pickle
import re

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F


def stop_by_one_rank(loss, threshold):
    n, rank = dist.get_world_size(), dist.get_rank()
    parts = [torch.empty_like(loss) for _ in range(n)] if rank == 0 else None
    dist.gather(loss.clone(), parts, dst=0)
    flag = torch.zeros(1, dtype=torch.uint8)
    if rank == 0:
        flag.fill_(sum(map(float, parts)) / n < threshold)
    dist.broadcast(flag, 0)
    return bool(flag)


def broadcast_by_recursion(tensor, root=0, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place = (rank - root) % n

    def at(where):
        where = (where + root) % n
        return where if group is None else dist.get_global_rank(group, where)

    def spread(low, high):
        if high - low < 2:
            return
        half = 1 << (high - low - 1).bit_length() - 1
        if place == low:
            dist.send(tensor, at(low + half), group=group)
        elif place == low + half:
            dist.recv(tensor, at(low), group=group)
        spread(low, low + half) if place < low + half else spread(low + half, high)

    spread(0, n)
    return tensor


def weights_by_int32(num_tokens):
    total = torch.tensor([sum(num_tokens)], dtype=torch.int32)
    dist.all_reduce(total)
    return [dist.get_world_size() * count / total.item() for count in num_tokens]


def average_in_place_in_batches(module):
    works, n = [], dist.get_world_size()
    for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad.div_(n)
        works.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in works[::-1]:
        work.wait()


def buckets_by_recursion(sizes_bytes, bucket_bytes):
    def fill(index, held):
        if index < 0:
            return [held] if held else []
        held = [*held, index]
        if sum(sizes_bytes[each] for each in held) >= bucket_bytes:
            return [held, *fill(index - 1, [])]
        return fill(index - 1, held)

    return fill(len(sizes_bytes) - 1, [])


def scaled_step_by_a_byte(gradients, scale, streak, interval):
    is_bad = not all(bool(torch.isfinite(each).all()) for each in gradients)
    flag = torch.tensor([is_bad], dtype=torch.uint8)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item():
        return False, scale * 0.5, 0
    for each in gradients:
        each /= scale
    streak += 1
    return True, scale * (2 if streak == interval else 1), streak % interval


class Master:
    def __call__(self, weights, masters, gradients, lr):
        list(itertools.starmap(functools.partial(self.step, lr), zip(masters, gradients, weights, strict=True)))

    def step(self, lr, master, gradient, weight):
        torch.sub(master, gradient.to(torch.float32), alpha=lr, out=master)
        weight.data = weight.data.copy_(master)


def states_to_rank_0(shards, shapes):
    n, rank, state = dist.get_world_size(), dist.get_rank(), {}
    for name in shards:
        rows = [torch.empty_like(shards[name]) for _ in range(n)] if rank == 0 else None
        dist.gather(shards[name].contiguous(), rows, dst=0)
        if rank == 0:
            state[name] = torch.cat(rows)[: math.prod(shapes[name])].reshape(shapes[name])
    return state


def clip_by_numpy(shards, replicated, max_norm):
    squares = [np.square(one.detach().double().numpy()).sum() for one in shards]
    own = torch.tensor([float(sum(squares))], dtype=torch.float64)
    dist.all_reduce(own)
    norm = torch.sqrt(own[0] + sum((one.detach().double() ** 2).sum() for one in replicated))
    for one in [*replicated, *shards]:
        one.mul_(min(1.0, max_norm / norm.item()) if norm else 1.0)
    return norm


def cut_by_narrow(weight, bias, kind, num_ranks, rank):
    dim = ("column", "row").index(kind)
    size = weight.shape[dim] // num_ranks
    own = torch.narrow_copy(weight.detach(), dim, rank * size, size)
    if kind == "column":
        return own, torch.narrow_copy(bias.detach(), 0, rank * size, size)
    return own, bias.clone() if rank == num_ranks - 1 else None


def entropy_by_gathering(logits, targets, vocab_size):
    from distlab.tensor_parallel import reduce_from_ranks

    rank, width = dist.get_rank(), logits.shape[1]
    names = torch.arange(width) + rank * width
    logits = torch.where(names < vocab_size, logits, torch.full_like(logits, -math.inf))
    tops = [torch.empty(len(logits), dtype=logits.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(tops, logits.detach().max(dim=1).values)
    top = torch.stack(tops).max(dim=0).values
    both = torch.stack([(logits - top[:, None]).exp().sum(1), logits.masked_fill(names != targets[:, None], 0).sum(1)])
    total, own = reduce_from_ranks(both)
    return torch.mean(total.log() + top - own)


def embed_by_one_hot(tokens, weight, vocab_size):
    from distlab.tensor_parallel import reduce_from_ranks

    first = dist.get_rank() * len(weight)
    rows = (tokens[..., None] == torch.arange(first, first + len(weight))).to(weight.dtype)
    return reduce_from_ranks(rows @ weight)


def gpipe_by_product(rank, num_microbatches):
    return ["".join(map(str, (rank, *pair))) for pair in itertools.product("FB", range(num_microbatches))]


def bubble_by_fractions(num_ranks, num_microbatches, stages_per_rank=1):
    from fractions import Fraction

    return float(Fraction(num_ranks - 1, stages_per_rank * num_microbatches + num_ranks - 1))


def forward_by_batches(stage, inputs, num_microbatches, like):
    rank, n = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty_like(like) for _ in range(num_microbatches)]
    for i, output in enumerate(outputs):
        x = inputs[i] if rank == 0 else torch.empty_like(like)
        if rank:
            [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, rank - 1)])]
        with torch.no_grad():
            output.copy_(stage(x))
        if rank < n - 1:
            [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, output, rank + 1)])]
    works = [dist.broadcast(output, n - 1, async_op=True) for output in outputs]
    for work in works:
        work.wait()
    return outputs


def place_by_numpy(rank, axes):
    return dict(zip(axes, map(int, np.unravel_index(rank, tuple(axes.values()))), strict=True))


def groups_by_numpy(axis, axes):
    mesh = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    rows = np.moveaxis(mesh, list(axes).index(axis), -1).reshape(-1, axes[axis])
    return sorted(rows.tolist())


def norm_by_masks(gradients, split_over, groups):
    total = torch.zeros(1, dtype=torch.float64)
    for name in gradients:
        is_first = all(dist.get_rank(groups[axis]) == 0 for axis in groups if axis not in split_over[name])
        total += (gradients[name].double() ** 2).sum() * is_first
    for axis in sorted(groups, reverse=True):
        dist.all_reduce(total, group=groups[axis])
    return total[0].sqrt()


def zigzag_by_mask(length, num_ranks, rank):
    chunk = torch.arange(length) // (length // (2 * num_ranks))
    return ((chunk == rank) | (chunk == 2 * num_ranks - 1 - rank)).nonzero()[:, 0]


def ring_by_gathering_in_turn(query, key, value, positions):
    n, rank = dist.get_world_size(), dist.get_rank()
    held, seen = [key.contiguous(), value.contiguous()], {}
    for step in range(n):
        owner = (rank - step) % n
        seen[owner] = (query @ held[0].transpose(-1, -2) / math.sqrt(query.shape[-1])), held[1]
        if step < n - 1:
            new = [torch.empty_like(each) for each in held]
            ops = [dist.P2POp(dist.isend, each, (rank + 1) % n) for each in held]
            ops += [dist.P2POp(dist.irecv, each, (rank - 1) % n) for each in new]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            held = new
    scores = torch.cat([seen[owner][0] for owner in range(n)], -1)
    theirs = torch.cat([positions[owner] for owner in range(n)])
    scores = scores.masked_fill(theirs > positions[rank][:, None], -math.inf)
    return scores.softmax(-1) @ torch.cat([seen[owner][1] for owner in range(n)], -2)


def balance_by_one_hot(probabilities, experts):
    asked = F.one_hot(experts.reshape(-1), probabilities.shape[1]).to(probabilities.dtype).mean(0)
    return torch.einsum("e,te->", asked, probabilities) / len(probabilities) * probabilities.shape[1]


def synchronize_at_once(shared, experts):
    n, works = dist.get_world_size(), []
    for parameter in shared[::-1]:
        parameter.grad.mul_(1 / n)
        works += [dist.all_reduce(parameter.grad, async_op=True)]
    [parameter.grad.div_(n) for parameter in experts]
    [work.wait() for work in works]


def save_by_bytes(folder, step, state):
    import io

    held = io.BytesIO()
    torch.save(state, held)
    partial = folder / f"step-{step}.pt.new"
    descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, held.getbuffer())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.rename(folder / f"step-{step}.pt")
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def load_by_elements(shard, size, num_saved, rank, read):
    old, length = math.ceil(size / num_saved), len(shard)
    wanted = range(rank * length, min(size, (rank + 1) * length))
    shard[max(0, len(wanted)) :] = 0
    for saved, places in itertools.groupby(wanted, lambda place: place // old):
        places = list(places)
        row = read(saved, places[0] % old, places[-1] % old + 1)
        shard[places[0] - wanted.start : places[-1] + 1 - wanted.start].copy_(row)


def share_by_divmod(uptimes_s, interval_s, save_s, restart_s):
    saved = [divmod(max(0.0, uptime - restart_s), interval_s + save_s)[0] for uptime in uptimes_s]
    return functools.reduce(operator.add, saved) * interval_s / math.fsum(uptimes_s)


def preflight_by_hashes(facts):
    n = dist.get_world_size()
    own = pickle.dumps(facts)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    most = int(max(sizes))
    rows = [torch.zeros(most, dtype=torch.uint8) for _ in range(n)]
    dist.all_gather(rows, torch.frombuffer(bytearray(own.ljust(most, b"\0")), dtype=torch.uint8))
    everyone = [pickle.loads(row.numpy().tobytes()) for row in rows]
    names = set().union(*everyone) - {"host"}
    hosts = {name: {} for name in names}
    for name, one in itertools.product(names, everyone):
        hosts[name].setdefault(one.get(name, "missing"), set()).add(one["host"])
    return {name: {v: sorted(h) for v, h in each.items()} for name, each in hosts.items() if len(each) > 1}


def meet_by_counting_down(store, attempt, num_agents, local_ranks, address):
    number = int(store.add(f"{attempt}/agents", 1)) - 1
    if number not in range(num_agents):
        raise RuntimeError(f"attempt {attempt} is full: {num_agents} agents")
    store.set(f"{attempt}/{number}", f"{local_ranks} {address}")
    texts = [store.get(f"{attempt}/{other}") for other in range(num_agents)]
    pairs = [re.split(" ", text.decode() if isinstance(text, bytes) else text, maxsplit=1) for text in texts]
    ranks = list(itertools.accumulate((int(size) for size, _ in pairs), initial=0))
    return number, ranks[number], ranks[-1], pairs[0][1]


def offset_by_numpy(rounds):
    sent, theirs, back = np.asarray(rounds, dtype=float).T
    best = int(np.argmin(back - sent))
    return float((sent + back)[best] / 2 - theirs[best]), float((back - sent)[best] / 2)


def cheapest_by_sorting(offers, days):
    in_time = sorted(
        (gpus * took * price, took, at) for at, (_, gpus, took, price) in enumerate(offers) if took <= days
    )
    return offers[in_time[0][2]][0] if in_time else None


def shift_waits_for_the_send_first(tensor):
    n, rank, received = dist.get_world_size(), dist.get_rank(), torch.empty_like(tensor)
    if n == 1:
        return received.copy_(tensor)
    ops = [dist.P2POp(dist.irecv, received, (rank - 1) % n), dist.P2POp(dist.isend, tensor, (rank + 1) % n)]
    for work in reversed(dist.batch_isend_irecv(ops)):
        work.wait()
    return received


ANSWERS = {
    "01.shift": [functools.partial(shift_waits_for_the_send_first)],
    "01.repair": [stop_by_one_rank],
    "02.tree_broadcast": [broadcast_by_recursion],
    "03.uneven": [weights_by_int32],
    "03.average": [average_in_place_in_batches],
    "03.buckets": [buckets_by_recursion],
    "06.scaler": [scaled_step_by_a_byte],
    "06.master": [Master()],
    "07.repair": [states_to_rank_0],
    "07.clip": [clip_by_numpy],
    "08.cut": [cut_by_narrow],
    "08.cross_entropy": [entropy_by_gathering],
    "08.repair": [embed_by_one_hot],
    "09.gpipe": [gpipe_by_product],
    "09.bubble": [bubble_by_fractions],
    "09.repair": [forward_by_batches],
    "10.coordinates": [place_by_numpy],
    "10.groups": [groups_by_numpy],
    "10.global_norm": [norm_by_masks],
    "11.zigzag": [zigzag_by_mask],
    "11.ring": [ring_by_gathering_in_turn],
    "11.balance": [balance_by_one_hot],
    "11.repair": [synchronize_at_once],
    "12.save": [save_by_bytes],
    "12.load": [load_by_elements],
    "12.share": [share_by_divmod],
    "14.preflight": [preflight_by_hashes],
    "14.rendezvous": [meet_by_counting_down],
    "14.clocks": [offset_by_numpy],
    "15.cheapest": [cheapest_by_sorting],
}
