"""The order of axes on nodes: which groups lie inside a node, and what crosses between nodes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from distlab.course.grading.cases import Cases
from distlab.grading import Evidence, Mutant

PLACE_CASES = (  # axes, bytes sent along each, devices of a node
    ({"tensor": 2, "pipeline": 2, "data": 2}, {"tensor": 8e9, "pipeline": 0.1e9, "data": 1e9}, 4),
    ({"pipeline": 4, "data": 8, "tensor": 2}, {"pipeline": 0.2e9, "data": 3e9, "tensor": 8e9}, 8),
    ({"data": 4, "tensor": 16}, {"data": 2e9, "tensor": 9e9}, 8),
    ({"pipeline": 8, "data": 4, "tensor": 8}, {"pipeline": 0.1e9, "data": 2e9, "tensor": 12e9}, 8),
    ({"data": 2, "tensor": 2}, {"data": 1e9, "tensor": 2e9}, 8),
    ({"tensor": 2, "data": 8, "context": 4}, {"tensor": 4e9, "data": 5e9, "context": 4e9}, 8),
    ({"tensor": 2, "context": 8, "pipeline": 4}, {"tensor": 4e9, "context": 9e9, "pipeline": 0.1e9}, 8),
    ({"expert": 8, "data": 4, "tensor": 1}, {"expert": 4e9, "data": 2e9, "tensor": 0.0}, 8),
)


def use_order(fn: Callable[..., Any], axes: dict[str, int], traffic: dict[str, float], devices_per_node: int) -> Any:
    """Return what crosses between nodes with an order: several orders may be best."""
    order = fn(axes, traffic, devices_per_node)
    if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(traffic):
        return {"the axes, each once": order, "GB that a rank sends between nodes": None}
    reach = [prod(axes[axis] for axis in order[at:]) for at in range(len(order))]
    sent = sum(
        traffic[axis] for axis, far in zip(order, reach, strict=True) if axes[axis] > 1 and far > devices_per_node
    )
    return {"the axes, each once": sorted(order), "GB that a rank sends between nodes": sent / 1e9}


drive_place = Cases(
    {
        f"{' x '.join(f'{name} ({size})' for name, size in axes.items())} on nodes of {devices}": (
            axes,
            traffic,
            devices,
        )
        for axes, traffic, devices in PLACE_CASES
    },
    use_order,
)


def budget_place(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{len(PLACE_CASES)} clusters, none with more bytes between nodes than needed"]


_BEST = "list(min(permutations(axes), key=crossing))"
_TURNED = "it puts first what should come last: the fastest axis, whose ranks are neighbours, is the last of the list"
_WHOLE = "compare whole orders, not axis by axis"


def _greedy(mutant: Mutant, worth: str) -> Mutant:
    """Take axes into a node as long as they fit, those first that are worth most."""
    return mutant.setup("from math import log2").body(f"""
        inside, room = [], devices_per_node
        for axis in sorted(axes, key=lambda axis: {worth}, reverse=True):
            if axes[axis] <= room:
                inside.append(axis)
                room //= axes[axis]
        return [axis for axis in axes if axis not in inside] + inside[::-1]
    """)


WRONG_PLACE = (
    Mutant(
        "as given",
        "as given",
        "the axes stay as they are given; an axis crosses where its size times all faster axes' is above a node's",
        1,
    ).edit(_BEST, "list(axes)"),
    Mutant("turned round", "turned round", _TURNED, 1).edit(_BEST, "sorted(axes, key=lambda axis: -traffic[axis])"),
    Mutant("best, turned round", "turned round", _TURNED, 1).edit(_BEST, f"{_BEST}[::-1]"),
    Mutant("counted from the slowest", "turned round", _TURNED).edit("reversed(order)", "order"),
    Mutant(
        "busiest fastest",
        "room left",
        "the busiest axis does not fit a node there: leave the room inside to others that fit",
        1,
    ).edit(_BEST, "sorted(axes, key=lambda axis: traffic[axis])"),
    _greedy(
        Mutant(
            "greedy",
            "others send more",
            f"it takes the busiest axis that fits, then the next; two smaller ones may send more together: {_WHOLE}",
            1,
        ),
        "traffic[axis]",
    ),
    _greedy(
        Mutant(
            "per bit",
            "per doubling",
            f"it goes by traffic for each doubling of a size, and leaves room unused: {_WHOLE}",
            1,
        ),
        "traffic[axis] / log2(axes[axis]) if axes[axis] > 1 else 0.0",
    ),
    Mutant(
        "largest fastest", "by size", "it sorts the axes by their sizes; those that send most should be neighbours", 1
    ).edit(_BEST, "sorted(axes, key=lambda axis: axes[axis])"),
    Mutant(
        "fits alone",
        "fits alone",
        "it asks whether each axis alone fits a node; count its size times those of all faster axes",
        1,
    ).edit(_BEST, "sorted(axes, key=lambda axis: (axes[axis] <= devices_per_node, traffic[axis]))"),
)
