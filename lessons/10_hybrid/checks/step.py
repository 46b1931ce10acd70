"""A step on a mesh of data and tensor: whose samples, which group, which divisor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_10.checks.norm import groups_on, now_ns
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.traffic import calls
from distlab.grading.diagnosis.values import compare, describe, same, seeded
from distlab.plan import Mesh

WIDTH, FEATURES, BATCH = 5, 12, 12
PARTS = ("loss", "first's gradient", "second's gradient")


def step_meshes(world_size: int) -> list[Mesh]:
    """Return meshes of data and tensor."""
    shapes = [(2, 2)] if world_size == 4 else []  # it tells most faults apart
    shapes += [(1, world_size)] + [(world_size, 1)] * (world_size > 1)
    meshes = [Mesh({"data": data, "tensor": tensor}) for data, tensor in shapes]
    return meshes + [Mesh({"tensor": 2, "data": 2})] * (world_size == 4)  # data ranks are the neighbours here


def step_tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return first, second, x and target as one process has them."""
    first = seeded(-1, WIDTH, FEATURES, purpose="first") / WIDTH**0.5
    second = seeded(-1, FEATURES, WIDTH, purpose="second") / FEATURES**0.5
    return first, second, seeded(-1, BATCH, WIDTH, purpose="x"), seeded(-1, BATCH, WIDTH, purpose="target")


def drive_step(fn: Callable[..., Any]) -> list[Any]:
    """Run a step on each mesh."""
    rank, results = dist.get_rank(), []
    for mesh in step_meshes(dist.get_world_size()):
        place, t = mesh.coordinates(rank)["tensor"], mesh.axis_size("tensor")
        first, second, x, target = step_tensors()
        own = first.chunk(t, dim=1)[place].contiguous(), second.chunk(t)[place].contiguous()
        with groups_on(mesh) as groups:
            begin_ns = now_ns()
            got = fn(*own, x, target, groups)
            results.append({"got": got, "run_ns": (begin_ns, time.monotonic_ns())})
            dist.barrier()
    return results


SHARES: dict[str, Callable[[int, int, int, int], tuple[int, int]]] = {
    "data": lambda rank, place, d, t: (place, d),
    "world": lambda rank, place, d, t: (rank, d * t),
    "rank % data": lambda rank, place, d, t: (rank % d, d),
    "of all ranks": lambda rank, place, d, t: (place, d * t),
}


@dataclass(frozen=True)
class Variant:
    """A way to take the step; the defaults are right.

    Attributes:
        samples: which of SHARES: from rank, place on data, and sizes of data and tensor, the part and of how many.
        outputs: over which group partial outputs are summed; "own": over none, "world": over all ranks.
        gradients: over which group gradients are summed.
        divide: by the size of which group the sums are divided.
        loss: whether the loss is averaged too.
    """

    samples: str = "data"
    outputs: str = "tensor"
    gradients: str = "data"
    divide: str = "data"
    loss: bool = True


