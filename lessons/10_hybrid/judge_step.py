"""Name what is wrong with a step on a mesh of data and tensor: whose samples, which group, which divisor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from distlab_lesson_10 import cases
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls
from distlab.grading.values import compare, describe, equal
from distlab.plan import Mesh

PARTS = ("loss", "first's gradient", "second's gradient")


SHARES: dict[
    str, Callable[[int, int, int, int], tuple[int, int]]
] = {  # of rank, data place, d and t: part, of how many
    "world": lambda rank, place, d, t: (rank, d * t),
    "rank % data": lambda rank, place, d, t: (rank % d, d),
    "of all ranks": lambda rank, place, d, t: (place, d * t),
}


@dataclass(frozen=True)
class Variant:
    """A way to take the step; the defaults are right.

    Attributes:
        samples: by the place on this axis ranks take their samples, or one of SHARES.
        outputs: over which group partial outputs are summed.
        gradients: over which group gradients are summed; "own": over none.
        divide: by the size of which group the sums are divided.
        loss: whether the loss is averaged too.
    """

    samples: str = "data"
    outputs: str = "tensor"
    gradients: str = "data"
    divide: str = "data"
    loss: bool = True


RIGHT = Variant()
WRONG = {
    "tensor ranks read different data": (
        Variant(samples="world"),
        "ranks of one tensor group took different samples, and added up parts of outputs that do not belong together:"
        " take samples by the place on the data axis",
    ),
    "tensor ranks read different data, alone": (
        Variant(samples="world", divide="world"),
        "ranks of one tensor group took different samples, and added up parts of outputs that do not belong together:"
        " take samples by the place on the data axis",
    ),
    "tensor ranks read different data, by modulo": (
        Variant(samples="rank % data"),
        "samples were taken by rank % data, the place on data only where data is the fastest axis: ask the group,"
        " dist.get_rank(groups['data'])",
    ),
    "divided by world size": (
        Variant(divide="world"),
        "it was divided by the number of all ranks; only the data ranks' gradients were summed: divide by the size of"
        " the data axis",
    ),
    "slices summed": (
        Variant(gradients="world", divide="world"),
        "gradients were averaged over all ranks; tensor ranks hold different parts of the weights, which must not be"
        " mixed: sum over the data group",
    ),
    "slices summed, by data": (
        Variant(gradients="world"),
        "gradients were summed over all ranks; tensor ranks hold different parts of the weights, which must not be"
        " mixed: sum over the data group",
    ),
    "gradients not averaged": (
        Variant(gradients="own", divide="own"),
        "it is that of the own samples: replicas drift apart; all_reduce over the data group",
    ),
    "slices summed, in the wrong group": (
        Variant(gradients="tensor", divide="tensor"),
        "gradients were summed over the tensor group, whose ranks hold different parts of the weights, which must not"
        " be mixed: sum over the data group",
    ),
    "sum not mean": (Variant(divide="own"), "the sum over the data ranks was not divided by their number"),
    "outputs not summed": (
        Variant(outputs="own"),
        "the output is made of the own columns and rows alone: all_reduce it over the tensor group",
    ),
    "outputs of other samples summed": (
        Variant(outputs="world"),
        "outputs were summed over all ranks, those of other samples too: sum over the tensor group",
    ),
    "outputs of other samples summed, by data": (
        Variant(outputs="data"),
        "outputs were summed over the data group, whose samples differ: sum over the tensor group",
    ),
    "samples left out": (
        Variant(samples="of all ranks"),
        "samples were cut into as many parts as there are ranks, and only as many as data ranks were taken: cut them by"
        " the size of the data axis",
    ),
    "own loss": (Variant(loss=False), "it is the mean over the own samples: average it over the data group too"),
}


def emulate(mesh: Mesh, variant: Variant) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what each rank has after a step in some way, computed in one process."""
    first, second, x, target = cases.step_tensors()
    t = mesh.axis_size("tensor")
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    own = [(first.chunk(t, dim=1)[p["tensor"]], second.chunk(t)[p["tensor"]]) for p in places]
    shares = [_share(mesh, rank, variant.samples) for rank in range(mesh.size)]
    xs, targets = ([whole.chunk(number)[part] for part, number in shares] for whole in (x, target))
    hiddens = [torch.tanh(part @ weight) for part, (weight, _) in zip(xs, own, strict=True)]
    partial = [hidden @ weight for hidden, (_, weight) in zip(hiddens, own, strict=True)]
    raw = []
    for rank, (hidden, (_, weight)) in enumerate(zip(hiddens, own, strict=True)):
        difference = _summed(mesh, rank, variant.outputs, partial) - targets[rank]
        grad = 2 * difference / difference.numel()
        inner = grad @ weight.T * (1 - hidden.square())
        raw.append((difference.square().mean(), xs[rank].T @ inner, hidden.T @ grad))
    results = []
    for rank in range(mesh.size):
        count = len(_members(mesh, rank, variant.divide))
        rows = list(zip(*raw, strict=True))
        loss, *gradients = [_summed(mesh, rank, variant.gradients, list(row)) / count for row in rows]
        results.append((loss if variant.loss else raw[rank][0], *gradients))
    return results  # type: ignore[return-value]


