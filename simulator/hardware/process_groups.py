"""Process groups: ranks that exchange something, where they sit in the nodes, and what a call among them costs.

Every device has a wire of its own inside its node and a wire of its own to other nodes, as the presets' figures are a
device's. So groups that exchange at the same time do not slow one another down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from distlab.plan import Cluster, Link
from simulator.hardware.cost import (
    all_gather_s,
    all_reduce_steps,
    all_to_all_s,
    hierarchical_all_reduce_s,
    hierarchical_all_to_all_s,
    library_all_reduce_s,
    message_s,
    reduce_scatter_s,
    reduce_scatter_steps,
    ring_over_nodes_s,
)
from simulator.units import to_ns

Links = Mapping[str, Link]
NO_LINKS: Links = MappingProxyType({})

_COSTS = {
    "all_reduce": (library_all_reduce_s, hierarchical_all_reduce_s),
    "all_gather": (all_gather_s, ring_over_nodes_s),
    "reduce_scatter": (reduce_scatter_s, ring_over_nodes_s),  # the same steps, the other way round
    "all_to_all": (all_to_all_s, hierarchical_all_to_all_s),
}


class Group(NamedTuple):
    """Ranks of a cluster that exchange: neighbours, or ranks some way apart.

    Attributes:
        cluster: where they are.
        num_ranks: how many.
        is_in_one_node: whether no message leaves a node.
        ranks_per_node: ranks in each node, where all have as many (of neighbours: where they fill their nodes); else 0.
        links: the measured link of each kind of call that was measured, used in place of the cluster's links.
    """

    cluster: Cluster
    num_ranks: int
    is_in_one_node: bool
    ranks_per_node: int
    links: Links = NO_LINKS

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks fill alike: 1 where they are in one, or sit unevenly."""
        return 1 if self.is_in_one_node or not self.ranks_per_node else self.num_ranks // self.ranks_per_node

    def exchange_ns(self, kind: str, num_bytes: float, crossing: float = 1.0) -> int:
        """Return the time of a call with num_bytes on each rank: in one node a ring, over equal nodes hierarchical.

        Neighbours that span nodes without filling them, and ranks that spread over nodes unevenly, run a ring over the
        slower of the two links. So where few bytes travel, a group in one node may take longer than one that is spread
        evenly: 8 ranks wait for 14 latencies in a ring and, four to a node, for 3 + 2 + 3. A library that finds a
        tree faster there picks it (6 latencies); this does not. `crossing` is an all-to-all's (see
        `hierarchical_all_to_all_s`).
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
            links = {"intra_node": intra, "inter_node": inter}
            if kind == "all_to_all":
                return to_ns(hierarchical_all_to_all_s(whole, per_node, self.num_nodes, **links, crossing=crossing))
            return to_ns(many(whole, per_node, self.num_nodes, **links))
        return to_ns(max(one(whole, num_ranks, link) for link in (intra, inter)))

    def hop_ns(self, num_bytes: float) -> int:
        """Return the time in which every rank sends num_bytes to the next one in a ring: the slowest message's."""
        if (own := self.links.get("send")) is not None:
            return to_ns(message_s(num_bytes, own))
        links = [self.cluster.inter_node] * (not self.is_in_one_node)
        if self.is_in_one_node or not self.ranks_per_node or self.ranks_per_node > 1:
            links.append(self.cluster.intra_node)
        return to_ns(max(message_s(num_bytes, link) for link in links))

    def sent_bytes(self, kind: str, num_bytes: float, crossing: float = 1.0) -> float:
        """Return what a rank sends for a call with num_bytes on each rank, by a ring; of an all-to-all, what leaves."""
        if kind == "all_gather":
            return (self.num_ranks - 1) * num_bytes
        if kind == "all_to_all":
            stays = (1 - crossing) * (self.num_ranks - self.ranks_per_node) if self.num_nodes > 1 else 0.0
            return (self.num_ranks - 1 - stays) / self.num_ranks * num_bytes
        if kind == "reduce_scatter":
            return reduce_scatter_steps(self.num_ranks).bytes_factor * num_bytes
        return all_reduce_steps(self.num_ranks).bytes_factor * num_bytes


class GroupPlacement(NamedTuple):
    """How ranks sit in their nodes: what their calls cost follows from it. See `Group` for the fields."""

    num_ranks: int
    is_in_one_node: bool
    ranks_per_node: int


def placement_of(ranks: Sequence[int], per_node: int) -> GroupPlacement:
    """Return how these ranks, which rise, sit in nodes of `per_node`."""
    first, count = ranks[0], len(ranks)
    if first // per_node == ranks[-1] // per_node:
        return GroupPlacement(count, True, count)
    if ranks[-1] - first == count - 1:
        return GroupPlacement(count, False, per_node if first % per_node == 0 and count % per_node == 0 else 0)
    in_nodes = Counter(rank // per_node for rank in ranks)
    same = len(set(in_nodes.values())) == 1
    return GroupPlacement(count, False, in_nodes[first // per_node] if same else 0)


def group_of(cluster: Cluster, ranks: Sequence[int], links: Links = NO_LINKS) -> Group:
    """Return the group of these ranks, which rise."""
    return Group(cluster, *placement_of(ranks, cluster.devices_per_node), links)
