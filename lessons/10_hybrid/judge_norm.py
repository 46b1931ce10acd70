"""Name what is wrong with a norm over all axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from distlab_lesson_10 import cases
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls
from distlab.grading.values import describe
from distlab.plan import Mesh

AXES = ("pipeline", "data", "tensor")
ROUNDED = 1e-5  # what float32 may lose


def judge_norm(evidence: Evidence) -> Iterator[Fault]:
    """Each element once, the same number on every rank, and a few numbers sent for it."""
    for index, mesh in enumerate(cases.norm_meshes(evidence.world_size)):
        results = [result[index] for result in evidence.results]
        norms = []
        for rank, result in enumerate(results):
            number = _number(result["norm"])
            if number is None:
                got = describe(result["norm"])
                yield Fault("returned", f"on {mesh} rank {rank}: expected the norm, a tensor of one number, got {got}")
                return
            norms.append(number)
        fault = _norm_fault(norms, mesh) or _cost_fault(evidence, results, mesh)
        if fault is None and not all(result["kept"] for result in results):
            fault = Fault("changed argument", f"on {mesh} the gradients were changed; the optimizer still needs them")
        if fault is not None:
            yield fault
            return


def _number(norm: Any) -> float | None:
    if isinstance(norm, Tensor) and norm.numel() == 1:
        return float(norm)
    return float(norm) if isinstance(norm, float) else None


def squares_of(mesh: Mesh) -> dict[int, dict[str, float]]:
    """Return the sum of squares of each gradient that each rank holds."""
    found = {}
    for rank in range(mesh.size):
        gradients = cases.gradients_at(mesh.coordinates(rank), mesh)
        found[rank] = {name: float(gradient.square().sum()) for name, gradient in gradients.items()}
    return found


def copies(name: str, mesh: Mesh) -> int:
    """Return how many ranks hold each element of a gradient."""
    return prod(size for axis, size in mesh.axes if axis not in cases.SPLIT_OVER[name])


def true_square(mesh: Mesh) -> float:
    """Return the sum of squares of the whole model's gradient."""
    return sum(square / copies(name, mesh) for rank in squares_of(mesh).values() for name, square in rank.items())


def _is_whole(name: str) -> bool:
    return "tensor" not in cases.SPLIT_OVER[name]


def wrong_squares(mesh: Mesh, rank: int) -> dict[str, tuple[float, str]]:
    """Return what each known fault makes of a rank's sum of squares, and what to say."""
    held, data, tensor = squares_of(mesh), mesh.axis_size("data"), mesh.axis_size("tensor")
    true = true_square(mesh)
    whole = {r: {name: s / copies(name, mesh) for name, s in parts.items()} for r, parts in held.items()}
    replicated = sum(s for parts in whole.values() for name, s in parts.items() if _is_whole(name))

    def over(*axes: str) -> float:
        """Sum this rank's group over some axes, all that it holds counted once."""
        place = mesh.coordinates(rank)
        members = [r for r in held if all(mesh.coordinates(r)[a] == place[a] for a in AXES if a not in axes)]
        return sum(sum(held[r].values()) for r in members)

    stage = {r for r in held if mesh.coordinates(r)["pipeline"] == mesh.coordinates(rank)["pipeline"]}
    of_stage = sum(s for r in stage for s in whole[r].values())
    return {
        "own stage only": (
            of_stage,
            "is that of the own stage: sum over pipeline too, or every stage clips by another",
        ),
        "own part only": (sum(held[rank].values()), "is that of the parts on this rank: all_reduce the sum of squares"),
        "replicated counted t times": (
            true + (tensor - 1) * replicated,
            f"counts what is whole on every tensor rank {tensor} times: divide such squares by their number of copies",
        ),
        "copies counted": (
            data * true,
            f"counts every replica's gradient, {data} times the same: data is no axis to sum squares over",
        ),
        "everything counted": (
            sum(sum(parts.values()) for parts in held.values()),
            "counts every copy on every rank: divide each square by the number of ranks that hold a copy",
        ),
        "replicated forgotten": (true - replicated, "lacks what is whole on every tensor rank"),
        "own tensor part only": (over("pipeline"), "lacks the other tensor ranks' parts: sum over tensor too"),
        "divided before the square": (
            sum(s / copies(name, mesh) ** 2 for parts in held.values() for name, s in parts.items()),
            "is too small: gradients were divided by their number of copies; divide their squares by it",
        ),
        "not a root": (true**2, "is the square of the norm: take the root"),
        "averaged": (true / mesh.size, f"is too small: the sum of squares was divided by all {mesh.size} ranks"),
        "norms added": (
            sum(sum(parts.values()) ** 0.5 for parts in whole.values()) ** 2,
            "is the sum of the ranks' norms; lengths do not add, their squares do",
        ),
        "norms added, all": (
            sum(sum(parts.values()) ** 0.5 for parts in held.values()) ** 2,
            "is the sum of the ranks' norms; lengths do not add, their squares do",
        ),
        "largest": (
            max(sum(parts.values()) for parts in held.values()),
            "is the largest of the ranks' norms; squares are summed, not compared",
        ),
    }


def _norm_fault(norms: list[float], mesh: Mesh) -> Fault | None:
    true = true_square(mesh)
    for rank, norm in enumerate(norms):
        if _close(norm**2, true):
            continue
        if abs(norm / true**0.5 - 1) < ROUNDED:
            text = f"on {mesh} rank {rank}'s norm is {norm:.9f}, expected {true**0.5:.9f}"
            return Fault("rounded", f"{text}: right, but rounded on the way. Add up squares in torch.float64")
        text = f"on {mesh} rank {rank}'s norm is {norm:.4g}, expected {true**0.5:.4g}"
        for code, (square, words) in wrong_squares(mesh, rank).items():
            if _close(norm**2, square):
                return Fault(code.partition(",")[0], f"{text}: it {words}")
        return Fault("values", text)
    return None


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * abs(other)


def _cost_fault(evidence: Evidence, results: list[dict[str, Any]], mesh: Mesh) -> Fault | None:
    for rank, result in enumerate(results):
        begin_ns, end_ns = result["run_ns"]
        made = [call for call in calls(evidence, rank) if begin_ns <= call.start_ns <= end_ns and call.op != "barrier"]
        most = max(made, key=lambda call: call.num_bytes, default=None)
        if most is not None and most.num_bytes > 2 * 8:
            text = f"right result, but on {mesh} rank {rank} sends {most.num_bytes} bytes in one {most.op}"
            return Fault("gradients sent", f"{text}: add up squares here first, one number is enough")
        if len(made) > len(AXES):
            text = f"right result, but on {mesh} rank {rank} makes {len(made)} calls"
            return Fault("a call a tensor", f"{text}: add up all squares first, then one all-reduce an axis")
    return None


def norm_failure(error: RankError, world_size: int) -> Fault | None:
    """Name stages that make different numbers of calls."""
    text = str(error)
    if "do not make the same call" in text or "has returned without it" in text or "deadlock" in text:
        words = f"on {world_size} ranks some wait in an all-reduce that others never make: stages hold different"
        words += " gradients, and different numbers of them"
        return Fault("a call a tensor", f"{words}. Add up the squares first; then as many all-reduces on every rank")
    return None


def budget_norm(evidence: Evidence) -> list[str]:
    """Say what the norm cost."""
    meshes = cases.norm_meshes(evidence.world_size)
    made = len([call for call in calls(evidence, 0) if call.op != "barrier"])
    return [f"{made} all-reduces of one number for {len(meshes)} meshes"]
