"""Row: what one rank runs, written the way papers tell it: "n times: a forward of this half, a backward of that"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import B, F, I, Schedule, W

Ints = NDArray[np.int32]

OLDEST = -1
_CODES = {"F": F, "I": I, "W": W, "B": B}


class Row:
    """The growing order of a rank with two halves, 0 and 1: parts of the model, or copies of it.

    `row.add(3, "0F 1F")` appends 0F 1F 0F 1F 0F 1F. Each half and kind goes through the micro-batches in order; a B
    counts as an I and a W. A "W" without a half is the weight gradient of the oldest I whose W has not come yet; a row
    that has one must write all its W in this way.
    """

    def __init__(self) -> None:
        self._next = {(half, kind): 0 for half in (0, 1) for kind in "FIW"}  # micro-batch of the next action
        self._parts: list[Ints] = [np.empty((0, 3), np.int32)]

    def add(self, times: int, actions: str) -> None:
        """Append the actions, in their order, as often as told."""
        if times <= 0:
            return
        names = actions.split()
        part = np.full((times, len(names), 3), OLDEST, np.int32)
        for place, name in enumerate(names):
            part[:, place, 1] = _CODES[name[-1]]
            if name != "W":
                part[:, place, 0] = int(name[0])
                part[:, place, 2] = self._count(int(name[0]), name[1], times) + np.arange(times)
        self._parts.append(part.reshape(-1, 3))

    def _count(self, half: int, kind: str, times: int) -> int:
        """Return the next micro-batch of a half and kind, and count on."""
        first = self._next[half, "I" if kind == "B" else kind]
        for counter in "IW" if kind == "B" else kind:
            self._next[half, counter] += times
        return first

    def columns(self) -> Ints:
        """Return (half, kind, micro-batch) of each action."""
        table = np.concatenate(self._parts)
        oldest = np.flatnonzero(table[:, 0] == OLDEST)
        if oldest.size:
            table[oldest] = table[np.flatnonzero(table[:, 1] == I)]
            table[oldest, 1] = W
        return table


def join_rows(rows: Sequence[Ints], stage_of: Callable[[int, Ints], Ints], *, num_microbatches: int) -> Schedule:
    """Put the ranks' rows together, without the micro-batches that were only there to fill the pattern.

    Args:
        rows: (half, kind, micro-batch) of each rank's actions.
        stage_of: from a rank and the halves of its actions to their stages.
        num_microbatches: micro-batches to keep: the first ones.
    """
    kept = [row if row[:, 2].max() < num_microbatches else row[row[:, 2] < num_microbatches] for row in rows]
    table = np.concatenate(kept)
    return Schedule.from_columns(
        stage=np.concatenate([stage_of(rank, row[:, 0]) for rank, row in enumerate(kept)]),
        kind=table[:, 1],
        microbatch=table[:, 2],
        lengths=[len(row) for row in kept],
    )
