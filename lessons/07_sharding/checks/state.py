"""A norm over shards, and a state dict that is put together from them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, in_megabytes
from distlab.course.grading.diagnosis.values import seeded
from distlab.course.grading.variation.draw import Name
from distlab.grading import Evidence, Fault, Mutant

SHAPES = {"embed.weight": torch.Size([5, 3]), "norm.bias": torch.Size([7]), "head.weight": torch.Size([2, 6])}
LIMITS = {"a limit of a third of the norm": 1 / 3, "a limit of three times the norm": 3.0}
CLIP_SHARDS, CLIP_WHOLE = (6, 10, 3), (4, 3)


def _clip_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Make gradients that differ in size between ranks, so that no rank's own norm is the mean."""
    shards = [[(r + 1) * seeded(r, size, purpose=f"clip {size}") for size in CLIP_SHARDS] for r in range(n)]
    whole = [3 * seeded(-1, size, purpose=f"whole {size}") for size in CLIP_WHOLE]
    norm = float(torch.cat([*chain(*shards), *whole]).norm())
    return {name: (shards[rank], whole, factor * norm) for name, factor in LIMITS.items()}


def use_clip(fn: Callable[..., Any], shards: list[Tensor], replicated: list[Tensor], max_norm: float) -> dict[str, Any]:
    """Return the norm in the gradients' type; what was scaled in 32 bits at most, for 1e-6 may be added to the norm."""
    given = copy.deepcopy([shards, replicated])
    kept = [[*gradients] for gradients in given]
    dtype = next((gradient.dtype for gradient in chain(*kept)), torch.float64)
    norm = fn(*given, max_norm)
    if isinstance(norm, float) or (isinstance(norm, Tensor) and norm.numel() == 1):
        norm = torch.tensor(float(norm), dtype=torch.float64).to(dtype)
    scaled = [[one.float() if one.dtype == torch.float64 else one for one in gradients] for gradients in kept]
    return {"the norm": norm, "shards": scaled[0], "replicated": scaled[1], "lengths of both": [*map(len, given)]}


