"""Which ranks make a node, the wire between nodes, and how long a collective occupies it."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

OWN_STEPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
_SPEED = re.compile(r"([0-9.]+)\s*(B|kB|MB|GB)/s")
_TIME = re.compile(r"([0-9.]+)\s*(s|ms|us)")


@dataclass(frozen=True)
class Wire:
    """A wire, one way: bandwidth, and what one message takes apart from its bytes."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s!r}; pass the bytes of a second, above 0, such as 125e6")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(
                f"latency_s is {self.latency_s!r}; pass the seconds of one message, at least 0, such as 50e-6"
            )

    @classmethod
    def of(cls, text: str) -> Wire:
        """Read "40MB/s" or "40MB/s,200us".

        Raises:
            ValueError: it is something else.
        """
        speed, _, latency = text.replace(" ", "").partition(",")
        found, delay = _SPEED.fullmatch(speed), _TIME.fullmatch(latency or "0s")
        if found is None or delay is None:
            raise ValueError(f"the wire between nodes is {text!r}; pass bandwidth and latency, such as 40MB/s,200us")
        try:
            return cls(float(found[1]) * _BYTES[found[2]], float(delay[1]) / _PER_SECOND[delay[2]])
        except ValueError as error:
            raise ValueError(f"the wire between nodes is {text!r}: {error}") from None

    def __str__(self) -> str:
        unit = next((unit for unit in ("GB", "MB", "kB") if self.bytes_per_s >= _BYTES[unit]), "B")
        return f"{self.bytes_per_s / _BYTES[unit]:g}{unit}/s,{self.latency_s * 1e6:g}us"


def ring_bytes(op: str, num_bytes: int, num_ranks: int, *, is_root: bool = False, before_root: bool = False) -> int:
    """Return the bytes that a rank would send if a collective ran as a ring (a chain for those with a root).

    S is the payload that the rank contributes (for scatter, the share that it gets), n the number of ranks:
    all_reduce 2(n-1)/n S; reduce_scatter and all_to_all (n-1)/n S; all_gather (n-1) S; broadcast S, except the last
    rank of the chain, which stands before the root; reduce and gather S, except the root; scatter (n-1) S at the root.
    Rounded to whole bytes.
    """
    n = num_ranks
    if n < 2:
        return 0
    if op == "all_reduce":
        return round(2 * (n - 1) * num_bytes / n)
    if op in ("reduce_scatter", "all_to_all"):
        return round((n - 1) * num_bytes / n)
    if op == "all_gather" or (op == "scatter" and is_root):
        return (n - 1) * num_bytes
    if op == "broadcast":
        return 0 if before_root else num_bytes
    return num_bytes if op in ("reduce", "gather") and not is_root else 0


def link_s(op: str, num_bytes: int, num_ranks: int, *, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the time of a collective on each rank's link: steps x latency + bytes sent / bandwidth, as a ring.

    Args:
        op: plain name of the call ("all_reduce", ...).
        num_bytes: payload that the rank hands to the call.
        num_ranks: ranks in its group.
        bytes_per_s: of the link, one way.
        latency_s: of one message.

    Cost: n - 1 steps for all_gather, reduce_scatter and all_to_all, twice as many for all_reduce, log2 n for the rest;
        bytes as `ring_bytes`.
    """
    if num_ranks < 2:
        return 0.0
    steps = num_ranks - 1 if op in OWN_STEPS else math.ceil(math.log2(num_ranks))
    return (2 * steps if op == "all_reduce" else steps) * latency_s + ring_bytes(op, num_bytes, num_ranks) / bytes_per_s


class Pace:
    """This rank's end of a wire: what is sent goes through one after the other.

    All clocks of a host show the same time, so a moment means the same to every rank.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._free_s = 0.0
        self._guard = threading.Lock()

    def occupy(self, seconds: float, since_s: float) -> float:
        """Occupy the wire for some time, behind what is on it; return the moment when it is free again."""
        with self._guard:
            self._free_s = max(self._free_s, since_s) + seconds
            return self._free_s


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment of the monotonic clock."""
    while (left_s := moment_s - time.monotonic()) > 0:
        time.sleep(left_s)


DEFAULT_WIRE = Wire(1e9, 50e-6)  # about what sockets of one machine take


@dataclass(frozen=True)
class Nodes:
    """Nodes of equal size; ranks fill them in their order, as torchrun's do.

    Attributes:
        count: how many.
        between: the wire of each rank to other nodes, such as "40MB/s,200us"; None: "1GB/s,50us".
    """

    count: int
    between: Wire | None = None

    def __init__(self, count: int, between: Wire | str | None = None) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"nodes is {count!r}; pass a whole number of nodes, such as 2")
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "between", Wire.of(between) if isinstance(between, str) else between)

    @property
    def wire(self) -> Wire:
        """The wire of each rank to other nodes."""
        return self.between or DEFAULT_WIRE

    @classmethod
    def for_ranks(cls, nodes: Nodes | int, world_size: int) -> Nodes:
        """Return the nodes that a number of ranks makes.

        Raises:
            ValueError: the ranks do not fill them evenly.
        """
        chosen = nodes if isinstance(nodes, Nodes) else cls(nodes)
        if world_size % chosen.count:
            raise ValueError(
                f"{world_size} ranks do not fill {chosen.count} nodes evenly; use a multiple of {chosen.count} ranks"
            )
        if chosen.count == 1 and chosen.between is not None:
            raise ValueError(f"there is one node, so nothing lies between nodes ({chosen.between}); pass nodes=2")
        return chosen

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Return what torchrun would set on a rank of such nodes."""
        each = world_size // self.count
        local = {"LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
        return local | {"GROUP_RANK": str(rank // each), "GROUP_WORLD_SIZE": str(self.count)}


@dataclass(frozen=True)
class NodePlacement:
    """Where a rank of a group sits.

    Attributes:
        nodes: the group's ranks in each node that has some, by their numbers in the group.
        mates: those in the node of this rank, itself too.
    """

    nodes: tuple[tuple[int, ...], ...]
    mates: tuple[int, ...]

    @classmethod
    def of(cls, members: Sequence[int], rank: int, each: int) -> NodePlacement:
        """Lay out a group whose members have these numbers among all ranks, in nodes of `each` ranks."""
        by_node: dict[int, list[int]] = {}
        for number, member in enumerate(members):
            by_node.setdefault(member // each, []).append(number)
        nodes = tuple(tuple(numbers) for numbers in by_node.values())
        return cls(nodes, next(numbers for numbers in nodes if rank in numbers))

    def part(self, op: str, num_bytes: int) -> int:
        """Return this rank's part of what goes across: the ranks of a node add up first, where all nodes are equal."""
        is_even = len({len(numbers) for numbers in self.nodes}) == 1
        return num_bytes // len(self.mates) if op in ("all_reduce", "reduce_scatter") and is_even else num_bytes

    def bytes_out(self, op: str, num_bytes: int) -> int:
        """Return the bytes that this rank sends to other nodes for a collective, as `wire.ring_bytes` counts them.

        Args:
            op: plain name of the call ("all_reduce", ...).
            num_bytes: payload that the rank hands to the call.
        """
        return ring_bytes(op, self.part(op, num_bytes), len(self.nodes))
