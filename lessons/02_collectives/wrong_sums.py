"""Wrong versions of whole all-reduces and of their predicted times, for mutants.py."""

# ruff: noqa: D103
from __future__ import annotations

import math

import torch
import torch.distributed as dist

from distlab import collectives
from distlab.comm.p2p import Receive, Send, exchange

Group = dist.ProcessGroup | None


# halving and doubling


def doubling_of_whole_tensors(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    distance = 1
    while distance < n:
        received = torch.empty_like(tensor)
        exchange(Receive(received, rank ^ distance), Send(tensor.clone(), rank ^ distance), group=group)
        tensor += received
        distance *= 2
    return tensor


def halving_never_doubles(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    collectives.halving_reduce_scatter(tensor, group)
    return tensor


def halving_keeps_the_sent_half(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    block, swaps, distance = tensor, [], n // 2
    while distance:
        peer = rank ^ distance
        first, second = block.tensor_split(2)
        received = torch.empty_like(first)
        exchange(Receive(received[: second.numel()], peer), Send(second, peer), group=group)
        first[: second.numel()] += received[: second.numel()]
        swaps.append((peer, first, second))
        block, distance = first, distance // 2
    for peer, mine, theirs in reversed(swaps):
        exchange(Receive(theirs, peer), Send(mine[: theirs.numel()], peer), group=group)
    return tensor


def halving_rounds_down(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    block, swaps, distance = tensor, [], n // 2
    while distance:
        peer, half = rank ^ distance, block.numel() // 2
        first, second = block[:half], block[half : 2 * half]
        mine, theirs = (first, second) if rank < peer else (second, first)
        received = torch.empty_like(mine)
        exchange(Receive(received, peer), Send(theirs, peer), group=group)
        mine += received
        swaps.append((peer, mine, theirs))
        block, distance = mine, distance // 2
    for peer, mine, theirs in reversed(swaps):
        exchange(Receive(theirs, peer), Send(mine, peer), group=group)
    return tensor


def halving_walks_forward(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
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
    for peer, mine, theirs in swaps:
        exchange(Receive(theirs, peer), Send(mine, peer), group=group)
    return tensor


# two levels

Two = dist.ProcessGroup


def two_whole_all_reduces(tensor: torch.Tensor, local: Two, cross: Two) -> torch.Tensor:
    collectives.ring_all_reduce(tensor, local)
    return collectives.ring_all_reduce(tensor, cross)


def levels_swapped(tensor: torch.Tensor, local: Two, cross: Two) -> torch.Tensor:
    chunk = collectives.ring_reduce_scatter(tensor, cross)
    collectives.ring_all_reduce(chunk, local)
    return collectives.ring_all_gather(tensor, cross)


def levels_never_cross(tensor: torch.Tensor, local: Two, cross: Two) -> torch.Tensor:
    collectives.ring_reduce_scatter(tensor, local)
    return collectives.ring_all_gather(tensor, local)


def levels_never_gather(tensor: torch.Tensor, local: Two, cross: Two) -> torch.Tensor:
    chunk = collectives.ring_reduce_scatter(tensor, local)
    collectives.ring_all_reduce(chunk, cross)
    return tensor


def levels_cross_with_everything(tensor: torch.Tensor, local: Two, cross: Two) -> torch.Tensor:
    collectives.ring_reduce_scatter(tensor, local)
    collectives.ring_all_gather(tensor, local)
    return collectives.ring_all_reduce(tensor, cross)


# predicted times


def times_of_one_way(num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    levels, least = math.ceil(math.log2(n)), (n - 1) / n * num_bytes
    return {
        "ring": (n - 1) * latency_s + least / bytes_per_s,
        "tree": levels * (latency_s + num_bytes / bytes_per_s),
        "halving_doubling": levels * latency_s + least / bytes_per_s,
    }


def times_in_bits(num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    levels, least = math.ceil(math.log2(n)), 2 * (n - 1) / n * num_bytes
    return {
        "ring": 2 * (n - 1) * latency_s + 8 * least / bytes_per_s,
        "tree": 2 * levels * (latency_s + 8 * num_bytes / bytes_per_s),
        "halving_doubling": 2 * levels * latency_s + 8 * least / bytes_per_s,
    }


def times_of_whole_rings(num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    levels = math.ceil(math.log2(n))
    return {
        "ring": 2 * (n - 1) * (latency_s + num_bytes / bytes_per_s),
        "tree": 2 * levels * (latency_s + num_bytes / bytes_per_s),
        "halving_doubling": 2 * levels * latency_s + 2 * (n - 1) / n * num_bytes / bytes_per_s,
    }


def times_with_ring_latencies(num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    levels, least = math.ceil(math.log2(n)), 2 * (n - 1) / n * num_bytes
    return {
        "ring": 2 * (n - 1) * latency_s + least / bytes_per_s,
        "tree": 2 * (n - 1) * latency_s + 2 * levels * num_bytes / bytes_per_s,
        "halving_doubling": 2 * levels * latency_s + least / bytes_per_s,
    }


def times_with_levels_cut_off(num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    levels, least = int(math.log2(n)), 2 * (n - 1) / n * num_bytes
    return {
        "ring": 2 * (n - 1) * latency_s + least / bytes_per_s,
        "tree": 2 * levels * (latency_s + num_bytes / bytes_per_s),
        "halving_doubling": 2 * levels * latency_s + least / bytes_per_s,
    }


def times_that_multiply(num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    levels, least = math.ceil(math.log2(n)), 2 * (n - 1) / n * num_bytes
    return {
        "ring": 2 * (n - 1) * latency_s + least * bytes_per_s,
        "tree": 2 * levels * (latency_s + num_bytes * bytes_per_s),
        "halving_doubling": 2 * levels * latency_s + least * bytes_per_s,
    }
