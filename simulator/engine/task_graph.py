"""A graph of operations: the rank and lane of each, how long it takes, and what it waits for.

A lane runs one operation at a time, in the order in which they were added (first in, first out). That order is a
dependency too. Lane 0 of a rank computes; every other lane communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

COMPUTE = 0
COMMUNICATION = 1
NONE, SEVERAL = -1, -2  # in place of the one operation that is needed


class Graph:
    """Operations in columns, numbered in the order in which they were added.

    Attributes:
        rank: the rank that runs the operation.
        lane: COMPUTE, or a lane of the rank that communicates.
        peer: the other rank that takes part (a send's receiver), or -1.
        duration_ns: how long it takes when it is alone.
        need: the operation that must have ended, in addition to its lane's previous one; NONE, or SEVERAL.
        several: of each operation that needs SEVERAL, which.
    """

    def __init__(self) -> None:
        self.rank: list[int] = []
        self.lane: list[int] = []
        self.peer: list[int] = []
        self.duration_ns: list[int] = []
        self.need: list[int] = []
        self.several: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.rank)

    def needs(self, operation: int) -> tuple[int, ...]:
        """Return the operations that must have ended before one starts, in addition to its lane's previous one."""
        need = self.need[operation]
        return self.several[operation] if need == SEVERAL else () if need == NONE else (need,)

    def add(self, rank: int, lane: int, duration_ns: int, *, needs: Iterable[int] = (), peer: int = -1) -> int:
        """Add an operation at the end of its lane and return its number.

        A need may have a number that has not been added yet.

        Raises:
            ValueError: the duration is negative.
        """
        if duration_ns < 0:
            raise ValueError(f"rank {rank}: a duration is {duration_ns} ns; pass times >= 0")
        self.rank.append(rank)
        self.lane.append(lane)
        self.peer.append(peer)
        self.duration_ns.append(duration_ns)
        found = tuple(needs)
        if len(found) > 1 or min(found, default=0) < 0:
            self.several[len(self.need)] = found
            self.need.append(SEVERAL)
        else:
            self.need.append(found[0] if found else NONE)
        return len(self.rank) - 1

    def extend(self, rank: int, lane: Sequence[int], duration_ns: Sequence[int], need: Sequence[int]) -> None:
        """Add many operations of a rank that need one other or NONE, in columns, as `add` would one after the other.

        Raises:
            ValueError: a duration is negative.
        """
        if min(duration_ns, default=0) < 0:
            raise ValueError(f"a duration is {min(duration_ns)} ns; pass times >= 0")
        self.rank += [rank] * len(lane)
        self.peer += [-1] * len(lane)
        self.lane += lane
        self.duration_ns += duration_ns
        self.need += need
