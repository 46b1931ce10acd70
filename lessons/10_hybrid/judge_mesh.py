"""Name what is wrong with places on a mesh, with the groups of an axis, and with the order of axes on nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import log2, prod
from numbers import Integral
from typing import Any

from distlab_lesson_10 import cases

from distlab.grading import Evidence, Fault
from distlab.grading.values import describe
from distlab.plan import Mesh

Case = tuple[dict[str, int], dict[str, float], int]  # axes, bytes along each, devices of a node


def judge_places(evidence: Evidence) -> Iterator[Fault]:
    """The last axis varies fastest, and every place is inside its axis."""
    for axes, found in zip(cases.MESHES, evidence.results[0], strict=True):
        mesh = Mesh(axes)
        for rank, got in enumerate(found):
            what = f"rank {rank} of {mesh}"
            if not isinstance(got, dict) or not all(isinstance(value, Integral) for value in got.values()):
                yield Fault("returned", f"{what}: expected a dict of axes and places, got {describe(got)}")
                return
            if set(got) != set(axes):
                yield Fault("axes", f"{what}: got places on {', '.join(map(str, got))}; expected one on each axis")
                return
        yield from _place_fault(mesh, found)
        if found != [mesh.coordinates(rank) for rank in range(mesh.size)]:
            return
        turned = next((got for got in found if list(got) != list(axes)), None)
        if turned is not None:
            text = f"on {mesh} the places are right, in the order {', '.join(turned)}"
            yield Fault("turned round", f"{text}; return them in the order of the axes: {', '.join(axes)}")
            return


def _place_fault(mesh: Mesh, found: list[dict[str, int]]) -> Iterator[Fault]:
    axes = dict(mesh.axes)
    turned = Mesh(dict(reversed(mesh.axes)))
    if all(got == turned.coordinates(rank) for rank, got in enumerate(found)) and found[1] != mesh.coordinates(1):
        text = f"on {mesh} rank 1 differs from rank 0 on {mesh.names[0]}, expected on {mesh.names[-1]}"
        yield Fault("first axis fastest", f"{text}: the last axis varies fastest, like the last digit of a number")
        return
    for rank, got in enumerate(found):
        want = mesh.coordinates(rank)
        if got == want:
            continue
        axis = next(name for name in axes if got[name] != want[name])
        text = f"rank {rank} of {mesh}: its place on {axis} is {got[axis]}, expected {want[axis]}"
        if got == {name: place + 1 for name, place in want.items()}:
            yield Fault("from one", f"{text}: places are counted from 0")
        elif not 0 <= got[axis] < axes[axis]:
            text += f". It must lie in 0..{axes[axis] - 1}: divide by the sizes of the faster axes, then take the rest"
            yield Fault("outside", f"{text} by the axis' own size")
        elif got[axis] == rank % axes[axis]:
            text += f". That is rank % {axes[axis]}: divide by the product of the faster axes' sizes first"
            yield Fault("not divided", text)
        elif got[axis] == rank // axes[axis] % axes[axis]:
            text += (
                f". That divides by {axes[axis]}, the axis' own size; divide by the product of the faster axes' sizes"
            )
            yield Fault("own size", text)
        else:
            yield Fault("values", text)
        return


def budget_places(evidence: Evidence) -> list[str]:
    """Say how many meshes were asked."""
    return [f"{len(cases.MESHES)} meshes, {sum(Mesh(axes).size for axes in cases.MESHES)} ranks"]


def judge_groups(evidence: Evidence) -> Iterator[Fault]:
    """Each rank once; members differ on the axis alone."""
    for axes, found in zip(cases.MESHES, evidence.results[0], strict=True):
        mesh = Mesh(axes)
        for axis in axes:
            fault = _groups_fault(mesh, axis, found[axis])
            if fault is not None:
                yield fault
                return


def _groups_fault(mesh: Mesh, axis: str, got: Any) -> Fault | None:
    what, size = f"the groups of {axis} on {mesh}", mesh.axis_size(axis)
    nested = isinstance(got, list | tuple) and all(isinstance(group, list | tuple) for group in got)
    if not nested or not all(isinstance(rank, Integral) for group in got for rank in group):
        return Fault("returned", f"{what}: expected a list of lists of ranks, got {describe(got)}")
    found, want = [tuple(group) for group in got], mesh.groups(axis)
    if found == want:
        return None
    members = sorted(rank for group in found for rank in group)
    if members != list(range(mesh.size)):
        return _lost(what, found, members, mesh)
    for group in found:
        if len(group) == size:
            continue
        places = [mesh.coordinates(rank)[axis] for rank in group]
        if len(set(places)) == 1 and size > 1:
            text = f"{what}: {list(group)} all stand at the same place on {axis}"
            return Fault("same place", f"{text}; a group differs on {axis} and agrees on all other axes")
        text = f"{what}: {list(group)} has {len(group)} ranks, expected {size}, the size of the axis"
        return Fault("wrong size", text)
    for group in found:
        fault = _mixed(what, axis, group, mesh)
        if fault is not None:
            return fault
    return Fault("order", f"{what}: right groups in another order: {found}, expected {want}")


def _lost(what: str, found: list[tuple[int, ...]], members: list[int], mesh: Mesh) -> Fault:
    missing = [rank for rank in range(mesh.size) if rank not in members]
    if len(found) == 1 and missing:
        text = f"{what}: got one group, {list(found[0])}. Every rank makes every group, also those it is not in: a rank"
        return Fault("one group", f"{text} that makes fewer waits for ever. List all of them")
    if missing:
        return Fault("rank missing", f"{what}: rank {missing[0]} is in none of {found}")
    rank = next(rank for rank in members if members.count(rank) > 1 or not 0 <= rank < mesh.size)
    where = f"is in {members.count(rank)} groups" if rank < mesh.size else f"does not exist on {mesh.size} ranks"
    return Fault("rank twice", f"{what}: rank {rank} {where}; every rank is in exactly one")


def _mixed(what: str, axis: str, group: tuple[int, ...], mesh: Mesh) -> Fault | None:
    places = [mesh.coordinates(rank) for rank in group]
    for other in mesh.names:
        apart = sorted({place[other] for place in places})
        if other == axis or len(apart) == 1:
            continue
        text = f"{what}: {list(group)} mixes places {', '.join(map(str, apart))} on {other}"
        if group == tuple(range(group[0], group[0] + len(group))):
            text += f". Neighbouring numbers differ on the fastest axis, {mesh.names[-1]}; take ranks that are"
            return Fault("neighbours", f"{text} as far apart as the product of the faster axes' sizes")
        return Fault("mixed", f"{text}; members differ on {axis} alone")
    return None


def budget_groups(evidence: Evidence) -> list[str]:
    """Say how many groups were asked."""
    count = sum(len(Mesh(axes).groups(axis)) for axes in cases.MESHES for axis in axes)
    return [f"{count} groups on {len(cases.MESHES)} meshes; each is made by all ranks"]


def crossing(order: Sequence[str], axes: dict[str, int], devices: int) -> list[str]:
    """Return the axes whose groups have ranks of several nodes."""
    outside, reach = [], 1
    for axis in reversed(order):
        reach *= axes[axis]
        if axes[axis] > 1 and reach > devices:
            outside.append(axis)
    return outside


def cost_of(order: Sequence[str], case: Case) -> float:
    """Return how many bytes a rank sends between nodes with an order of the axes."""
    axes, traffic, devices = case
    return sum(traffic[axis] for axis in crossing(order, axes, devices))


def best_of(case: Case) -> tuple[str, ...]:
    """Return an order with which the fewest bytes cross."""
    return min(permutations(case[0]), key=lambda order: cost_of(order, case))


def judge_order(evidence: Evidence) -> Iterator[Fault]:
    """As few bytes between nodes as any order can do."""
    found = evidence.results[0]
    for case, got in zip(cases.PLACE_CASES, found, strict=True):
        axes, _, devices = case
        asked = f"{' x '.join(f'{name} ({size})' for name, size in axes.items())} on nodes of {devices}"
        if not isinstance(got, list | tuple) or sorted(map(str, got)) != sorted(axes):
            yield Fault("returned", f"{asked}: expected each of {', '.join(axes)} once, got {describe(got)}")
            return
        if cost_of(got, case) <= cost_of(best_of(case), case):
            continue
        yield _order_fault(tuple(got), case, asked, is_turned=_is_turned(found, case, tuple(got)))
        return


def _is_turned(found: list[Any], case: Case, order: tuple[str, ...]) -> bool:
    """Say whether an answer is right when read from its end, and all answers together are better so."""
    if cost_of(order[::-1], case) > cost_of(best_of(case), case):
        return False
    pairs = [(one, got) for one, got in zip(cases.PLACE_CASES, found, strict=True) if isinstance(got, list | tuple)]
    answers = [(one, got) for one, got in pairs if sorted(map(str, got)) == sorted(one[0])]
    return sum(cost_of(got[::-1], one) for one, got in answers) < sum(cost_of(got, one) for one, got in answers)


def _order_fault(order: tuple[str, ...], case: Case, asked: str, *, is_turned: bool) -> Fault:
    axes, traffic, devices = case
    best, outside = best_of(case), crossing(order, axes, devices)
    worst = max(outside, key=lambda axis: traffic[axis])
    text = f"{asked}: with {', '.join(order)} (slowest to fastest) groups of {' and '.join(outside)} lie across nodes"
    text += f", {cost_of(order, case) / 1e9:.1f} GB a rank; {', '.join(best)} sends {cost_of(best, case) / 1e9:.1f} GB"
    text += " there"
    if is_turned:
        return Fault("turned round", f"{text}. The fastest axis comes last in the list: yours is the other way round")
    busiest = max(axes, key=lambda axis: traffic[axis])
    if axes[busiest] > devices and order[-1] == busiest:
        text += f". {busiest} has {axes[busiest]} ranks and leaves a node of {devices} wherever it stands: give the"
        return Fault("does not fit", f"{text} place inside to an axis that fits")
    kept, better = ([axis for axis in axes if axis not in crossing(one, axes, devices)] for one in (order, best))
    room = devices // prod(axes[axis] for axis in kept)
    denser = _denser(kept, worst, case)
    left = devices // prod(axes[axis] for axis in denser)
    if worst in better and denser and left < axes[worst]:
        text += f". {_listed(denser, axes)} sends more than {worst} for each doubling of its size, but leaves room for"
        text += f" {left} in a node where {worst} has {axes[worst]}: compare whole orders, not axis by axis"
        return Fault("per doubling", text)
    if worst == busiest:
        return Fault(f"{worst} across nodes", f"{text}. {worst} sends most: its ranks should be next to each other")
    if all(axes[axis] > room for axis in outside):
        text += f". {_listed(kept, axes)} inside leaves no room in a node; {_listed(better, axes)} fit there instead"
        return Fault("others send more", f"{text}, and send more together: compare whole orders, not axis by axis")
    inside = prod(axes[axis] for axis in order[order.index(worst) :])
    text += f". With the faster axes' sizes {worst} reaches over {inside} devices: is there an axis that still fits?"
    return Fault("room left", text)


def _denser(kept: list[str], outside: str, case: Case) -> list[str]:
    """Return the axes inside a node that send more than one outside for each doubling of their size."""
    axes, traffic, _ = case
    parts = {axis: traffic[axis] / log2(axes[axis]) for axis in (*kept, outside) if axes[axis] > 1}
    return [axis for axis in parts if parts[axis] > parts[outside]]


def _listed(names: list[str], axes: dict[str, int]) -> str:
    """Name the axes that have more than one rank."""
    return " and ".join(name for name in names if axes[name] > 1)


def budget_order(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{len(cases.PLACE_CASES)} clusters, none with more bytes between nodes than needed"]
