"""What the checks of lesson 10 run: meshes of every shape that a few ranks have, on paper and with real groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import mesh_groups
from distlab.grading.values import seeded
from distlab.plan import Mesh

MESHES = (  # on paper; the first names faults best
    {"pipeline": 2, "data": 2, "tensor": 2},
    {"pipeline": 4, "data": 3, "tensor": 2},
    {"data": 2, "pipeline": 1, "context": 3},
    {"tensor": 4},
)
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


def drive_places(fn: Callable[[int, dict[str, int]], Any]) -> list[list[Any]]:
    """Ask for the place of every rank of each mesh."""
    return [[fn(rank, dict(axes)) for rank in range(Mesh(axes).size)] for axes in MESHES]


def drive_groups(fn: Callable[[str, dict[str, int]], Any]) -> list[dict[str, Any]]:
    """Ask for the groups of every axis of each mesh."""
    return [{axis: fn(axis, dict(axes)) for axis in axes} for axes in MESHES]


def whole_batch() -> Tensor:
    """Return a batch in which every number stands once."""
    return torch.arange(SAMPLES * POSITIONS).view(SAMPLES, POSITIONS)


def drive_parts(fn: Callable[..., Any]) -> list[list[Any]]:
    """Ask for the part of every rank of each mesh."""
    found = []
    for axes in FULL_MESHES:
        mesh = Mesh(axes)
        found.append([fn(whole_batch(), r, mesh, MICROBATCHES) for r in range(mesh.size)])
    return found


def drive_axes(fn: Callable[..., Any]) -> list[dict[tuple[str, bool], Any]]:
    """Ask for each kind of parameter, with and without sequence parallelism."""
    asked = [(kind, sequence) for kind in KINDS for sequence in (False, True)]
    return [{(kind, sequence): fn(kind, dict(axes), sequence) for kind, sequence in asked} for axes in GRADIENT_MESHES]


def drive_order(fn: Callable[..., Any]) -> list[Any]:
    """Ask for the order of the axes of each case."""
    return [fn(dict(axes), dict(traffic), devices) for axes, traffic, devices in PLACE_CASES]


def norm_meshes(world_size: int) -> list[Mesh]:
    """Return meshes of pipeline, data and tensor: each axis alone, then two of them."""
    names = ("pipeline", "data", "tensor")
    alone = [{name: world_size if name == one else 1 for name in names} for one in ("tensor", "pipeline", "data")]
    pairs = [{name: 1 if name == left_out else 2 for name in names} for left_out in names] if world_size == 4 else []
    return [Mesh(axes) for axes in (*alone, *pairs)]


def step_meshes(world_size: int) -> list[Mesh]:
    """Return meshes of data and tensor."""
    shapes = [(2, 2)] if world_size == 4 else []  # it tells most faults apart
    shapes += [(1, world_size)] + [(world_size, 1)] * (world_size > 1)
    meshes = [Mesh({"data": data, "tensor": tensor}) for data, tensor in shapes]
    return meshes + [Mesh({"tensor": 2, "data": 2})] * (world_size == 4)  # data ranks are the neighbours here


@contextlib.contextmanager
def groups_on(mesh: Mesh) -> Iterator[dict[str, dist.ProcessGroup]]:
    """Make the groups of a mesh, and end them."""
    groups = mesh_groups(mesh)
    try:
        yield groups
    finally:
        for group in groups.values():
            dist.destroy_process_group(group)


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
            same = all(torch.equal(kept[name], gradients[name]) for name in kept)
            norm = norm.clone() if isinstance(norm, Tensor) else norm
            results.append({"norm": norm, "kept": same, "run_ns": (begin_ns, end_ns)})
    return results


def now_ns() -> int:
    """Return the time by the clock of the records, once all ranks are here."""
    dist.barrier()
    return time.monotonic_ns()


WIDTH, FEATURES, BATCH = 5, 12, 12


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
