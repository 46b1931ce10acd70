"""Rules for what a caller passes, checked before any process starts."""

from __future__ import annotations

import math
import operator
import resource
from typing import SupportsIndex

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
MAX_RANKS = 1024
FDS_PER_RANK = 3


def check_world_size(world_size: object) -> int:
    """Return the world size.

    Raises:
        ValueError: it is not a whole number from 1 to what this process may start.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, SupportsIndex):
        raise ValueError(f"world_size is {world_size!r}; pass a whole number of ranks, such as 4")
    number = operator.index(world_size)
    if number < 1:
        raise ValueError(f"world_size is {number}; pass at least 1 rank")
    limit = max_ranks()
    if number > limit:
        raise ValueError(f"world_size is {number}; this process can start at most {limit} ranks (real processes each)")
    return number


def max_ranks() -> int:
    """Return how many ranks fit this process's limit of open files, at most 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(hard if hard != resource.RLIM_INFINITY else 1 << 20, max(soft, 1 << 16))
    return max(1, min(MAX_RANKS, (files - 64) // FDS_PER_RANK))


def check_timeout(timeout_s: object) -> float:
    """Return the timeout in seconds.

    Raises:
        ValueError: it is not a positive, finite number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s is {timeout_s!r}; pass a positive number of seconds, such as 60")
    return float(timeout_s)


def check_backend(backend: object, world_size: int) -> str | None:
    """Return the backend.

    Raises:
        ValueError: it is unknown, or it is nccl and there is not one GPU per rank.
    """
    if backend is None:
        return None
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; pass one of {', '.join(BACKENDS)}, or None to choose")
    if "nccl" in backend:
        from distlab.comm import device

        if (count := device.num_gpus()) < world_size:
            raise ValueError(
                f"backend nccl needs a GPU for each of {world_size} ranks, and there are {count}; pass 'gloo'"
            )
    return backend
