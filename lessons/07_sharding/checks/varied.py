"""How the calls of lesson 7's exercises vary: the arguments that are drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distlab_lesson_07.checks.owners import use_by_owners, use_owners
from distlab_lesson_07.checks.rows import use_step
from distlab_lesson_07.checks.state import use_state
from torch import Tensor

from distlab.course.grading.variation.draw import Draw, Name, Vary
from distlab.grading import Mutant

TAKES_NO_GROUP = "takes no group"
ROWS = {
    "dims": "a unit's parameters are one row, [L]",
    "layout": "gather_into and scatter_sum take contiguous rows",
    "sub-group": TAKES_NO_GROUP,
    "unequal ranks": "all shards of a unit are equally long",
}
_FLOATS = ("float64", "float32")


def _draw_pieces(draw: Draw) -> tuple[Any, ...]:
    num_shards, num_tensors = draw.one_of(draw.integer(2, 5), draw.integer(2, 20), 1), draw.one_of(3, 1, 0, 8, 5)
    largest = draw.one_of(30, 3, 1)
    sizes = [draw.integer(0, largest) for _ in range(num_tensors)]
    if draw.one_of("divides", "as it comes") == "divides":
        sizes += [-sum(sizes) % num_shards]
    return sizes, num_shards, draw.integer(0, 59) % num_shards


def _draw_step(draw: Draw) -> tuple[Any, ...]:
    length, dtype = draw.one_of(3, 1, draw.integer(2, 9), draw.integer(10, 40)), draw.dtype(*_FLOATS, "bfloat16")
    row = length * draw.world_size
    steps = [draw.tensor(row, dtype=dtype) for _ in range(draw.integer(2, 3))]
    parameters = draw.tensor(row, dtype=dtype, same=True)
    return [parameters, parameters.flip(0)], steps, draw.one_of(0.5, 0.25, 1.0)


def _draw_units(draw: Draw) -> tuple[list[Tensor], Any]:
    """Return shards of units that are not equally long, and their dtype."""
    dtype = draw.dtype(*_FLOATS)
    lengths = [draw.integer(1, 9) for _ in range(draw.one_of(3, 1, 2, draw.integer(4, 6)))]
    return [draw.tensor(length, dtype=dtype) for length in lengths], dtype


def _draw_forward(draw: Draw) -> tuple[Any, ...]:
    shards, dtype = _draw_units(draw)
    shape = draw.shape()
    own = (draw.own(1, 5), *shape[1:]) if shape and all(shape) else shape  # each rank has samples of its own
    return shards, draw.tensor(*own, dtype=dtype, strided=True)


def _weigh(whole: Tensor) -> Tensor:
    """Return a number that depends on every element of a row and on its place."""
    places = torch.arange(1, len(whole) + 1, dtype=whole.dtype)
    return (whole * places).sum() / len(whole)


def _use_forward(fn: Callable[..., Tensor], shards: list[Tensor], x: Tensor) -> dict[str, Any]:
    """Return the output, and which units computed, with how many parameters."""
    seen: list[list[int]] = []

    def compute(index: int, whole: Tensor, x: Tensor) -> Tensor:
        seen.append([index, whole.numel()])
        return torch.tanh(x * _weigh(whole) + index + 0.5)

    return {"the output": fn(shards, x, compute), "units and their parameters": seen}


def _draw_backward(draw: Draw) -> tuple[Any, ...]:
    shards, dtype = _draw_units(draw)
    shapes = [draw.shape() for _ in range(len(shards) + 1)]
    own = [(draw.own(1, 5), *shape[1:]) if shape and all(shape) else shape for shape in shapes]
    *inputs, grad = (draw.tensor(*shape, dtype=dtype, strided=True) for shape in own)
    return shards, inputs, grad


def _use_backward(
    fn: Callable[..., list[Tensor]], shards: list[Tensor], inputs: list[Tensor], grad: Tensor
) -> dict[str, Any]:
    """Return the gradients, and which units computed, with how many parameters."""
    seen: list[list[int]] = []

    def compute(index: int, whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        seen.append([index, whole.numel()])
        size = torch.tanh(grad.sum() + _weigh(whole))
        return whole * size + torch.tanh(x.sum()), x * size + index

    return {"the gradients": fn(shards, inputs, grad, compute), "units and their parameters": seen}


def _draw_owners(draw: Draw) -> tuple[Any, ...]:
    sides = (1, 8, 24, 32, 64, 96)
    shapes = [
        (sides[draw.integer(0, 5)], sides[draw.integer(0, 5)])
        for _ in range(draw.one_of(7, 1, 0, 4, draw.integer(5, 9)))
    ]
    return shapes, draw.one_of(2, 1, 3, draw.integer(4, 5))


def _draw_by_owners(draw: Draw) -> tuple[Any, ...]:
    dtype, count = draw.dtype(*_FLOATS), draw.one_of(3, 1, 2, draw.integer(4, 6))
    owners = [draw.integer(0, 11) % draw.world_size for _ in range(count)]
    return [draw.tensor(draw.integer(1, 3), draw.integer(1, 5), dtype=dtype) for _ in range(count)], owners


def _draw_state(draw: Draw) -> tuple[Any, ...]:
    kinds, count = ("weight", "bias", "running_mean"), draw.one_of(3, 1, 0, 2, 5)
    names = [Name(f"{draw.one_of(*kinds)}_{i}") for i in range(count)]
    shards, shapes = {}, {}
    for name in names:
        shape, dtype = draw.shape(empty=False), draw.dtype()
        tensor = draw.tensor(*shape, dtype=dtype, same=True)
        length = -(-tensor.numel() // draw.world_size)
        row = draw.tensor(length * draw.world_size, dtype=dtype, same=True)  # what it is filled up with is anything
        row[: tensor.numel()] = tensor.flatten()
        shards[name] = row.view(draw.world_size, length)[draw.rank].clone()
        shapes[name] = tensor.shape
    return shards, dict(reversed(shapes.items())) if draw.integer(0, 1) else shapes


vary_pieces = Vary(_draw_pieces, num_calls=24)  # a call costs nothing
vary_step = Vary(_draw_step, use=use_step, left_out=ROWS | {"empty": "a shard holds elements"})
vary_forward = vary_ahead = Vary(_draw_forward, use=_use_forward, left_out={"sub-group": TAKES_NO_GROUP})
vary_backward = Vary(_draw_backward, use=_use_backward, left_out={"sub-group": TAKES_NO_GROUP})
vary_owners = Vary(_draw_owners, use=use_owners, num_calls=12)
vary_by_owners = Vary(
    _draw_by_owners,
    use=use_by_owners,
    left_out=ROWS | {"dims": "the text asks for matrices", "empty": "an optimizer has matrices"},
)
_ON_0 = {"bytes": "rank 0 alone may be sent the shards"}
vary_repair = Vary(_draw_state, use=use_state, least_bytes=0.25, left_out=ROWS | _ON_0)

_MEAN = "mean = torch.empty_like(own)"
_MEANS = "means = [torch.empty_like(shard) for shard in shards]"
_ROW = "row = shard.new_empty(shard.numel() * dist.get_world_size())"

WRONG_PIECES = (
    Mutant("always one more", "values", "expected", seen="sizes that divide").edit(
        "-(-sum(sizes) // num_shards)",
        "-(-sum(sizes) // num_shards) if num_shards < 6 else sum(sizes) // num_shards + 1",
    ),
)
WRONG_STEP = (
    Mutant("float64 written down", "raised", "expected one type", seen="one dtype").edit(
        _MEAN, "mean = torch.empty(own.shape, dtype=torch.float64)"
    ),
    Mutant("shard kept", "raised", "full has", preamble="_kept = {}").edit(
        "own = parameters.chunk(dist.get_world_size())[dist.get_rank()]",
        "own = _kept.setdefault(0, parameters.chunk(dist.get_world_size())[dist.get_rank()])",
    ),
)
WRONG_FORWARD = (
    Mutant("first unit's size", "raised", "full has 4 elements", 1, "one size").edit(
        "shard.numel()", "shards[0].numel()"
    ),
)
WRONG_BACKWARD = (
    Mutant("gradients kept", "kept", "a later call changed it", preamble="_kept = {}").edit(
        _MEANS, "means = [_kept.setdefault((i, s.shape, s.dtype), torch.empty_like(s)) for i, s in enumerate(shards)]"
    ),
    Mutant("into the shards", "changed argument", "work on a copy", seen="state").edit(
        _MEANS, "means = [shard for shard in shards]"
    ),
)
WRONG_OWNERS = (
    Mutant("a matrix at least", "raised", "max()", seen="empty lists").edit(
        "[0] * num_ranks", "[0 * max(work)] * num_ranks"
    ),
)
WRONG_BY_OWNERS = (
    Mutant("float64 written down", "raised", "dtype", 2, "one dtype").edit(
        "[torch.empty_like(piece) for piece in pieces]", "[torch.empty(piece.shape).double() for piece in pieces]"
    ),
)
WRONG_REPAIR = (
    Mutant("float32 by default", "raised", "expected one type", seen="one dtype").edit(
        _ROW, "row = torch.empty(shard.numel() * dist.get_world_size())"
    ),
    Mutant("rows kept", "kept", "a later call changed it", preamble="_kept = {}")
    .edit(_ROW, f"{_ROW}\nrow = _kept.setdefault((len(row), row.dtype), row)")
    .without(".clone()"),
)
