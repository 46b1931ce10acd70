"""A row of parameters that is cut into shards, and the step of ZeRO-1 on such a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import in_megabytes
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

SHARD_CASES = (((6, 6), 2), ((5, 3), 2), ((7,), 3), ((2, 9, 1), 4), ((3, 4, 0, 5), 3), ((1, 2), 4), ((10, 7), 1))
ROW = 24  # elements of the row of ZeRO-1: 1, 2, 3 and 4 ranks divide it
UPDATES = 2


def _pieces_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    every = ((list(sizes), count, shard) for sizes, count in SHARD_CASES for shard in range(count))
    return {f"tensors of {case[0]} elements, shard {case[2]} of {case[1]}": case for case in every}


class Momentum:
    """An optimizer with state for what it is given: SGD with momentum; writes down what that was."""

    def __init__(self, lr: float) -> None:
        self.lr, self.buffer, self.seen = lr, torch.zeros(()), list[tuple[Tensor, Tensor]]()

    def __call__(self, shard: Tensor, gradient: Tensor) -> None:
        """Update a shard in place."""
        self.seen.append((shard.clone(), gradient.clone()))
        self.buffer = self.buffer.to(gradient.dtype) * 0.5 + gradient
        shard.sub_(self.lr * self.buffer)


def use_step(fn: Callable[..., Any], rows: list[Tensor], gradients: list[Tensor], lr: float) -> dict[str, Any]:
    """Make some updates of the rows in turn; say what update got, and what became of the row."""
    updates = [Momentum(lr / (1 + number)) for number in range(len(rows))]
    steps = {}
    for step, gradient in enumerate(gradients):
        for number, (row, update) in enumerate(zip(rows, updates, strict=True)):
            update.seen.clear()
            fn(row, gradient.clone(), update)
            shard, mean = update.seen[0] if update.seen else (None, None)
            steps[f"step {step}" + f", row {number}" * (len(rows) > 1)] = {
                "number of calls of update": len(update.seen),
                "the shard that update got": shard,
                "the gradient that update got": mean,
                "parameters": row.clone(),
            }
    return steps


def _step_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    gradients = [seeded(rank, ROW, purpose=f"zero 1 {step}") for step in range(UPDATES)]
    return {"": ([seeded(-1, ROW, purpose="row")], gradients, 0.1)}


drive_pieces = Cases(_pieces_cases)
drive_step = Cases(_step_cases, use_step, needs="a reduce-scatter and an all-gather")


def budget_pieces(evidence: Evidence) -> list[str]:
    """Say how much is filled up."""
    filled = max(-(-sum(sizes) // count) * count - sum(sizes) for sizes, count in SHARD_CASES)
    return [f"{len(SHARD_CASES)} cases; at most {filled} elements filled up, always fewer than there are shards"]


def budget_step(evidence: Evidence) -> list[str]:
    """Say what was sent and what state a rank holds."""
    n, first = evidence.world_size, evidence.results[0][""]["result"]["step 0"]
    sent, state = in_megabytes(2 * (n - 1) / n * 8 * ROW), first["the gradient that update got"].numel()
    return [f"sent {sent} per rank and step, as an all-reduce does", f"optimizer state: {state} of {ROW} elements"]


_LENGTH, _BOTH = "-(-sum(sizes) // num_shards)", "start - begin, stop - begin"
_PIECE, _FROM_LOW, _MANY = f"(tensor, {_BOTH})", "start - low, stop - low", "start - begin, stop - start"
_ROW_END = "start - begin, high if high < begin + size else size"
_BOUNDS = "low, high = shard * length, (shard + 1) * length"
_SUM, _OWN = "scatter_sum(gradient, mean)\nmean /= dist.get_world_size()", "gradient.chunk(dist.get_world_size())"
_ALONE = "the shard is updated with this rank's own gradient; scatter_sum adds up those of all ranks"

WRONG_PIECES = (
    Mutant(
        "rounded down",
        "elements lost",
        "the last elements are in no shard, so no rank would update them; round up: -(-total // num_shards)",
    ).edit(_LENGTH, "sum(sizes) // num_shards"),
    Mutant(
        "whole tensors",
        "unequal shards",
        "tensors stay whole: the fullest rank decides what fits; cut through them, so that shards are equally long",
    ).body("""
        held, found = [0] * num_shards, []
        for tensor, size in enumerate(sizes):
            least = held.index(min(held))
            held[least] += size
            if least == shard and size:
                found.append((tensor, 0, size))
        return found
    """),
    Mutant(
        "each tensor",
        "each tensor cut",
        "every tensor is cut by itself, as FSDP2 does; here the tensors lie end to end, and their row is cut",
    ).body("""
        lengths = [-(-size // num_shards) for size in sizes]
        cuts = [(shard * part, min((shard + 1) * part, size)) for part, size in zip(lengths, sizes, strict=True)]
        return [(tensor, *cut) for tensor, cut in enumerate(cuts) if cut[0] < cut[1]]
    """),
    Mutant("empty pieces", "empty piece", "a piece without elements is in the list: leave it out (start < stop)").edit(
        "start < stop", "start <= stop"
    ),
    Mutant("padding is the last's", "past the end", "what the row is filled up with belongs to no tensor").edit(
        "low, high =", "sizes = [*sizes[:-1], sizes[-1] + length * num_shards - sum(sizes)]\nlow, high ="
    ),
    Mutant("first ones longer", "first longer", "the first shards are one longer; all are equal, and filled up").edit(
        _BOUNDS,
        "low, high = (s * (sum(sizes) // num_shards) + min(s, sum(sizes) % num_shards) for s in (shard, shard + 1))",
    ),
    Mutant(
        "no cut tensors", "no cut tensors", "a tensor that is cut is in no shard; take the part that is in this one"
    ).edit("start < stop", "size == stop - start > 0"),
    Mutant(
        "rest to the last", "rest to the last", "the last shard takes the rest, and is longer; round up, all are equal"
    )
    .edit(_LENGTH, "sum(sizes) // num_shards")
    .edit(_BOUNDS, "low, high = shard * length, (shard + 1) * length if shard < num_shards - 1 else sum(sizes)"),
    *(
        Mutant(name, name, says).edit(_PIECE, f"(tensor, {piece})")
        for name, says, piece in (
            ("in the row", "start and stop count in the whole row; subtract where the tensor begins", "start, stop"),
            ("end in the row", "the end of a shard counts in the row; subtract where the tensor begins", _ROW_END),
            ("in the shard", "both count in the shard; subtract the tensor's begin, not the shard's", _FROM_LOW),
            ("last element", "stop is the last element; one past it is asked, as in a slice", f"{_BOTH} - 1"),
            ("a length", "stop is how many elements there are; start + that many is asked", _MANY),
            ("not cut at its end", "a piece is not cut at the end of its shard", "start - begin, size"),
            ("not cut at its start", "a piece is not cut at the start of its shard", "0, stop - begin"),
        )
    ),
    Mutant("filled in front", "filled in front", "the row is filled up in front; fill it up at its end").edit(
        "], 0\n", "], length * num_shards - sum(sizes)\n"
    ),
)
WRONG_STEP = (
    Mutant(
        "all-reduce",
        "all-reduce",
        "every rank gets the mean of all gradients and uses one shard of it; scatter_sum is the half that you need",
        2,
    )
    .edit("scatter_sum(gradient, mean)", "dist.all_reduce(gradient)")
    .edit("mean /=", f"mean = {_OWN}[dist.get_rank()] /"),
    Mutant(
        "updates everything",
        "whole row updated",
        "all elements are updated, so every rank holds the optimizer's state of all; give update the own shard alone",
        2,
    )
    .edit("update(own, mean)", "gather_into(gradient, mean)\nupdate(parameters, gradient)")
    .without("gather_into(parameters, own)"),
    Mutant(
        "no gather",
        "not gathered",
        "the others' shards have their old values: replicas drift apart; all-gather the new ones after the update",
        2,
        66,
    ).without("gather_into(parameters, own)"),
    Mutant("gathers first", "gathered too early", "shards are gathered before update; the others get old ones", 2).edit(
        "update(own, mean)\ngather_into(parameters, own)", "gather_into(parameters, own)\nupdate(own, mean)"
    ),
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).without("mean /= dist.get_world_size()"),
    Mutant("own gradient", "own gradient", _ALONE, 2, 66).edit(_SUM, f"mean = {_OWN}[dist.get_rank()]"),
    Mutant("own gradient, divided", "own gradient", _ALONE, 2, 66).edit(
        _SUM, f"mean = {_OWN}[dist.get_rank()] / dist.get_world_size()"
    ),
    Mutant("a copy", "nothing written", "the parameters are as before: update a view of the row, not a copy")
    .edit("[dist.get_rank()]", "[dist.get_rank()].clone()")
    .edit("gather_into(parameters, own)", "gather_into(torch.empty_like(parameters), own)"),
    Mutant("another's shard", "wrong shard", "a different rank's shard is updated: parameters.chunk(n)[rank]", 2)
    .edit("[dist.get_rank()]", "[-1 - dist.get_rank()]")
    .edit("gather_into(parameters, own)", "gather_into(parameters, own.clone())"),
)
