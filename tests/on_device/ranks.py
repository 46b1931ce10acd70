"""Living ranks of a device and a backend, by world size, as the fixture `ranks` gives them to tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from distlab.comm import Ranks, device
from on_device.mode import moved, run_on_device

WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may give other bits in every run


class NotHere(Exception):
    """This machine, or this backend, cannot run it; the text says why."""


class RanksOnDevice:
    """Ranks whose programs run on a device; their results come to this process's device."""

    def __init__(self, pool: Ranks, kind: str) -> None:
        self._pool, self._kind = pool, kind

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(*args) on every rank, with its tensors on the rank's device."""
        found = self._pool.run(run_on_device, self._kind, fn, *moved(args, torch.device("cpu")))
        return moved(found, torch.device(self._kind, 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class Machine:
    """Makes ranks on demand and ends them.

    Args:
        kind: "cpu" or "cuda".
        backend: "gloo", or "nccl" (with gloo next to it for tensors on the CPU, as for users); None chooses as `Ranks`.
        timeout_s: how long one call may take.
    """

    def __init__(self, kind: str = "cpu", backend: str | None = None, timeout_s: float = 60.0) -> None:
        self.kind, self.backend, self.timeout_s = kind, backend, timeout_s
        self.pools: dict[int, Ranks] = {}
        self.made: dict[tuple[str, str], Any] = {}  # values of fixtures that whole modules share
        if kind != "cpu":
            os.environ.setdefault(*WORKSPACE)

    def ranks(self, world_size: int) -> Any:
        """Return that many ranks.

        Raises:
            NotHere: nccl wants a GPU for each rank, and there are fewer.
        """
        if self.backend == "nccl" and world_size > device.num_gpus():
            raise NotHere(f"needs {world_size} GPUs: nccl wants one for each rank, and there are {device.num_gpus()}")
        if world_size not in self.pools:
            backend = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend
            self.pools[world_size] = Ranks(world_size, timeout_s=self.timeout_s, backend=backend)
        pool = self.pools[world_size]
        return pool if self.kind == "cpu" else RanksOnDevice(pool, self.kind)

    def close(self) -> None:
        """End all ranks."""
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()
