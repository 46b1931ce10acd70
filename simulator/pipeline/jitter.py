"""Jitter and stragglers: what makes equal work take unequal time on different ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Jitter:
    """A random factor for the duration of every action: positive, 1 on average (log-normal).

    Attributes:
        relative: standard deviation of the factor; 0.05: most actions within 5 % of their time.
        seed: what the factors are drawn from; equal seeds give equal factors.
    """

    relative: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.relative >= 0 and math.isfinite(self.relative)):
            raise ValueError(f"Jitter: relative is {self.relative!r}; pass a spread >= 0, such as 0.05")

    def factors(self, num_actions: int) -> Floats:
        """Draw one factor per action."""
        variance = math.log1p(self.relative**2)
        normal = np.random.default_rng([self.seed, num_actions]).standard_normal(num_actions)
        return np.exp(math.sqrt(variance) * normal - variance / 2)


def slow_factors(slow_ranks: Mapping[int, float] | None, num_ranks: int) -> Floats:
    """Return the factor of each rank's times: 1 where `slow_ranks` does not name it.

    Raises:
        ValueError: a rank does not exist, or a factor is not positive.
    """
    factors = np.ones(num_ranks)
    for rank, factor in (slow_ranks or {}).items():
        if not 0 <= rank < num_ranks:
            raise ValueError(f"slow_ranks names rank {rank}; the pipeline has ranks 0..{num_ranks - 1}")
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"slow_ranks gives rank {rank} the factor {factor!r}; pass a number above 0, such as 1.3")
        factors[rank] = factor
    return factors


def stretched(duration_ns: Ints, factors: Floats | None) -> Ints:
    """Return durations times factors, in whole nanoseconds."""
    return duration_ns if factors is None else np.rint(duration_ns * factors).astype(np.int64)
