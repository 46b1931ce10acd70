"""The functions that lesson 02 asks for, each with its budget.

`ring_reduce_scatter` and `ring_all_gather` make the ring, `tree_broadcast` takes few steps, `halving_doubling` few
steps and few bytes, `hierarchical_all_reduce` spares the slow links, and `all_reduce_times` predicts which of them
wins. The library's own versions, cut into pieces and open to any number of ranks, are in distlab/collectives.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from distlab import collectives
from distlab.comm.p2p import Receive, Send, exchange


def ring_reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over all ranks, leaving each rank with its own chunk of the sum.

    Shapes: tensor [L] -> chunk `rank` of tensor.tensor_split(n), a view into tensor; the rest of tensor is scratch.
    Cost: n-1 steps; (n-1)/n S bytes sent per rank.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    scratch = torch.empty_like(chunks[0])  # chunk 0 is never shorter than a different one
    for step in range(n - 1):
        outgoing = chunks[(rank - step - 1) % n]  # this rank has added its part: pass it on
        grows = chunks[(rank - step - 2) % n]
        received = scratch[: grows.numel()]
        exchange(Receive(received, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        grows += received
    return chunks[rank]


def ring_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Fill a tensor on every rank from the ranks' chunks.

    Shapes: tensor [L], of which this rank has filled chunk `rank` of tensor.tensor_split(n); returns it, whole.
    Cost: n-1 steps; (n-1)/n S bytes sent per rank.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        known, unknown = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(Receive(unknown, (rank - 1) % n), Send(known, (rank + 1) % n), group=group)
    return tensor


def tree_broadcast(tensor: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Copy the root's tensor to every rank, doubling in each step the number of ranks that have it.

    Shapes: any; the same on all ranks; returns tensor. root is a rank of the group.
    Cost: ceil(log2 n) steps; the root sends ceil(log2 n) S bytes, all others less.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place = (rank - root) % n  # the root stands at place 0
    have = 1  # places 0 to have - 1 have the tensor
    while have < n:
        if place < have and place + have < n:
            exchange(Send(tensor, (place + have + root) % n), group=group)
        elif have <= place < 2 * have:
            exchange(Receive(tensor, (place - have + root) % n), group=group)
        have *= 2
    return tensor


def halving_doubling(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over all ranks in place, where their number is a power of two.

    Shapes: tensor [L], returned. Halves are block.tensor_split(2); the lower rank of a pair keeps the first.
    Cost: 2 log2(n) steps; 2 (n-1)/n S bytes sent per rank.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    block, swaps, distance = tensor, [], n // 2
    while distance:
        peer = rank ^ distance
        first, second = block.tensor_split(2)
        mine, theirs = (first, second) if rank < peer else (second, first)
        received = torch.empty_like(mine)
        exchange(Receive(received, peer), Send(theirs, peer), group=group)
        mine += received
        swaps.append((peer, mine, theirs))
        block, distance = mine, distance // 2
    for peer, mine, theirs in reversed(swaps):
        exchange(Receive(theirs, peer), Send(mine, peer), group=group)
    return tensor


def hierarchical_all_reduce(tensor: torch.Tensor, local: dist.ProcessGroup, cross: dist.ProcessGroup) -> torch.Tensor:
    """Sum over all ranks of all machines in place, sending little between machines.

    `local` holds the g ranks of this machine, `cross` the m ranks with the same place on all machines.

    Shapes: tensor [L], returned.
    Cost: 2 (g-1)/g S bytes sent per rank inside the machine, 2 (m-1)/m S/g between machines.
    """
    chunk = collectives.ring_reduce_scatter(tensor, local)
    collectives.ring_all_reduce(chunk, cross)
    return collectives.ring_all_gather(tensor, local)


def all_reduce_times(num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    """Predict the seconds of an all-reduce: {"ring": ..., "tree": ..., "halving_doubling": ...}.

    A message of S bytes takes latency_s + S / bytes_per_s. The tree is a reduce up and a broadcast down, whole tensors
    in ceil(log2 n) steps each way. n is a power of two for halving_doubling.
    """
    levels = math.ceil(math.log2(n))
    least_bytes = 2 * (n - 1) / n * num_bytes
    return {
        "ring": 2 * (n - 1) * latency_s + least_bytes / bytes_per_s,
        "tree": 2 * levels * (latency_s + num_bytes / bytes_per_s),
        "halving_doubling": 2 * levels * latency_s + least_bytes / bytes_per_s,
    }


def relay_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over all ranks in place: every rank's tensor travels once around the ring, and each rank adds what passes.

    Shapes: any; returns tensor.
    Cost: n-1 steps; (n-1) S bytes sent per rank.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    outgoing, incoming = tensor.clone(), torch.zeros_like(tensor)
    for _ in range(n - 1):
        exchange(Receive(incoming, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        tensor += incoming
        outgoing, incoming = incoming, outgoing  # pass on what came, receive into the other buffer
    return tensor
