"""Schedules that repeat one pattern: the time from a forward pass to its backward pass is the memory it costs.

Where F, I and W take one slot each, a rank with two half-stages starts a micro-batch every 6 slots. A micro-batch that
is held for n slots then costs n / 6 of a half-stage. Down the V and up again, forward and then backward, its passes can
move on by one slot per rank, or by more: 1 + 1 + 1 + 1 slots per rank make V-Min, 2 + 1 + 2 + 1 V-Half.

The price is a bubble. With F = I = W the authors state about two thirds of 1F1B's 6 (p - 1) slots for V-Min, half of it
for V-Half. Simulated, the pattern alone leaves 4 p - 5 slots in V-Min and 3.25 p - 2 in V-Half (4, 8, 16 and 32 ranks).
So V-Min has the stated bubble as it is. V-Half lacks p / 4 slots of it: the authors' code goes over the warm-up and the
drain once more, to fill gaps, which is left out here.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from distlab.plan.require import require_counts
from distlab.plan.schedules.grammar import F, I, Schedule, W
from distlab.plan.schedules.rows import join_rows
from distlab.plan.schedules.v_shaped import v_stage

BEAT = 6
HALF = np.array([0, 1, 1, 0, 1, 0], np.int32)  # of the six actions that a rank runs of a micro-batch, in this order
KIND = np.array([F, F, I, I, W, W], np.int32)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan V-Half: about half the memory of 1F1B's first rank, p half-stages and a few, on every rank.

    Source: Qi et al. 2024 (arXiv:2405.15362), V-Half; see this module for what differs.
    """
    return _repeat(num_ranks, num_microbatches, hops=(2, 1, 2, 1))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan V-Min: about a third of the memory of 1F1B's first rank, 2p / 3 half-stages and a few, on every rank.

    Passes follow each other without slack: where F, I and W take different times, ranks wait in the steady state too.

    Source: Qi et al. 2024 (arXiv:2405.15362), V-Min; see this module for what differs.
    """
    return _repeat(num_ranks, num_microbatches, hops=(1, 1, 1, 1))


def _repeat(num_ranks: int, num_microbatches: int, hops: tuple[int, int, int, int]) -> Schedule:
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    slots = _block(num_ranks, hops)  # [rank, action of the block]
    microbatch = np.repeat(np.arange(num_microbatches, dtype=np.int32), BEAT)
    half, kind = np.tile(HALF, num_microbatches), np.tile(KIND, num_microbatches)
    rows = []
    for slot in slots:
        order = np.argsort(np.add.outer(BEAT * np.arange(num_microbatches), slot).reshape(-1), kind="stable")
        rows.append(np.stack([half[order], kind[order], microbatch[order]], axis=1))
    return join_rows(rows, partial(v_stage, num_ranks), num_microbatches=num_microbatches)


def _block(num_ranks: int, hops: tuple[int, int, int, int]) -> NDArray[np.int64]:
    """Give each rank's six actions of micro-batch 0 their slots, such that no two ever want the same one.

    The passes wait at the three turns of the V, as little as can be; W take the slots that are left.
    """
    rank = np.arange(num_ranks)
    behind = num_ranks - 1 - rank
    shortest = sorted(product(range(1, BEAT + 1), repeat=3), key=sum)
    for turns in shortest:
        down = hops[0] * rank
        up = down[-1] + turns[0] + hops[1] * behind
        gradient_down = up[0] + turns[1] + hops[2] * rank
        gradient_up = gradient_down[-1] + turns[2] + hops[3] * behind
        passes = np.stack([down, up, gradient_down, gradient_up], axis=1)
        beats = np.sort(passes % BEAT, axis=1)
        if (beats[:, 1:] != beats[:, :-1]).all():
            return np.concatenate([passes, [_weight_slots(slots) for slots in passes]], axis=1)
    raise AssertionError(f"no pattern of {hops} slots per rank fits {num_ranks} ranks")


def _weight_slots(passes: NDArray[np.int64]) -> list[int]:
    """Find the first free slots after the two I of a rank."""
    free = set(range(BEAT)) - set((passes % BEAT).tolist())
    slots = []
    for gradient in passes[2:].tolist():
        slot = next(slot for slot in range(gradient + 1, gradient + BEAT + 1) if slot % BEAT in free)
        free.remove(slot % BEAT)
        slots.append(slot)
    return slots
