"""Where the ranks of a plan sit in a cluster, and who exchanges with whom along each axis.

Ranks are numbered by the mesh of `distlab.plan.axes`: the last axis of its order varies fastest. A node holds
neighbouring numbers, so the order decides which exchanges stay inside nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from distlab.plan import AXES, Cluster, Plan
from distlab.plan.axes import check_order
from simulator.hardware.process_groups import Group, GroupPlacement, Links, placement_of

Ints = NDArray[np.int64]
LARGE_BYTES = 1e9
COPIES = ("data", "expert", "context")  # ranks with equal parameters; an expert's are on fewer
EXPERT_COPIES = ("data", "context")


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
        if plan.float8 != "none" and cluster.device.float8_flops_per_s is None:
            raise ValueError(
                f"the plan has float8 {plan.float8!r} and {cluster.device.name} has no products of 8 bits; use a "
                "device that has (Ada, Hopper, Blackwell), or float8 'none'"
            )
        if plan.world_size > cluster.num_devices:
            degrees = {axis: getattr(plan, axis) for axis in ("data", "pipeline", *AXES)}
            shown = [f"{n} ({axis})" for axis, n in degrees.items() if n > 1 or axis in ("data", "pipeline")]
            raise ValueError(
                f"the plan needs {' x '.join(shown)} = {plan.world_size} ranks; cluster "
                f"{cluster.name!r} has {cluster.num_devices} devices; lower a degree or use a larger cluster"
            )

    @cached_property
    def ranks(self) -> Ints:
        """Numbers of the ranks, one row per rank of the pipeline: all that run its stages [P, R]."""
        return _grid(self._sizes, self.order, ("pipeline",)).T

    def groups(self, axes: Sequence[str], pipeline: int = 0) -> tuple[Group, ...]:
        """Return the groups along some axes at a place in the pipeline, one of all those that cost alike."""
        return tuple(Group(self.cluster, *seat, self.links) for seat in self.placements(axes, pipeline))

    def placements(self, axes: Sequence[str], pipeline: int = 0) -> tuple[GroupPlacement, ...]:
        """Return how the groups along some axes at a place in the pipeline sit in their nodes, each way once."""
        return self.at_places(axes)[pipeline]

    def at_places(self, axes: Sequence[str]) -> tuple[tuple[GroupPlacement, ...], ...]:
        """Return `placements` at every place in the pipeline."""
        return _placements(self._sizes, self.order, tuple(axes), self.cluster.devices_per_node)

    def slowest(self, axes: Sequence[str], pipeline: int = 0) -> Group:
        """Return the group along these axes in which a large all-reduce takes longest; the others wait for it."""
        groups = self.groups(axes, pipeline)
        if len(groups) == 1:
            return groups[0]
        return max(groups, key=lambda group: group.exchange_ns("all_reduce", LARGE_BYTES))

    def rows(self, axes: Sequence[str], pipeline: int = 0) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each of these groups, from 0: the first one on the node where the first group begins."""
        return _rows(self._sizes, self.order, tuple(axes), self.cluster.devices_per_node)[pipeline]

    def crosses_nodes(self, here: int, there: int) -> bool:
        """Return whether any message between two ranks of the pipeline leaves a node."""
        nodes = self._nodes
        return bool((nodes[here] != nodes[there]).any())

    @cached_property
    def _nodes(self) -> Ints:
        return self.ranks // self.cluster.devices_per_node

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self.plan, axis) for axis in self.order)


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
