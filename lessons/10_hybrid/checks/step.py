"""A step on a mesh of data and tensor: whose samples, which group, which divisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from distlab_lesson_10.checks.norm import groups_on

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant
from distlab.plan import Mesh

WIDTH, FEATURES, BATCH = 5, 12, 12


def step_meshes(world_size: int) -> list[Mesh]:
    """Return meshes of data and tensor."""
    shapes = [(2, 2)] if world_size == 4 else []  # it tells most faults apart
    shapes += [(1, world_size)] + [(world_size, 1)] * (world_size > 1)
    meshes = [Mesh({"data": data, "tensor": tensor}) for data, tensor in shapes]
    return meshes + [Mesh({"tensor": 2, "data": 2})] * (world_size == 4)  # data ranks are the neighbours here


def _use_step(fn: Callable[..., Any], mesh: Mesh) -> dict[str, Any]:
    """Give each rank its part of the weights, and all of the batch."""
    place, t = mesh.coordinates(dist.get_rank())["tensor"], mesh.axis_size("tensor")
    first = seeded(-1, WIDTH, FEATURES, purpose="first").chunk(t, dim=1)[place].contiguous() / WIDTH**0.5
    second = seeded(-1, FEATURES, WIDTH, purpose="second").chunk(t)[place].contiguous() / FEATURES**0.5
    x, target = (seeded(-1, BATCH, WIDTH, purpose=purpose) for purpose in ("x", "target"))
    with groups_on(mesh) as groups:
        got = fn(first, second, x, target, groups)
        dist.barrier()
    parts = got if isinstance(got, list | tuple) and len(got) == 3 else (got, None, None)
    return dict(zip(("the loss", "first's gradient", "second's gradient"), parts, strict=True))


drive_find_the_bug = Cases(
    lambda rank, n: {f"on {mesh}": (mesh,) for mesh in step_meshes(n)}, _use_step, 1.1, "the own part of the samples"
)


def budget_find_the_bug(evidence: Evidence) -> list[str]:
    """Say which meshes were run."""
    meshes = ", ".join(str(mesh) for mesh in step_meshes(evidence.world_size))
    return [f"loss and gradients of one process on {meshes}"]


_OWN, _MEAN = "part, num_parts = dist.get_rank(data), dist.get_world_size(data)", "value /= num_parts"
_MEAN_OF_DATA = "value /= dist.get_world_size(data)"
_AVERAGE = f"dist.all_reduce(value, group=data)\n{_MEAN}"
_APART = "tensor ranks read different data"
_BY_PLACE = "take samples by the place in the data group, dist.get_rank(groups['data'])"
_MIXED = "tensor ranks hold different parts of the weights, which must not be mixed: sum over the data group"
_OTHERS = "it sums outputs of different samples; sum over the tensor group, whose ranks hold parts of one output"

WRONG_FIND_THE_BUG = (
    Mutant("whole batch", "whole batch", "it works on all samples: take the own part, or data ranks save no time", 4)
    .edit(_OWN, "part, num_parts = 0, 1")
    .edit(_MEAN, _MEAN_OF_DATA),
    Mutant("by rank", _APART, f"ranks of one tensor group add up parts of outputs of different samples: {_BY_PLACE}", 2)
    .edit(_OWN, "part, num_parts = dist.get_rank(), dist.get_world_size()")
    .edit(_MEAN, _MEAN_OF_DATA),
    Mutant(
        "rank // tensor",
        _APART,
        f"rank // tensor is the place on data only where data is the slower axis: {_BY_PLACE}",
        4,
    ).edit("dist.get_rank(data)", "dist.get_rank() // dist.get_world_size(tensor)"),
    Mutant(
        "rank % data", _APART, f"rank % data is the place on data only where data is the faster axis: {_BY_PLACE}", 4
    ).edit("dist.get_rank(data)", "dist.get_rank() % dist.get_world_size(data)"),
    Mutant(
        "part of all", "samples left out", "samples are cut by the number of all ranks: cut them by the size of data", 2
    )
    .edit(_OWN, "part, num_parts = dist.get_rank(data), dist.get_world_size()")
    .edit(_MEAN, _MEAN_OF_DATA),
    Mutant(
        "world size",
        "divided by world size",
        "only the data ranks' gradients are summed: divide by the size of data",
        2,
        9,
    ).edit(_MEAN, "value /= dist.get_world_size()"),
    Mutant("all ranks", "slices summed", _MIXED, 2).edit(
        _AVERAGE, "dist.all_reduce(value)\nvalue /= dist.get_world_size()"
    ),
    Mutant("tensor group", "slices summed", _MIXED, 2).edit(
        _AVERAGE, "dist.all_reduce(value, group=tensor)\nvalue /= dist.get_world_size(tensor)"
    ),
    Mutant("sum", "not divided", "the sum over the data ranks is not divided by their number", 2, 9).without(_MEAN),
    Mutant(
        "own", "gradients not averaged", "gradients of the own samples: replicas drift apart; average over data", 2, 66
    ).edit(_AVERAGE, "pass"),
    Mutant(
        "place 0 alone",
        "gradients not averaged",
        "only tensor place 0 averages over data: the others' weights drift apart",
        4,
        5,
    ).edit(_AVERAGE, "if dist.get_rank(tensor) == 0:\n    dist.all_reduce(value, group=data)\n    value /= num_parts"),
    Mutant(
        "own loss", "own loss", "the loss is the mean over the own samples: average it over the data group too", 2
    ).edit("(loss, grad_first, grad_second)", "(grad_first, grad_second)"),
    Mutant(
        "own columns",
        "outputs not summed",
        "the output is of the own columns and rows: all_reduce it over the tensor group",
        2,
        35,
    ).without("dist.all_reduce(output, group=tensor)"),
    Mutant("wrong group", "outputs of other samples summed", _OTHERS, 4, 7).edit(
        "(output, group=tensor)", "(output, group=data)"
    ),
    Mutant("every output", "outputs of other samples summed", _OTHERS, 2, 7).edit("(output, group=tensor)", "(output)"),
    Mutant(
        "output averaged",
        "output averaged",
        "it averages the output over the tensor ranks, whose parts are summands",
        2,
    ).edit("(output, group=tensor)", "(output, group=tensor)\noutput /= tensor.size()"),
    Mutant("sigmoid", "sigmoid", "it takes the sigmoid's derivative, y (1 - y); that of tanh is 1 - y^2", 1).edit(
        "(1 - hidden.square())", "hidden * (1 - hidden)"
    ),
    Mutant("hidden", "hidden", "hidden columns of tensor ranks are different ones: sum outputs alone", 2).edit(
        "torch.tanh(x @ first)", "x @ first\ndist.all_reduce(hidden, group=tensor)\nhidden = torch.tanh(hidden)"
    ),
    Mutant("not squared", "not squared", "it takes 1 - y for tanh's derivative: that is 1 - y^2, with the square").edit(
        "hidden.square()", "hidden"
    ),
)
