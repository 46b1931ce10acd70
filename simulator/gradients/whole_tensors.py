"""What an update of whole matrices (Muon) costs where ranks hold parts of them: by owners, or everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from distlab.plan import least_busiest, newton_schulz_flops
from distlab.plan.require import chosen


class WholeUpdate(NamedTuple):
    """What an update takes: operations of the busiest rank and of all matrices once, bytes on each rank before a call.

    The calls are all-to-alls: gradients and values to owners, new values back.
    """

    flops: float
    all_flops: float
    buffers_bytes: tuple[float, ...]

    def seconds(self, flops_per_s: float, exchange_s: Callable[[float], float]) -> float:
        """Return the time: buckets of matrices are computed while others travel, so the longer of both."""
        return max(self.flops / flops_per_s, sum(map(exchange_s, self.buffers_bytes)))


def whole_update(
    shapes: Iterable[tuple[int, ...]], num_ranks: int, *, by: str = "owners", bytes_each: float = 4
) -> WholeUpdate:
    """Return what an update of the matrices among these tensors takes; (n-1)/n of each buffer is sent.

    Source: distlab.sharding.WholeTensorOptimizer, whose ways these are.
    """
    chosen("by", by, ("owners", "everywhere"))
    matrices = [shape for shape in shapes if len(shape) == 2]
    work, size = [newton_schulz_flops(shape) for shape in matrices], bytes_each * sum(map(math.prod, matrices))
    if by == "everywhere":
        return WholeUpdate(sum(work), sum(work), (2 * size,))
    return WholeUpdate(least_busiest(work, num_ranks), sum(work), (2 * size / num_ranks, size / num_ranks))
