"""Several stages a rank: the actions of its second stage are a lighter shade of the same colours, and so on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.viz.drawing.style import SHADE

PASSES = ("F", "B", "I", "W")


def shaded(trace: Trace) -> Trace:
    """Give the passes of each rank's stages kinds of their own: F for its first stage, F~1 for its second, and so on.

    A trace of one stage a rank, or of none, comes back as it is.
    """
    words, num_words = list(trace.words), len(trace.words)
    if not len(trace) or trace.stage.max() < 1:
        return trace
    is_pass = np.isin(words, PASSES)
    rows = is_pass[trace.kind] & (trace.stage >= 0)
    present = stages_of_ranks(trace.rank[rows], trace.stage[rows])
    if (present.sum(axis=1) < 2).all():
        return trace
    which = np.cumsum(present, axis=1) - 1  # a stage's place among those of its rank
    shade = np.zeros(len(trace), np.int32)
    shade[rows] = which[trace.rank[rows], trace.stage[rows]]
    for number in range(1, int(shade.max()) + 1):
        words += [f"{word}{SHADE}{number}" for word in trace.words]
    return replace(trace, kind=trace.kind + shade * np.int32(num_words), words=tuple(words))


def stages_of_ranks(rank: NDArray[np.int32], stage: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which stages each rank has: [ranks, stages]."""
    shape = int(rank.max(initial=-1)) + 1, int(stage.max(initial=-1)) + 1
    present = np.zeros(shape, bool)
    present[rank, stage] = True
    return present
