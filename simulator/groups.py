"""Groups: ranks that exchange something, where they sit in the nodes, and what a call among them costs.

Every device has a wire of its own inside its node and a wire of its own to other nodes, as the presets' figures are a
device's. So groups that exchange at the same time do not slow one another down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from distlab.plan.records import Cluster, Link
from simulator.cost import (
    all_gather_s,
    all_reduce_s,
    all_reduce_steps,
    all_to_all_s,
    hierarchical_all_gather_s,
    hierarchical_all_reduce_s,
    hierarchical_all_to_all_s,
    message_s,
    reduce_scatter_s,
    reduce_scatter_steps,
)
from simulator.units import to_ns

Links = Mapping[str, Link]
NO_LINKS: Links = MappingProxyType({})

_COSTS = {
    "all_reduce": (all_reduce_s, hierarchical_all_reduce_s),
    "all_gather": (all_gather_s, hierarchical_all_gather_s),
    "reduce_scatter": (reduce_scatter_s, hierarchical_all_gather_s),  # the same steps, the other way round
    "all_to_all": (all_to_all_s, hierarchical_all_to_all_s),
}


class Group(NamedTuple):
    """Ranks of a cluster that exchange: neighbours, or ranks some way apart.

    Attributes:
        cluster: where they are.
        first_rank: the first of them.
        num_ranks: how many.
        in_nodes: how many are in each node that has any, where they are no neighbours.
        links: of each kind of call that was measured, the line that it takes in place of the cluster's links.
    """

    cluster: Cluster
    first_rank: int
    num_ranks: int
    in_nodes: tuple[int, ...] = ()
    links: Links = NO_LINKS

    def exchange_ns(self, kind: str, num_bytes: float) -> int:
        """Return the time of a call with num_bytes on each rank: in one node a ring, over equal nodes hierarchical.

        Neighbours that span nodes without filling them, and ranks that spread over nodes unevenly, run a ring over the
        slower of the two links. So where few bytes travel, a group in one node may take longer than one that is spread
        evenly: 8 ranks wait for 14 latencies in a ring and, four to a node, for 3 + 2 + 3. A library that finds a
        tree faster there picks it (6 latencies); this does not.
        """
        num_ranks, cluster = self.num_ranks, self.cluster
        one, many = _COSTS[kind]
        whole = num_bytes * num_ranks if kind == "all_gather" else num_bytes
        if (own := self.links.get(kind)) is not None:
            return to_ns(one(whole, num_ranks, own))
        intra, inter = cluster.intra_node, cluster.inter_node
        if self.is_in_one_node:
            return to_ns(one(whole, num_ranks, intra))
        if per_node := self.ranks_per_node:
            return to_ns(many(whole, per_node, num_ranks // per_node, intra_node=intra, inter_node=inter))
        return to_ns(max(one(whole, num_ranks, link) for link in (intra, inter)))

    def hop_ns(self, num_bytes: float) -> int:
        """Return the time in which every rank sends num_bytes to the next one in a ring: the slowest message's."""
        if (own := self.links.get("send")) is not None:
            return to_ns(message_s(num_bytes, own))
        links = [self.cluster.inter_node] * (not self.is_in_one_node)
        if self.is_in_one_node or not self.ranks_per_node or self.ranks_per_node > 1:
            links.append(self.cluster.intra_node)
        return to_ns(max(message_s(num_bytes, link) for link in links))

    @property
    def seat(self) -> tuple[int, bool, int]:
        """What its calls' costs follow from: equal of two groups on a cluster, so are their costs."""
        return self.num_ranks, self.is_in_one_node, self.ranks_per_node

    @property
    def is_in_one_node(self) -> bool:
        """Whether no message leaves a node."""
        if self.in_nodes:
            return len(self.in_nodes) == 1
        per_node = self.cluster.devices_per_node
        return self.first_rank // per_node == (self.first_rank + self.num_ranks - 1) // per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks in each node, where all have as many (of neighbours: where they fill their nodes); else 0."""
        if self.in_nodes:
            return self.in_nodes[0] if len(set(self.in_nodes)) == 1 else 0
        per_node = self.cluster.devices_per_node
        if self.is_in_one_node:
            return self.num_ranks
        return per_node if self.first_rank % per_node == 0 and self.num_ranks % per_node == 0 else 0

    def sent_bytes(self, kind: str, num_bytes: float) -> float:
        """Return what a rank sends for a call with num_bytes on each rank, by a ring; of an all-to-all, what leaves."""
        if kind == "all_gather":
            return (self.num_ranks - 1) * num_bytes
        if kind in ("reduce_scatter", "all_to_all"):
            return reduce_scatter_steps(self.num_ranks).bytes_factor * num_bytes
        return all_reduce_steps(self.num_ranks).bytes_factor * num_bytes


def group_of(cluster: Cluster, ranks: Sequence[int], links: Links = NO_LINKS) -> Group:
    """Return the group of these ranks, which rise."""
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return Group(cluster, ranks[0], len(ranks), links=links)
    nodes = [rank // cluster.devices_per_node for rank in ranks]
    return Group(cluster, ranks[0], len(ranks), tuple(nodes.count(node) for node in sorted(set(nodes))), links)
