"""Reference solutions of lesson 1, the simplest first. Each depends on its arguments and on these imports alone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def shift(tensor: Tensor) -> Tensor:
    """Send `tensor` to the next rank and return the tensor of the rank before.

    The ranks stand in a circle: the last one sends to rank 0. A single rank is its own neighbour.
    `tensor` itself stays as it is.

    Cost: the bytes of `tensor` sent once by each rank, all at the same time.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    arriving = dist.irecv(received, (rank - 1) % world_size)
    leaving = dist.isend(tensor, (rank + 1) % world_size)
    arriving.wait()
    leaving.wait()
    return received


def ping_pong(tensor: Tensor, partner: int, rounds: int) -> float:
    """Send `tensor` to `partner` and get it back, `rounds` times; return the seconds that one message took.

    Both partners call this with each other's rank. The lower rank sends first and waits for the answer before it
    sends again; the higher rank answers. A round is two messages, one each way.

    Cost: `rounds` messages sent by each partner.
    """
    rank, answer = dist.get_rank(), torch.empty_like(tensor)
    start = time.perf_counter()
    for _ in range(rounds):
        if rank < partner:
            dist.send(tensor, partner)
            dist.recv(answer, partner)
        else:
            dist.recv(answer, partner)
            dist.send(tensor, partner)
    return (time.perf_counter() - start) / (2 * rounds)


def fit(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Fit `time = alpha + size / beta` to measured messages; return (alpha in seconds, beta in bytes per second).

    Least squares of the *relative* error, so that a message of 20 microseconds counts as much as one of 20
    milliseconds: the sum of ((alpha + size / beta) / time - 1)^2 over all messages is smallest.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_s, dtype=float)
    rows = np.stack([1 / times, sizes / times], axis=1)  # alpha * (1 / time) + (1 / beta) * (size / time) = 1
    alpha_s, seconds_per_byte = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
    return float(alpha_s), float(1 / seconds_per_byte)


def gather(tensor: Tensor, root: int) -> list[Tensor] | None:
    """Bring every rank's tensor to `root`, by messages.

    `root` returns a list with the tensor of rank 0 first, then that of rank 1, and so on, its own included.
    The other ranks return None.

    Cost: every rank but `root` sends its tensor once; `root` sends nothing.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(tensor, root)
        return None
    tensors = [tensor.clone() if sender == root else torch.empty_like(tensor) for sender in range(world_size)]
    arriving = [dist.irecv(tensors[sender], sender) for sender in range(world_size) if sender != root]
    for message in arriving:
        message.wait()
    return tensors


def should_stop(loss: Tensor, threshold: float) -> bool:
    """Tell whether the mean of all ranks' losses is below `threshold`; every rank calls this after each step.

    `loss` is this rank's own loss, a tensor with one number; it stays as it is.

    Cost: one collective of one number.
    """
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() < threshold
