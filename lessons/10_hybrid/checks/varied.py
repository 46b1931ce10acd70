"""How the calls of lesson 10's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_10.checks.nodes import use_order
from distlab_lesson_10.checks.placed import use_missing
from distlab_lesson_10.checks.shares import use_axes, use_part
from torch import Tensor

from distlab.course.grading.variation.draw import Draw, Name, Vary
from distlab.grading import Mutant
from distlab.placements import Partial, Replicate, Shard, placement_of
from distlab.plan import Mesh

MATRIX = "the text asks for matrices"
SIZES_DIVIDE = "all sizes divide, and none is 0"
_NAMES = ("pipeline", "data", "expert", "context", "tensor")
_FLOATS = ("float64", "float32")


def _shuffled(draw: Draw, names: tuple[str, ...]) -> list[str]:
    left, found = list(names), []
    while left:
        found.append(left.pop(draw.integer(0, len(left) - 1)))
    return found


def _draw_axes(draw: Draw, num_axes: int, most: int = 4) -> dict[str, int]:
    return {name: draw.integer(1, most) for name in _shuffled(draw, _NAMES)[:num_axes]}


def _draw_part(draw: Draw) -> tuple[Any, ...]:
    axes = {name: draw.integer(1, 2) for name in _shuffled(draw, _NAMES)}
    axes[draw.one_of(*_NAMES)] = draw.integer(2, 3)
    num_microbatches = draw.one_of(1, 2, 3, draw.integer(4, 5))
    samples = axes["data"] * axes["expert"] * num_microbatches * draw.integer(1, 2)
    positions = axes["context"] * draw.integer(1, 3)
    batch = torch.arange(samples * positions).view(samples, positions) + draw.integer(0, 99)
    batch = batch.to(draw.dtype("int64", "float64", "int32", "float32"))
    return draw.one_of(batch, batch.T.contiguous().T), axes, num_microbatches


def _draw_gradient_axes(draw: Draw) -> tuple[Any, ...]:
    kind = draw.one_of("matrix", "norm", "tied", "expert")
    return kind, {name: draw.integer(1, 6) for name in _shuffled(draw, _NAMES)}, draw.one_of(True, False, True)


def _groups_on(draw: Draw, axes: dict[str, int]) -> dict[str, Any]:
    return {axis: draw.split_group([list(group) for group in Mesh(axes).groups(axis)]) for axis in axes}


def _draw_mesh(draw: Draw, names: list[str]) -> dict[str, int]:
    """Return a mesh of these axes that all ranks fill: one axis has them all, or two share them."""
    n, whole = draw.world_size, draw.integer(0, len(names) - 1)
    sizes = dict.fromkeys(names, 1)
    if draw.one_of("two", "one") == "two" and n == 4 and len(names) > 1:
        sizes[names[whole]] = sizes[names[whole - 1]] = 2
    else:
        sizes[names[whole]] = n
    return sizes


def _draw_norm(draw: Draw) -> tuple[Any, ...]:
    names = _shuffled(draw, _NAMES)[: draw.one_of(3, 1, 2, 4)]
    axes, dtype = _draw_mesh(draw, names), draw.dtype(*_FLOATS, "bfloat16")
    mesh, gradients, split_over = Mesh(axes), {}, {}
    place = mesh.coordinates(draw.rank)
    for index in range(draw.integer(1, 4)):
        split = [axis for axis in names if draw.integer(0, 1)]
        shape, stage = draw.shape(), draw.integer(0, 3)
        held = [draw.tensor(*shape, dtype=dtype, strided=True, same=True) for _ in range(mesh.size)]
        alike = [r for r in range(mesh.size) if all(mesh.coordinates(r)[axis] == place[axis] for axis in split)]
        if not split or index == 0 or place[split[0]] <= stage:
            gradients[f"weight {index}"], split_over[f"weight {index}"] = held[alike[0]], split
    if names[0] in axes and axes[names[0]] > 1 and draw.integer(0, 2) == 0:  # a stage may hold nothing that learns
        split_over = {
            name: [names[0], *(axis for axis in split if axis != names[0])] for name, split in split_over.items()
        }
        if place[names[0]] == 0:
            gradients, split_over = {}, {}
    split_over = {name: [*map(Name, split)] for name, split in split_over.items()}
    groups = {Name(axis): group for axis, group in _groups_on(draw, axes).items()}
    return gradients, split_over, groups, str(dtype).removeprefix("torch.")


def _use_norm(
    fn: Callable[..., Any], gradients: dict[str, Tensor], split_over: dict[str, list[str]], groups: Any, digits: str
) -> Tensor:
    """Return the norm with as many digits as the gradients have."""
    return torch.tensor(float(fn(gradients, split_over, groups)), dtype=torch.float64).to(getattr(torch, digits))


def _draw_order(draw: Draw) -> tuple[Any, ...]:
    names = _shuffled(draw, _NAMES)[: draw.one_of(5, 1, 3, 5, 4, 5)]
    axes = {name: 2 ** draw.one_of(1, 0, 1, 2, 3) for name in names}
    inside = [name for name in names if draw.integer(0, 1)]  # these fill a node, and mostly send more
    traffic = {name: round(draw.number(0.1, 6.0) + 4 * (name in inside), 2) * 1e9 for name in names}
    return axes, traffic, prod(axes[name] for name in inside) * draw.one_of(1, 1, 2)


def _draw_redistribute(draw: Draw) -> tuple[Any, ...]:
    """Return a change, each with all ranks and with some."""
    change, where = draw.one_of(*product(("SR", "SS", "PR", "PS", "RS"), ("some", "all")))
    apart = [[*range(start, draw.world_size, 2)] for start in (1, 0)]
    group = draw.split_group(apart) if where == "some" and draw.world_size > 1 else None
    n, dims = draw.size_of(group), draw.one_of(3, 2, 3, 1)
    first = draw.integer(0, dims - 1)
    before, after = (
        {"S": Shard(dim % dims), "R": Replicate(), "P": Partial()}[kind]
        for kind, dim in zip(change, (first, first + draw.integer(1, 2)), strict=True)
    )
    lengths = [n * draw.integer(1, 3) for _ in range(dims)]
    if isinstance(before, Shard):
        lengths[before.dim] //= n
    form = {"dtype": draw.dtype(*_FLOATS, "bfloat16", "int64"), "strided": change[0] != "P", "same": change[0] == "R"}
    return draw.tensor(*lengths, **form), before, after, group


def _use_redistribute(fn: Callable[..., Any], local: Tensor, before: Any, after: Any, group: Any) -> Tensor:
    """Hand over the group of all ranks where none was drawn."""
    made: Tensor = fn(local, before, after, dist.group.WORLD if group is None else group)
    return made


def _draw_missing(draw: Draw) -> tuple[Any, ...]:
    """Return a program that is legal but for a sum, where one is missing."""
    placements = (Shard(0), Shard(1), Replicate(), Shard(1), Shard(0), Partial())
    layouts = {f"x{index}": placements[draw.integer(0, 5)] for index in range(4)}
    at, program = dict(layouts), list[tuple[str, ...]]()
    for index in range(draw.integer(2, 7)):
        for _ in range(60):
            operation = ("matmul", "add", "relu", "sum", "all_reduce", "matmul")[draw.integer(0, 5)]
            names = [list(at)[draw.integer(0, len(at) - 1)] for _ in range(1 + (operation in ("matmul", "add")))]
            placed, numbers = [at[name] for name in names], {name for name in names if name.startswith("n")}
            if numbers and operation != "all_reduce":
                continue  # a sum is a number, and no matrix
            try:
                made = _result(operation, placed)
            except ValueError:
                if Partial() not in placed or draw.integer(0, 3):
                    continue
                made = Replicate()
            result = f"{'n' if numbers or operation == 'sum' else 'y'}{draw.integer(0, 3 + index)}"
            program.append((result, operation, *names))
            at[result] = made
            break
    return program, layouts


def _result(operation: str, placed: list[Any]) -> Any:
    if operation == "all_reduce":
        if placed != [Partial()]:
            raise ValueError("sums copies")
        return Replicate()
    return placement_of(operation, *((one,) for one in placed))[0]


def _draw_step(draw: Draw) -> tuple[Any, ...]:
    axes = _draw_mesh(draw, draw.one_of(["data", "tensor"], ["tensor", "data"]))
    dtype, width = draw.dtype(*_FLOATS), draw.integer(1, 5)
    features, samples = axes["tensor"] * draw.integer(1, 3), axes["data"] * draw.integer(1, 4)
    first, second = draw.tensor(width, features, same=True), draw.tensor(features, width, same=True)
    x, target = (draw.tensor(samples, width, dtype=dtype, strided=True, same=True) for _ in range(2))
    part, num_parts = Mesh(axes).coordinates(draw.rank)["tensor"], axes["tensor"]
    own = (first.chunk(num_parts, dim=1)[part] / width**0.5, second.chunk(num_parts)[part] / features**0.5)
    return *(weight.to(dtype).contiguous() for weight in own), x, target, _groups_on(draw, axes)


vary_my_batch = Vary(_draw_part, use=use_part, left_out={"dims": MATRIX, "empty": SIZES_DIVIDE})
vary_gradient_axes = Vary(_draw_gradient_axes, use=use_axes)
vary_global_norm = Vary(
    _draw_norm, use=_use_norm, least_bytes=0.5, left_out={"bytes": "a square may travel as float32"}
)
vary_place = Vary(_draw_order, use=use_order, num_calls=24)  # wrong orders are often as good
vary_redistribute = Vary(
    _draw_redistribute,
    use=_use_redistribute,
    num_calls=21,
    left_out={"empty": SIZES_DIVIDE, "unequal ranks": "all parts are of one size"},
)
vary_missing_sum = Vary(_draw_missing, use=use_missing, num_calls=32)
vary_find_the_bug = Vary(
    _draw_step, left_out={"dims": MATRIX, "empty": SIZES_DIVIDE, "unequal ranks": "all ranks hold parts of one size"}
)

WRONG_MY_BATCH = (
    Mutant("two micro-batches", "returned", "expected a list of", 1, "one set of arguments").edit(
        "own.chunk(num_microbatches)", "own.chunk(2)"
    ),
    Mutant("whole numbers", "values", "int64 of shape", 1, "one dtype").edit(
        "list(own.chunk(num_microbatches))", "[part.long() for part in own.chunk(num_microbatches)]"
    ),
)
WRONG_GRADIENT_AXES = (
    Mutant("context of two", "values", "to divide by", 1, "one set of arguments").edit(
        '* axes["context"]', '* min(axes["context"], 2)'
    ),
)
WRONG_GLOBAL_NORM = (
    Mutant("rows only", "raised", "in global_norm", 1, "one shape").edit(
        "gradient.square().sum()", "gradient @ gradient"
    ),
    Mutant("first one's dtype", "raised", "StopIteration", 3, "a rank without gradients").edit(
        "square = torch.zeros", "assert next(iter(gradients.values())).is_floating_point()\nsquare = torch.zeros"
    ),
)
WRONG_PLACE = (
    Mutant("three axes", "values", "between nodes", 1, "one size").edit(
        "permutations(axes)", "((*list(axes)[:-3], *order) for order in permutations(list(axes)[-3:]))"
    ),
)
WRONG_REDISTRIBUTE = (
    Mutant("rank of all", "raised", "tuple index out of range", 4, "one group").edit("group.rank()", "dist.get_rank()"),
    Mutant("two dims", "shape", "expected shape", 4, "one shape").edit(
        "local.chunk(n, after.dim)", "local.chunk(n, min(after.dim, 1))", times=2
    ),
)
WRONG_FIND_THE_BUG = (
    Mutant("twelve samples", "scale", "too", 1, "one size").edit("difference.numel()", "(60 // num_parts)"),
)
