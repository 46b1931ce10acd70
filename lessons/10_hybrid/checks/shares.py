"""A rank's share of the batch, and the axes over which a gradient is summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import describe
from distlab.plan import Mesh

SPLIT_BATCH = ("data", "expert", "context")
FULL_MESHES = (
    {"pipeline": 2, "data": 2, "expert": 1, "context": 1, "tensor": 2},
    {"pipeline": 1, "data": 2, "expert": 1, "context": 2, "tensor": 1},
    {"pipeline": 1, "data": 2, "expert": 2, "context": 1, "tensor": 1},
    {"pipeline": 2, "data": 2, "expert": 2, "context": 3, "tensor": 2},
)
MICROBATCHES = 2
SAMPLES, POSITIONS = 96, 6
KINDS = ("matrix", "norm", "tied", "expert")
GRADIENT_MESHES = (
    {"pipeline": 2, "data": 3, "expert": 1, "context": 1, "tensor": 2},
    {"pipeline": 4, "data": 3, "expert": 5, "context": 2, "tensor": 2},
)


class Given(NamedTuple):
    """What is cut up, and into how many micro-batches."""

    mesh: Mesh
    samples: int = SAMPLES
    positions: int = POSITIONS
    num_microbatches: int = MICROBATCHES

    def batch(self) -> Tensor:
        """Return a batch in which every number stands once."""
        return torch.arange(self.samples * self.positions).view(self.samples, self.positions)


def drive_parts(fn: Callable[..., Any]) -> list[list[Any]]:
    """Ask for the part of every rank of each mesh."""
    given = [Given(Mesh(axes)) for axes in FULL_MESHES]
    return [[fn(one.batch(), rank, one.mesh, MICROBATCHES) for rank in range(one.mesh.size)] for one in given]


def drive_axes(fn: Callable[..., Any]) -> list[dict[tuple[str, bool], Any]]:
    """Ask for each kind of parameter, with and without sequence parallelism."""
    asked = [(kind, sequence) for kind in KINDS for sequence in (False, True)]
    return [{(kind, sequence): fn(kind, dict(axes), sequence) for kind, sequence in asked} for axes in GRADIENT_MESHES]


def judge_parts(evidence: Evidence) -> Iterator[Fault]:
    """The same along tensor and pipeline, other positions along context, every number of the batch once."""
    for axes, parts in zip(FULL_MESHES, evidence.results[0], strict=True):
        yield from judge_mesh(Given(Mesh(axes)), parts)


def judge_mesh(given: Given, parts: list[Any]) -> Iterator[Fault]:
    """Judge what all ranks of one mesh got."""
    for judge in (_judge_form, _judge_same, _judge_context, _judge_whole):
        yield from judge(given, parts)


def _on(mesh: Mesh) -> str:
    return " x ".join(f"{name} ({size})" for name, size in mesh.axes if size > 1)


def _judge_form(given: Given, parts: list[Any]) -> Iterator[Fault]:
    axes, count = dict(given.mesh.axes), given.num_microbatches
    want = (given.samples // (axes["data"] * axes["expert"] * count), given.positions // axes["context"])
    for rank, own in enumerate(parts):
        what = f"on {_on(given.mesh)} rank {rank}"
        if not isinstance(own, list | tuple) or not all(isinstance(part, Tensor) for part in own):
            yield Fault("returned", f"{what}: expected a list of micro-batches, got {describe(own)}")
        if len(own) != count:
            yield Fault("micro-batches", f"{what} has {len(own)} micro-batches, expected {count}")
        for part in own:
            if part.shape != want:
                yield _shape_fault(tuple(part.shape), want, what, given)


def _shape_fault(shape: tuple[int, ...], want: tuple[int, int], what: str, given: Given) -> Fault:
    text = f"{what}: a micro-batch has shape {list(shape)}, expected {list(want)}"
    axes, num_ranks = dict(given.mesh.axes), given.mesh.size
    if len(shape) == 2 and shape[0] == want[0] and shape[1] * axes["tensor"] == want[1]:
        return Fault("positions by tensor", f"{text}: tensor ranks all work on whole samples here")
    if len(shape) == 2 and shape[1] == given.positions != want[1]:
        return Fault("context forgotten", f"{text}: context ({axes['context']}) cuts the positions, dimension 1")
    if len(shape) == 2 and shape[0] != want[0] and shape[0]:
        each = given.samples / given.num_microbatches / shape[0]
        if abs(each - num_ranks) < 1e-9:
            text += f": the samples were divided by all {num_ranks} ranks; only data and expert take different ones"
            return Fault("divided by all ranks", text)
        if each == axes["data"] != axes["data"] * axes["expert"]:
            text += ": the ranks of the expert axis take different samples too, as those of data do"
            return Fault("expert forgotten", text)
    return Fault("shape", text)


def _judge_same(given: Given, parts: list[list[Tensor]]) -> Iterator[Fault]:
    """Ranks that differ on tensor or pipeline alone work on the same."""
    mesh = given.mesh
    reasons = {
        "tensor": "they add up parts of one result, and these would be of different samples",
        "pipeline": "the last stage would compare one sample's output with another's targets",
    }
    for axis, why in reasons.items():
        for first, *others in mesh.groups(axis):
            for rank in others:
                if not all(map(torch.equal, parts[first], parts[rank])):
                    text = f"on {_on(mesh)} ranks {first} and {rank} differ on {axis} alone and read different data"
                    text = f"{text}: {why}; take the place on data and expert, not the rank"
                    yield Fault(f"{axis} ranks read different data", text)


def _judge_context(given: Given, parts: list[list[Tensor]]) -> Iterator[Fault]:
    """Ranks that differ on context alone hold pieces of the same samples, each in one piece."""
    mesh, length = given.mesh, given.positions
    for first, *others in mesh.groups("context"):
        for rank in others:
            one, other = (torch.cat(list(parts[r]))[:, 0] // length for r in (first, rank))
            if not torch.equal(one, other):
                text = f"on {_on(mesh)} ranks {first} and {rank} differ on context alone and hold different samples"
                yield Fault(
                    "context ranks apart", f"{text}: they share a sample's positions, whose attention needs both"
                )
    for rank, own in enumerate(parts):
        if not bool((own[0][0].diff() == 1).all()):
            text = f"on {_on(mesh)} rank {rank} holds positions {(own[0][0] % length).tolist()} of a sample"
            yield Fault("positions scattered", f"{text}: here context ranks hold one piece each")


def _judge_whole(given: Given, parts: list[list[Tensor]]) -> Iterator[Fault]:
    """Over data, expert and context every number of the batch stands once."""
    mesh = given.mesh
    ranks = [r for r in range(mesh.size) if all(mesh.coordinates(r)[name] == 0 for name in ("pipeline", "tensor"))]
    for axis in SPLIT_BATCH:
        for first, *others in mesh.groups(axis):
            if first in ranks and others and all(map(torch.equal, parts[first], parts[others[0]])):
                text = f"on {_on(mesh)} ranks {first} and {others[0]} differ on {axis} and read the same data"
                yield Fault(f"{axis} ranks read the same", f"{text}: the second adds nothing to the gradient")
    seen = torch.cat([torch.cat(list(parts[rank])).flatten() for rank in ranks])
    counts = torch.bincount(seen, minlength=given.samples * given.positions)
    if not bool((counts == 1).all()):
        lost, twice = int((counts == 0).sum()), int((counts > 1).sum())
        text = f"on {_on(mesh)} {lost} of {counts.numel()} positions are read by no rank and {twice} more than once"
        yield Fault("positions lost", f"{text}: number the replicas data x expert, without gaps")


def budget_parts(evidence: Evidence) -> list[str]:
    """Say how many ranks were asked."""
    ranks = sum(Mesh(axes).size for axes in FULL_MESHES)
    return [f"{ranks} ranks of {len(FULL_MESHES)} meshes; each position is worked on once"]


def right_axes(kind: str, sequence_parallel: bool) -> set[str]:
    """Return the axes over which a kind of parameter is summed."""
    summed = {"data", "context"}
    if kind != "expert":
        summed.add("expert")
    if kind == "norm" and sequence_parallel:
        summed.add("tensor")
    if kind == "tied":
        summed.add("pipeline")
    return summed


def judge_axes(evidence: Evidence) -> Iterator[Fault]:
    """Every axis along which gradients of one parameter differ, and the number of means that were summed."""
    for axes, answers in zip(GRADIENT_MESHES, evidence.results[0], strict=True):
        for (kind, sequence), got in answers.items():
            what = f"{_on(Mesh(axes))}, {kind}{' with' if sequence else ' without'} sequence_parallel"
            yield from _judge_pair(got, what, axes)
            summed = {axis for axis in got[0] if axes[axis] > 1}
            want = {axis for axis in right_axes(kind, sequence) if axes[axis] > 1}
            for axis, (code, words) in MISSING.items():
                if axis in want - summed:
                    yield Fault(code, f"{what}: not summed over {axis}: {words}")
            for axis in sorted(summed - want):
                text = f"{what}: summed over {axis}"
                if axis == "tensor" and kind == "norm":
                    text += (
                        f", where every rank has found the same whole gradient: it becomes {axes['tensor']} times too"
                    )
                    yield Fault("copies summed", f"{text} large")
                code, held = {"tensor": ("slices", "parts"), "expert": ("experts", "experts")}.get(
                    axis, ("stages", "layers")
                )
                code += " summed" if axis == "tensor" else " mixed"
                yield Fault(code, f"{text}, whose ranks hold different {held}: these must not be mixed")
            yield from _judge_divisor(got[1], axes, got[0], what)


MISSING = {  # an axis that was left out: the parameter's copies drift apart
    "data": ("data forgotten", "replicas read different samples; their copies drift apart"),
    "context": ("context forgotten", "context ranks see different positions of a sample; their copies drift apart"),
    "expert": ("expert forgotten", "the ranks of the expert axis read different samples and hold copies of it"),
    "tensor": ("norm not summed", "each tensor rank went over its own part of the positions: sum the parts"),
    "pipeline": ("tied not summed", "first and last stage both hold it, and each finds a part of its gradient"),
}


def _judge_pair(got: Any, what: str, axes: dict[str, int]) -> Iterator[Fault]:
    if not isinstance(got, list | tuple) or len(got) != 2 or not isinstance(got[0], list | tuple | set | frozenset):
        yield Fault("returned", f"{what}: expected a list of axes and a number, got {describe(got)}")
    for axis in got[0]:
        if axis not in axes:
            yield Fault("returned", f"{what}: there is no axis {axis!r}; there are {', '.join(axes)}")
        count = list(got[0]).count(axis)
        if count > 1:
            text = f"{what}: {axis} is listed {count} times: a second sum over it adds up what is a sum already"
            yield Fault("summed twice", text)
    if isinstance(got[1], bool) or not isinstance(got[1], int | float):
        yield Fault("returned", f"{what}: expected a number to divide by, got {describe(got[1])}")


def _judge_divisor(number: float, axes: dict[str, int], summed: Any, what: str) -> Iterator[Fault]:
    want = prod(axes[axis] for axis in SPLIT_BATCH)
    if number == want:
        return
    text = f"{what}: divided by {number:g}, expected {want}"
    if number == prod(axes.values()):
        text += ": that is the number of all ranks, and most of them share samples with others; the gradient is"
        yield Fault("divided by world size", f"{text} {number / want:g} times too small")
    if number == 1:
        yield Fault("sum not mean", f"{text}: each rank's loss is a mean, and {want} of these were summed")
    if number == axes["data"]:
        text += ": expert and context ranks too have losses that are means over positions of their own"
        yield Fault("divided by data alone", text)
    if number == prod(axes[axis] for axis in set(summed)):
        text += ": that is the number of gradients summed. What counts is how many parts the batch was cut into, data x"
        yield Fault("divided by the sum's ranks", f"{text} expert x context, whatever the parameter")
    yield Fault("divisor", f"{text}: data x expert x context")


def budget_axes(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{2 * len(KINDS)} kinds of parameters on {len(GRADIENT_MESHES)} meshes"]


_CHUNK, _CONTEXT = (
    'batch.chunk(axes["data"] * axes["expert"])[replica]',
    'own.chunk(axes["context"], dim=1)[place["context"]]',
)
_NUM_MEANS = 'axes["data"] * axes["expert"] * axes["context"]'

WRONG_PARTS = (
    Mutant("by rank", "divided by all ranks", "by all 8 ranks", 1).edit(_CHUNK, "batch.chunk(mesh.size)[rank]"),
    Mutant("rank modulo data", "tensor ranks read different data", "of different", 1).edit(
        "[replica]", '[rank % (axes["data"] * axes["expert"])]'
    ),
    Mutant("same seed", "data ranks read the same", "adds nothing to the gradient", 1, 19).edit("[replica]", "[0]"),
    Mutant("no expert", "expert forgotten", "as those of data do", 1).edit(
        _CHUNK, 'batch.chunk(axes["data"])[place["data"]]'
    ),
    Mutant("no context", "context forgotten", "cuts the positions", 1).edit(_CONTEXT, "own"),
    Mutant("one micro-batch", "micro-batches", "has 1 micro-batches, expected 2", 1, 58).edit(
        "list(own.chunk(num_microbatches))", "[own]"
    ),
    Mutant("scattered", "positions scattered", "one piece each", 1).edit(
        _CONTEXT, 'own[:, place["context"] :: axes["context"]]'
    ),
    Mutant("data + expert", "positions lost", "without gaps", 1).edit(
        'place["data"] * axes["expert"]', 'place["data"]'
    ),
)
WRONG_AXES = (
    Mutant("world size", "divided by world size", "4 times too small", 1, 9).edit(_NUM_MEANS, "prod(axes.values())"),
    Mutant("sum", "sum not mean", "each rank's loss is a mean", 1, 9).edit(_NUM_MEANS, "1"),
    Mutant("divided by data", "divided by data alone", "expert and context", 1).edit(_NUM_MEANS, 'axes["data"]'),
    Mutant("divided by summed", "divided by the sum's ranks", "whatever the param", 1).edit(
        _NUM_MEANS, "prod(axes[axis] for axis in summed)"
    ),
    Mutant("no context", "context forgotten", "copies drift apart", 1).edit('"expert", "context"]', '"expert"]'),
    Mutant("all axes", "stages mixed", "hold different layers", 1).edit("return summed", "return list(axes)"),
    Mutant("norms forgotten", "norm not summed", "its own part of the positions", 1, 35).edit(
        'kind == "norm" and sequence_parallel', "False"
    ),
    Mutant("data twice", "summed twice", "data is listed 2 times", 1)
    .edit('["data", "expert", "context"]', '["data", "context", "data"]')
    .edit('if kind == "expert":\n    summed.remove("expert")', 'if kind != "expert":\n    summed.append("expert")'),
    Mutant("norms always", "copies summed", "2 times too large", 1).without(" and sequence_parallel"),
    Mutant("tied forgotten", "tied not summed", "first and last stage", 1, 17).edit('kind == "tied"', "False"),
    Mutant("experts averaged", "experts mixed", "different experts", 1).edit('kind == "expert"', "False"),
)
