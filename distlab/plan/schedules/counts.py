"""The check that every generator of schedules makes first."""

from __future__ import annotations

import numpy as np


def require_counts(**counts: int) -> None:
    """Refuse a number of ranks, stages or micro-batches that is no whole number of at least 1.

    Raises:
        ValueError: which one, and what it is.
    """
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"{name} is {count!r}; pass a whole number of at least 1")
