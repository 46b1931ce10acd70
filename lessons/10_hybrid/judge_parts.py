"""Name what is wrong with a rank's share of the batch, and with the axes over which a gradient is summed."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from distlab_lesson_10 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.values import describe
from distlab.plan import Mesh

SPLIT_BATCH = ("data", "expert", "context")


def judge_parts(evidence: Evidence) -> Iterator[Fault]:
    """The same along tensor and pipeline, other positions along context, every number of the batch once."""
    for axes, found in zip(cases.FULL_MESHES, evidence.results[0], strict=True):
        mesh = Mesh(axes)
        for check in (_judge_form, _judge_same, _judge_context, _judge_pieces, _judge_whole):
            fault = check(mesh, found)
            if fault is not None:
                yield fault
                return


def _on(mesh: Mesh) -> str:
    return " x ".join(f"{name} ({size})" for name, size in mesh.axes if size > 1)


def _judge_same(mesh: Mesh, found: list[list[Tensor]]) -> Fault | None:
    """Ranks that differ on tensor or pipeline alone work on the same."""
    for axis, why in (
        ("tensor", "they add up parts of one result, and these would be of different samples"),
        ("pipeline", "the last stage would compare one sample's output with another's targets"),
    ):
        for group in mesh.groups(axis):
            for rank in group[1:]:
                if all(map(torch.equal, found[group[0]], found[rank])):
                    continue
                text = f"on {_on(mesh)} ranks {group[0]} and {rank} differ on {axis} alone and read different data"
                advice = "take the place on data and expert, not the rank"
                return Fault(f"{axis} ranks read different data", f"{text}: {why}; {advice}")
    return None


def _judge_form(mesh: Mesh, found: list[Any]) -> Fault | None:
    axes = dict(mesh.axes)
    samples = cases.SAMPLES // (axes["data"] * axes["expert"] * cases.MICROBATCHES)
    want = (samples, cases.POSITIONS // axes["context"])
    for rank, parts in enumerate(found):
        what = f"on {_on(mesh)} rank {rank}"
        if not isinstance(parts, list | tuple) or not all(isinstance(part, Tensor) for part in parts):
            return Fault("returned", f"{what}: expected a list of micro-batches, got {describe(parts)}")
        if len(parts) != cases.MICROBATCHES:
            text = f"{what} has {len(parts)} micro-batches, expected {cases.MICROBATCHES}"
            return Fault("micro-batches", text)
        for part in parts:
            if tuple(part.shape) != want:
                return _shape_fault(tuple(part.shape), want, what, mesh)
    return None


def _shape_fault(shape: tuple[int, ...], want: tuple[int, int], what: str, mesh: Mesh) -> Fault:
    text = f"{what}: a micro-batch has shape {list(shape)}, expected {list(want)}"
    axes = dict(mesh.axes)
    if len(shape) == 2 and shape[0] == want[0] and shape[1] * axes["tensor"] == want[1]:
        return Fault("positions by tensor", f"{text}: tensor ranks all work on whole samples here")
    if len(shape) == 2 and shape[1] == cases.POSITIONS != want[1]:
        text += f": context ({axes['context']}) cuts the positions, dimension 1"
        return Fault("context forgotten", text)
    if len(shape) == 2 and shape[0] != want[0]:
        each = cases.SAMPLES / cases.MICROBATCHES / shape[0] if shape[0] else 0
        if abs(each - mesh.size) < 1e-9:
            text += f": the samples were divided by all {mesh.size} ranks; only data and expert take different ones"
            return Fault("divided by all ranks", text)
        if each == axes["data"] != axes["data"] * axes["expert"]:
            text += ": the ranks of the expert axis take different samples too, as those of data do"
            return Fault("expert forgotten", text)
    return Fault("shape", text)


def _judge_context(mesh: Mesh, found: list[list[Tensor]]) -> Fault | None:
    for group in mesh.groups("context"):
        rows = [torch.cat(list(found[rank])) // cases.POSITIONS for rank in group]
        for rank, row in zip(group[1:], rows[1:], strict=True):
            if torch.equal(rows[0][:, 0], row[:, 0]):
                continue
            text = f"on {_on(mesh)} ranks {group[0]} and {rank} differ on context alone and hold different samples"
            return Fault("context ranks apart", f"{text}: they share a sample's positions, whose attention needs both")
    return None


def _judge_pieces(mesh: Mesh, found: list[list[Tensor]]) -> Fault | None:
    """The positions of a sample that a rank holds follow each other."""
    for rank, parts in enumerate(found):
        row = parts[0][0]
        if bool((row.diff() == 1).all()):
            continue
        text = f"on {_on(mesh)} rank {rank} holds positions {(row % cases.POSITIONS).tolist()} of a sample"
        return Fault("positions scattered", f"{text}: here context ranks hold one piece each")
    return None


def _judge_whole(mesh: Mesh, found: list[list[Tensor]]) -> Fault | None:
    """Over data, expert and context every number of the batch stands once."""
    axes = dict(mesh.axes)
    ranks = [r for r in range(mesh.size) if all(mesh.coordinates(r)[name] == 0 for name in ("pipeline", "tensor"))]
    for axis in SPLIT_BATCH:
        for group in mesh.groups(axis):
            if group[0] not in ranks or axes[axis] == 1:
                continue
            if all(map(torch.equal, found[group[0]], found[group[1]])):
                text = f"on {_on(mesh)} ranks {group[0]} and {group[1]} differ on {axis} and read the same data"
                return Fault(f"{axis} ranks read the same", f"{text}: the second adds nothing to the gradient")
    seen = torch.cat([torch.cat(list(found[rank])).flatten() for rank in ranks])
    counts = torch.bincount(seen, minlength=cases.whole_batch().numel())
    if bool((counts == 1).all()):
        return None
    lost, twice = int((counts == 0).sum()), int((counts > 1).sum())
    text = f"on {_on(mesh)} {lost} of {counts.numel()} positions are read by nobody and {twice} more than once"
    return Fault("positions lost", f"{text}: number the replicas data x expert, without gaps")


def budget_parts(evidence: Evidence) -> list[str]:
    """Say how many ranks were asked."""
    ranks = sum(Mesh(axes).size for axes in cases.FULL_MESHES)
    return [f"{ranks} ranks of {len(cases.FULL_MESHES)} meshes; each position is worked on once"]


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
    for axes, found in zip(cases.GRADIENT_MESHES, evidence.results[0], strict=True):
        for (kind, sequence), got in found.items():
            what = f"{_on(Mesh(axes))}, {kind}{' with' if sequence else ' without'} sequence_parallel"
            fault = _pair_form(got, what, axes)
            if fault is None:
                summed = {axis for axis in got[0] if axes[axis] > 1}
                want = {axis for axis in right_axes(kind, sequence) if axes[axis] > 1}
                fault = _missing(summed, want, what) or _too_many(summed, want, kind, what, axes)
                fault = fault or _divisor(got[1], axes, got[0], what)
            if fault is not None:
                yield fault
                return


def _pair_form(got: Any, what: str, axes: dict[str, int]) -> Fault | None:
    if not isinstance(got, list | tuple) or len(got) != 2 or not isinstance(got[0], list | tuple | set | frozenset):
        return Fault("returned", f"{what}: expected a list of axes and a number, got {describe(got)}")
    twice = [axis for axis in axes if list(got[0]).count(axis) > 1]
    if twice:
        text = f"{what}: {twice[0]} is listed {list(got[0]).count(twice[0])} times"
        return Fault("summed twice", f"{text}: a second sum over it adds up what is a sum already")
    unknown = [axis for axis in got[0] if axis not in axes]
    if unknown:
        return Fault("returned", f"{what}: there is no axis {unknown[0]!r}; there are {', '.join(axes)}")
    if isinstance(got[1], bool) or not isinstance(got[1], int | float):
        return Fault("returned", f"{what}: expected a number to divide by, got {describe(got[1])}")
    return None


def _missing(summed: set[str], want: set[str], what: str) -> Fault | None:
    """Name an axis that was left out; the parameter's copies would drift apart."""
    why = {
        "data": ("data forgotten", "replicas read different samples; their copies drift apart"),
        "expert": ("expert forgotten", "the ranks of the expert axis read different samples and hold copies of it"),
        "context": ("context forgotten", "context ranks see different positions of a sample; their copies drift apart"),
        "tensor": ("norm not summed", "each tensor rank went over its own part of the positions: sum the parts"),
        "pipeline": ("tied not summed", "first and last stage both hold it, and each finds a part of its gradient"),
    }
    for axis in ("data", "context", "expert", "tensor", "pipeline"):
        if axis in want - summed:
            code, words = why[axis]
            return Fault(code, f"{what}: not summed over {axis}: {words}")
    return None


