"""Zero bubble by hand: split the backward pass, and let weight gradients fill what would be idle.

Only I, the input-gradient part, is waited for by the stage before; W may run whenever there is time (and until it has
run, its micro-batch's memory is held). The bubble falls from (p - 1)(F + I + W) under 1F1B to (p - 1)(F + I - W) for
ZB-H1 and to (p - 1)(F + I - 2W) for ZB-H2: none where the three take the same time.

The zero-bubble papers call our I "B".
"""

from __future__ import annotations

import numpy as np

from distlab.plan.require import require_counts
from distlab.plan.schedules.grammar import Schedule
from distlab.plan.schedules.turns import depth_first, take_turns


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan ZB-H1: 1F1B's warm-up and 1F1B's memory, a third of its bubble.

    Rank r puts off the W of its first r micro-batches, so that every rank holds up to min(m, p), what 1F1B's first rank
    holds; the remaining W run while the last I travel back.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 2.1.
    """
    hops = _hops(num_ranks, num_microbatches)
    forward, backward = depth_first(((0, num_microbatches),), 1)
    return take_turns(forward, backward, warm_up=hops, weight_delay=hops[::-1])


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan ZB-H2: twice the warm-up fills the wait for the first I too; every rank holds up to min(m, 2p - 1).

    Ranks start one after the other and end one after the other, each without a gap: counted from a rank's own start to
    its own end it has no bubble where F = I = W. For that the optimizer's step must not wait for all ranks at once.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 2.2.
    """
    hops = _hops(num_ranks, num_microbatches)
    forward, backward = depth_first(((0, num_microbatches),), 1)
    return take_turns(forward, backward, warm_up=2 * hops, weight_delay=2 * hops[::-1])


def _hops(num_ranks: int, num_microbatches: int) -> np.ndarray:
    """Count, for each rank, the ranks between it and the end of the pipeline."""
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return np.arange(num_ranks, dtype=np.int32)[::-1]
