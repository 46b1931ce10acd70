"""Placement: which axis belongs on which wire, on a cluster of nodes.

A node holds ranks with neighbouring numbers, so the order of a mesh's axes decides whose exchanges stay inside nodes:
the last axes' do. Axes of size 1 are nowhere, and orders that differ in their places alone are one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from distlab.plan import AXES, Cluster, Plan, Workload, mesh_of
from simulator.step.result import Step
from simulator.step.simulate import simulate


class Placed(NamedTuple):
    """An order of the axes, slowest first, and the step with it."""

    order: tuple[str, ...]
    step: Step


def rank_orders(workload: Workload, cluster: Cluster, plan: Plan) -> list[Placed]:
    """Simulate a step with every order of the axes, fastest first; of equal ones, in the order of AXES.

    An axis inside nodes does not always win. There a call is costed as a flat ring, of n ranks 2 (n-1) latencies for an
    all-reduce, and over nodes as a hierarchical one, which has fewer. So where messages are small and the wire between
    nodes has a low latency, tensor ranks spread over two nodes come out ahead of those in one; a library that runs a
    tree for small messages would turn that round (see `simulator.hardware.rank_layout`).

    Cost: one simulation per order: 6 for three axes above 1, 120 for five.

    Raises:
        ValueError: as `simulate`.
    """
    small = tuple(axis for axis in AXES if getattr(plan, axis) == 1)  # they stand first, in the order of AXES
    orders = [(*small, *order) for order in permutations(axis for axis in AXES if axis not in small)]
    placed = [Placed(order, simulate(workload, cluster, plan, order=order)) for order in orders]
    return sorted(placed, key=lambda found: found.step.duration_s)


def axes_inside_nodes(cluster: Cluster, plan: Plan, order: Sequence[str] = AXES) -> tuple[str, ...]:
    """Return the axes whose groups all stay inside a node, those of size 1 left out; slowest first."""
    mesh = mesh_of(plan, order=order)
    per_node = cluster.devices_per_node
    return tuple(axis for axis, size in mesh.axes if size > 1 and not mesh.crosses_nodes(axis, per_node))
