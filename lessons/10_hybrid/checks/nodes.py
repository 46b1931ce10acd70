"""The order of axes on nodes: which groups lie inside a node, and what crosses between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from math import log2, prod
from typing import Any

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import describe

Case = tuple[dict[str, int], dict[str, float], int]  # axes, bytes along each, devices of a node
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


def drive_order(fn: Callable[..., Any]) -> list[Any]:
    """Ask for the order of the axes of each case."""
    return [fn(dict(axes), dict(traffic), devices) for axes, traffic, devices in PLACE_CASES]


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
    answers = evidence.results[0]
    for case, got in zip(PLACE_CASES, answers, strict=True):
        yield from judge_case(got, case, answers)


def judge_case(got: Any, case: Case, answers: Sequence[Any] = ()) -> Iterator[Fault]:
    """Judge an order of the axes; all cases' answers tell whether it is turned round."""
    axes, _, devices = case
    asked = f"{' x '.join(f'{name} ({size})' for name, size in axes.items())} on nodes of {devices}"
    if not _is_order(got, case):
        yield Fault("returned", f"{asked}: expected each of {', '.join(axes)} once, got {describe(got)}")
    elif cost_of(got, case) > cost_of(best_of(case), case) * (1 + 1e-12):
        is_turned = bool(answers) and _is_turned(list(answers), case, tuple(got))
        yield _order_fault(tuple(got), case, asked, is_turned=is_turned)


def _is_order(got: Any, case: Case) -> bool:
    return isinstance(got, list | tuple) and sorted(map(str, got)) == sorted(case[0])


def _is_turned(answers: list[Any], case: Case, order: tuple[str, ...]) -> bool:
    """Say whether an answer is right when read from its end, and all answers together are better so."""
    pairs = [(one, got) for one, got in zip(PLACE_CASES, answers, strict=True) if _is_order(got, one)]
    better = sum(cost_of(got[::-1], one) for one, got in pairs) < sum(cost_of(got, one) for one, got in pairs)
    return better and cost_of(order[::-1], case) <= cost_of(best_of(case), case)


def _order_fault(order: tuple[str, ...], case: Case, asked: str, *, is_turned: bool) -> Fault:
    axes, traffic, devices = case
    best, outside = best_of(case), crossing(order, axes, devices)
    worst = max(outside, key=lambda axis: traffic[axis])
    text = f"{asked}: with {', '.join(order)} (slowest to fastest) groups of {' and '.join(outside)} lie across nodes"
    text += (
        f", {cost_of(order, case) / 1e9:.1f} GB per rank; {', '.join(best)} sends {cost_of(best, case) / 1e9:.1f} GB"
    )
    text += " there"
    if is_turned:
        return Fault("turned round", f"{text}. The fastest axis comes last in the list: yours is the other way round")
    busiest = max(axes, key=lambda axis: traffic[axis])
    if axes[busiest] > devices and order[-1] == busiest:
        text += f". {busiest} has {axes[busiest]} ranks and leaves a node of {devices} wherever it stands: give the"
        return Fault("does not fit", f"{text} place inside to an axis that fits")
    kept, better = ([axis for axis in axes if axis not in crossing(one, axes, devices)] for one in (order, best))
    parts = {axis: traffic[axis] / log2(axes[axis]) for axis in (*kept, worst) if axes[axis] > 1}
    denser = [axis for axis in parts if parts[axis] > parts[worst]]  # they send more for each doubling of their size
    left = devices // prod(axes[axis] for axis in denser)
    if worst in better and denser and left < axes[worst]:
        text += f". {_listed(denser, axes)} sends more than {worst} for each doubling of its size, but leaves room for"
        text += f" {left} in a node where {worst} has {axes[worst]}: compare whole orders, not axis by axis"
        return Fault("per doubling", text)
    if worst == busiest:
        return Fault(f"{worst} across nodes", f"{text}. {worst} sends most: its ranks should be next to each other")
    if all(axes[axis] > devices // prod(axes[axis] for axis in kept) for axis in outside):
        text += f". {_listed(kept, axes)} inside leaves no room in a node; {_listed(better, axes)} fit there instead"
        return Fault("others send more", f"{text}, and send more together: compare whole orders, not axis by axis")
    inside = prod(axes[axis] for axis in order[order.index(worst) :])
    text += f". With the faster axes' sizes {worst} reaches over {inside} devices: is there an axis that still fits?"
    return Fault("room left", text)


def _listed(names: list[str], axes: dict[str, int]) -> str:
    """Name the axes that have more than one rank."""
    return " and ".join(name for name in names if axes[name] > 1)


def budget_order(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{len(PLACE_CASES)} clusters, none with more bytes between nodes than needed"]


_BEST = "list(min(permutations(axes), key=crossing))"


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


WRONG_ORDERS = (
    Mutant("as given", "tensor across nodes", "8.0 GB per rank", 1).edit(_BEST, "list(axes)"),
    Mutant("turned round", "turned round", "the other way round", 1).edit(
        _BEST, "sorted(axes, key=lambda axis: -traffic[axis])"
    ),
    Mutant("busiest fastest", "room left", "is there an axis that still fits", 1).edit(
        _BEST, "sorted(axes, key=lambda axis: traffic[axis])"
    ),
    _greedy(Mutant("greedy", "others send more", "leaves no room in a node", 1), "traffic[axis]"),
    _greedy(
        Mutant("per bit", "per doubling", "but leaves room for 4 in a node", 1),
        "traffic[axis] / log2(axes[axis]) if axes[axis] > 1 else 0.0",
    ),
    Mutant("largest fastest", "tensor across nodes", "next to each other", 1).edit(
        _BEST, "sorted(axes, key=lambda axis: axes[axis])"
    ),
    Mutant("fits alone", "room left", "is there an axis that still fits", 1).edit(
        _BEST, "sorted(axes, key=lambda axis: (axes[axis] <= devices_per_node, traffic[axis]))"
    ),
)