def _state_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Cut each tensor's row, filled up with NaN (a bias's with zeros), into equal shards."""
    shards = {}
    for name, shape in SHAPES.items():
        filling = 0.0 if name.endswith("bias") else torch.nan  # so that dropping one value is not enough
        row = torch.full((-(-shape.numel() // n), n), filling, dtype=torch.float64).flatten()
        row[: shape.numel()] = seeded(-1, *shape, purpose=name).flatten()
        shards[Name(name)] = row.chunk(n)[rank].clone()
    return {"": (shards, {Name(name): shape for name, shape in SHAPES.items()})}


def use_state(fn: Callable[..., Any], shards: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Any]:
    """Return the state, and what the shards are afterwards."""
    state = fn(shards, shapes)
    own = {str(name): shard for name, shard in shards.items()}
    state = {str(name): tensor for name, tensor in state.items()} if isinstance(state, dict) else state
    return {"the state": state, "the caller's shards afterwards": own}


drive_clip = Cases(_clip_cases, use_clip, most_bytes=2.1, needs="an all-reduce of one number per call")
drive_repair = Cases(_state_cases, use_state, most_bytes=0)


def failure_repair(error: RankError, world_size: int) -> Fault | None:
    """Name a gather that only rank 0 calls."""
    text = str(error)
    row = re.search(r"shape '\[(.+)\]' is invalid for input of size (\d+)", text)
    if row is not None and int(row[2]) > (size := math.prod(map(int, row[1].split(",")))):
        return Fault("not cut", f"a row of {size} elements was filled up to {row[2]}: cut it, then view\n{row[0]}")
    if text.partition("do not make the same call")[2].partition("every rank must")[0].count(": all_gather") > 1:
        words = "the ranks gather different tensors at the same time: all must go through the names in one order"
        return Fault("names mixed", f"{words}, such as that of the dict, which is the same on every rank")
    if "has returned without it" in text or "do not make the same call" in text:
        words = f"on {world_size} ranks rank 0 waits in its gather; the others never call it: rank 0 alone holds only a"
        words += " shard, so a state dict needs every rank"
        return Fault("not on every rank", f"{words}. Gather outside the `if`, keep the result inside it")
    return None


def budget_clip(evidence: Evidence) -> list[str]:
    """Say what the norm cost."""
    made = len(calls(evidence, 0)) // len(LIMITS)
    return [f"{made} all-reduce of one number: {in_megabytes(2 * (evidence.world_size - 1) / evidence.world_size * 8)}"]


def budget_repair(evidence: Evidence) -> list[str]:
    """Say what was gathered."""
    return [f"{len(calls(evidence, 0))} gathers, one per tensor, by all ranks; whole on rank 0 only"]


_REPLICATED = "square = sum((gradient.square().sum() for gradient in replicated), square)"
_ALL = "in [*shards, *replicated]), torch"
_REDUCE, _ROOT = "dist.all_reduce(square)", "norm = square.sqrt()"
_FACTOR = "factor = (max_norm / norm).clamp(max=1.0)"
_NO_LENGTHS = "norms are added; lengths do not add, their squares do: all_reduce the squares, then take the root"
_ALL_COUNT = "is divided by world_size; the ranks hold different parts, and all of them count"

WRONG_CLIP = (
    Mutant(
        "own shards",
        "own shards only",
        "the norm is that of the own shards only: ranks scale by different factors; all_reduce the sum of squares",
        2,
        30,
    ).without(_REDUCE),
    Mutant(
        "n times",
        "replicated counted n times",
        "replicated gradients count once for each rank that has them: add their squares after the all-reduce",
        2,
        31,
    )
    .without(_REPLICATED)
    .edit("in shards), torch", _ALL),
    Mutant("forgotten", "replicated forgotten", "the replicated gradients are part of the norm too").without(
        _REPLICATED
    ),
    Mutant("sum of norms", "norms added", _NO_LENGTHS, 2, 30)
    .without(_REPLICATED)
    .edit("in shards), torch", _ALL)
    .edit(_ROOT, "norm = square")
    .edit(_REDUCE, f"square = square.sqrt()\n{_REDUCE}"),
    Mutant("sum of the shards' norms", "norms added", _NO_LENGTHS, 2, 30).edit(
        _REDUCE, f"square = square.sqrt()\n{_REDUCE}\nsquare = square**2"
    ),
    Mutant("sum of all norms", "norms added", _NO_LENGTHS, 1, 30)
    .edit(".square().sum()", ".norm()", times=2)
    .edit(_ROOT, "norm = square"),
    Mutant("magnitudes", "magnitudes", "magnitudes are added; the norm is the root of the sum of squares", 1)
    .edit(".square().sum()", ".abs().sum()", times=2)
    .edit(_ROOT, "norm = square"),
    Mutant("two norms", "norms added", _NO_LENGTHS, 1, 30)
    .without(_REPLICATED)
    .edit(_ROOT, "norm = square.sqrt() + sum(gradient.square().sum() for gradient in replicated).sqrt()"),
    Mutant("length 1", "length 1", "gradients get length 1; multiply by max_norm / norm", 1).edit(
        _FACTOR, "factor = 1 / norm if norm > max_norm else 1.0"
    ),
    Mutant("each alone", "each alone", "each gradient is clipped by its own norm; one factor is for all", 1).edit(
        "*= factor", "*= (max_norm / gradient.norm()).clamp(max=1.0)"
    ),
    Mutant("mean of squares", "averaged", f"the sum of squares {_ALL_COUNT}", 2, 30).edit(
        _REDUCE, f"{_REDUCE}\nsquare /= dist.get_world_size()"
    ),
    Mutant("mean of norms", "averaged", f"the sum of the ranks' norms {_ALL_COUNT}: add up squares", 2)
    .without(_REDUCE)
    .edit(_ROOT, f"{_ROOT}\ndist.all_reduce(norm)\nnorm /= dist.get_world_size()"),
    Mutant("the largest rank's", "largest rank alone", "MAX takes the largest rank's squares: sum over ranks", 2).edit(
        _REDUCE, "dist.all_reduce(square, dist.ReduceOp.MAX)"
    ),
    Mutant("largest element", "largest element", "the largest element is not the norm: add up squares").edit(
        "(gradient.square().sum() for gradient in shards)",
        "(gradient.abs().max() ** 2 for gradient in shards if gradient.numel())",
    ),
    Mutant("no root", "no root", "it is the square of the norm: take the root").edit(_ROOT, "norm = square"),
    Mutant("norm after", "norm after", "it is the norm after clipping; the one before is asked").edit(
        "return norm", "return norm * factor"
    ),
    Mutant(
        "clip_grad_norm_",
        "gradients of gradients",
        "these tensors are the gradients, and have no .grad, where torch's clip_grad_norm_ looks; sum up their squares",
    ).body("return torch.nn.utils.clip_grad_norm_([*shards, *replicated], max_norm)"),
    Mutant("stretches", "scaled up", "below the limit gradients stay as they are: clamp the factor at 1").without(
        ".clamp(max=1.0)"
    ),
    Mutant("a part", "not scaled", "the replicated ones are not scaled: scale them too, in place", 1, 31).edit(
        "in [*shards, *replicated]:", "in shards:"
    ),
    Mutant("copies scaled", "not scaled", "nothing is scaled: scale in place, gradient *= factor").edit(
        "gradient *= factor", "gradient = gradient * factor"
    ),
    Mutant("gathers", "gradients gathered", "whole gradients travel, for one number: add up own squares first", 2).edit(
        _REDUCE,
        """
        square = torch.zeros_like(square)
        for shard in shards:
            whole = shard.new_empty(shard.numel() * dist.get_world_size())
            gather_into(whole, shard)
            square += whole.square().sum()
        """,
    ),
    Mutant(
        "a call per tensor",
        "a call per tensor",
        "each all-reduce costs a message's delay; add up the squares of all shards first, then all_reduce once",
        2,
    ).edit(
        _REDUCE,
        """
        squares = [gradient.square().sum() for gradient in shards]
        for one in squares:
            dist.all_reduce(one)
        square = sum(squares, torch.zeros_like(square))
        """,
    ),
)

_GATHER = "row = shard.new_empty(shard.numel() * dist.get_world_size())\ngather_into(row, shard)"
_GATHER_IN_LOOP, _GATHER_IN_IF = _GATHER.replace("\n", "\n    "), _GATHER.replace("\n", "\n        ")
_WHOLE, _ON_0 = "row[: shapes[name].numel()].view(shapes[name]).clone()", "dist.get_rank() == 0"
_FILLED = "the row's end is what it was filled up with; take the first shapes[name].numel() elements"

WRONG_REPAIR = (
    Mutant("only rank 0", "not on every rank", "inside it", 2, 41, ends=True).edit(
        f"for name, shard in shards.items():\n    {_GATHER_IN_LOOP}\n    if {_ON_0}:\n        state",
        f"if {_ON_0}:\n    for name, shard in shards.items():\n        {_GATHER_IN_IF}\n        state",
    ),
    Mutant("filled up", "filled up", f"{_FILLED}, in their shape", 2).edit(_WHOLE, "row"),
    Mutant("from the end", "filled up", _FILLED, 2).edit("row[: shapes[name].numel()]", "row[-shapes[name].numel() :]"),
    Mutant("flat", "flat", "a row has lost the shape; .view(shapes[name]) gives it back").without(
        ".view(shapes[name])"
    ),
    Mutant(
        "on every rank",
        "whole on every rank",
        "a node of 8 ranks has 8 copies of the whole model in memory: take part, and keep tensors on rank 0 only",
        2,
    ).edit(f"if {_ON_0}:", "if True:"),
    Mutant("own shards", "own shard", "rank 0 has its own shards alone: gather the others'", 2, 44)
    .edit(_GATHER, "row = shard")
    .edit(_WHOLE, "row"),
    Mutant("the last rank", "on another rank", "the last rank has all tensors: rank 0 keeps them", 2).edit(
        _ON_0, "dist.get_rank() == dist.get_world_size() - 1"
    ),
    Mutant("None elsewhere", "returned", "expected an empty dict", 2).edit("return state", "return state or None"),
    Mutant("empties the dict", "shards emptied", "the caller's dict has changed: training goes on with it").edit(
        "for name, shard in shards.items():", "for name in list(shards):\n    shard = shards.pop(name)"
    ),
)