def _share(mesh: Mesh, rank: int, samples: str) -> tuple[int, int]:
    """Return which part of the samples a rank takes, and of how many."""
    if samples in SHARES:
        sizes = mesh.axis_size("data"), mesh.axis_size("tensor")
        return SHARES[samples](rank, mesh.coordinates(rank)["data"], *sizes)
    return mesh.coordinates(rank)[samples], mesh.axis_size(samples)


def _members(mesh: Mesh, rank: int, group: str) -> tuple[int, ...]:
    if group == "world":
        return tuple(range(mesh.size))
    return (rank,) if group == "own" else mesh.group_of(rank, group)


def _summed(mesh: Mesh, rank: int, group: str, values: list[Tensor]) -> Tensor:
    return torch.stack([values[member] for member in _members(mesh, rank, group)]).sum(0)


def judge_step(evidence: Evidence) -> Iterator[Fault]:
    """Loss and gradients of one process, on every mesh."""
    for index, mesh in enumerate(cases.step_meshes(evidence.world_size)):
        results = [result[index]["got"] for result in evidence.results]
        for rank, got in enumerate(results):
            if not isinstance(got, list | tuple) or len(got) != len(PARTS):
                yield Fault(
                    "returned", f"on {mesh} rank {rank}: expected a loss and two gradients, got {describe(got)}"
                )
                return
        fault = _fault(results, mesh) or _whole_fault(evidence, index, mesh)
        if fault is not None:
            yield fault
            return


def _fault(results: list[Any], mesh: Mesh) -> Fault | None:
    want = emulate(mesh, RIGHT)
    for rank, got in enumerate(results):
        for place, name in enumerate(PARTS):
            what = f"on {mesh} rank {rank}'s {name}"
            fault = compare(got[place], want[rank][place], what, mesh.size)
            if fault is None:
                continue
            if fault.code in ("returned", "shape", "dtype", "device", "layout", "nan"):
                return fault
            return _named(results, rank, place, mesh) or fault
    return None


def _whole_fault(evidence: Evidence, index: int, mesh: Mesh) -> Fault | None:
    """Name ranks that add up the outputs of all samples: right, and as slow as without the data axis."""
    data, tensor = mesh.axis_size("data"), mesh.axis_size("tensor")
    for rank, result in enumerate(evidence.results):
        begin_ns, end_ns = result[index]["run_ns"]
        made = [call for call in calls(evidence, rank) if begin_ns <= call.start_ns <= end_ns]
        summed = [call.num_bytes for call in made if call.group == mesh.group_of(rank, "tensor")]
        if data > 1 and tensor > 1 and cases.BATCH * cases.WIDTH * 8 in summed:
            text = f"right result, but on {mesh} rank {rank} works on all {cases.BATCH} samples, as every other does"
            return Fault("whole batch", f"{text}: take the own part of {data}, or data ranks save no time")
    return None


def _named(results: list[Any], rank: int, place: int, mesh: Mesh) -> Fault | None:
    """Find the way that leads to what a rank has, first with all of it, then with the wrong part alone."""
    for places in (range(len(PARTS)), (place,)):
        for code, (variant, words) in WRONG.items():
            for one in (variant, replace(variant, loss=False)):
                if _matches(results[rank], one, rank, places, mesh):
                    text = f"on {mesh} rank {rank}'s {PARTS[place]} is not one process's"
                    return Fault(code.partition(",")[0], f"{text}: {words}")
    return None


def _matches(got: Any, variant: Variant, rank: int, places: Any, mesh: Mesh) -> bool:
    wrong = emulate(mesh, variant)[rank]
    pairs = [(got[place], wrong[place]) for place in places]
    return all(isinstance(one, Tensor) and one.shape == other.shape and equal(one, other) for one, other in pairs)


def step_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a collective that only some ranks make."""
    text = str(error)
    if "do not make the same call" in text or "has returned without it" in text:
        words = f"on {world_size} ranks some wait in a collective that the others never call"
        return Fault("not on every rank", f"{words}: every rank of a group calls it, whatever its place")
    return None


def budget_step(evidence: Evidence) -> list[str]:
    """Say which meshes were run."""
    meshes = ", ".join(str(mesh) for mesh in cases.step_meshes(evidence.world_size))
    return [f"loss and gradients of one process on {meshes}"]
