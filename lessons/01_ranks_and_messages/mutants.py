"""Wrong versions of lesson 1's solutions, each with the fault that its check must name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from distlab_lesson_01 import solutions
from torch import Tensor

from distlab.grading import Mutant

# 01.shift


def _send_first_everywhere(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    dist.send(tensor, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    return received


def _one_rank_forgotten(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    arriving = dist.irecv(received, (rank - 1) % world_size)
    dist.send(tensor, (rank + 1) % world_size)
    arriving.wait()
    return received


def _line_not_circle(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = tensor.clone()
    requests = []
    if rank > 0:
        requests.append(dist.irecv(received, rank - 1))
    if rank < world_size - 1:
        requests.append(dist.isend(tensor, rank + 1))
    for request in requests:
        request.wait()
    return received


def _past_the_end(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    requests = [dist.isend(tensor, rank + 1), dist.irecv(received, rank - 1)]
    for request in requests:
        request.wait()
    return received


def _wrong_direction(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    requests = [dist.irecv(received, (rank + 1) % world_size), dist.isend(tensor, (rank - 1) % world_size)]
    for request in requests:
        request.wait()
    return received


def _receive_not_waited(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.zeros_like(tensor)
    dist.irecv(received, (rank - 1) % world_size)
    dist.isend(tensor, (rank + 1) % world_size).wait()
    return received


def _chain_of_ranks(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(received, world_size - 1)
    else:
        dist.recv(received, rank - 1)
        dist.send(tensor, (rank + 1) % world_size)
    return received


def _overwrites_its_argument(tensor: Tensor) -> Tensor:
    tensor.copy_(solutions.shift(tensor))
    return tensor


def _gathers_everything(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everything = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everything, tensor)
    return everything[(rank - 1) % world_size]


# 01.ping_pong


def _play(tensor: Tensor, partner: int, rounds: int, begins: bool) -> float:
    answer, start = torch.empty_like(tensor), time.perf_counter()
    for _ in range(rounds):
        if begins:
            dist.send(tensor, partner)
            dist.recv(answer, partner)
        else:
            dist.recv(answer, partner)
            dist.send(tensor, partner)
    return time.perf_counter() - start


def _round_trip_not_halved(tensor: Tensor, partner: int, rounds: int) -> float:
    return _play(tensor, partner, rounds, dist.get_rank() < partner) / rounds


def _all_rounds(tensor: Tensor, partner: int, rounds: int) -> float:
    return _play(tensor, partner, rounds, dist.get_rank() < partner) / 2


def _rank_0_begins(tensor: Tensor, partner: int, rounds: int) -> float:
    return _play(tensor, partner, rounds, dist.get_rank() == 0) / (2 * rounds)


def _answer_not_waited_for(tensor: Tensor, partner: int, rounds: int) -> float:
    answer, start = torch.empty_like(tensor), time.perf_counter()
    for half in range(2):
        for _ in range(rounds):
            if (half == 0) == (dist.get_rank() < partner):
                dist.send(tensor, partner)
            else:
                dist.recv(answer, partner)
    return (time.perf_counter() - start) / (2 * rounds)


def _both_at_once(tensor: Tensor, partner: int, rounds: int) -> float:
    answer, start = torch.empty_like(tensor), time.perf_counter()
    for _ in range(rounds):
        leaving = dist.isend(tensor, partner)
        dist.recv(answer, partner)
        leaving.wait()
    return (time.perf_counter() - start) / (2 * rounds)


# 01.fit


def _fit_swapped(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    alpha_s, beta = solutions.fit(sizes_bytes, times_s)
    return beta, alpha_s


def _fit_slope(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    alpha_s, beta = solutions.fit(sizes_bytes, times_s)
    return alpha_s, 1 / beta


def _fit_bits(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    return solutions.fit([8 * size for size in sizes_bytes], times_s)


def _fit_through_zero(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    sizes, times = np.array(sizes_bytes), np.array(times_s)
    return 0.0, float((sizes @ sizes) / (sizes @ times))


def _fit_absolute(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    slope, start = np.polyfit(sizes_bytes, times_s, 1)
    return float(start), float(1 / slope)


def _fit_two_points(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    beta = (sizes_bytes[-1] - sizes_bytes[0]) / (times_s[-1] - times_s[0])
    return times_s[0] - sizes_bytes[0] / beta, beta


# 01.gather


def _collect(tensor: Tensor, root: int, source_of: Callable[[int], int | None]) -> list[Tensor] | None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(tensor, root)
        return None
    tensors = []
    for place in range(world_size):
        tensors.append(tensor.clone() if place == root else torch.empty_like(tensor))
        if place != root:
            dist.recv(tensors[-1], source_of(place))
    return tensors


def _from_anyone(tensor: Tensor, root: int) -> list[Tensor] | None:
    return _collect(tensor, root, lambda place: None)


def _root_is_0(tensor: Tensor, root: int) -> list[Tensor] | None:
    return _collect(tensor, 0, lambda place: place)


def _one_buffer(tensor: Tensor, root: int) -> list[Tensor] | None:
    if dist.get_rank() != root:
        dist.send(tensor, root)
        return None
    buffer, tensors = torch.empty_like(tensor), []
    for sender in range(dist.get_world_size()):
        if sender != root:
            dist.recv(buffer, sender)
        tensors.append(tensor if sender == root else buffer)
    return tensors


def _own_missing(tensor: Tensor, root: int) -> list[Tensor] | None:
    tensors = solutions.gather(tensor, root)
    return None if tensors is None else tensors[:root] + tensors[root + 1 :]


def _to_everybody(tensor: Tensor, root: int) -> list[Tensor] | None:
    lists = [solutions.gather(tensor, other) for other in range(dist.get_world_size())]
    return lists[root]


# 01.repair


def _only_rank_0_calls(loss: Tensor, threshold: float) -> bool:
    total = loss.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total.item() / dist.get_world_size() < threshold


def _sum_not_mean(loss: Tensor, threshold: float) -> bool:
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() < threshold


def _own_loss(loss: Tensor, threshold: float) -> bool:
    return loss.item() < threshold


def _loss_overwritten(loss: Tensor, threshold: float) -> bool:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size() < threshold


MUTANTS = (
    Mutant.written(
        "01.shift", "every rank sends first", _send_first_everywhere, "deadlock", "waits in send to", 2, "bug museum 3"
    ),
    Mutant.written(
        "01.shift", "one rank forgotten", _one_rank_forgotten, "itself", "receives from itself", 1, "torch refuses it"
    ),
    Mutant.written(
        "01.shift", "a line, not a circle", _line_not_circle, "own tensor", "circle must close", 2, "wrong ends"
    ),
    Mutant.written("01.shift", "past the end", _past_the_end, "no such rank", "outside 0 to 1", 2, "wrong ends"),
    Mutant.written(
        "01.shift", "wrong direction", _wrong_direction, "wrong direction", "the next one", 3, "right on 2 ranks"
    ),
    Mutant.written(
        "01.shift", "never waits", _receive_not_waited, "not waited", "never wait()", 2, "pytorch tutorial on isend"
    ),
    Mutant.written(
        "01.shift", "a chain", _chain_of_ranks, "one after another", "one after another", 4, "bug museum 25"
    ),
    Mutant.written(
        "01.shift", "overwrites", _overwrites_its_argument, "argument changed", "was changed", 2, "bug museum 40"
    ),
    Mutant.written(
        "01.shift", "all_gather", _gathers_everything, "native collective", "dist.all_gather", 2, "bug museum 1"
    ),
    Mutant.written("01.ping_pong", "not halved", _round_trip_not_halved, "round trip", "there and back", 2, "common"),
    Mutant.written("01.ping_pong", "not divided", _all_rounds, "all rounds", "divide by 2 * rounds", 2, "common"),
    Mutant.written("01.ping_pong", "rank 0 begins", _rank_0_begins, "deadlock", "recv from", 4, "bug museum 3"),
    Mutant.written(
        "01.ping_pong", "no waiting", _answer_not_waited_for, "answer not waited for", "before the answer", 2, "common"
    ),
    Mutant.written("01.ping_pong", "both at once", _both_at_once, "both at once", "at the same time", 2, "common"),
    Mutant.written("01.fit", "alpha and beta swapped", _fit_swapped, "swapped", "changed places", 1, "common"),
    Mutant.written("01.fit", "slope for beta", _fit_slope, "slope", "1 / slope", 1, "common"),
    Mutant.written("01.fit", "bits for bytes", _fit_bits, "bits", "divide by 8", 1, "HDR 200 Gb/s read as 200 GB/s"),
    Mutant.written("01.fit", "no latency", _fit_through_zero, "no latency", "through zero", 1, "size over time"),
    Mutant.written(
        "01.fit", "absolute errors", _fit_absolute, "absolute errors", "divide each row by its time", 1, "common"
    ),
    Mutant.written(
        "01.fit", "two points", _fit_two_points, "two points", "only the smallest and the largest", 1, "common"
    ),
    Mutant.written("01.gather", "from anyone", _from_anyone, "wrong order", "say from whom", 3, "bug museum 27"),
    Mutant.written("01.gather", "root is 0", _root_is_0, "root ignored", "replace the fixed number", 2, "bug museum 7"),
    Mutant.written("01.gather", "one buffer", _one_buffer, "one buffer", "a tensor of its own", 3, "bug museum 40"),
    Mutant.written("01.gather", "own missing", _own_missing, "wrong length", "own tensor is missing", 2, "common"),
    Mutant.written(
        "01.gather", "to everybody", _to_everybody, "too many messages", "each root that it is not", 3, "bug museum 1"
    ),
    Mutant.written(
        "01.repair", "reduce", solutions.should_stop_to_repair, "ranks disagree", "differently", 2, "bug museum 4"
    ),
    Mutant.written(
        "01.repair", "under if", _only_rank_0_calls, "not on every rank", "out of the `if`", 2, "bug museum 5"
    ),
    Mutant.written(
        "01.repair", "sum, not mean", _sum_not_mean, "sum not mean", "divide by world_size", 2, "bug museum 9"
    ),
    Mutant.written("01.repair", "own loss", _own_loss, "not communicated", "its own loss alone", 2, "bug museum 20"),
    Mutant.written(
        "01.repair", "overwritten", _loss_overwritten, "argument changed", "loss.clone()", 2, "bug museum 40"
    ),
)
