"""Where the ranks of a plan sit in a cluster, who exchanges with whom along each axis, and what their calls cost.

Ranks are numbered by the mesh of `distlab.plan.mesh`: the last axis of its order varies fastest. A node holds
neighbouring numbers, so the order decides which exchanges stay inside nodes.

Every device has a wire of its own inside its node and a wire of its own to other nodes, as the presets' figures are a
device's. So groups that exchange at the same time do not slow one another down.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import AXES, Cluster, Link, Plan
from distlab.plan.mesh import check_order, sizes_of
from simulator.hardware import cost
from simulator.units import to_ns

Ints = NDArray[np.int64]
LARGE_BYTES = 1e9
COPIES = ("data", "expert", "context")  # ranks with equal parameters; an expert's are on fewer
EXPERT_COPIES = ("data", "context")
Links = Mapping[str, Link]
NO_LINKS: Links = MappingProxyType({})

_COSTS = {
    "all_reduce": (cost.library_all_reduce_s, cost.hierarchical_all_reduce_s),
    "all_gather": (cost.all_gather_s, cost.ring_over_nodes_s),
    "reduce_scatter": (cost.reduce_scatter_s, cost.ring_over_nodes_s),  # the same steps, the other way round
    "all_to_all": (cost.all_to_all_s, cost.hierarchical_all_to_all_s),
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

    def exchange_ns(self, kind: str, num_bytes: float, sent: cost.Sent | None = None) -> int:
        """Return the time of a call with num_bytes on each rank: in one node a ring, over equal nodes hierarchical.

        Neighbours that span nodes without filling them, and ranks that spread over nodes unevenly, run a ring over the
        slower of the two links. So where few bytes travel, a group in one node may take longer than one that is spread
        evenly: 8 ranks wait for 14 latencies in a ring and, four to a node, for 3 + 2 + 3. A library that finds a
        tree faster there picks it (6 latencies); this does not. `sent` makes an all-to-all a `dispatch_s`.
        """
        num_ranks, cluster = self.num_ranks, self.cluster
        one, many = _COSTS[kind]
        whole = num_bytes * num_ranks if kind == "all_gather" else num_bytes
        if (own := self.links.get(kind)) is not None:
            return to_ns(one(whole, num_ranks, own))
        intra, inter = cluster.intra_node, cluster.inter_node
        links = {"intra_node": intra, "inter_node": inter}
        if sent is not None and self.ranks_per_node:
            return to_ns(cost.dispatch_s(whole, self.ranks_per_node, self.num_nodes, **links, sent=sent))
        if self.is_in_one_node:
            return to_ns(one(whole, num_ranks, intra))
        if per_node := self.ranks_per_node:
            return to_ns(many(whole, per_node, self.num_nodes, **links))
        return to_ns(max(one(whole, num_ranks, link) for link in (intra, inter)))

    def hop_ns(self, num_bytes: float) -> int:
        """Return the time in which every rank sends num_bytes to the next one in a ring: the slowest message's."""
        if (own := self.links.get("send")) is not None:
            return to_ns(cost.message_s(num_bytes, own))
        links = [self.cluster.inter_node] * (not self.is_in_one_node)
        if self.is_in_one_node or not self.ranks_per_node or self.ranks_per_node > 1:
            links.append(self.cluster.intra_node)
        return to_ns(max(cost.message_s(num_bytes, link) for link in links))

    def sent_bytes(self, kind: str, num_bytes: float, sent: cost.Sent | None = None) -> float:
        """Return what a rank sends for a call with num_bytes on each rank, by a ring; of an all-to-all, what leaves."""
        if kind == "all_gather":
            return (self.num_ranks - 1) * num_bytes
        if kind == "all_to_all":
            if sent is None or not self.ranks_per_node:
                return (self.num_ranks - 1) / self.num_ranks * num_bytes
            here, nodes = (self.ranks_per_node - 1) / self.num_ranks, self.num_nodes
            return (here * sent.to_ranks + (nodes - 1) / nodes * sent.to_nodes) * num_bytes
        if kind == "reduce_scatter":
            return cost.reduce_scatter_steps(self.num_ranks).bytes_factor * num_bytes
        return cost.all_reduce_steps(self.num_ranks).bytes_factor * num_bytes


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