def _too_many(summed: set[str], want: set[str], kind: str, what: str, axes: dict[str, int]) -> Fault | None:
    for axis in sorted(summed - want):
        text = f"{what}: summed over {axis}"
        if axis == "tensor" and kind == "norm":
            text += f", where every rank has found the same whole gradient: it becomes {axes['tensor']} times too large"
            return Fault("copies summed", text)
        if axis == "tensor":
            return Fault("slices summed", f"{text}, whose ranks hold different parts: these must not be mixed")
        if axis == "expert":
            return Fault("experts mixed", f"{text}, whose ranks hold different experts: these must not be mixed")
        if axis == "pipeline":
            return Fault("stages mixed", f"{text}, whose ranks hold different layers: these must not be mixed")
        return Fault("values", text)
    return None


def _divisor(number: float, axes: dict[str, int], summed: Any, what: str) -> Fault | None:
    want = prod(axes[axis] for axis in SPLIT_BATCH)
    if number == want:
        return None
    text = f"{what}: divided by {number:g}, expected {want}"
    over = prod(axes[axis] for axis in set(summed))
    if number == prod(axes.values()):
        text += ": that is the number of all ranks, and most of them share samples with others; the gradient is"
        return Fault("divided by world size", f"{text} {number / want:g} times too small")
    if number == 1:
        return Fault("sum not mean", f"{text}: each rank's loss is a mean, and {want} of these were summed")
    if number == axes["data"]:
        text += ": expert and context ranks too have losses that are means over positions of their own"
        return Fault("divided by data alone", text)
    if number == over:
        text += ": that is the number of gradients summed. What counts is how many parts the batch was cut into, data x"
        return Fault("divided by the sum's ranks", f"{text} expert x context, whatever the parameter")
    return Fault("divisor", f"{text}: data x expert x context")


def budget_axes(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{2 * len(cases.KINDS)} kinds of parameters on {len(cases.GRADIENT_MESHES)} meshes"]
