"""A rank's share of the batch, and the axes over which a gradient is summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.grading import Evidence, Mutant
from distlab.plan import Mesh

FULL_MESHES = (
    {"pipeline": 2, "data": 2, "expert": 1, "context": 1, "tensor": 2},
    {"pipeline": 1, "data": 2, "expert": 1, "context": 2, "tensor": 1},
    {"pipeline": 1, "data": 2, "expert": 2, "context": 1, "tensor": 1},
    {"pipeline": 2, "data": 2, "expert": 2, "context": 3, "tensor": 2},
)
KINDS = ("matrix", "norm", "tied", "expert")
GRADIENT_MESHES = (
    {"pipeline": 2, "data": 3, "expert": 1, "context": 1, "tensor": 2},
    {"pipeline": 4, "data": 3, "expert": 5, "context": 2, "tensor": 2},
)


def _on(axes: dict[str, int]) -> str:
    return "on " + " x ".join(f"{name} ({size})" for name, size in axes.items() if size > 1)


def use_part(fn: Callable[..., Any], batch: Tensor, axes: dict[str, int], num_microbatches: int) -> dict[str, Any]:
    """Return what all ranks work on; samples and pieces are numbered as they come, since any numbering is right.

    The batch holds whole numbers, each one more than the one before.
    """
    samples: dict[int, int] = {}
    pieces: dict[Any, int] = {}
    result: dict[str, Any] = {}
    for rank in range(Mesh(axes).size):
        own = fn(batch, rank, Mesh(axes), num_microbatches)
        is_list = isinstance(own, list | tuple) and all(isinstance(part, Tensor) for part in own)
        kinds = (
            [f"{str(part.dtype).removeprefix('torch.')} of shape {list(part.shape)}" for part in own]
            if is_list
            else own
        )
        result[f"rank {rank}'s micro-batches"] = kinds
        if is_list and len({*kinds}) == 1 and own[0].ndim == 2 and own[0].numel():
            rows = (torch.cat(list(own)) - batch[0, 0]).long()
            number, place = rows // batch.shape[1], rows % batch.shape[1]
            first, size = int(place[0, 0]), place.shape[1]
            piece = first // size if first % size == 0 else f"from {first}"
            result[f"rank {rank}'s samples"] = number.apply_(lambda one: samples.setdefault(one, len(samples)))
            result[f"rank {rank}'s piece of the positions"] = pieces.setdefault(piece, len(pieces))
            result[f"rank {rank}'s positions in its piece"] = place - first
        else:
            result |= {
                f"rank {rank}'s {name}": None
                for name in ("samples", "piece of the positions", "positions in its piece")
            }
    return result


def use_axes(fn: Callable[..., Any], kind: str, axes: dict[str, int], sequence_parallel: bool) -> dict[str, Any]:
    """Return the axes in any order; one of a single rank may be there or not."""
    got = fn(kind, axes, sequence_parallel)
    summed, divisor = got if isinstance(got, list | tuple) and len(got) == 2 else (got, None)
    if isinstance(summed, list | tuple | set | frozenset):
        summed = sorted(str(axis) for axis in summed if axes.get(axis, 2) > 1)
    divisor = float(divisor) if isinstance(divisor, int) and divisor is not True else divisor
    return {"the axes of more than one rank to sum over": summed, "the number to divide by": divisor}


def _batch(samples: int, positions: int) -> Tensor:
    return torch.arange(samples * positions).view(samples, positions)


drive_my_batch = Cases({_on(axes): (_batch(96, 6), axes, 2) for axes in FULL_MESHES}, use_part)
drive_gradient_axes = Cases(
    {
        f"{kind} {'with' if sequence else 'without'} sequence_parallel, {_on(axes)}": (kind, axes, sequence)
        for axes in GRADIENT_MESHES
        for kind in KINDS
        for sequence in (False, True)
    },
    use_axes,
)


def budget_my_batch(evidence: Evidence) -> list[str]:
    """Say how many ranks were asked."""
    ranks = sum(Mesh(axes).size for axes in FULL_MESHES)
    return [f"{ranks} ranks of {len(FULL_MESHES)} meshes; each position is worked on once"]


def budget_gradient_axes(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{2 * len(KINDS)} kinds of parameters on {len(GRADIENT_MESHES)} meshes"]


_CHUNK, _CONTEXT = (
    'batch.chunk(axes["data"] * axes["expert"])[replica]',
    'own.chunk(axes["context"], dim=1)[place["context"]]',
)
_NUM_MEANS = 'axes["data"] * axes["expert"] * axes["context"]'
_SUMMED = 'summed = ["data", "expert", "context"]'

WRONG_MY_BATCH = (
    Mutant(
        "by rank", "divided by all ranks", "the samples are divided by all ranks; only data and expert take others", 1
    ).edit(_CHUNK, "batch.chunk(mesh.size)[rank]"),
    Mutant(
        "rank modulo data",
        "tensor ranks read different data",
        "ranks of one tensor group add up parts of one result: take the place on data and expert, not the rank",
        1,
    ).edit("[replica]", '[rank % (axes["data"] * axes["expert"])]'),
    Mutant(
        "stages apart",
        "pipeline ranks read different data",
        "the last stage would compare one sample's output with the targets of a different one: stages work on the same",
        1,
    ).edit('+ place["expert"]', '+ (place["expert"] + place["pipeline"]) % axes["expert"]'),
    Mutant(
        "same seed",
        "data ranks read the same",
        "replicas read the same: the second adds nothing to the gradient",
        1,
        19,
    ).edit("[replica]", "[0]"),
    Mutant(
        "no expert", "expert forgotten", "the ranks of the expert axis take different samples, as those of data do", 1
    ).edit(_CHUNK, 'batch.chunk(axes["data"])[place["data"]]'),
    Mutant("no context", "context forgotten", "context cuts the positions, dimension 1", 1).edit(_CONTEXT, "own"),
    Mutant("tensor too", "positions by tensor", "tensor ranks all work on whole samples here", 1).edit(
        _CONTEXT, f'{_CONTEXT}.chunk(axes["tensor"], dim=1)[place["tensor"]]'
    ),
    Mutant("one micro-batch", "micro-batches", "cut the samples of the rank into micro-batches", 1, 58).edit(
        "list(own.chunk(num_microbatches))", "[own]"
    ),
    Mutant("scattered", "positions scattered", "here a context rank holds one piece of the positions", 1).edit(
        _CONTEXT, 'own[:, place["context"] :: axes["context"]]'
    ),
    Mutant(
        "data + expert",
        "samples lost",
        "some samples are read twice, others by no rank: number the replicas without gaps, data x size of expert + "
        "expert",
        1,
    ).edit('place["data"] * axes["expert"]', 'place["data"]'),
)
WRONG_GRADIENT_AXES = (
    Mutant(
        "world size",
        "divided by world size",
        "most of all ranks share their samples: do not divide by their number",
        1,
        9,
    ).edit(_NUM_MEANS, "prod(axes.values())"),
    Mutant(
        "sum", "not divided", "each rank's loss is a mean: divide by the number of means that were summed", 1, 9
    ).edit(_NUM_MEANS, "1"),
    Mutant(
        "divided by data",
        "divided by data alone",
        "the losses of expert and context ranks are means of their own too",
        1,
    ).edit(_NUM_MEANS, 'axes["data"]'),
    Mutant(
        "divided by summed",
        "divided by the sum's ranks",
        "it divides by the number of gradients summed; what counts, whatever the parameter, is the parts of the batch",
        1,
    ).edit(_NUM_MEANS, "prod(axes[axis] for axis in summed)"),
    Mutant(
        "fewer for experts",
        "divided by the sum's ranks",
        "an expert has gradients of the tokens of all ranks of its axis; the loss is the mean over them too",
        1,
    ).edit(_NUM_MEANS, 'prod(axes[axis] for axis in ("data", "expert", "context") if axis in summed)'),
    Mutant(
        "tensor divides",
        "tensor divides",
        "tensor ranks' parts of a norm's gradient are added, not averaged: their number does not divide",
        1,
    ).edit(_NUM_MEANS, f'{_NUM_MEANS} * (axes["tensor"] if "tensor" in summed else 1)'),
    Mutant(
        "no context",
        "context forgotten",
        "context ranks see different positions of a sample; their copies drift apart",
        1,
    ).edit('"expert", "context"]', '"expert"]'),
    Mutant(
        "no expert", "expert forgotten", "the ranks of the expert axis read different samples, and hold copies of it", 1
    )
    .edit(_SUMMED, 'summed = ["data", "context"]')
    .edit('summed.remove("expert")', "pass"),
    Mutant(
        "all axes", "stages mixed", "stages hold different layers, and tensor ranks different parts: do not mix them", 1
    ).edit("return summed", "return list(axes)"),
    Mutant(
        "norms forgotten",
        "norm not summed",
        "with sequence_parallel a tensor rank goes over its own part of the positions",
        1,
        35,
    ).edit('kind == "norm" and sequence_parallel', "False"),
    Mutant("data twice", "summed twice", "an axis is listed twice: the second sum adds up what is a sum already", 1)
    .edit(_SUMMED, 'summed = ["data", "context", "data"]')
    .edit('if kind == "expert":\n    summed.remove("expert")', 'if kind != "expert":\n    summed.append("expert")'),
    Mutant(
        "norms always",
        "copies summed",
        "without sequence_parallel every tensor rank has found the whole gradient of a norm",
        1,
    ).without(" and sequence_parallel"),
    Mutant(
        "tied forgotten",
        "tied not summed",
        "first and last stage hold it, and each finds a part of its gradient",
        1,
        17,
    ).edit('kind == "tied"', "False"),
    Mutant(
        "experts averaged", "experts mixed", "the ranks of the expert axis hold different experts: do not mix them", 1
    ).edit('kind == "expert"', "False"),
    Mutant(
        "all kinds", "all kinds", "only a norm is whole on tensor ranks: what is cut over them is not summed there", 1
    ).edit('if kind == "norm" and sequence_parallel:', "if sequence_parallel:"),
)
