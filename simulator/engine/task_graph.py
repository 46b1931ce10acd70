"""A graph of operations: the rank and lane of each, how long it takes, and what it waits for.

A lane runs one operation at a time, in the order in which they were added (first in, first out). That order is a
dependency too. Lane 0 of a rank computes; every other lane communicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

COMPUTE = 0
COMMUNICATION = 1


@dataclass(frozen=True, eq=False)
class Graph:
    """Operations in columns, numbered in the order in which they were added.

    Attributes:
        rank: the rank that runs the operation.
        lane: COMPUTE, or a lane of the rank that communicates.
        peer: the other rank that takes part (a send's receiver), or -1.
        duration_ns: how long it takes when it is alone.
        need_offsets: operation i needs `needs[need_offsets[i]:need_offsets[i + 1]]`, and its lane's previous one.
        needs: operations that must have ended.
        latency_ns: time between the end of what is needed and the earliest start, one per need.
    """

    rank: Ints
    lane: Ints
    peer: Ints
    duration_ns: Ints
    need_offsets: Ints
    needs: Ints
    latency_ns: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def needs_of(self, operation: int) -> list[int]:
        """Return the operations that one operation needs, without its lane's previous one."""
        first, last = self.need_offsets[operation : operation + 2]
        return [int(need) for need in self.needs[first:last]]


class GraphBuilder:
    """Adds operations one by one; `graph()` returns the columns."""

    def __init__(self) -> None:
        self._rank: list[int] = []
        self._lane: list[int] = []
        self._peer: list[int] = []
        self._duration_ns: list[int] = []
        self._offsets: list[int] = [0]
        self._needs: list[int] = []
        self._latency_ns: list[int] = []

    def __len__(self) -> int:
        return len(self._rank)

    def add(
        self,
        rank: int,
        lane: int,
        duration_ns: int,
        *,
        needs: Iterable[int] = (),
        latency_ns: int = 0,
        peer: int = -1,
    ) -> int:
        """Add an operation at the end of its lane and return its number.

        A need may have a number that has not been added yet.

        Raises:
            ValueError: a duration or latency is negative.
        """
        if duration_ns < 0 or latency_ns < 0:
            raise ValueError(
                f"rank {rank}: a duration is {duration_ns} ns and a latency {latency_ns} ns; pass times >= 0"
            )
        self._rank.append(rank)
        self._lane.append(lane)
        self._peer.append(peer)
        self._duration_ns.append(duration_ns)
        for need in needs:
            self._needs.append(need)
            self._latency_ns.append(latency_ns)
        self._offsets.append(len(self._needs))
        return len(self._rank) - 1

    def graph(self) -> Graph:
        """Return the graph.

        Raises:
            ValueError: an operation needs one that was never added.
        """
        missing = [need for need in self._needs if not 0 <= need < len(self)]
        if missing:
            raise ValueError(f"an operation needs operation {missing[0]}; the graph has {len(self)}")
        columns = (self._rank, self._lane, self._peer, self._duration_ns, self._offsets, self._needs, self._latency_ns)
        return Graph(*(np.array(column, dtype=np.int64) for column in columns))
