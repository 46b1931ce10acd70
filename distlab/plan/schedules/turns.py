"""Orders in which a rank warms up with forward passes, then takes turns: a forward, a backward, perhaps a weight part.

1F1B, its interleaved form, ZB-H1 and ZB-H2 are all of this kind. They differ in three things: how many forward passes
a rank starts with, how long it puts off the weight gradients, and in which order it takes its stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.partition import split_evenly
from distlab.plan.schedules.grammar import B, F, I, Schedule, W
from distlab.plan.schedules.rows import Ints

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
    warm = np.minimum(warm_up, count)[:, None]

    # The place of an action is the number of actions before it: of its own kind, and of each other kind.
    if weight_delay is None:
        forwards = _Places(lambda index: index + np.maximum(index - warm, 0), warm)
        backwards = _Places(lambda index: index + np.minimum(index + warm + 1, count), count - warm - 1)
        parts = [(F, forward, forwards), (B, backward, backwards)]
    else:
        delay = weight_delay[:, None]
        last = count - 1 - delay  # the W behind the last I; those that are left come after it
        forwards = _Places(
            lambda index: index + np.maximum(index - warm, 0) + np.maximum(index - warm - delay, 0), warm, warm + delay
        )
        backwards = _Places(
            lambda index: index + np.minimum(index + warm + 1, count) + np.maximum(index - delay, 0),
            count - warm - 1,
            delay,
        )
        weights = _Places(
            lambda index: index + np.minimum(index + delay + 1, count) + np.minimum(index + delay + 1 + warm, count),
            last,
            last - warm,
        )
        parts = [(F, forward, forwards), (I, backward, backwards), (W, backward, weights)]
    length = count * len(parts)
    both = np.empty(num_ranks * length, np.int32)  # micro-batch and kind as one number: one way through memory
    stage = np.repeat(np.arange(num_ranks, dtype=np.int32), length)
    for letter, passes, places in parts:
        packed = (passes.microbatch << np.int32(BITS)) + np.int32(letter)
        turned = passes.turn * np.int32(num_ranks) if passes.turn.any() else None
        for first, stop, begin, end, apart in places.runs(num_ranks, count, length):
            both[begin:end:apart] = packed[first:stop]
            if turned is not None:
                stage[begin:end:apart] += turned[first:stop]
    microbatch, kind = both >> np.int32(BITS), both.astype(np.int8) & np.int8((1 << BITS) - 1)
    return Schedule.from_columns(stage=stage, kind=kind, microbatch=microbatch, lengths=[length] * num_ranks)


class _Places:
    """Where the passes of one kind stand in each rank's order: evenly spaced, except for some bends.

    Args:
        place: of passes, by their index [ranks, n].
        bends: indexes at which the spacing changes [ranks, 1]; those outside the passes do not count.
    """

    def __init__(self, place: Callable[[NDArray[np.int64]], NDArray[np.int64]], *bends: NDArray[np.integer]) -> None:
        self._place, self._bends = place, bends

    def runs(self, num_ranks: int, count: int, length: int) -> list[list[int]]:
        """List first pass and stop, and begin, end and step of their places among all ranks' `length` actions each.

        Slices are laid out faster than the places of all passes, one by one.
        """
        ends = np.broadcast_to([0, count], (num_ranks, 2))
        edges = np.sort(np.concatenate([ends, *(bend.clip(0, count) for bend in self._bends)], axis=1), axis=1)
        first, stop = edges[:, :-1], edges[:, 1:]
        place = self._place(first)
        apart = self._place(first + 1) - place
        begin = place + length * np.arange(num_ranks)[:, None]
        runs = np.stack([first, stop, begin, begin + apart * (stop - first), apart], axis=-1)
        some: list[list[int]] = runs[first < stop].tolist()
        return some
