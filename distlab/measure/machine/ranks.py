"""What a measurement needs of its ranks: their devices and clocks, and numbers that are the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from distlab.comm.agree import group_device
from distlab.comm.clocks import clock_offsets_ns
from distlab.comm.device import device_of as device_of, is_gpu, synchronize
from distlab.measure.machine.facts import num_cores

Result = TypeVar("Result")
LEAST_WAIT_S = 0.002
SPIN_S = 0.0003  # a sleep may end so late


def shared_cores(device: torch.device) -> int | None:
    """Return the cores that all ranks share; None on GPUs, where ranks do not compute on cores."""
    return None if is_gpu(device) else num_cores()


def now(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work so far."""
    synchronize(device)
    return time.perf_counter()


def time_calls(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds of one call of several that follow one another; the first, before a barrier, warms up."""
    with torch.no_grad():
        call()
        dist.barrier()
        begin = now(device)
        for _ in range(repeats):
            call()
        return (now(device) - begin) / repeats


class Starter:
    """Begins something on all ranks at one moment; made and used by every rank at the same time.

    A barrier does not: of four ranks on two cores two leave it first, and the others wait for a core, some
    milliseconds with sockets. What the first two have done by then would not count where each rank takes its own time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ahead_s = clock_offsets_ns()[dist.get_rank()] / 1e9  # 0 on one machine

    def begin(self) -> float:
        """Wait for the moment; return it on the clock of `now`. A rank that has no core then begins later.

        Cost: a barrier, an all-reduce of 16 bytes, and three times what the barrier took on the rank that came last.
        """
        come = now(self.device)
        dist.barrier()
        met = time.perf_counter()
        latest, shortest = largest_over_ranks([met + self._ahead_s, come - met], self.device)
        begin = latest + LEAST_WAIT_S - 3 * shortest - self._ahead_s
        time.sleep(max(0.0, begin - SPIN_S - time.perf_counter()))
        while time.perf_counter() < begin:
            pass
        return begin


def mean_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return each value's mean over all ranks; every rank calls this.

    Cost: one all-reduce of 8 bytes per value.
    """
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total / dist.get_world_size()]


def largest_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks; every rank calls this.

    Cost: one all-reduce of 8 bytes per value.
    """
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]


def on_first_rank(make: Callable[[], Result]) -> Result:
    """Call `make` on the first rank only, and return its result on all; every rank calls this.

    Ranks that share cores would only wait for each other if each of them computed the same.

    Cost: one broadcast of the pickled result, after one of its length.

    Raises:
        Exception: on every rank, what `make` raised on the first.
    """
    made: list[object] = [None]
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except Exception as error:  # the other ranks wait for this one, so they must receive the error
            made[0] = error
    dist.broadcast_object_list(made, src=0, device=group_device())
    if isinstance(made[0], Exception):
        raise made[0]
    return cast(Result, made[0])