@dataclass(frozen=True, eq=False)
class RankLayout:
    """A plan on a cluster.

    Attributes:
        cluster: the devices.
        plan: the degrees.
        order: axes from the slowest to the fastest.
        links: the measured link of each kind of call that was measured, used in place of the cluster's links.
    """

    cluster: Cluster
    plan: Plan
    order: tuple[str, ...] = AXES
    links: Links = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_order(self.order)
        plan, cluster = self.plan, self.cluster
        if plan.fold_experts and plan.pipeline > 1 and "pipeline" not in (self.order[0], self.order[-1]):
            raise ValueError(
                f"fold_experts lays expert ranks over neighbours of a stage, and the order is {', '.join(self.order)}: "
                "name pipeline first, or leave fold_experts out"
            )
        bits, makers = (4, "Blackwell") if plan.float8 == "nvfp4" else (8, "Ada, Hopper, Blackwell")
        if plan.float8 != "none" and getattr(cluster.device, f"float{bits}_flops_per_s") is None:
            raise ValueError(
                f"the plan has float8 {plan.float8!r} and {cluster.device.name} has no products of {bits} bits; use a "
                f"device that has ({makers}), write float{bits}_flops_per_s in [cluster] device, or float8 'none'"
            )
        offload, own = plan.sharding.offload, cluster.device
        if own.host_memory_bytes is None and (offload != "none" or plan.offload_activations):
            said = "offload_activations is true" if offload == "none" else f"sharding's offload is {offload!r}"
            raise ValueError(
                f"{said} and nothing says how much of its host's memory {own.name} may use; write host_memory_bytes "
                "in [cluster] device, such as 64e9, or keep all on the device"
            )
        if plan.world_size > cluster.num_devices:
            order = ("data", "pipeline", "expert", "context", "tensor")
            degrees = dict(zip(order, sizes_of(plan, order), strict=True))
            shown = [f"{n} ({axis})" for axis, n in degrees.items() if n > 1 or axis in ("data", "pipeline")]
            raise ValueError(
                f"the plan needs {' x '.join(shown)} = {plan.world_size} ranks; cluster "
                f"{cluster.name!r} has {cluster.num_devices} devices; lower a degree or use a larger cluster"
            )

    @cached_property
    def ranks(self) -> Ints:
        """Numbers of the ranks, one row per rank of the pipeline: all that run its stages [P, R]."""
        return _grid(sizes_of(self.plan, self.order), self.order, ("pipeline",)).T

    def groups(self, axes: Sequence[str], pipeline: int = 0) -> tuple[Group, ...]:
        """Return the groups along some axes at a place in the pipeline, one of all those that cost alike."""
        return tuple(Group(self.cluster, *seat, self.links) for seat in self.placements(axes, pipeline))

    def placements(self, axes: Sequence[str], pipeline: int = 0) -> tuple[GroupPlacement, ...]:
        """Return how the groups along some axes at a place in the pipeline sit in their nodes, each way once."""
        return self.at_places(axes)[pipeline]

    def at_places(self, axes: Sequence[str]) -> tuple[tuple[GroupPlacement, ...], ...]:
        """Return `placements` at every place in the pipeline."""
        return _placements(self._sizes(axes), self.order, tuple(axes), self.cluster.devices_per_node)

    def slowest(self, axes: Sequence[str], pipeline: int = 0) -> Group:
        """Return the group along these axes in which a large all-reduce takes longest; the others wait for it."""
        groups = self.groups(axes, pipeline)
        if len(groups) == 1:
            return groups[0]
        return max(groups, key=lambda group: group.exchange_ns("all_reduce", LARGE_BYTES))

    def rows(self, axes: Sequence[str], pipeline: int = 0) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each of these groups, from 0: the first one on the node where the first group begins."""
        return _rows(self._sizes(axes), self.order, tuple(axes), self.cluster.devices_per_node)[pipeline]

    def crosses_nodes(self, here: int, there: int) -> bool:
        """Return whether any message between two ranks of the pipeline leaves a node."""
        nodes = self._nodes
        return bool((nodes[here] != nodes[there]).any())

    @cached_property
    def _nodes(self) -> Ints:
        return self.ranks // self.cluster.devices_per_node

    def _sizes(self, axes: Sequence[str]) -> tuple[int, ...]:
        return sizes_of(self.plan, self.order, of_experts=tuple(axes) in (("expert",), EXPERT_COPIES))


@lru_cache(maxsize=128)
def _grid(sizes: tuple[int, ...], order: tuple[str, ...], axes: tuple[str, ...]) -> Ints:
    """Return the ranks, those along `axes` in a row each [groups, ranks], rising."""
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    inside = [place for place, axis in enumerate(order) if axis in axes]
    outside = [place for place, axis in enumerate(order) if axis not in axes]
    length = math.prod(sizes[place] for place in inside)
    return grid.transpose([*outside, *inside]).reshape(-1, length)


@lru_cache(maxsize=256)
def _rows(
    sizes: tuple[int, ...], order: tuple[str, ...], axes: tuple[str, ...], per_node: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return for each place in the pipeline the groups along `axes`, moved to the first node, each once."""
    groups, at = _grid(sizes, order, axes), order.index("pipeline")
    firsts = groups[:, 0]  # groups differ in their first rank alone
    places = firsts // math.prod(sizes[at + 1 :]) % sizes[at]
    seats: list[dict[int, None]] = [{} for _ in range(sizes[at])]
    for place, seat in zip(places.tolist(), (firsts % per_node).tolist(), strict=True):
        seats[place][seat] = None
    rows = {seat: tuple((groups[0] + seat).tolist()) for seat in set[int]().union(*seats)}
    return tuple(tuple(rows[seat] for seat in each) for each in seats)


@lru_cache(maxsize=256)
def _placements(
    sizes: tuple[int, ...], order: tuple[str, ...], axes: tuple[str, ...], per_node: int
) -> tuple[tuple[GroupPlacement, ...], ...]:
    """Return for each place in the pipeline how the groups along `axes` sit in their nodes, each way once."""
    if all(size == 1 for size, axis in zip(sizes, order, strict=True) if axis in axes):
        return ((placement_of([0], per_node),),) * sizes[order.index("pipeline")]  # each rank is alone
    places = _rows(sizes, order, axes, per_node)
    seat = {row: placement_of(row, per_node) for row in dict.fromkeys(chain.from_iterable(places))}  # mostly alike
    return tuple(tuple(dict.fromkeys(seat[row] for row in rows)) for rows in places)
