"""Which action each action of a pipeline depends on, looked up for all of them at once.

A table holds the row of each F, of each B or I (both pass a gradient back) and of each W, by stage and micro-batch.
What each action depends on is the same table, moved by one stage.
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedule_arrays import F, Ints, Rows, ScheduleArrays, W, action_name

NOTHING, MISSING = -1, -2  # in place of the action that is needed


def find_dependencies(order: ScheduleArrays, rank: Ints) -> Rows:
    """Return the action that each one needs, or NOTHING: F from the stage before, B and I from the stage behind.

    The last stage's backward needs its own forward; W needs its own I. `rank` is the rank of each action.

    Raises:
        ValueError: an action is there twice, needs one that no rank runs, or comes before it on the same rank.
    """
    num_actions = len(order.kind)
    if num_actions == 0:
        return np.zeros(0, np.int32)
    stages, microbatches = int(order.stage.max()) + 1, int(order.microbatch.max()) + 1
    size, tables = stages * microbatches, 3 if order.kind.max() == W else 2
    if 4 * size >= 2**31:
        raise ValueError(f"{stages} stages x {microbatches} micro-batches are too many to simulate; use fewer")
    # A slot for each F, for each B or I, and for each W; 32 bits need half the memory traffic of 64.
    slot = order.stage * np.int32(microbatches)
    slot += order.microbatch
    slot += (order.kind != F) * np.int32(size)
    if tables == 3:
        slot += (order.kind == W) * np.int32(size)
    place = np.full(tables * size, MISSING, np.int32)
    place[slot.astype(np.int64)] = np.arange(num_actions, dtype=np.int32)  # 64-bit indices: twice as fast
    if np.count_nonzero(place >= 0) < num_actions:
        twice = int(np.flatnonzero(place.take(slot) != np.arange(num_actions))[0])
        raise ValueError(f"rank {rank[twice]}: {action_name(order, twice)} is in the schedule twice; run it once")
    table = place.reshape(tables, stages, microbatches)
    needed = _needed_by(table).reshape(-1).take(slot)
    _check(order, rank, needed, own_forward=table[0].reshape(-1).take(slot % np.int32(size)))
    return needed


def _needed_by(table: Rows) -> Rows:
    """Return, for each slot, the action that the slot's action needs.

    Shapes: table [2 or 3, stages, micro-batches] -> the same
    """
    needed_by = np.empty_like(table)
    needed_by[0, 0] = NOTHING
    needed_by[0, 1:] = table[0, :-1]
    needed_by[1, :-1] = table[1, 1:]
    needed_by[1, -1] = table[0, -1]
    needed_by[2:] = table[1]
    return needed_by


def _check(order: ScheduleArrays, rank: Ints, needed: Rows, *, own_forward: Rows) -> None:
    """Refuse an action whose dependency is missing, or comes later on the same rank."""
    rows = np.arange(len(needed), dtype=np.int32)
    first = np.repeat(order.offsets[:-1], np.diff(order.offsets))
    wrong = np.flatnonzero((own_forward < first) | (own_forward > rows))
    if wrong.size:
        text = f"rank {rank[wrong[0]]}: {action_name(order, int(wrong[0]))} comes before its own forward on that rank"
        raise ValueError(f"deadlock: {text}; run the forward first")
    missing = np.flatnonzero(needed == MISSING)
    if missing.size:
        row = int(missing[0])
        raise ValueError(f"rank {rank[row]}: what {action_name(order, row)} needs is in no rank's order")
    late = np.flatnonzero((needed > rows) & (rank.take(needed, mode="clip") == rank))
    if late.size:
        row = int(late[0])
        text = f"rank {rank[row]}: {action_name(order, row)} comes before {action_name(order, int(needed[row]))}"
        raise ValueError(f"deadlock: {text}, which it needs, on the same rank; swap them")
