"""Which ranks make a node, and how the ranks of a group sit in the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distlab.comm.nodes.wire import Wire, ring_bytes

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
        return {
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
            "GROUP_RANK": str(rank // each),
            "GROUP_WORLD_SIZE": str(self.count),
        }


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
