"""Needs: the action that each action of a pipeline waits for, looked up for all of them at once.

A table holds the row of each F, of each B or I (both pass a gradient back) and of each W, by stage and micro-batch.
What each needs is the same table, moved by a stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.pipeline.schedule_arrays import F, Ints, Order, Rows, W, action_name

NOTHING, NOWHERE = -1, -2  # what an action needs


class Needs(NamedTuple):
    """What each action needs; and, of an order that lacks nothing and has one rank a stage, where everything is.

    Attributes:
        need: the action that each one needs, or NOTHING.
        home: rank of each stage, or None.
        table: the action that is each F, each B or I, and each W [2 or 3, stages, micro-batches], or None.
    """

    need: Rows
    home: Ints | None = None
    table: Rows | None = None


def find_needs(order: Order, rank: Rows) -> Needs:
    """Return the action that each one needs: F from the stage before, I from the stage behind, W its own I.

    The last stage's backward needs its own forward.

    Raises:
        ValueError: an action is there twice, needs one that is nowhere, or comes before what it needs on its own rank.
    """
    num_actions = len(order.kind)
    if num_actions == 0:
        return Needs(np.zeros(0, np.int32))
    stages, microbatches = int(order.stage.max()) + 1, int(order.microbatch.max()) + 1
    size, tables = stages * microbatches, 3 if order.kind.max() == W else 2
    if 4 * size >= 2**31:
        raise ValueError(f"{stages} stages x {microbatches} micro-batches are too many to simulate; use fewer")
    # A slot for each F, for each B or I (both pass a gradient back), and for each W; 32 bits: half the memory traffic.
    slot = order.stage * np.int32(microbatches)
    slot += order.microbatch
    slot += (order.kind != F) * np.int32(size)
    if tables == 3:
        slot += (order.kind == W) * np.int32(size)
    place = np.full(tables * size, -1, np.int32)
    place[slot.astype(np.int64)] = np.arange(num_actions, dtype=np.int32)  # by wide numbers: twice as fast
    filled = np.count_nonzero(place >= 0)
    if filled < num_actions:
        twice = int(np.flatnonzero(place.take(slot) != np.arange(num_actions))[0])
        raise ValueError(f"rank {rank[twice]}: {action_name(order, twice)} is in the schedule twice; run it once")
    table = place.reshape(tables, stages, microbatches)
    home = _home_in_order(table, order.offsets) if filled == len(place) else None
    if home is not None:
        return Needs(_needed_by(table).reshape(-1).take(slot), home, table)
    own = table[0].reshape(-1).take(slot % size)
    place[place < 0] = NOWHERE
    need = _needed_by(table).reshape(-1).take(slot)
    _check_order(order, rank, need, own)
    return Needs(need)


def _needed_by(table: Rows) -> Rows:
    """Return, by the slot of an action, what it needs: the same table, moved to the slots of those that need it."""
    needed_by = np.empty_like(table)
    needed_by[0, 0] = NOTHING
    needed_by[0, 1:] = table[0, :-1]
    needed_by[1, :-1] = table[1, 1:]
    needed_by[1, -1] = table[0, -1]
    needed_by[2:] = table[1]
    return needed_by


def _home_in_order(table: Rows, offsets: Ints) -> Ints | None:
    """Return each stage's rank; None unless it runs F before B or I, and I before W, and what it hands itself."""
    low, high = table.min(axis=(0, 2)), table.max(axis=(0, 2))
    home = np.searchsorted(offsets, low, side="right") - 1
    if not (home == np.searchsorted(offsets, high, side="right") - 1).all():
        return None
    forward, backward = table[0], table[1]
    own = np.flatnonzero(home[1:] == home[:-1])  # this stage and the next one
    in_order = (
        (forward < backward).all()
        and (len(table) == 2 or (backward < table[2]).all())
        and (forward[own] < forward[own + 1]).all()
        and (backward[own + 1] < backward[own]).all()
    )
    return home if in_order else None


def _check_order(order: Order, rank: Rows, need: Rows, own: Rows) -> None:
    """Name what is nowhere, or too late on its own rank; `own` is each action's own forward."""
    rows = np.arange(len(need))
    wrong = np.flatnonzero((own < order.offsets[:-1].take(rank)) | (own > rows))
    if wrong.size:
        text = f"rank {rank[wrong[0]]}: {action_name(order, int(wrong[0]))} comes before its own forward on that rank"
        raise ValueError(f"deadlock: {text}; run the forward first")
    lost = np.flatnonzero(need == NOWHERE)
    if lost.size:
        raise ValueError(f"rank {rank[lost[0]]}: what {action_name(order, int(lost[0]))} needs is in no rank's order")
    late = np.flatnonzero((need > rows) & (rank.take(need, mode="clip") == rank))
    if late.size:
        row = int(late[0])
        text = f"rank {rank[row]}: {action_name(order, row)} comes before {action_name(order, int(need[row]))}"
        raise ValueError(f"deadlock: {text}, which it needs, on the same rank; turn them round")
