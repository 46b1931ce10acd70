"""Compiled: an order with a level for each action, so that all ranks can be run one level at a time.

    end[action] = max(end of the rank's previous action, end of the action it needs + latency) + duration

Every action gets a level above those two. GPipe, 1F1B, interleaved and breadth-first orders, and the zero-bubble ones
made from 1F1B, have levels in closed form; any other order gets them from a frontier that walks all ranks' orders
together, and names deadlocks. A weight gradient waits for nothing but its own rank, so it shares the level of the
action before it.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.dependencies import NOTHING, find_needs
from simulator.pipeline.frontier import NEVER, Grid
from simulator.pipeline.schedule_arrays import LETTERS, B, F, I, Ints, Order, Rows, W, action_name
from simulator.pipeline.sequential import Walk

Bools = NDArray[np.bool_]

SHOWN = 8
LARGE = 20_000  # actions
MANY, FEW = 1024, 4  # levels; actions a level, fewer of which are faster one by one


class CompiledOrder:
    """An order with its needs and levels worked out once; `run` then takes any durations and latencies.

    Attributes:
        order: the order.
        need: the action that each one waits for beside its rank's previous one, or -1.
        remote: whether that action is on another rank.
        level: a number above those of both; a weight gradient has that of the action before it.
        table: the action that is each F, each B or I, and each W [2 or 3, stages, micro-batches]; None of an order that
            lacks one, or has a stage on two ranks.
    """

    def __init__(self, order: Order) -> None:
        """Work out needs and levels.

        Raises:
            ValueError: an action is there twice, needs one that is nowhere, or comes before what it needs on its own
                rank; or ranks wait for one another in a circle (a deadlock).
        """
        self.order = order
        if len(order.kind) > LARGE:
            keep_freed_memory()
        self._rank = np.repeat(np.arange(order.num_ranks, dtype=np.int32), np.diff(order.offsets))
        self.need, self._seen_home, self.table = find_needs(order, self._rank)
        if self._seen_home is None:
            self.remote = (self.need >= 0) & (self._rank.take(self.need, mode="clip") != self._rank)
        else:
            self.remote = _crosses(self._seen_home).reshape(-1).take(self.code)
        need = np.where(self.remote, self.need, np.int32(NOTHING))
        level, self._walk = closed_form_levels(order, need), None
        if level is None:
            level = _frontier(order, self.need, self.remote)
        if level is None:
            self._walk = _walk(order, need)
            level = self._walk.level
        self.level = level
        if self._walk is not None:
            return
        turns = -(-(int(order.stage.max(initial=0)) + 1) // order.num_ranks)
        riders = np.flatnonzero(order.kind == W)
        self._grid = Grid(self.level, self._rank, need=need, riders=riders if len(riders) else None, turns=turns)

    @cached_property
    def rank(self) -> Ints:
        """Rank of each action."""
        return self._rank.astype(np.int64)

    def run(self, duration_ns: Ints, latency_ns: Ints | int = 0) -> Ints:
        """Return the end of each action.

        Args:
            duration_ns: of each action.
            latency_ns: between the end of an action on another rank and the earliest start of the one that needs it;
                one number, or one for each action that needs (what it says elsewhere is not read).
        """
        if not len(self.need):
            return np.zeros(0, np.int64)
        return (self._walk or self._grid).run(duration_ns, latency_ns)

    def run_by_stage(self, duration_ns: Ints, handover_ns: Ints, each_ns: Ints | None = None) -> Ints:
        """Return the end of each action, from times that depend on nothing but stage and kind.

        `each_ns` are the durations of all actions, for a caller who has them.

        Shapes: duration_ns [S, 4] (F, B, I, W), handover_ns [S] (from the end of a stage's action to the start of the
        one on another rank that needs it), each_ns [A] -> [A]
        """
        each_ns = duration_ns.reshape(-1).take(self.code) if each_ns is None else each_ns
        home = self.home
        if home is None:  # a stage on two ranks
            latency = handover_ns.take(self.order.stage.take(self.need, mode="clip"))
            return self.run(each_ns, latency)
        before, behind = np.append(0, handover_ns[:-1]), np.append(handover_ns[1:], 0)
        latency = np.where(_crosses(home), np.stack([before, behind, behind, before], axis=1), NEVER)
        if self._walk is not None:
            return self._walk.run(each_ns, latency.reshape(-1).take(self.code))
        return self._grid.run_by_code(self.code, (duration_ns.reshape(-1), latency.reshape(-1)), each_ns)

    @cached_property
    def code(self) -> Rows:
        """Stage and kind of each action as one number: 4 x stage + kind."""
        return self.order.stage * np.int32(len(LETTERS)) + self.order.kind

    @cached_property
    def home(self) -> Ints | None:
        """Rank of each stage; None where a stage has two."""
        if self._seen_home is not None:
            return self._seen_home
        home = np.zeros(int(self.order.stage.max(initial=-1)) + 1, np.int64)
        home[self.order.stage] = self._rank
        return home if (home.take(self.order.stage) == self._rank).all() else None


def _crosses(home: Ints) -> Bools:
    """Return whether F, B, I and W of each stage need something from another rank [S, 4]."""
    crosses = np.zeros((len(home), len(LETTERS)), np.bool_)
    crosses[1:, F] = home[1:] != home[:-1]
    crosses[:-1, B] = crosses[:-1, I] = crosses[1:, F]
    return crosses


def keep_freed_memory() -> None:
    """Let the C library keep the memory of temporary arrays instead of returning it to the system each time.

    Half the time of a large order went to pages that were given back and asked for again. glibc raises its thresholds
    to the largest block that was ever mapped and freed, here 30 MiB that nobody touches; elsewhere this does nothing.
    """
    np.empty(30 * 2**20, np.uint8)


def closed_form_levels(order: Order, need: Rows) -> Rows | None:
    """Return levels by where a rank's first backward stands, or None for an order for which they do not hold.

    `need` is the action on another rank that each one waits for, or -1.

    The k-th action of rank r, weight gradients left out, has level k plus r while the rank warms up, plus p - 1 in the
    steady part and plus 2 (p - 1) - r while it drains: a wave of forwards down the ranks, one of backwards up.
    """
    ranks = order.num_ranks
    counts = np.diff(order.offsets)
    if not len(need) or counts[0] < 2 or not (counts == counts[0]).all():
        return None
    kind = order.kind.reshape(ranks, int(counts[0]))
    place = _places(kind)
    if place is None:
        return None
    length = int(place[0, -1]) + 1
    lead = place[np.arange(ranks), np.argmax(kind != F, axis=1)]
    row = np.arange(ranks, dtype=np.int32)
    for warm in (lead,) if lead[0] == length // 2 else (lead - 1, lead):
        if (warm < 0).any() or (2 * warm > length).any():
            continue
        # What is added changes at two places of each rank: row numbers, of the first steady action and of the first
        # one behind it, in which weight gradients count.
        steady, drain = warm, length - warm
        if place.shape[1] > length:
            steady, drain = (np.count_nonzero(place < at[:, None], axis=1) for at in (steady, drain))
        added = np.repeat(
            np.stack([row, np.full_like(row, ranks - 1), 2 * (ranks - 1) - row], axis=1).reshape(-1),
            np.stack([steady, drain - steady, place.shape[1] - drain], axis=1).reshape(-1),
        )
        level = place.reshape(-1) + added
        # Along a rank it rises whatever `warm` is; what is left to check is every need on another rank.
        if ((level.take(need, mode="clip") < level) | (need < 0)).all():
            return level
    return None


def _places(kind: NDArray[np.integer]) -> Rows | None:
    """Return each action's place in its rank's order, weight gradients left out; None where ranks differ in length."""
    is_w = kind == W
    if not is_w.any():
        return np.broadcast_to(np.arange(kind.shape[1], dtype=np.int32), kind.shape)
    place = np.cumsum(~is_w, axis=1, dtype=np.int32)
    place -= np.int32(1)
    return place if (place[:, -1] == place[0, -1]).all() else None


def _walk(order: Order, need: Rows) -> Walk:
    walk = Walk(order, need)
    left = np.flatnonzero(np.array(walk.pointers) < order.offsets[1:])
    if left.size:
        raise ValueError(_deadlock(order, need, np.array(walk.pointers)[left], left))
    return walk


def _frontier(order: Order, need: Rows, remote: Bools) -> Rows | None:
    """Give levels to any order: at each level every rank whose next action has what it needs runs it.

    None where, of many levels, most have too few actions to be worth a step of all ranks.
    """
    rows = np.flatnonzero(order.kind != W)
    counts = np.bincount(order.rank[rows], minlength=order.num_ranks)
    stop = np.cumsum(counts)
    pointer = stop - counts
    place = np.full(len(need) + 1, len(rows))  # of each action in `rows`; the last is always done
    place[rows] = np.arange(len(rows))
    wants = np.append(place[np.where(remote, need, -1)[rows]], len(rows))
    level = np.zeros(len(rows) + 1, np.int32)
    done = np.zeros(len(rows) + 1, bool)
    done[-1] = True  # what an action without a need reads, and what a finished rank points at
    at = 0
    left = pointer < stop
    while left.any():
        go = done.take(wants.take(pointer)) & left
        actions = pointer[go]
        if not actions.size:
            raise ValueError(_deadlock(order, need, rows[pointer[left]], np.flatnonzero(left)))
        level[actions] = at
        done[actions] = True
        pointer = pointer + go
        left = pointer < stop
        at += 1
        if at % MANY == 0 and at * FEW > np.count_nonzero(done):
            return None
    return level.take(np.cumsum(order.kind != W) - 1)


def _deadlock(order: Order, need: Rows, actions: Ints, ranks: Ints) -> str:
    texts = [
        f"rank {rank} at {action_name(order, int(action))} waits for {action_name(order, int(need[action]))}"
        for rank, action in list(zip(ranks, actions, strict=True))[:SHOWN]
    ]
    more = f"; and {len(ranks) - SHOWN} ranks more" if len(ranks) > SHOWN else ""
    return f"deadlock: {'; '.join(texts)}{more}"
