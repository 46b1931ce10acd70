"""The time of a redistribution: its collectives follow one another, each on the wires of its mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from distlab.plan import Cluster, Mesh
from simulator.hardware.rank_layout import NO_LINKS, Links, group_of

# What a rank has where it sends one byte in a ring of n ranks: its part of a gather, else the whole.
BYTES_HELD = {
    "all_gather": lambda n: 1 / (n - 1),
    "reduce_scatter": lambda n: n / (n - 1),
    "all_reduce": lambda n: n / (2 * (n - 1)),
    "all_to_all": lambda n: n / (n - 1),
}


class Sending(Protocol):
    """A step of a route, as of `distlab.placements.route`."""

    @property
    def collective(self) -> str:
        """One of BYTES_HELD, or what sends nothing."""

    @property
    def axis(self) -> int:
        """Of the mesh."""

    @property
    def bytes_sent(self) -> int:
        """By each rank of the axis."""


def redistribution_s(moves: Iterable[Sending], mesh: Sequence[int], cluster: Cluster, links: Links = NO_LINKS) -> float:
    """Return the time of a route's steps on a cluster; steps that send nothing take none.

    Args:
        moves: the route.
        mesh: ranks on each axis, slowest first; neighbours share a node.
        cluster: where they are.
        links: the measured link of each kind of call, used in place of the cluster's links.
    """
    axes = Mesh({f"axis {number}": size for number, size in enumerate(mesh)})
    total = 0
    for move in moves:
        if move.bytes_sent and move.collective in BYTES_HELD:
            held = BYTES_HELD[move.collective](mesh[move.axis]) * move.bytes_sent
            groups = axes.groups(f"axis {move.axis}")
            total += max(group_of(cluster, ranks, links).exchange_ns(move.collective, held) for ranks in groups)
    return total / 1e9
