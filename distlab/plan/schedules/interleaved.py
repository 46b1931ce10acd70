"""Several stages per rank, dealt out in a loop: stage s is on rank s mod p.

A micro-batch goes round the ranks once for each stage that a rank has. With v stages per rank the last rank starts
after a v-th of the time: the bubble shrinks to (p - 1) / v slots of (F + B), counted for all of a rank's stages. In
exchange each micro-batch is sent on v times as often.
"""

from __future__ import annotations

import numpy as np

from distlab.plan.require import require_counts
from distlab.plan.schedules.grammar import B, F, Schedule
from distlab.plan.schedules.turns import depth_first, rounds_of, take_turns


def interleaved(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Plan interleaved 1F1B: 1F1B whose ranks go through all their stages with a round of micro-batches at a time.

    With v stages per rank, rank 0 holds v p + p - 1 micro-batches of a stage at its peak: 1 + (p - 1) / (p v) times
    what 1F1B holds. The rounds have p micro-batches where these divide; others are spread over the rounds. With one
    stage per rank it warms up twice as long as 1F1B, for nothing: give each rank at least two.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2. They ask for a multiple of p micro-batches; torch's
        ScheduleInterleaved1F1B for equal rounds. Unequal rounds, the larger ones first, are this project's.
    """
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    rounds = rounds_of(num_ranks, num_microbatches)
    forward, backward = depth_first(rounds, stages_per_rank)
    return take_turns(forward, backward, warm_up=_warm_up(num_ranks, rounds, stages_per_rank, a_hop=2))


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Plan interleaved 1F1B with a split backward pass, whose weight gradients fill the end of the step.

    Rank r starts with p - 1 - r forward passes fewer than in `interleaved`, since I takes less than B, and puts off the
    weight gradients of r passes. With one stage per rank it is ZB-H1.

    Source: torch's ScheduleInterleavedZeroBubble, after Qi et al. 2023 (arXiv:2401.10241), which has no such schedule.
    """
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    rounds = rounds_of(num_ranks, num_microbatches)
    forward, backward = depth_first(rounds, stages_per_rank)
    warm_up = _warm_up(num_ranks, rounds, stages_per_rank, a_hop=1)
    return take_turns(forward, backward, warm_up=warm_up, weight_delay=np.arange(num_ranks))


def looped_bfs(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Plan looped breadth-first: a rank runs all micro-batches through one of its stages, then through the next.

    It is GPipe with the short bubble of interleaving, and holds everything: m micro-batches of v stages. In exchange a
    stage's gradients are whole early, and with sharded parameters each stage is gathered once per direction.

    Source: Lamy-Poirier 2022 (arXiv:2211.05953); the backward passes run from the last micro-batch to the first, as in
        torch's ScheduleLoopedBFS.
    """
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    step = np.arange(stages_per_rank * num_microbatches, dtype=np.int32)
    turn, microbatch = step // num_microbatches, step % num_microbatches
    shape = (num_ranks, 2 * len(step))
    turns = np.concatenate([turn, turn[::-1]])
    return Schedule.from_columns(
        stage=turns * num_ranks + np.arange(num_ranks, dtype=np.int32)[:, None],
        kind=np.broadcast_to(np.repeat(np.array([F, B], np.int8), len(step)), shape),
        microbatch=np.broadcast_to(np.concatenate([microbatch, microbatch[::-1]]), shape),
        lengths=[shape[1]] * num_ranks,
    )


def _warm_up(num_ranks: int, rounds: tuple[tuple[int, int], ...], stages_per_rank: int, *, a_hop: int) -> np.ndarray:
    """Count each rank's forward passes before its first backward.

    Those of all its stages but the last, for the first round of micro-batches; and `a_hop` for each rank behind it.
    """
    start, stop = rounds[0]
    hops = num_ranks - 1 - np.arange(num_ranks)
    return (stages_per_rank - 1) * (stop - start) + a_hop * hops
