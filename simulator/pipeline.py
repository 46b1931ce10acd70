"""Pipeline: when every action of a schedule starts and ends, exactly, one vector step for all ranks at a time.

    end[action] = max(end of the rank's previous action, end of the action it needs + latency) + duration

Every action gets a level above those two; a level is four array operations over the ranks. GPipe and 1F1B have levels
in closed form; any other order gets them from a frontier that walks all ranks' orders together, and names deadlocks.

The letters are the pipeline's: F forward, I input gradient, W weight gradient, B = I + W. The zero-bubble papers call
our I "B".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.grammar import Schedule
from simulator.levels import NEVER, Grid

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

F, B, I, W = range(4)  # noqa: E741 - the field's letter
LETTERS = "FBIW"
SHOWN = 8
LARGE = 20_000  # actions


class Order(NamedTuple):
    """What each rank runs, in columns; rank r owns the actions from offsets[r] to offsets[r + 1].

    Attributes:
        kind: F, B, I or W.
        stage: the part of the model, 0 first.
        microbatch: the micro-batch.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    offsets: Ints

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.offsets) - 1


def order_of(schedule: Schedule) -> Order:
    """Return the computations of any schedule; its sends and receives are left out, since the engine derives them."""
    kind, stage, microbatch = (
        column.astype(np.int64) for column in (schedule.kind, schedule.stage, schedule.microbatch)
    )
    if not schedule.has_communication:
        return Order(kind, stage, microbatch, schedule.offsets)
    keep = kind <= W
    offsets = np.append(0, np.cumsum(keep))[schedule.offsets]
    return Order(kind[keep], stage[keep], microbatch[keep], offsets)


class CompiledOrder:
    """An order with its needs and levels worked out once; `run` then takes any durations and latencies.

    Attributes:
        order: the order.
        rank: rank of each action.
        need: the action that each one waits for beside its rank's previous one, or -1.
        remote: whether that action is on another rank.
        level: a number above those of both.
    """

    def __init__(self, order: Order) -> None:
        """Work out needs and levels.

        Raises:
            ValueError: an action is there twice, needs one that is nowhere, or comes before what it needs on its own
                rank; or ranks wait for one another in a circle (a deadlock).
        """
        self.order = order
        if len(order.kind) > LARGE:
            _keep_freed_memory()
        counts = np.diff(order.offsets)
        self.rank = np.repeat(np.arange(order.num_ranks), counts)
        self.need = _needs(order, self.rank)
        self.has_need = self.need >= 0
        level = _closed_form_levels(order, self.rank, self.need, self.has_need)
        # Closed forms have one stage a rank, so that every need is on another one.
        elsewhere = level is not None or self.rank.take(self.need, mode="clip") != self.rank
        self.remote = self.has_need & elsewhere
        self.level = _frontier(order, self.need) if level is None else level
        self._grid = Grid(self.level, self.rank, self.need, order.num_ranks)

    def run(self, duration_ns: Ints, latency_ns: Ints | int = 0) -> Ints:
        """Return the end of each action.

        Args:
            duration_ns: of each action.
            latency_ns: between the end of the action that each one needs and its earliest start; one number for all
                needs on other ranks, or one an action (what it says where nothing is needed is not read).
        """
        if isinstance(latency_ns, int):
            latency_ns = self.remote * np.int64(latency_ns)
        if not len(self.need):
            return np.zeros(0, np.int64)
        return self._grid.run(duration_ns, np.where(self.has_need, latency_ns, NEVER))


def _keep_freed_memory() -> None:
    """Let the C library keep the memory of temporary arrays instead of returning it to the system each time.

    Half the time of a large order went to pages that were given back and asked for again. glibc raises its thresholds
    to the largest block that was ever mapped and freed, here 30 MiB that nobody touches; elsewhere this does nothing.
    """
    np.empty(30 * 2**20, np.uint8)


def peak_in_flight(order: Order) -> Ints:
    """Return, a rank, the most micro-batches (a stage each) whose forward has run and whose backward has not."""
    step = np.where(order.kind == F, 1, np.where((order.kind == B) | (order.kind == I), -1, 0))
    peaks = np.zeros(order.num_ranks, np.int64)
    for rank in range(order.num_ranks):
        row = step[order.offsets[rank] : order.offsets[rank + 1]]
        peaks[rank] = max(0, int(np.cumsum(row).max(initial=0)))
    return peaks


def _name(order: Order, action: int) -> str:
    return f"{order.stage[action]}{LETTERS[order.kind[action]]}{order.microbatch[action]}"


