"""Right answers to lesson 2, written in other ways than the reference."""

import functools
import math
from itertools import pairwise

import torch
import torch.distributed as dist

from distlab import collectives
from distlab.comm.p2p import Receive, Send, exchange, send_receive, start


def ring_reduce_scatter_counts_down(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    before, behind = (rank - 1) % n, (rank + 1) % n
    parts = torch.tensor_split(tensor, n)
    for left in range(n - 1, 0, -1):
        goes, comes = parts[(rank + left) % n], torch.zeros_like(parts[(rank + left - 1) % n])
        exchange(Send(goes, behind), Receive(comes, before), group=group)
        parts[(rank + left - 1) % n].add_(comes)
    return parts[rank]


def ring_reduce_scatter_to_the_left(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    parts = tensor.tensor_split(n)
    for step in range(n - 1):
        leaves, grows = parts[(rank + step + 1) % n], parts[(rank + step + 2) % n]
        came = torch.empty_like(grows)
        exchange(Receive(came, (rank + 1) % n), Send(leaves, (rank - 1) % n), group=group)
        grows += came
    return parts[rank]


def ring_all_gather_by_list(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    walk = [chunks[(rank - step) % n] for step in range(n)]
    for have, miss in pairwise(walk):
        exchange(Send(have, (rank + 1) % n), Receive(miss, (rank - 1) % n), group=group)
    return tensor


def ring_all_gather_through_a_buffer(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks, at = tensor.tensor_split(n), rank
    for _ in range(1, n):
        known, at = at, at - 1 if at else n - 1
        landing = torch.empty_like(chunks[at])
        exchange(Receive(landing, (rank - 1) % n), Send(chunks[known], (rank + 1) % n), group=group)
        chunks[at][:] = landing
    return tensor


def tree_broadcast_by_bits(tensor, root=0, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    place = (me + n - root) % n
    for level in range(math.ceil(math.log2(n))):
        bit = 1 << level
        if place < bit <= n - 1 - place:
            exchange(Send(tensor, (me + bit) % n), group=group)
        if bit <= place < 2 * bit:
            exchange(Receive(tensor, (me - bit) % n), group=group)
    return tensor


def tree_broadcast_far_first(tensor, root=0, group=None):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    place, bit = (me - root) % n, 1 << (n - 1).bit_length() >> 1
    while bit:
        if place % (2 * bit) == 0 and place + bit < n:
            exchange(Send(tensor, (me + bit) % n), group=group)
        elif place % (2 * bit) == bit:
            exchange(Receive(tensor, (me - bit) % n), group=group)
        bit >>= 1
    return tensor


def halving_doubling_recursive(tensor, group=None):
    rank = dist.get_rank(group)

    def both_ways(block, distance):
        if distance == 0:
            return
        halves, side = block.tensor_split(2), int(bool(rank & distance))
        partner, arrived = rank ^ distance, torch.empty_like(halves[side])
        exchange(Send(halves[1 - side], partner), Receive(arrived, partner), group=group)
        halves[side].add_(arrived)
        both_ways(halves[side], distance // 2)
        exchange(Send(halves[side], partner), Receive(halves[1 - side], partner), group=group)

    both_ways(tensor, dist.get_world_size(group) // 2)
    return tensor


def halving_doubling_in_two_loops(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    partners = [rank ^ (n >> level) for level in range(1, n.bit_length())]
    blocks = [tensor]
    for partner in partners:
        pair = blocks[-1].tensor_split(2)
        own, other = pair if rank < partner else pair[::-1]
        came = own.clone()
        exchange(Receive(came, partner), Send(other, partner), group=group)
        own.add_(came)
        blocks.append(own)
    for level in range(len(partners) - 1, -1, -1):
        pair = blocks[level].tensor_split(2)
        missing = pair[1] if rank < partners[level] else pair[0]
        exchange(Receive(missing, partners[level]), Send(blocks[level + 1], partners[level]), group=group)
    return tensor


def hierarchical_in_a_chain(tensor, local, cross):
    steps = (
        lambda own: collectives.ring_reduce_scatter(own, group=local),
        lambda own: collectives.ring_all_reduce(own, group=cross),
    )
    functools.reduce(lambda value, step: step(value), steps, tensor)
    collectives.ring_all_gather(tensor, group=local)
    return tensor


def hierarchical_reduce_then_gather(tensor, local, cross):
    chunk = collectives.ring_reduce_scatter(tensor, local)
    collectives.ring_reduce_scatter(chunk, cross)
    collectives.ring_all_gather(chunk, cross)
    collectives.ring_all_gather(tensor, local)
    return tensor


def times_step_by_step(num_bytes, n, latency_s, bytes_per_s):
    def message(size):
        return latency_s + size / bytes_per_s

    levels = (n - 1).bit_length()
    ring = sum(message(num_bytes / n) for _ in range(2 * (n - 1)))
    tree = sum(message(num_bytes) for _ in range(2 * levels))
    halves = 2 * sum(message(num_bytes / 2**level) for level in range(1, levels + 1))
    return {"halving_doubling": halves, "ring": ring, "tree": tree}


def times_by_counts(num_bytes, n, latency_s, bytes_per_s):
    levels, part = math.ceil(math.log(n, 2) - 1e-9), num_bytes * (1 - 1 / n)
    counts = {"ring": (n - 1, part), "tree": (levels, levels * num_bytes), "halving_doubling": (levels, part)}
    return {name: 2 * (steps * latency_s + sent / bytes_per_s) for name, (steps, sent) in counts.items()}


def repair_with_a_fresh_buffer(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    passing = tensor.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(passing)
        send_receive(passing, (rank + 1) % n, arrived, (rank - 1) % n, group)
        tensor.add_(arrived)
        passing = arrived
    return tensor


def repair_adds_at_the_end(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    seen = [tensor.clone()]
    while len(seen) < n:
        seen.append(torch.empty_like(tensor))
        exchange(Receive(seen[-1], (rank - 1) % n), Send(seen[-2], (rank + 1) % n), group=group)
    return tensor.copy_(torch.stack(seen).sum(0))


def repair_the_other_way(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    buffers = [tensor.clone(), tensor.clone()]
    for step in range(n - 1):
        out, into = buffers[step % 2], buffers[1 - step % 2]
        pending = start(Send(out, (rank - 1) % n), Receive(into, (rank + 1) % n), group=group)
        pending.wait_received()
        tensor += into
        pending.wait()
    return tensor