_APART = (
    "ranks of one tensor group took different samples, and added up parts of outputs that do not belong together: take"
    " samples by the place on the data axis"
)
_SLICES = "tensor ranks hold different parts of the weights, which must not be mixed: sum over the data group"
_SLICES_OF_GROUP = _SLICES.replace("tensor ranks", "whose ranks")
WRONG = (
    ("tensor ranks read different data", Variant(samples="world"), _APART),
    ("tensor ranks read different data", Variant(samples="world", divide="world"), _APART),
    (
        "tensor ranks read different data",
        Variant(samples="rank % data"),
        "samples were taken by rank % data, the place on data only where data is the fastest axis: ask the group,"
        " dist.get_rank(groups['data'])",
    ),
    (
        "divided by world size",
        Variant(divide="world"),
        "it was divided by the number of all ranks; only the data ranks' gradients were summed: divide by the size of"
        " the data axis",
    ),
    (
        "slices summed",
        Variant(gradients="world", divide="world"),
        f"gradients were averaged over all ranks; {_SLICES}",
    ),
    ("slices summed", Variant(gradients="world"), f"gradients were summed over all ranks; {_SLICES}"),
    (
        "gradients not averaged",
        Variant(gradients="own", divide="own"),
        "it is that of the own samples: replicas drift apart; all_reduce over the data group",
    ),
    (
        "slices summed",
        Variant(gradients="tensor", divide="tensor"),
        f"gradients were summed over the tensor group, {_SLICES_OF_GROUP}",
    ),
    ("sum not mean", Variant(divide="own"), "the sum over the data ranks was not divided by their number"),
    (
        "outputs not summed",
        Variant(outputs="own"),
        "the output is made of the own columns and rows alone: all_reduce it over the tensor group",
    ),
    (
        "outputs of other samples summed",
        Variant(outputs="world"),
        "outputs were summed over all ranks, those of other samples too: sum over the tensor group",
    ),
    (
        "outputs of other samples summed",
        Variant(outputs="data"),
        "outputs were summed over the data group, whose samples differ: sum over the tensor group",
    ),
    (
        "samples left out",
        Variant(samples="of all ranks"),
        "samples were cut into as many parts as there are ranks, and only as many as data ranks were taken: cut them by"
        " the size of the data axis",
    ),
    ("own loss", Variant(loss=False), "it is the mean over the own samples: average it over the data group too"),
)


def emulate(mesh: Mesh, variant: Variant) -> list[tuple[Tensor, ...]]:
    """Return what each rank has after a step in some way, computed in one process."""
    first, second, x, target = step_tensors()
    d, t = mesh.axis_size("data"), mesh.axis_size("tensor")
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    own = [(first.chunk(t, dim=1)[place["tensor"]], second.chunk(t)[place["tensor"]]) for place in places]
    shares = [SHARES[variant.samples](rank, place["data"], d, t) for rank, place in enumerate(places)]
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
        loss, *gradients = [_summed(mesh, rank, variant.gradients, row) / count for row in zip(*raw, strict=True)]
        results.append((loss if variant.loss else raw[rank][0], *gradients))
    return results


def _members(mesh: Mesh, rank: int, group: str) -> tuple[int, ...]:
    if group == "world":
        return tuple(range(mesh.size))
    return (rank,) if group == "own" else mesh.group_of(rank, group)


def _summed(mesh: Mesh, rank: int, group: str, values: Any) -> Tensor:
    return torch.stack([values[member] for member in _members(mesh, rank, group)]).sum(0)


def judge_step(evidence: Evidence) -> Iterator[Fault]:
    """Loss and gradients of one process, on every mesh."""
    for index, mesh in enumerate(step_meshes(evidence.world_size)):
        results = [result[index]["got"] for result in evidence.results]
        for rank, got in enumerate(results):
            if not isinstance(got, list | tuple) or len(got) != len(PARTS):
                text = f"on {mesh} rank {rank}: expected a loss and two gradients, got {describe(got)}"
                yield Fault("returned", text)
        want = emulate(mesh, Variant())
        for rank, got in enumerate(results):
            for place, name in enumerate(PARTS):
                if fault := compare(got[place], want[rank][place], f"on {mesh} rank {rank}'s {name}", mesh.size):
                    yield _named(got, rank, place, mesh) or fault
        yield from _judge_whole(evidence, index, mesh)


def _judge_whole(evidence: Evidence, index: int, mesh: Mesh) -> Iterator[Fault]:
    """Name ranks that add up the outputs of all samples: right, and as slow as without the data axis."""
    d, t = dict(mesh.axes)["data"], dict(mesh.axes)["tensor"]
    for rank, result in enumerate(evidence.results):
        begin_ns, end_ns = result[index]["run_ns"]
        made = [call for call in calls(evidence, rank) if begin_ns <= call.start_ns <= end_ns]
        summed = [call.num_bytes for call in made if call.group == mesh.group_of(rank, "tensor")]
        if d > 1 and t > 1 and BATCH * WIDTH * 8 in summed:
            text = f"right result, but on {mesh} rank {rank} works on all {BATCH} samples, as every other does"
            yield Fault("whole batch", f"{text}: take the own part of {d}, or data ranks save no time")


