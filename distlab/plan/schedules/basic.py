"""The first three schedules, one stage per rank: naive model parallelism, GPipe and 1F1B.

With p stages and m micro-batches, naive model parallelism takes m p slots of (F + B) when communication is free: one
rank computes while the others wait. GPipe and 1F1B take m + p - 1 slots: the bubble is (p - 1) slots. They differ in
memory. GPipe runs all forward passes first and keeps m micro-batches; 1F1B starts each backward as soon as it can, so
that stage i keeps min(m, p - i).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distlab.plan.require import require_count
from distlab.plan.schedules.grammar import B, F, Schedule


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan naive model parallelism: a micro-batch goes all the way up and all the way down before the next one starts.

    One rank computes at a time, so that p ranks are as fast as one. What they save is memory: each holds its part of
    the model, and the activations of one micro-batch.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    step = np.arange(2 * num_microbatches, dtype=np.int32)
    return _same_on_every_rank(num_ranks, np.where(step % 2 == 0, F, B), step // 2)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan GPipe: every rank runs all forward passes, then all backward passes, each in the order of micro-batches.

    Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3; the backward order is torch's ScheduleGPipe (the paper
        runs it from the last micro-batch to the first).
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    step = np.arange(2 * num_microbatches, dtype=np.int32)
    return _same_on_every_rank(num_ranks, np.where(step < num_microbatches, F, B), step % num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan 1F1B: a rank warms up, then alternates one forward and one backward, then drains.

    Rank r warms up with min(m, p - 1 - r) forward passes; any m will do, m < p too.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1, without interleaving.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    every = np.arange(num_microbatches, dtype=np.int32)
    kind = np.full((num_ranks, 2 * num_microbatches), B, np.int8)
    microbatch = np.empty(kind.shape, np.int32)
    for rank in range(num_ranks):
        warm = min(num_ranks - 1 - rank, num_microbatches)
        drain = 2 * num_microbatches - warm
        kind[rank, :warm] = kind[rank, warm:drain:2] = F
        microbatch[rank, :warm] = every[:warm]
        microbatch[rank, warm:drain:2] = every[warm:]  # the k-th pair runs F of warm + k, then B of k
        microbatch[rank, warm + 1 : drain : 2] = every[: num_microbatches - warm]
        microbatch[rank, drain:] = every[num_microbatches - warm :]
    return one_stage_a_rank(kind, microbatch)


def _same_on_every_rank(num_ranks: int, kind: NDArray[np.generic], microbatch: NDArray[np.generic]) -> Schedule:
    shape = (num_ranks, len(kind))
    return one_stage_a_rank(np.broadcast_to(kind, shape), np.broadcast_to(microbatch, shape))


def one_stage_a_rank(kind: NDArray[np.generic], microbatch: NDArray[np.generic]) -> Schedule:
    """Return the schedule of these actions [ranks, actions], where rank r runs stage r."""
    num_ranks, length = kind.shape
    stage = np.broadcast_to(np.arange(num_ranks, dtype=np.int32)[:, None], (num_ranks, length))
    return Schedule.from_columns(stage=stage, kind=kind, microbatch=microbatch, lengths=[length] * num_ranks)
