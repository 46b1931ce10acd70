"""A state dict that is put together from shards."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import seeded
from distlab.course.grading.variation.draw import Name
from distlab.grading import Evidence, Fault, Mutant

SHAPES = {"embed.weight": torch.Size([5, 3]), "norm.bias": torch.Size([7]), "head.weight": torch.Size([2, 6])}


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


def budget_repair(evidence: Evidence) -> list[str]:
    """Say what was gathered."""
    return [f"{len(calls(evidence, 0))} gathers, one per tensor, by all ranks; whole on rank 0 only"]


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
