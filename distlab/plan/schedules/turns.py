"""Schedules in which a rank warms up with forward passes, then takes turns: a forward, a backward, perhaps its W.

They differ in three things: how many forward passes a rank starts with, how long it puts off the weight gradients, and
in which order it takes its stages. 1F1B is of this kind too.

Interleaving: with v stages per rank, stage s on rank s mod p, a micro-batch goes round the ranks v times. The last rank
starts after a v-th of the time: the bubble shrinks to (p - 1) / v slots of (F + B), counted for all of a rank's stages.
In exchange each micro-batch is sent on v times as often.

Zero bubble: only I, the input-gradient part of the backward pass, is waited for by the stage before; W may run whenever
there is time (and until it has run, its micro-batch's memory is held). The bubble falls from (p - 1)(F + I + W) under
1F1B to (p - 1)(F + I - W) for ZB-H1 and to (p - 1)(F + I - 2W) for ZB-H2: none where the three take the same time. The
zero-bubble papers call our I "B".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.partition import split_evenly
from distlab.plan.require import require_count
from distlab.plan.schedules.grammar import B, F, I, Schedule, W

Ints = NDArray[np.int32]


def interleaved(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Plan interleaved 1F1B: 1F1B whose ranks go through all their stages with a round of micro-batches at a time.

    With v stages per rank, rank 0 holds v p + p - 1 micro-batches of a stage at its peak: 1 + (p - 1) / (p v) times
    what 1F1B holds. The rounds have p micro-batches where these divide; others are spread over the rounds. With one
    stage per rank it warms up twice as long as 1F1B, for nothing: give each rank at least two.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2. They ask for a multiple of p micro-batches; torch's
        ScheduleInterleaved1F1B for equal rounds. Unequal rounds, the larger ones first, are this project's.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    rounds = rounds_of(num_ranks, num_microbatches)
    forward, backward = depth_first(rounds, stages_per_rank)
    return take_turns(forward, backward, warm_up=_before_the_last_stage(rounds, stages_per_rank) + 2 * _hops(num_ranks))


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Plan interleaved 1F1B with a split backward pass, whose weight gradients fill the end of the step.

    Rank r starts with p - 1 - r forward passes fewer than in `interleaved`, since I takes less than B, and puts off the
    weight gradients of r passes. With one stage per rank it is ZB-H1.

    Source: torch's ScheduleInterleavedZeroBubble, after Qi et al. 2023 (arXiv:2401.10241), which has no such schedule.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    rounds, hops = rounds_of(num_ranks, num_microbatches), _hops(num_ranks)
    forward, backward = depth_first(rounds, stages_per_rank)
    warm_up = _before_the_last_stage(rounds, stages_per_rank) + hops
    return take_turns(forward, backward, warm_up=warm_up, weight_delay=hops[::-1])


def looped_bfs(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Plan looped breadth-first: a rank runs all micro-batches through one of its stages, then through the next.

    It is GPipe with the short bubble of interleaving, and holds everything: m micro-batches of v stages. In exchange a
    stage's gradients are whole early, and with sharded parameters each stage is gathered once per direction.

    Source: Lamy-Poirier 2022 (arXiv:2211.05953); the backward passes run from the last micro-batch to the first, as in
        torch's ScheduleLoopedBFS.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    turn, microbatch = np.divmod(np.arange(stages_per_rank * num_microbatches, dtype=np.int32), num_microbatches)
    forward, backward = Passes(turn, microbatch), Passes(turn[::-1], microbatch[::-1])
    return take_turns(forward, backward, warm_up=np.full(num_ranks, len(turn)))


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan ZB-H1: 1F1B's warm-up and 1F1B's memory, a third of its bubble.

    Rank r puts off the W of its first r micro-batches, so that every rank holds up to min(m, p), what 1F1B's first rank
    holds; the remaining W run while the last I travel back.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 2.1.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    forward, backward = depth_first(((0, num_microbatches),), 1)
    hops = _hops(num_ranks)
    return take_turns(forward, backward, warm_up=hops, weight_delay=hops[::-1])


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan ZB-H2: twice the warm-up fills the wait for the first I too; every rank holds up to min(m, 2p - 1).

    Ranks start one after the other and end one after the other, each without a gap: counted from a rank's own start to
    its own end it has no bubble where F = I = W. For that the optimizer's step must not wait for all ranks at once.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 2.2.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    forward, backward = depth_first(((0, num_microbatches),), 1)
    hops = _hops(num_ranks)
    return take_turns(forward, backward, warm_up=2 * hops, weight_delay=2 * hops[::-1])


class Passes(NamedTuple):
    """The forward passes that every rank runs, or the backward passes, in their order.

    Attributes:
        turn: which of the rank's own stages, 0 for the first; rank r's stage is turn x ranks + r.
        microbatch: of which micro-batch.
    """

    turn: Ints
    microbatch: Ints


def rounds_of(num_ranks: int, num_microbatches: int) -> tuple[tuple[int, int], ...]:
    """Cut the micro-batches into the rounds of an interleaved schedule, (start, stop) each: about as many as ranks.

    No round is smaller than the number of ranks if there are that many micro-batches, and the larger ones come first.
    """
    return split_evenly(num_microbatches, max(1, num_microbatches // num_ranks))


def depth_first(rounds: tuple[tuple[int, int], ...], stages_per_rank: int) -> tuple[Passes, Passes]:
    """Order the forward and the backward passes: a round of micro-batches through all of a rank's stages at a time."""
    microbatches = [np.arange(start, stop, dtype=np.int32) for start, stop in rounds]
    microbatch = np.concatenate([np.tile(one, stages_per_rank) for one in microbatches])
    turns = np.arange(stages_per_rank, dtype=np.int32)
    turn = np.concatenate([np.repeat(turns, stop - start) for start, stop in rounds])
    return Passes(turn, microbatch), Passes(stages_per_rank - 1 - turn, microbatch)


