"""Orders in which a rank warms up with forward passes, then takes turns: a forward, a backward, perhaps a weight part.

1F1B, its interleaved form, ZB-H1 and ZB-H2 are all of this kind. They differ in three things: how many forward passes
a rank starts with, how long it puts off the weight gradients, and in which order it takes its stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.partition import split_evenly
from distlab.plan.schedules.grammar import B, F, I, Schedule, W

Ints = NDArray[np.int32]
BITS = 2  # that hold F, B, I or W


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
    count, num_ranks = len(forward.turn), len(warm_up)
    index = np.arange(count, dtype=np.int32)[None]
    warm = np.minimum(warm_up, count).astype(np.int32)[:, None]
    ahead = np.maximum(index - warm, 0)  # backward passes before each forward pass
    # The place of an action is the number of actions before it: of its own kind, and of each other kind.
    forward_place, backward_place = index + ahead, index + np.minimum(index + warm + 1, count)
    if weight_delay is None:
        parts = [(F, forward, forward_place), (B, backward, backward_place)]
    else:
        delay = weight_delay.astype(np.int32)[:, None]
        forward_place += np.maximum(ahead - delay, 0)
        backward_place += np.maximum(index - delay, 0)
        after = index + delay + 1  # the I that a W comes after, counted from 1
        weight_place = index + np.minimum(after, count) + np.minimum(after + warm, count)
        parts = [(F, forward, forward_place), (I, backward, backward_place), (W, backward, weight_place)]
    length = count * len(parts)
    both = np.empty(num_ranks * length, np.int32)  # micro-batch and kind as one number: one way through memory, not two
    stage = np.repeat(np.arange(num_ranks, dtype=np.int32), length)
    starts = np.arange(0, len(both), length)[:, None]
    for letter, passes, place in parts:
        rows = starts + place
        both[rows] = (passes.microbatch << np.int32(BITS)) + np.int32(letter)
        if passes.turn.any():
            stage[rows] += passes.turn * np.int32(num_ranks)
    microbatch, kind = both >> np.int32(BITS), both.astype(np.int8) & np.int8((1 << BITS) - 1)
    return Schedule.from_columns(stage=stage, kind=kind, microbatch=microbatch, lengths=[length] * num_ranks)
