"""Backward through units: each rank keeps its shard of the mean gradients, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_07.checks import units
from distlab_lesson_07.checks.units import NUM_UNITS, SAMPLES, UNIT_BYTES, WIDTH
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Mutant


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    grad = seeded(rank, SAMPLES, WIDTH, purpose="grad")
    return {"": (units.shards_of(rank, n), units.inputs_of(rank)[:-1], grad)}


def _use(fn: Callable[..., Any], shards: list[Tensor], inputs: list[Tensor], grad: Tensor) -> dict[str, Any]:
    """Run backward; say which input each unit got, and what is whole at the peak: a row and its gradient may be."""
    took = dict.fromkeys(range(NUM_UNITS), "nothing")
    known = [x.clone() for x in inputs]

    def compute(unit: int, whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        took[unit] = next((f"inputs[{place}]" for place, one in enumerate(known) if torch.equal(x, one)), "no input")
        x = x if took[unit] == f"inputs[{unit}]" else known[unit]
        inner = grad * (1 - units.forward_of(whole, x).square())
        return (x.T @ inner).flatten(), inner @ whole.view(WIDTH, WIDTH).T

    found = units.run_units(fn, shards, inputs, grad, compute=compute, gives="the gradients")
    own = (NUM_UNITS + 1) / dist.get_world_size()  # shards of gradients, and one that is made
    whole = max(2, int(found["measured"].peak / UNIT_BYTES + 0.4 - own))
    inputs_in_words = {f"unit {unit} takes as its input": words for unit, words in took.items()}
    return found | inputs_in_words | {"rows and gradients of units that are whole at once": whole}


drive_backward = Cases(_cases, _use, needs="an all-gather and a reduce-scatter of each unit, in each of 4 runs,")
budget_backward = units.budget_of_units

_MEANS = "means = [torch.empty_like(shard) for shard in shards]"
_SCATTER = "scatter_sum(whole_grad, means[index])\nmeans[index] /= world_size"
_OWN = "whole_grad.chunk(world_size)[dist.get_rank()]"
_LATE = "reduce and drop each at once (a name keeps a tensor until it is given the next)"
_ALONE = "the gradients are of this rank's samples alone: nothing of the others reached them"

WRONG_BACKWARD = (
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).without("means[index] /= world_size"),
    Mutant(
        "same gradient",
        "gradient not passed on",
        "all units were given the gradient of the last output; hand the gradient of a unit's input to the one before",
    ).edit("whole_grad, grad =", "whole_grad, _ ="),
    Mutant("reduced at the end", "never freed", f"the whole gradients of all units are kept; {_LATE}", 1)
    .edit(_MEANS, "grads = []")
    .edit(_SCATTER, "grads.append(whole_grad)")
    .edit(
        "return means",
        f"""
        {_MEANS}
        for mean, whole_grad in zip(means, reversed(grads)):
            scatter_sum(whole_grad, mean)
            mean /= world_size
        return means
        """,
    ),
    Mutant(
        "gradient freed late", "freed too late", f"the old gradient is kept while the next is made; {_LATE}", 2
    ).without("del whole_grad"),
    Mutant("rows kept", "rows never freed", "the rows of all units are kept: del a row after compute", 1)
    .edit(_MEANS, f"{_MEANS}\nrows = []")
    .edit("del whole\n", "rows.append(whole)\n"),
    Mutant(
        "all-reduce",
        "all-reduce",
        "whole gradients are brought to every rank, which keeps one shard; scatter_sum is the half that you need",
        2,
    ).edit(_SCATTER, f"dist.all_reduce(whole_grad)\nmeans[index] = {_OWN} / world_size"),
    Mutant(
        "whole gradients", "whole gradient", "ranks keep whole gradients; scatter_sum leaves each its own part", 2
    ).edit(_SCATTER, "dist.all_reduce(whole_grad)\nmeans[index] = whole_grad / world_size"),
    Mutant("turned round", "wrong order", "gradients are in the order of backward: return unit 0's first", 1).edit(
        "return means", "return means[::-1]"
    ),
    Mutant("one tensor", "one tensor for all", "units share one tensor, which has unit 0's: make one for each").edit(
        _MEANS, "means = [torch.empty_like(shards[0])] * len(shards)"
    ),
    Mutant("own samples", "not communicated", _ALONE, 2, 66).edit(_SCATTER, f"means[index] = {_OWN}.clone()"),
    Mutant("own samples, divided", "not communicated", _ALONE, 2, 66).edit(
        _SCATTER, f"means[index] = {_OWN} / world_size"
    ),
)
