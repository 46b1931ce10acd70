"""Parts: orders in which all ranks run all micro-batches at once, as GPipe and breadth-first ones do, cut in each part.

In GPipe every rank runs all F, then all B. Each part is steady, and a beat is one action. `fold_parts` takes the same
micro-batches out of every part.

Within a part, what an action needs is in the same column. What an earlier part made on another rank (breadth-first: the
last rank's F, for the first rank's next stage) is another matter: when the columns are put back, it becomes later by
less than what comes before the action. That is no harm where the action did not wait for it, and `unfold` looks.
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.compiled import CompiledOrder
from simulator.pipeline.folds import Columns, Cut, Fold, columns_of

ROOM = 8  # micro-batches that are left beside two for each rank
WORTH = 2  # times as many actions as are left
BEFORE, BEHIND = slice(None, -1), slice(1, None)  # each stage but the last, and the stage behind it


def num_parts(columns: Columns) -> int:
    """Return in how many parts all ranks run all micro-batches, in their order or backwards; 0 if they do not."""
    kind, stage, microbatch = columns
    num = int(microbatch[0].max()) + 1
    if kind.shape[1] % num:
        return 0
    kinds, stages, rows = (each[0].reshape(-1, num) for each in columns)
    every = np.arange(num)
    in_turn = (rows == every).all(axis=1) | (rows == every[::-1]).all(axis=1)
    if not (in_turn.all() and (kinds == kinds[:, :1]).all() and (stages == stages[:, :1]).all()):
        return 0
    by_part = stage.reshape(len(stage), -1, num)
    alike = (by_part == by_part[..., :1]).all() and (microbatch == microbatch[0]).all() and (kind == kind[0]).all()
    return len(rows) if alike else 0


def fold_parts(columns: Columns, parts: int) -> Fold | None:
    """Take the same micro-batches out of every part; None where that is not worth it.

    Raises:
        ValueError: what is left is not in order.
    """
    ranks, length = columns.kind.shape
    num, half = length // parts, ranks + ROOM
    left = 2 * half
    if WORTH * left > num:
        return None
    row = columns.microbatch[0]
    small = columns.only(np.flatnonzero((row < half) | (row >= num - half)))
    small.microbatch[small.microbatch >= half] -= np.int32(num - left)
    compiled = CompiledOrder(small.order())
    found = columns_of(compiled)
    if found is None:
        return None
    (forward, backward), first = found[0][:2], found[1]
    across = [
        (first[needs] + column[needs])[column[needed] // left != column[needs] // left]
        for column, needed, needs in ((forward, BEFORE, BEHIND), (backward, BEHIND, BEFORE))
    ]
    cuts = tuple(Cut(part * left + half, 1, num - left) for part in range(parts))
    return Fold(compiled, cuts, reach=1, unwaited=np.concatenate(across))
