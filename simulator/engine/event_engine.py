"""The event engine: when every operation of a graph starts and ends, exactly, in whole nanoseconds.

An operation starts when its lane is free and everything that it needs has ended. With contention a rank computes more
slowly while it communicates, and communicates more slowly while it computes. Rates then change only when some operation
starts or ends, so the engine goes from one such moment to the next and is exact between them.

Ranks that outnumber the cores of their machine take turns on them: the fewer of them compute, the faster these do.

How whole numbers stay exact: a slowdown of 1.25 is kept as 1250/1000. Work is counted in thousandths: alone, an
operation does 1250 units a nanosecond; in contention it does 1000. An end that falls inside a nanosecond is
rounded up to the next.
"""

from __future__ import annotations

import heapq
import math
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Contention
from simulator.engine.task_graph import COMPUTE, NONE, SEVERAL, Graph

Ints = NDArray[np.int64]

UNITS = 1000
SHOWN = 8


class Times(NamedTuple):
    """Start and end of each operation, in nanoseconds."""

    start_ns: Ints
    end_ns: Ints


class SharedCores(NamedTuple):
    """Cores that all ranks share evenly, fewer than there are ranks. Waiting ranks leave them to the others.

    Attributes:
        num_cores: of all ranks together.
        ranks_each: real ranks for each rank of the graph; they compute when it does.
    """

    num_cores: int
    ranks_each: int = 1

    def speeds(self, num_ranks: int) -> tuple[int, list[int]]:
        """Return the compute speed when 0, 1, 2, ... ranks compute at once, in units of the speed when all of them do.

        That unit is the first number: durations are given for it. A rank has at most one core.
        """
        everyone = num_ranks * self.ranks_each
        whole = math.lcm(*range(1, num_ranks + 1)) * self.num_cores
        alone = max(whole, everyone * whole // self.num_cores)
        return whole, [min(alone, num_ranks * whole // max(busy, 1)) for busy in range(num_ranks + 1)]


def run(graph: Graph, contention: Contention | None = None, cores: SharedCores | None = None) -> Times:
    """Return when each operation of the graph starts and ends.

    Error: exact; with contention or shared cores an end inside a nanosecond is rounded up.

    Raises:
        ValueError: an operation needs one that was never added; or operations wait for one another in a circle, and the
            text names them (a deadlock).
    """
    several = list(chain.from_iterable(graph.several.values()))
    missing = [need for need in several if not 0 <= need < len(graph)]
    slow = contention or Contention()
    if cores is None and not missing and not slows_down(slow) and (times := _run_in_order(graph)) is not None:
        return times
    missing += [need for need in graph.need if need >= len(graph)]
    if missing:
        raise ValueError(
            f"an operation needs operation {missing[0]}; the graph has {len(graph)}: add it, or need another"
        )
    return _Contended(graph, slow, cores).run()


def slows_down(contention: Contention) -> bool:
    """Return whether computing and communicating at once makes either slower."""
    return contention.compute_slowdown > 1.0 or contention.communication_slowdown > 1.0


def _run_in_order(graph: Graph) -> Times | None:
    """Without contention, an operation's start is the longest path to it; None where one needs a later one."""
    lanes = 1 + max(graph.lane, default=0)
    free = [0] * (lanes * (1 + max(graph.rank, default=0)))  # when each lane is free
    end: list[int] = []
    columns = zip(graph.rank, graph.lane, graph.duration_ns, graph.need, strict=True)
    try:
        for rank, lane, duration, need in columns:
            place = rank * lanes + lane
            now = free[place]
            if need >= 0:
                if (after := end[need]) > now:
                    now = after
            elif need == SEVERAL:
                now = max(now, *[end[each] for each in graph.several[len(end)]])
            free[place] = now = now + duration
            end.append(now)
    except IndexError:  # what it needs has no end yet
        return None
    ends = whole_ns(end)
    return Times(ends - np.array(graph.duration_ns, np.int64), ends)


def whole_ns(times: list[int]) -> Ints:
    """Return times in a column; refuse those of more than 146 years, which 64 bits do not hold."""
    try:
        found = np.fromiter(times, np.int64, len(times))
    except OverflowError:
        found = np.array([2**62])
    if found.max(initial=0) >= 2**62:
        raise ValueError("the step takes more than 146 years; check the rates of the device and of the wires")
    return found


def _followers(graph: Graph) -> tuple[list[int], list[list[int]]]:
    """Return how many operations each one waits for, and which wait for it (lane order included)."""
    waiting = [1 - (need == NONE) for need in graph.need]
    for operation, needs in graph.several.items():
        waiting[operation] = len(needs)
    followers: list[list[int]] = [[] for _ in range(len(graph))]
    last: dict[tuple[int, int], int] = {}
    for operation, lane in enumerate(zip(graph.rank, graph.lane, strict=True)):
        for need in graph.needs(operation):
            followers[need].append(operation)
        if lane in last:
            followers[last[lane]].append(operation)
            waiting[operation] += 1
        last[lane] = operation
    return waiting, followers


class _Contended:
    """A run in which operations slow one another down: what is active, what each has left, when it was last counted."""

    def __init__(self, graph: Graph, contention: Contention, cores: SharedCores | None = None) -> None:
        self.graph = graph
        self.alone_units = [_units(contention.compute_slowdown), _units(contention.communication_slowdown)]
        self.is_communication = [int(lane != COMPUTE) for lane in graph.lane]
        self.members = [
            (rank,) if peer < 0 or peer == rank else (rank, peer)
            for rank, peer in zip(graph.rank, graph.peer, strict=True)
        ]
        num_ranks = 1 + max((max(ranks) for ranks in self.members), default=-1)
        self.active: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(num_ranks)]
        self.shares = cores is not None
        self.whole, self.speeds = cores.speeds(num_ranks) if cores else (1, [1] * (num_ranks + 1))
        self.computing: set[int] = set()  # operations, where ranks share cores
        self.left = [
            duration * self.alone_units[kind] * self.whole
            for duration, kind in zip(graph.duration_ns, self.is_communication, strict=True)
        ]
        self.rate = [0] * len(graph)
        self.counted_ns = [0] * len(graph)
        self.version = [0] * len(graph)
        self.events: list[tuple[int, int, int, int]] = []  # time, 0 end or 1 start, operation, version

    def run(self) -> Times:
        waiting, followers = _followers(self.graph)
        start = [0] * len(self.graph)
        end = [0] * len(self.graph)
        for operation, count in enumerate(waiting):
            if count == 0:
                heapq.heappush(self.events, (0, 1, operation, 0))
        done = 0
        while self.events:
            now, is_start, operation, version = heapq.heappop(self.events)
            if is_start:
                self._change(operation, now, starts=True)
                continue
            if version != self.version[operation]:
                continue  # its rate has changed since this end was predicted
            end[operation] = now
            done += 1
            self._change(operation, now, starts=False)
            for follower in followers[operation]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    start[follower] = now
                    heapq.heappush(self.events, (now, 1, follower, 0))
        if done < len(self.graph):
            raise ValueError(_deadlock(self.graph, waiting))
        return Times(whole_ns(start), whole_ns(end))

    def _change(self, operation: int, now: int, *, starts: bool) -> None:
        """Start or finish an operation; predict anew the end of every operation whose rate this changes."""
        kind = self.is_communication[operation]
        touched = {operation} if starts else set()
        for rank in self.members[operation]:
            mine, others = self.active[rank][kind], self.active[rank][1 - kind]
            if starts:
                mine.add(operation)
                self.counted_ns[operation] = now
            else:
                mine.discard(operation)
            touched |= others
        if self.shares and kind == COMPUTE:
            (self.computing.add if starts else self.computing.discard)(operation)
            touched |= self.computing
        for other in touched:
            self._predict_end(other, now)

    def _predict_end(self, operation: int, now: int) -> None:
        kind = self.is_communication[operation]
        disturbed = any(self.active[rank][1 - kind] for rank in self.members[operation])
        rate = UNITS if disturbed else self.alone_units[kind]
        rate *= self.speeds[len(self.computing)] if kind == COMPUTE else self.whole
        if rate == self.rate[operation] and self.version[operation]:
            return
        self.left[operation] = max(0, self.left[operation] - self.rate[operation] * (now - self.counted_ns[operation]))
        self.counted_ns[operation] = now
        self.rate[operation] = rate
        self.version[operation] += 1
        end = now - (-self.left[operation] // rate)  # rounded up
        heapq.heappush(self.events, (end, 0, operation, self.version[operation]))


def _units(slowdown: float) -> int:
    return max(UNITS, round(slowdown * UNITS))


def _deadlock(graph: Graph, waiting: list[int]) -> str:
    stuck = [operation for operation, count in enumerate(waiting) if count > 0]
    lanes: dict[tuple[int, int], int] = {}
    for operation in stuck:  # the first one of each lane blocks the lane
        lanes.setdefault((graph.rank[operation], graph.lane[operation]), operation)
    blocked = set(stuck)
    texts = []
    for (rank, lane), operation in sorted(lanes.items())[:SHOWN]:
        needs = [need for need in graph.needs(operation) if need in blocked]
        what = ", ".join(f"{need} of rank {graph.rank[need]}" for need in needs)
        texts.append(f"rank {rank} lane {lane}: operation {operation} waits for {what or 'the one before it'}")
    more = f"; and {len(lanes) - SHOWN} more lanes" if len(lanes) > SHOWN else ""
    return f"deadlock: {len(stuck)} operations can never start: {'; '.join(texts)}{more}"
