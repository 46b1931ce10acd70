"""The norm over all axes of a mesh, with real groups: each element once, and a few numbers sent for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankError, mesh_groups
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Fault, Mutant
from distlab.plan import Mesh

AXES = ("pipeline", "data", "tensor")
SPLIT_OVER = {
    "embedding": ["pipeline", "tensor"],
    "weight": ["pipeline", "tensor"],
    "second weight": ["pipeline", "tensor"],
    "positions": ["pipeline"],
    "norm": ["pipeline"],
    "last norm": ["pipeline"],
}


def norm_meshes(world_size: int) -> list[Mesh]:
    """Return meshes of pipeline, data and tensor: each axis alone, then two of them."""
    alone = [{name: world_size if name == one else 1 for name in AXES} for one in ("tensor", "pipeline", "data")]
    pairs = [{name: 1 if name == left_out else 2 for name in AXES} for left_out in AXES] if world_size == 4 else []
    return [Mesh(axes) for axes in (*alone, *pairs)]


@contextlib.contextmanager
def groups_on(mesh: Mesh) -> Iterator[dict[str, dist.ProcessGroup]]:
    """Make the groups of a mesh, and end them."""
    groups = mesh_groups(mesh)
    try:
        yield groups
    finally:
        for group in groups.values():
            dist.destroy_process_group(group)


def gradients_at(place: dict[str, int], mesh: Mesh) -> dict[str, Tensor]:
    """Return the gradients at a place: stages have different ones, and different numbers of them."""
    stage, part = place["pipeline"], place["tensor"]
    names = ["weight", "norm"]
    names += ["embedding", "positions"] * (stage == 0) + ["second weight"] * (stage == 1)
    names += ["last norm"] * (stage == mesh.axis_size("pipeline") - 1)
    found = {}
    for name in names:
        owner = 10 * stage + (part if "tensor" in SPLIT_OVER[name] else 0)
        found[name] = (1 + stage + part * ("tensor" in SPLIT_OVER[name])) * seeded(owner, 5, purpose=f"norm {name}")
    return found


def _use_norm(fn: Callable[..., Any], mesh: Mesh) -> dict[str, Any]:
    gradients = gradients_at(mesh.coordinates(dist.get_rank()), mesh)
    with groups_on(mesh) as groups:
        norm = fn(gradients, {name: list(SPLIT_OVER[name]) for name in gradients}, groups)
        dist.barrier()
    is_number = isinstance(norm, Tensor) and norm.numel() == 1
    return {"the norm": float(norm) if is_number else norm, "afterwards the gradients": gradients}


drive_global_norm = Cases(lambda rank, n: {f"on {mesh}": (mesh,) for mesh in norm_meshes(n)}, _use_norm, most_bytes=0)


def judge_global_norm(evidence: Evidence) -> Iterator[Fault]:
    """One call for each axis at most, of one number or two."""
    most = len(AXES) * len(norm_meshes(evidence.world_size))
    for rank in range(evidence.world_size):
        made = [call for call in calls(evidence, rank) if call.op != "barrier"]
        if large := [call for call in made if call.num_bytes > 2 * 8]:
            text = f"right result, but rank {rank} sends {large[0].num_bytes} bytes in one {large[0].op}"
            yield Fault("gradients sent", f"{text}: add up squares here first, one number is enough")
        if len(made) > most:
            text = f"right result, but rank {rank} makes {len(made)} calls where {most} are enough"
            yield Fault("a call per tensor", f"{text}: add up all squares first, then one all-reduce per axis")


def failure_global_norm(error: RankError, world_size: int) -> Fault | None:
    """Name stages that make different numbers of calls."""
    text = str(error)
    if "do not make the same call" in text or "has returned without it" in text or "deadlock" in text:
        words = f"on {world_size} ranks some wait in an all-reduce that others never make: stages hold different"
        words += " gradients, and different numbers of them"
        return Fault("a call per tensor", f"{words}. Add up the squares first; then as many all-reduces on every rank")
    return None


def budget_global_norm(evidence: Evidence) -> list[str]:
    """Say what the norm cost."""
    made = len([call for call in calls(evidence, 0) if call.op != "barrier"])
    return [f"{made} all-reduces of one number for {len(norm_meshes(evidence.world_size))} meshes"]


_GROUPS, _ROOT, _SQUARE = "groups.values()", "return square.sqrt()", "gradient.square().sum()"

WRONG_GLOBAL_NORM = (
    Mutant("elements sent", "gradients sent", "add up squares here first, one number is enough", 2)
    .edit("torch.zeros(()", "torch.zeros(10")
    .edit(f"square += {_SQUARE}", "square[:5] += gradient.square()")
    .edit(_ROOT, "return square.sum().sqrt()"),
    Mutant("own part", "own part only", "it is of the parts on this rank: all_reduce the sum of squares", 2, 30)
    .without(" / copies")
    .edit(_GROUPS, "()"),
    Mutant(
        "own stage", "own stage only", "sum over pipeline too, or every stage clips by a norm of its own", 3, 30
    ).edit(_GROUPS, '(groups["data"], groups["tensor"])'),
    Mutant(
        "own column", "own tensor part only", "it lacks the other tensor ranks' parts: sum over tensor too", 2, 30
    ).edit(_GROUPS, '(groups["data"], groups["pipeline"])'),
    Mutant(
        "all copies", "everything counted", "every copy counts anew: divide each square by its number of copies", 3, 31
    ).without(" / copies"),
    Mutant(
        "whole on tensor",
        "replicated counted t times",
        "what is whole on every tensor rank counts on each: divide such squares by their number of copies",
        2,
        31,
    )
    .without(" / copies")
    .edit(_GROUPS, '(groups["pipeline"], groups["tensor"])'),
    Mutant(
        "divided by parts", "divided by parts", "it divides by the number of parts; divide by the number of copies", 2
    ).edit("not in split_over[name]", "in split_over[name]"),
    Mutant(
        "replicas", "copies counted", "every replica's gradient counts: data is no axis to sum squares over", 4, 31
    ).edit("not in split_over[name]", 'not in (*split_over[name], "data")'),
    Mutant("float32", "rounded", "right, but rounded on the way: add up squares in torch.float64", 1).edit(
        "for group in", "square = square.float()\nfor group in"
    ),
    Mutant(
        "divided first",
        "divided before the square",
        "divide the squares, not the gradients, by the number of copies",
        2,
    ).edit(f"{_SQUARE} / copies", "(gradient / copies).square().sum()"),
    Mutant(
        "norms added", "norms added", "it is the sum of the ranks' norms; lengths do not add, their squares do", 2, 30
    )
    .edit(_ROOT, "return square")
    .edit("for group in", "square = square.sqrt()\nfor group in"),
    Mutant(
        "averaged", "averaged", "the sum of squares is divided by the number of all ranks; nothing divides it", 2, 30
    ).edit(_ROOT, "return (square / dist.get_world_size()).sqrt()"),
    Mutant("no root", "not a root", "it is the square of the norm: take the root", 1).edit(_ROOT, "return square"),
    Mutant("multiplied", "multiplied", "it multiplies by the number of copies, by which it is to divide", 2).edit(
        "/ copies", "* copies"
    ),
    Mutant("norms of gradients", "norms added", "norms of gradients are added; lengths do not add, their squares do")
    .edit(_SQUARE, "gradient.norm()")
    .edit(_ROOT, "return square"),
    Mutant("magnitudes", "magnitudes", "it adds up magnitudes; a norm is the root of the sum of squares", 1).edit(
        _SQUARE, "gradient.abs().sum()"
    ),
    Mutant("calls a gradient", "a call per tensor", "different numbers of them", 3, 5, ends=True).body("""
        total = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            square = gradient.square().sum()
            for axis in split_over[name]:
                dist.all_reduce(square, group=groups[axis])
            total += square
        return total.sqrt()
    """),
)
