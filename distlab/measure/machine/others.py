"""How many cores other processes take from the ranks: what makes a timed step slower than a calm machine's."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from distlab.comm.agree import group_device
from distlab.measure.machine.facts import num_cores
from distlab.measure.machine.ranks import mean_over_ranks

MAX_TAKEN_CORES = 0.2  # from more on, times say little


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


def taken_cores(all_s: float, ranks_s: float, wall_s: float, *, cores: int, num_ranks: int) -> float:
    """Return the cores that other processes took from the ranks; cores that the ranks leave free do not count.

    Args:
        all_s: seconds that all processes computed.
        ranks_s: seconds that the ranks computed, all together.
        wall_s: seconds that passed.
        cores: of the machine.
        num_ranks: ranks on it, each of which can use one core.
    """
    free = max(0, cores - num_ranks)
    return max(0.0, (all_s - ranks_s) / wall_s - free) if wall_s > 0 else 0.0


def busy_sentence(cores: float) -> str:
    """Say how many cores other processes took from the ranks."""
    return f"The machine was busy: other processes took {cores:.1f} of its cores from the ranks."


class OtherProcesses:
    """Measures the cores that processes other than the ranks take. Every rank makes one.

    On several machines it sees only the first rank's, and counts too few.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def taken(self) -> float:
        """Return the cores taken since the last call, the same on every rank; 0 where the system does not tell.

        Cost: one all-reduce and one broadcast of 8 bytes.
        """
        before, self._last = self._last, self._read()
        wall_s, own_s, all_s = (after - start for after, start in zip(self._last, before, strict=True))
        num_ranks = dist.get_world_size()
        ranks_s = num_ranks * mean_over_ranks([own_s], group_device())[0]
        found = taken_cores(all_s, ranks_s, wall_s, cores=num_cores(), num_ranks=num_ranks)
        agreed = torch.tensor(found, dtype=torch.float64, device=group_device())
        dist.broadcast(agreed, 0)
        return float(agreed)

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), busy_s() or 0.0
