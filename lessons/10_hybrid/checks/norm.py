"""The norm over all axes of a mesh, with real groups: each element once, and a few numbers sent for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankError, mesh_groups
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.traffic import calls
from distlab.grading.diagnosis.values import close, describe, numbers_differ, seeded
from distlab.plan import Mesh

AXES = ("pipeline", "data", "tensor")
ROUNDED = 1e-5  # what float32 may lose


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


def now_ns() -> int:
    """Return the time by the clock of the records, once all ranks are here."""
    dist.barrier()
    return time.monotonic_ns()


SPLIT_OVER = {
    "embedding": ["pipeline", "tensor"],
    "weight": ["pipeline", "tensor"],
    "second weight": ["pipeline", "tensor"],
    "positions": ["pipeline"],
    "norm": ["pipeline"],
    "last norm": ["pipeline"],
}


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


def drive_norm(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Ask for the norm on each mesh."""
    rank, results = dist.get_rank(), []
    for mesh in norm_meshes(dist.get_world_size()):
        with groups_on(mesh) as groups:
            gradients = gradients_at(mesh.coordinates(rank), mesh)
            kept = {name: gradient.clone() for name, gradient in gradients.items()}
            begin_ns = now_ns()
            norm = fn(gradients, {name: list(SPLIT_OVER[name]) for name in gradients}, groups)
            end_ns = now_ns()
            same = gradients.keys() == kept.keys() and all(torch.equal(kept[name], gradients[name]) for name in kept)
            norm = norm.clone() if isinstance(norm, Tensor) else norm
            results.append({"norm": norm, "kept": same, "run_ns": (begin_ns, end_ns)})
    return results


def judge_norm(evidence: Evidence) -> Iterator[Fault]:
    """Each element once, the same number on every rank, and a few numbers sent for it."""
    for index, mesh in enumerate(norm_meshes(evidence.world_size)):
        results = [result[index] for result in evidence.results]
        for rank, result in enumerate(results):
            norm = result["norm"]
            if not isinstance(norm, float) and not (isinstance(norm, Tensor) and norm.numel() == 1):
                text = f"on {mesh} rank {rank}: expected the norm, a tensor of one number, got {describe(norm)}"
                yield Fault("returned", text)
        for rank, result in enumerate(results):
            yield from _judge_value(float(result["norm"]), mesh, rank)
        for rank, result in enumerate(results):
            yield from _judge_cost(evidence, result["run_ns"], mesh, rank)
        if not all(result["kept"] for result in results):
            yield Fault("changed argument", f"on {mesh} the gradients were changed; the optimizer still needs them")


def _copies(name: str, mesh: Mesh) -> int:
    """Return how many ranks hold each element of a gradient."""
    return prod(size for axis, size in mesh.axes if axis not in SPLIT_OVER[name])


def squares_of(mesh: Mesh) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """Return the sum of squares of each gradient on each rank: as it is, and divided by its number of copies."""
    held = {}
    for rank in range(mesh.size):
        gradients = gradients_at(mesh.coordinates(rank), mesh)
        held[rank] = {name: float(gradient.square().sum()) for name, gradient in gradients.items()}
    return held, {r: {name: s / _copies(name, mesh) for name, s in parts.items()} for r, parts in held.items()}


def _wrong_squares(mesh: Mesh, rank: int) -> Iterator[tuple[str, float, str]]:
    """Known mistakes: what each makes of a rank's sum of squares, and what to say."""
    held, once = squares_of(mesh)
    data, tensor = mesh.axis_size("data"), mesh.axis_size("tensor")
    true = sum(sum(parts.values()) for parts in once.values())
    replicated = sum(s for parts in once.values() for name, s in parts.items() if "tensor" not in SPLIT_OVER[name])
    place = mesh.coordinates(rank)
    stage = [r for r in held if mesh.coordinates(r)["pipeline"] == place["pipeline"]]
    column = [r for r in held if all(mesh.coordinates(r)[axis] == place[axis] for axis in ("data", "tensor"))]
    text = "is that of the own stage: sum over pipeline too, or every stage clips by another"
    yield "own stage only", sum(sum(once[r].values()) for r in stage), text
    text = "is that of the parts on this rank: all_reduce the sum of squares"
    yield "own part only", sum(held[rank].values()), text
    text = f"counts what is whole on every tensor rank {tensor} times: divide such squares by their number of copies"
    yield "replicated counted t times", true + (tensor - 1) * replicated, text
    text = f"counts every replica's gradient, {data} times the same: data is no axis to sum squares over"
    yield "copies counted", data * true, text
    text = "counts every copy on every rank: divide each square by the number of ranks that hold a copy"
    yield "everything counted", sum(sum(parts.values()) for parts in held.values()), text
    yield "replicated forgotten", true - replicated, "lacks what is whole on every tensor rank"
    text = "lacks the other tensor ranks' parts: sum over tensor too"
    yield "own tensor part only", sum(sum(held[r].values()) for r in column), text
    divided = sum(s / _copies(name, mesh) for parts in once.values() for name, s in parts.items())
    text = "is too small: gradients were divided by their number of copies; divide their squares by it"
    yield "divided before the square", divided, text
    yield "not a root", true**2, "is the square of the norm: take the root"
    text = f"is too small: the sum of squares was divided by all {mesh.size} ranks"
    yield "averaged", true / mesh.size, text
    text = "is the sum of the ranks' norms; lengths do not add, their squares do"
    for squares in (once, held):
        yield "norms added", sum(sum(parts.values()) ** 0.5 for parts in squares.values()) ** 2, text
    text = "is the largest of the ranks' norms; squares are summed, not compared"
    yield "largest", max(sum(parts.values()) for parts in held.values()), text


