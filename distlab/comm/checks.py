"""Rules for what a caller passes, checked before any process starts."""

from __future__ import annotations

import math
import operator
import os
from typing import SupportsIndex

from distlab.comm.shared_memory.futex import why_not_here

CPU = "cpu"  # shared memory where all ranks can have it, else gloo
BACKENDS = ("gloo", "shared", "nccl", "cpu:gloo,cuda:nccl", CPU)
BACKEND_VARIABLE = "DISTLAB_BACKEND"
MAX_RANKS = 1024


def check_world_size(world_size: object) -> int:
    """Return the world size.

    Raises:
        ValueError: it is not a whole number from 1 to 1,024.
    """
    is_bool = isinstance(world_size, bool)
    number = operator.index(world_size) if isinstance(world_size, SupportsIndex) and not is_bool else 0
    if not 1 <= number <= MAX_RANKS:
        raise ValueError(f"world_size is {world_size!r}; pass a whole number of ranks, from 1 to {MAX_RANKS:,}")
    return number


def check_timeout(timeout_s: object, *, what: str = "timeout_s") -> float:
    """Return the timeout in seconds.

    Raises:
        ValueError: it is not a positive, finite number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"{what} is {timeout_s!r}; pass a positive number of seconds, such as 60")
    return float(timeout_s)


def check_backend(backend: object, world_size: int, num_nodes: int = 1) -> str | None:
    """Return the backend's name, or None where it is to be chosen.

    Where none is passed, or only the kind ("cpu"), the environment variable DISTLAB_BACKEND counts.

    Raises:
        ValueError: it is unknown, it is nccl and there is not one GPU per rank, or it is shared and does not work here;
            or there are nodes, which have a backend of their own.
    """
    if num_nodes > 1:
        if backend not in (None, "shared"):
            raise ValueError(
                f"backend is {backend!r} and the ranks make {num_nodes} nodes, which have a backend of their own "
                "(shared memory inside, a wire between); leave backend out"
            )
        backend = "shared"  # whatever the environment says
    what, outside = "backend", os.environ.get(BACKEND_VARIABLE)
    if outside and (backend is None or (backend == CPU and outside != "nccl")):
        backend, what = outside, BACKEND_VARIABLE
    if backend is None:
        return None
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"{what} is {backend!r}; pass one of {', '.join(BACKENDS)}, or None to choose")
    if backend == "shared" and (reason := why_not_here()):
        raise ValueError(f"backend shared does not work here: {reason}; pass 'gloo'")
    if "nccl" in backend:
        from distlab.comm import device

        if (count := device.num_gpus()) < world_size:
            raise ValueError(
                f"backend nccl needs a GPU for each of {world_size} ranks, and there are {count}; pass 'gloo'"
            )
    return backend
