"""What a measurement needs of its ranks: devices, clocks, a calm machine, numbers that are the same on every rank."""

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
MAX_TAKEN_CORES = 0.2  # by other processes: from more on, times say little


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


def busy_s() -> float | None:
    """Return the seconds that all processes have computed on this process's cores since the start of the machine.

    Time that a different virtual machine took ("steal") counts too. None where psutil or the system does not tell.
    """
    try:
        import psutil

        cores = psutil.cpu_times(percpu=True)
        own = [cores[core] for core in psutil.Process().cpu_affinity()]
        return float(sum(core.user + core.nice + core.system + getattr(core, "steal", 0.0) for core in own))
    except (ImportError, AttributeError, IndexError, OSError):
        return None


def busy_sentence(cores: float) -> str:
    """Say how many cores other processes took from the ranks."""
    return f"The machine was busy: other processes took {cores:.1f} of its cores from the ranks."


class OtherProcesses:
    """Measures the cores that processes other than the ranks take. Every rank makes one.

    On several machines it is about their mean, and counts too few.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def taken(self) -> float:
        """Return the cores taken since the last call, the same on every rank; 0 where the system does not tell.

        Cores that the ranks leave free, each of which can use one, do not count.

        Cost: one all-reduce of 24 bytes.
        """
        before, self._last = self._last, self._read()
        passed = [after - start for after, start in zip(self._last, before, strict=True)]
        num_ranks, (wall_s, own_s, all_s) = dist.get_world_size(), mean_over_ranks(passed, group_device())
        free = max(0, num_cores() - num_ranks)
        return max(0.0, (all_s - num_ranks * own_s) / wall_s - free)

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), busy_s() or 0.0
