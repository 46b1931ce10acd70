"""Two stages per rank, laid out as a V: down the ranks and up again. Stage s and stage 2p - 1 - s are on rank s.

The first rank has the last stage too: a micro-batch's backward pass starts where its forward pass began, and nothing
waits for the far end of the pipeline. Every rank holds about the same at its peak. A stage is half of what it is with
one stage per rank: "p half-stages" is as much memory as p / 2 micro-batches of 1F1B.

zb_v and dualpipe_v are told step by step; v_half and v_min, in building_blocks, repeat one pattern; dualpipe has the
model twice and runs it from both ends.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from distlab.plan.require import require_counts
from distlab.plan.schedules.grammar import Schedule
from distlab.plan.schedules.rows import Ints, Row, join_rows


def v_stage(num_ranks: int, rank: int, half: Ints) -> Ints:
    """Return the stage of a rank's half: 0 on the way down the ranks, 1 on the way up."""
    return np.where(half == 0, rank, 2 * num_ranks - 1 - rank)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan ZB-V: no bubble where F = I = W, with the memory of 1F1B's first rank (2p half-stages) on every rank.

    The pattern needs 2p - 1 micro-batches; with fewer, those that are not there are left out of it.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 6, in the order of torch's ScheduleZBVZeroBubble.
    """
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    count = max(num_microbatches, 2 * num_ranks - 1)
    rows = [_zb_v_row(num_ranks, rank, count) for rank in range(num_ranks)]
    return join_rows(rows, partial(v_stage, num_ranks), num_microbatches=num_microbatches)


def _zb_v_row(num_ranks: int, rank: int, count: int) -> Ints:
    to_the_end = num_ranks - rank  # ranks from here to the point of the V, this one included
    row = Row()
    row.add(2 * to_the_end - 1, "0F")  # until the first micro-batch comes back up
    row.add(rank, "1F 0F")
    row.add(to_the_end, "1F 1I 1W")
    left = count - (2 * to_the_end - 1) - rank  # forward passes of half 0
    row.add(left, "0F 0I 0W 1F 1I 1W")
    row.add(count - num_ranks - left, "0I 0W 1F 1I 1W")
    row.add(rank, "0I 1I")  # the W wait, so that the ranks above get their gradients at once
    row.add(to_the_end, "0I 0W")
    row.add(rank, "1W")
    row.add(rank, "0W")
    return row.columns()


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan DualPipeV: DualPipe cut in half, so that one copy of the model is enough.

    In the steady state a forward of one half meets a backward of the other; on GPUs the two may run interleaved, each
    hiding the communication of the other. The pattern needs 2p micro-batches; with fewer, those that are not there are
    left out of it.

    Source: the order that DeepSeek published with DualPipe (github.com/deepseek-ai/DualPipe, after arXiv:2412.19437),
        and that of torch's ScheduleDualPipeV; the "cut in half" is Sea AI Lab's.
    """
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    count = max(num_microbatches, 2 * num_ranks)
    rows = [_dualpipe_row(num_ranks, rank, count) for rank in range(num_ranks)]
    return join_rows(rows, partial(v_stage, num_ranks), num_microbatches=num_microbatches)


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Plan DualPipe: two copies of the model, and micro-batches that enter from both ends.

    Stage s is on rank s for the first half of the micro-batches (rounded up), and on rank p - 1 - s for the second; so
    each rank has two stages. It is plan data only: its copies' gradients would have to be summed. Check with
    `validate(schedule, copies=2)`. The pattern needs 2p micro-batches; with fewer, some are left out of it.

    Raises:
        ValueError: an odd number of ranks: in the middle one, both copies would be one.

    Source: DeepSeek-V3 2024 (arXiv:2412.19437), section 3.2.1, figure 5 and table 2, in the order of their code.
    """
    require_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_ranks % 2:
        raise ValueError(f"dualpipe pairs ranks from both ends; {num_ranks} ranks are odd, use {num_ranks + 1} ranks")
    half_ranks, first_half = num_ranks // 2, -(-num_microbatches // 2)
    count = max(first_half, num_ranks)
    rows = []
    for rank in range(num_ranks):
        row = _dualpipe_row(half_ranks, min(rank, num_ranks - 1 - rank), count)
        if rank >= half_ranks:  # seen from the other end of the pipeline
            row[:, 0] = 1 - row[:, 0]
        # From here on half 0 is the copy whose stage 0 is on rank 0; the other copy's micro-batches come after its own.
        row = row[row[:, 2] < np.where(row[:, 0] == 0, first_half, num_microbatches - first_half)]
        row[:, 2] += row[:, 0] * first_half
        rows.append(row)
    return join_rows(rows, partial(_copy_stage, num_ranks), num_microbatches=num_microbatches)


def _copy_stage(num_ranks: int, rank: int, half: Ints) -> Ints:
    return np.where(half == 0, rank, num_ranks - 1 - rank)


def _dualpipe_row(num_ranks: int, rank: int, count: int) -> Ints:
    """Order a rank's actions: micro-batches come by as half 0, from the near end, and as half 1, from the far one."""
    behind = num_ranks - 1 - rank
    row = Row()
    row.add(2 * behind, "0F")
    row.add(rank + 1, "0F 1F")
    row.add(behind, "1I W 1F")
    row.add(count - 2 * num_ranks + rank + 1, "0F 1B 1F 0B")  # the steady state
    row.add(behind, "1B 1F 0B")
    # The rest has no forward passes to hide: from its middle on, the backward passes are split.
    whole = rank + 1
    row.add(whole // 2, "1B 0B")
    if whole % 2:
        row.add(1, "1B 0I")
    row.add(whole // 2, "1I 0I")
    row.add(behind, "W 0I")
    row.add(whole, "W")
    return row.columns()
