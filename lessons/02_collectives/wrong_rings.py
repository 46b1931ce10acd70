"""Wrong versions of the ring's two halves and of the tree, for mutants.py."""

# ruff: noqa: D103
from __future__ import annotations

import math

import torch
import torch.distributed as dist

from distlab import collectives
from distlab.comm.p2p import Receive, Send, exchange

Group = dist.ProcessGroup | None


# reduce-scatter


def scatter_whole_tensors(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    travelling = tensor.clone()
    for _ in range(n - 1):
        received = torch.empty_like(travelling)
        exchange(Receive(received, (rank - 1) % n), Send(travelling, (rank + 1) % n), group=group)
        tensor += received
        travelling = received
    return tensor.tensor_split(n)[rank]


def scatter_one_chunk_late(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    scratch = torch.empty_like(chunks[0])
    for step in range(n - 1):
        outgoing, grows = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = scratch[: grows.numel()]
        exchange(Receive(received, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        grows += received
    return chunks[rank]


def scatter_copies(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        outgoing, grows = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange(Receive(grows, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
    return chunks[rank]


def scatter_adds_twice(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    scratch = torch.empty_like(chunks[0])
    for step in range(n):
        outgoing, grows = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = scratch[: grows.numel()]
        exchange(Receive(received, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        grows += received
    return chunks[rank]


def scatter_forgets_the_tail(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    size = tensor.numel() // n
    chunks = [tensor[size * c : size * (c + 1)] for c in range(n)]
    for step in range(n - 1):
        outgoing, grows = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(grows)
        exchange(Receive(received, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        grows += received
    return chunks[rank]


def scatter_passes_on_what_came(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    outgoing = chunks[(rank - 1) % n]
    for step in range(n - 1):
        grows = chunks[(rank - step - 2) % n]
        received = torch.empty_like(grows)
        exchange(Receive(received, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)
        grows += received
        outgoing = received
    return chunks[rank]


def scatter_sends_first(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        outgoing, grows = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        received = torch.empty_like(grows)
        exchange(Send(outgoing, (rank + 1) % n), group=group)
        exchange(Receive(received, (rank - 1) % n), group=group)
        grows += received
    return chunks[rank]


def scatter_straight_to_the_owner(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    total = chunks[rank].clone()
    for away in range(1, n):
        received = torch.empty_like(total)
        owner = (rank + away) % n
        exchange(Receive(received, (rank - away) % n), Send(chunks[owner], owner), group=group)
        total += received
    return total


def scatter_on_a_copy(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    return collectives.ring_reduce_scatter(tensor.clone(), group)


def scatter_by_torch(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


# all-gather


def gather_one_chunk_early(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        known, unknown = chunks[(rank - step + 1) % n], chunks[(rank - step) % n]
        exchange(Receive(unknown, (rank - 1) % n), Send(known, (rank + 1) % n), group=group)
    return tensor


def gather_adds(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        known, unknown = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(unknown)
        exchange(Receive(received, (rank - 1) % n), Send(known, (rank + 1) % n), group=group)
        unknown += received
    return tensor


def gather_stops_early(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 2):
        known, unknown = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(Receive(unknown, (rank - 1) % n), Send(known, (rank + 1) % n), group=group)
    return tensor


def gather_whole_tensors(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for step in range(n - 1):
        received = torch.empty_like(tensor)
        exchange(Receive(received, (rank - 1) % n), Send(tensor.clone(), (rank + 1) % n), group=group)
        came = (rank - step - 1) % n
        tensor.tensor_split(n)[came].copy_(received.tensor_split(n)[came])
    return tensor


def gather_straight_from_the_owner(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for away in range(1, n):
        owner = (rank - away) % n
        exchange(Receive(chunks[owner], owner), Send(chunks[rank], (rank + away) % n), group=group)
    return tensor


def gather_returns_its_chunk(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    return collectives.ring_all_gather(tensor, group).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


# broadcast


def broadcast_by_the_root_alone(tensor: torch.Tensor, root: int = 0, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank == root:
        for other in range(n):
            if other != root:
                exchange(Send(tensor, other), group=group)
    else:
        exchange(Receive(tensor, root), group=group)
    return tensor


def broadcast_along_a_chain(tensor: torch.Tensor, root: int = 0, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place = (rank - root) % n
    if place > 0:
        exchange(Receive(tensor, (rank - 1) % n), group=group)
    if place < n - 1:
        exchange(Send(tensor, (rank + 1) % n), group=group)
    return tensor


def broadcast_from_rank_zero(tensor: torch.Tensor, root: int = 0, group: Group = None) -> torch.Tensor:
    return collectives.tree_broadcast(tensor, 0, group)


def broadcast_to_powers_of_two(tensor: torch.Tensor, root: int = 0, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place = (rank - root) % n
    have = 1
    for _ in range(int(math.log2(n))):
        if place < have and place + have < n:
            exchange(Send(tensor, (place + have + root) % n), group=group)
        elif have <= place < 2 * have:
            exchange(Receive(tensor, (place - have + root) % n), group=group)
        have *= 2
    return tensor


def broadcast_to_global_ranks(tensor: torch.Tensor, root: int = 0, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place, have = (rank - root) % n, 1
    while have < n:
        if place < have and place + have < n:
            dist.send(tensor, (place + have + root) % n, group=group)
        elif have <= place < 2 * have:
            dist.recv(tensor, (place - have + root) % n, group=group)
        have *= 2
    return tensor