def _judge_value(norm: float, mesh: Mesh, rank: int) -> Iterator[Fault]:
    true = sum(sum(parts.values()) for parts in squares_of(mesh)[1].values())
    if close(norm**2, true):
        return
    if abs(norm / true**0.5 - 1) < ROUNDED:
        text = f"on {mesh} rank {rank}'s norm is {norm:.9f}, expected {true**0.5:.9f}"
        yield Fault("rounded", f"{text}: right, but rounded on the way. Add up squares in torch.float64")
    text = f"on {mesh} rank {rank}'s norm: {numbers_differ(norm, true**0.5)}"
    for code, square, words in _wrong_squares(mesh, rank):
        if close(norm**2, square):
            yield Fault(code, f"{text}: it {words}")
    yield Fault("values", text)


def _judge_cost(evidence: Evidence, run_ns: tuple[int, int], mesh: Mesh, rank: int) -> Iterator[Fault]:
    made = [c for c in calls(evidence, rank) if run_ns[0] <= c.start_ns <= run_ns[1] and c.op != "barrier"]
    most = max(made, key=lambda call: call.num_bytes, default=None)
    if most is not None and most.num_bytes > 2 * 8:
        text = f"right result, but on {mesh} rank {rank} sends {most.num_bytes} bytes in one {most.op}"
        yield Fault("gradients sent", f"{text}: add up squares here first, one number is enough")
    if len(made) > len(AXES):
        text = f"right result, but on {mesh} rank {rank} makes {len(made)} calls"
        yield Fault("a call per tensor", f"{text}: add up all squares first, then one all-reduce per axis")


def norm_failure(error: RankError, world_size: int) -> Fault | None:
    """Name stages that make different numbers of calls."""
    text = str(error)
    if "do not make the same call" in text or "has returned without it" in text or "deadlock" in text:
        words = f"on {world_size} ranks some wait in an all-reduce that others never make: stages hold different"
        words += " gradients, and different numbers of them"
        return Fault("a call per tensor", f"{words}. Add up the squares first; then as many all-reduces on every rank")
    return None


def budget_norm(evidence: Evidence) -> list[str]:
    """Say what the norm cost."""
    made = len([call for call in calls(evidence, 0) if call.op != "barrier"])
    return [f"{made} all-reduces of one number for {len(norm_meshes(evidence.world_size))} meshes"]


_GROUPS, _ROOT = "groups.values()", "return square.sqrt()"

WRONG_NORMS = (
    Mutant("own part", "own part only", "of the parts on this rank", 2, 30).without(" / copies").edit(_GROUPS, "()"),
    Mutant("own stage", "own stage only", "every stage clips by another", 3, 30).edit(
        _GROUPS, '(groups["data"], groups["tensor"])'
    ),
    Mutant("all copies", "replicated counted t times", "tensor rank 3 times", 3, 31).without(" / copies"),
    Mutant("whole on tensor", "replicated counted t times", "on every tensor rank 2 times", 2, 31)
    .without(" / copies")
    .edit(_GROUPS, '(groups["pipeline"], groups["tensor"])'),
    Mutant("replicas", "copies counted", "data is no axis", 4, 31).edit(
        "not in split_over[name]", 'not in (*split_over[name], "data")'
    ),
    Mutant("float32", "rounded", "torch.float64", 1).edit("for group in", "square = square.float()\nfor group in"),
    Mutant("divided first", "divided before the square", "divide their squares", 2).edit(
        "gradient.square().sum() / copies", "(gradient / copies).square().sum()"
    ),
    Mutant("norms added", "norms added", "lengths do not add", 2, 30)
    .edit(_ROOT, "return square")
    .edit("for group in", "square = square.sqrt()\nfor group in"),
    Mutant("averaged", "averaged", "divided by all 2 ranks", 2, 30).edit(
        _ROOT, "return (square / dist.get_world_size()).sqrt()"
    ),
    Mutant("calls a gradient", "a call per tensor", "different numbers of them", 3, 5).body("""
        total = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            square = gradient.square().sum()
            for axis in split_over[name]:
                dist.all_reduce(square, group=groups[axis])
            total += square
        return total.sqrt()
    """),
    Mutant("elements sent", "gradients sent", "one number is enough", 2)
    .edit("torch.zeros(()", "torch.zeros(10")
    .edit("square += gradient.square().sum()", "square[:5] += gradient.square()")
    .edit(_ROOT, "return square.sum().sqrt()"),
)