def take_turns(
    forward: Passes, backward: Passes, *, warm_up: NDArray[np.integer], weight_delay: NDArray[np.integer] | None = None
) -> Schedule:
    """Let every rank run `warm_up` forward passes, then a forward and a backward in turn, then the rest.

    With `weight_delay` the backward pass is split: the W of a pass comes right after the I of the one that is
    `weight_delay` passes later, and those that are left come last.

    Args:
        forward: forward passes in their order.
        backward: backward passes in their order; weight gradients follow it.
        warm_up: forward passes that each rank starts with.
        weight_delay: I whose W wait, for each rank; None for full backward passes.
    """
    num_ranks, index = len(warm_up), np.arange(len(forward.turn), dtype=np.int32)
    # In its turn k a rank runs F k + warm_up, then backward pass k, then the W that is due: what comes before turn 0
    # warms up. So the order is that of the turns; within one, a stable sort keeps F, B or F, I, W.
    parts = [(F, forward, index - warm_up[:, None])]
    if weight_delay is None:
        parts.append((B, backward, np.broadcast_to(index, (num_ranks, len(index)))))
    else:
        parts.append((I, backward, np.broadcast_to(index, (num_ranks, len(index)))))
        parts.append((W, backward, index + weight_delay[:, None]))
    order = np.argsort(np.concatenate([turns for _, _, turns in parts], axis=1), axis=1, kind="stable")
    stage = num_ranks * np.concatenate([passes.turn for _, passes, _ in parts])
    return Schedule.from_columns(
        stage=stage[order] + np.arange(num_ranks, dtype=np.int32)[:, None],
        kind=np.repeat(np.array([kind for kind, _, _ in parts], np.int8), len(index))[order],
        microbatch=np.concatenate([passes.microbatch for _, passes, _ in parts])[order],
        lengths=[order.shape[1]] * num_ranks,
    )


def _hops(num_ranks: int) -> Ints:
    """Count, for each rank, the ranks between it and the end of the pipeline."""
    return np.arange(num_ranks, dtype=np.int32)[::-1]


def _before_the_last_stage(rounds: tuple[tuple[int, int], ...], stages_per_rank: int) -> int:
    """Count the forward passes of all of a rank's stages but the last, for the first round of micro-batches."""
    start, stop = rounds[0]
    return (stages_per_rank - 1) * (stop - start)
