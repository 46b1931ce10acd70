"""Routes: the steps from one layout to a different one that send the fewest bytes.

A step changes the placement on one axis of the mesh, and costs what its collective sends. With n ranks on the axis, of
which each holds E elements when nothing is cut there:

| step         | collective       | elements sent per rank |
|--------------|------------------|------------------------|
| R -> S       | slice            | 0                      |
| R -> P       | keep on first    | 0                      |
| S -> P       | pad with zeros   | 0                      |
| S -> R       | all_gather       | (n-1)/n E              |
| P -> S       | reduce_scatter   | (n-1)/n E              |
| P -> R       | all_reduce       | 2 (n-1)/n E            |
| S -> S'      | all_to_all       | (n-1)/n of E/n         |

E depends on how the other axes cut the tensor, so the order of steps matters: (P, P) -> (R, R) is cheapest as
reduce_scatter on one axis, all_reduce of the part on the other one, all_gather on the first. There are few layouts
(on each axis R, P and one S for each dim), so the shortest path among all of them is found.

Axes that cut the same dim are nested: a step on one of them is possible only where no later axis cuts that dim.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from distlab.placements.layout import Layout, Partial, Placement, Replicate, Shard, check_layout, local_shape

NAMES = {  # of what changes one placement to the other
    (Replicate, Shard): "slice",
    (Replicate, Partial): "keep on first",
    (Shard, Partial): "pad with zeros",
    (Shard, Replicate): "all_gather",
    (Partial, Shard): "reduce_scatter",
    (Partial, Replicate): "all_reduce",
    (Shard, Shard): "all_to_all",
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Move(NamedTuple):
    """One step of a route.

    Attributes:
        collective: of COLLECTIVES, or "slice", "keep on first" or "pad with zeros", which send nothing.
        axis: of the mesh, on which it is made.
        before: the layout.
        after: the layout, which differs on that axis alone.
        bytes_sent: by each rank of the axis; where parts are uneven, by the one with the largest.
    """

    collective: str
    axis: int
    before: Layout
    after: Layout
    bytes_sent: int


def route(
    shape: Sequence[int],
    before: Sequence[Placement],
    after: Sequence[Placement],
    mesh: Sequence[int],
    *,
    itemsize: int = 4,
) -> tuple[Move, ...]:
    """Return the steps from one layout to the other that send the fewest bytes per rank.

    Of routes with equal bytes the one with fewer collectives is taken, then the one with fewer steps.

    Args:
        shape: of the whole tensor.
        before: its layout now, a placement for each axis.
        after: the wanted one.
        mesh: ranks on each axis, slowest first.
        itemsize: bytes of an element.

    Raises:
        ValueError: the tensor cannot have one of the layouts on the mesh.
    """
    first, last = check_layout(shape, before, mesh), check_layout(shape, after, mesh)
    return _shortest(tuple(shape), first, last, tuple(mesh), itemsize)


@lru_cache(4096)
def _shortest(
    shape: tuple[int, ...], first: Layout, last: Layout, mesh: tuple[int, ...], itemsize: int
) -> tuple[Move, ...]:
    """Dijkstra's search: the layout with the lowest cost so far is final."""
    done: set[Layout] = set()
    waiting: list[tuple[tuple[int, int, int], int, Layout, tuple[Move, ...]]] = [((0, 0, 0), 0, first, ())]
    count = 0  # of equal costs the first found goes on: the same on every rank
    while True:
        (sent, calls, steps), _, layout, moves = heapq.heappop(waiting)
        if layout == last:
            return moves
        if layout in done:
            continue
        done.add(layout)
        for move in moves_from(shape, layout, mesh, itemsize):
            count += 1
            cost = sent + move.bytes_sent, calls + (move.collective in COLLECTIVES), steps + 1
            heapq.heappush(waiting, (cost, count, move.after, (*moves, move)))


def moves_from(shape: Sequence[int], layout: Layout, mesh: Sequence[int], itemsize: int) -> Iterator[Move]:
    """Yield all single steps from a layout."""
    options: tuple[Placement, ...] = (Replicate(), Partial(), *map(Shard, range(len(shape))))
    for axis, now in enumerate(layout):
        later = layout[axis + 1 :]
        for then in options:
            if then == now or any(isinstance(one, Shard) and one in later for one in (now, then)):
                continue
            after = (*layout[:axis], then, *later)
            elements = _elements_sent(shape, layout, after, mesh, axis)
            yield Move(NAMES[type(now), type(then)], axis, layout, after, elements * itemsize)


def _elements_sent(shape: Sequence[int], before: Layout, after: Layout, mesh: Sequence[int], axis: int) -> int:
    """Return what the first rank sends, whose parts are the largest."""
    now, then, num_ranks = before[axis], after[axis], mesh[axis]
    if isinstance(now, Replicate) or (isinstance(now, Shard) and isinstance(then, Partial)) or num_ranks == 1:
        return 0
    own, part = local_shape(shape, before, mesh, 0), local_shape(shape, after, mesh, 0)
    if isinstance(then, Replicate):
        times = 2 / num_ranks if isinstance(now, Partial) else 1
        return math.ceil((num_ranks - 1) * math.prod(own) * times)
    if isinstance(now, Partial):
        return (num_ranks - 1) * math.prod(part)
    assert isinstance(then, Shard), "what is left is an all-to-all"
    kept = math.prod(own[: then.dim]) * part[then.dim] * math.prod(own[then.dim + 1 :])
    return math.prod(own) - kept