def _needs(order: Order, rank: Ints) -> Ints:
    """Return the action that each one needs: F from the stage before, I from the stage behind, W its own I.

    The last stage's backward needs its own forward, which its rank's order puts before it (checked here).
    """
    num_actions = len(order.kind)
    if num_actions == 0:
        return np.zeros(0, np.int64)
    stages, microbatches = int(order.stage.max()) + 1, int(order.microbatch.max()) + 1
    size = stages * microbatches
    if 4 * size >= 2**31:
        raise ValueError(f"{stages} stages x {microbatches} micro-batches are too many to simulate; use fewer")
    kind, stage = order.kind.astype(np.int8), order.stage.astype(np.int32)
    key = stage * np.int32(microbatches) + order.microbatch.astype(np.int32)  # 32 bits: half the memory traffic
    # A slot for each F, for each B or I (both pass a gradient back), and for each W.
    is_f, is_w = kind == F, kind == W
    slot = key + np.where(is_f, np.int32(0), np.int32(size))
    if is_w.any():
        slot[is_w] += size
    rows = np.arange(num_actions, dtype=np.int32)
    place = np.full(3 * size + microbatches, -1, np.int32)
    place[slot] = rows
    if np.count_nonzero(place >= 0) < num_actions:
        twice = np.flatnonzero(place.take(slot) != rows)
        raise ValueError(f"rank {rank[twice[0]]}: {_name(order, int(twice[0]))} is in the schedule twice; run it once")
    starts = (is_f & (stage == 0)) | (~(is_f | is_w) & (stage == stages - 1))
    wanted = slot + np.where(is_f, np.int32(-microbatches), np.int32(microbatches))
    if is_w.any():
        wanted[is_w] = slot[is_w] - size
    need = place.take(wanted, mode="clip")
    need[starts] = -1
    lost = np.flatnonzero((need < 0) & ~starts)
    if lost.size:
        raise ValueError(f"rank {rank[lost[0]]}: what {_name(order, int(lost[0]))} needs is in no rank's order")
    own = place.take(key)  # an F finds itself
    begins = np.repeat(order.offsets[:-1].astype(np.int32), np.diff(order.offsets))
    wrong = np.flatnonzero((own < begins) | (own > rows))
    if wrong.size:
        text = f"rank {rank[wrong[0]]}: {_name(order, int(wrong[0]))} comes before its own forward on that rank"
        raise ValueError(f"deadlock: {text}; run the forward first")
    return need.astype(np.int64)


def _closed_form_levels(order: Order, rank: Ints, need: Ints, has_need: Bools) -> Ints | None:
    """Return the levels of GPipe or 1F1B, or None for an order for which they do not hold."""
    ranks = order.num_ranks
    counts = np.diff(order.offsets)
    if not len(rank) or not (counts == counts[0]).all() or counts[0] < 2 or not np.array_equal(order.stage, rank):
        return None
    n = int(counts[0])
    kind = order.kind.reshape(ranks, n)
    lead = np.argmax(kind != F, axis=1)[:, None]
    row, k = np.arange(ranks)[:, None], np.arange(n)[None]
    for warm in (lead,) if lead[0] == n // 2 else (lead - 1,):
        level = k + np.where(k < warm, row, np.where(k < n - warm, ranks - 1, 2 * (ranks - 1) - row))
        flat = level.reshape(-1)
        # Along a rank it rises whatever `warm` is; what is left to check is every need on another rank.
        if ((flat.take(need, mode="clip") < flat) | ~has_need).all():
            return flat
    return None


def _frontier(order: Order, need: Ints) -> Ints:
    """Give levels to any order: at each level every rank whose next action has what it needs runs it."""
    level = np.zeros(len(need), np.int64)
    done = np.zeros(len(need) + 1, bool)
    done[-1] = True  # what an action without a need reads, and what a finished rank points at
    wants = np.append(need, -1)
    pointer, stop = order.offsets[:-1].copy(), order.offsets[1:]
    at = 0
    left = pointer < stop
    while left.any():
        go = done[wants[pointer]] & left
        actions = pointer[go]
        if not actions.size:
            raise ValueError(_deadlock(order, need, pointer[left], np.flatnonzero(left)))
        level[actions] = at
        done[actions] = True
        pointer = pointer + go
        left = pointer < stop
        at += 1
    return level


def _deadlock(order: Order, need: Ints, actions: Ints, ranks: Ints) -> str:
    texts = [
        f"rank {rank} at {_name(order, int(action))} waits for {_name(order, int(need[action]))}"
        for rank, action in list(zip(ranks, actions, strict=True))[:SHOWN]
    ]
    more = f"; and {len(ranks) - SHOWN} ranks more" if len(ranks) > SHOWN else ""
    return f"deadlock: {'; '.join(texts)}{more}"