def _named(got: Any, rank: int, place: int, mesh: Mesh) -> Fault | None:
    """Find the way that leads to what a rank has, first with all of it, then with the wrong part alone."""
    for places in (range(len(PARTS)), (place,)):
        for code, variant, words in WRONG:
            for one in (variant, replace(variant, loss=False)):
                wrong = emulate(mesh, one)[rank]
                if all(same(got[i], wrong[i]) for i in places):
                    return Fault(code, f"on {mesh} rank {rank}'s {PARTS[place]} is not one process's: {words}")
    return None


def step_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a collective that only some ranks make."""
    text = str(error)
    if "do not make the same call" in text or "has returned without it" in text:
        words = f"on {world_size} ranks some wait in a collective that the others never call"
        return Fault("not on every rank", f"{words}: every rank of a group calls it, whatever its place")
    return None


def budget_step(evidence: Evidence) -> list[str]:
    """Say which meshes were run."""
    meshes = ", ".join(str(mesh) for mesh in step_meshes(evidence.world_size))
    return [f"loss and gradients of one process on {meshes}"]


_OWN, _MEAN = "part, num_parts = dist.get_rank(data), dist.get_world_size(data)", "value /= num_parts"
_MEAN_OF_DATA = "value /= dist.get_world_size(data)"
_AVERAGE = f"dist.all_reduce(value, group=data)\n{_MEAN}"

WRONG_STEPS = (
    Mutant("by rank", "tensor ranks read different data", "by the place on the data axis", 2)
    .edit(_OWN, "part, num_parts = dist.get_rank(), dist.get_world_size()")
    .edit(_MEAN, _MEAN_OF_DATA),
    Mutant("world size", "divided by world size", "the size of the data axis", 2, 9).edit(
        _MEAN, "value /= dist.get_world_size()"
    ),
    Mutant("all ranks", "slices summed", "must not be mixed", 2).edit(
        _AVERAGE, "dist.all_reduce(value)\nvalue /= dist.get_world_size()"
    ),
    Mutant("tensor group", "slices summed", "data group", 2).edit(
        _AVERAGE, "dist.all_reduce(value, group=tensor)\nvalue /= dist.get_world_size(tensor)"
    ),
    Mutant("sum", "sum not mean", "not divided by their number", 2, 9).without(_MEAN),
    Mutant("own", "gradients not averaged", "drift apart", 2, 66).edit(_AVERAGE, "pass"),
    Mutant("own columns", "outputs not summed", "the tensor group", 2, 35).without(
        "dist.all_reduce(output, group=tensor)"
    ),
    Mutant("wrong group", "outputs of other samples summed", "data group", 4, 7).edit(
        "(output, group=tensor)", "(output, group=data)"
    ),
    Mutant("rank // tensor", "tensor ranks read different data", "by the place on", 4).edit(
        "dist.get_rank(data)", "dist.get_rank() // dist.get_world_size(tensor)"
    ),
    Mutant("rank % data", "tensor ranks read different data", "ask the", 4).edit(
        "dist.get_rank(data)", "dist.get_rank() % dist.get_world_size(data)"
    ),
    Mutant("part of all", "samples left out", "size of the data axis", 2)
    .edit(_OWN, "part, num_parts = dist.get_rank(data), dist.get_world_size()")
    .edit(_MEAN, _MEAN_OF_DATA),
    Mutant("whole batch", "whole batch", "works on all 12 samples", 4)
    .edit(_OWN, "part, num_parts = 0, 1")
    .edit(_MEAN, _MEAN_OF_DATA),
    Mutant("place 0 alone", "gradients not averaged", "drift apart", 4, 5).edit(
        _AVERAGE, "if dist.get_rank(tensor) == 0:\n    dist.all_reduce(value, group=data)\n    value /= num_parts"
    ),
)
