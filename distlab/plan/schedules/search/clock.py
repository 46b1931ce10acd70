"""When the actions of a schedule of one stage per rank would run: what the search trusts in the end.

The cost of a tiled schedule is first guessed from its draft. Before one is chosen, this runs it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import F, I, W
from distlab.plan.schedules.search.rules import PassCosts


def span_and_end(kinds: NDArray[np.int8], costs: PassCosts) -> tuple[int, int]:
    """Return the longest time from a rank's first start to its last end, and when the last rank ends.

    In the order that `can_run` shows to be possible: for each micro-batch j, from the first rank to the last all that
    comes before I j, then I j from the last rank to the first.
    """
    num_ranks, length = kinds.shape
    last, rows = num_ranks - 1, [iter(row) for row in kinds.tolist()]
    clock, start = [0] * num_ranks, [-1] * num_ranks
    inputs: list[list[int]] = [[0] * (length // 3)] + [[] for _ in range(num_ranks)]  # when each arrives at each rank
    num_f, num_w = [0] * num_ranks, [0] * num_ranks
    for _microbatch in range(length // 3):
        for rank in range(num_ranks):
            now = clock[rank]
            for kind in rows[rank]:
                if kind == I:
                    break
                if kind == W:
                    now += costs.weight_gradient[rank]
                    num_w[rank] += 1
                    continue
                assert kind == F
                begin = max(now, inputs[rank][num_f[rank]])
                if start[rank] < 0:
                    start[rank] = begin
                now = begin + costs.forward[rank]
                num_f[rank] += 1
                inputs[rank + 1].append(now + costs.communication[rank])
            clock[rank] = now
        gradient = 0
        for rank in range(last, -1, -1):
            clock[rank] = max(clock[rank], gradient) + costs.input_gradient[rank]
            gradient = clock[rank] + costs.communication[rank]
    for rank, done in enumerate(num_w):
        clock[rank] += (length // 3 - done) * costs.weight_gradient[rank]
    return max(end - begin for begin, end in zip(start, clock, strict=True)), max(clock)
