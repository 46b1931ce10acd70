"""Owners: whole things are given to ranks so that the busiest rank is done soon, as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distlab.plan.require import require, require_count


def assign_owners(work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Return the rank that owns each thing: the one that has least to do so far, the longest work first.

    Error: the busiest rank has at most 4/3 of what the best assignment would give it.
    Source: Graham 1969, Bounds on multiprocessing timing anomalies: longest processing time first.
    """
    require_count(num_ranks=num_ranks)
    load, owners = [0.0] * num_ranks, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        owners[index] = load.index(min(load))
        load[owners[index]] += work[index]
    return tuple(owners)


def least_busiest(work: Sequence[float], num_ranks: int) -> float:
    """Return a lower bound on the work of the busiest rank: a share of all, and k + 1 of the longest k n + 1."""
    require_count(num_ranks=num_ranks)
    falling, n = sorted(work, reverse=True), num_ranks
    crowded = (math.fsum(falling[at - at // n : at + 1]) for at in range(0, len(work), n))
    return max(math.fsum(work) / n, *crowded, 0.0)


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> float:
    """Return the operations of a matrix's Newton-Schulz iterations: each 4 m^2 n + 2 m^3, with m the shorter side."""
    require(len(shape) == 2, f"the shape is {list(shape)}, and Newton-Schulz takes a matrix: pass [rows, columns]")
    m, n = sorted(shape)
    return steps * (4.0 * m**2 * n + 2.0 * m**3)
