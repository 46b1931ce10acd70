"""Backward through units: each rank keeps its shard of the mean gradients, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_07.checks import units
from distlab_lesson_07.checks.units import MODEL_BYTES, NUM_UNITS, SAMPLES, UNIT, UNIT_BYTES, WIDTH
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import known_mistake
from distlab.grading.diagnosis.traffic import calls, in_megabytes
from distlab.grading.diagnosis.values import compare, describe, seeded


def backward_of(whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a unit's parameters and of its input."""
    if whole.numel() != WIDTH * WIDTH:  # it goes on, so that the judge can say what was wrong
        return x.new_zeros(WIDTH * WIDTH), grad
    inner = grad * (1 - units.forward_of(whole, x).square())
    return (x.T @ inner).flatten(), inner @ whole.view(WIDTH, WIDTH).T


def grad_of(rank: int) -> Tensor:
    """Return the gradient of a rank's last output."""
    return seeded(rank, SAMPLES, WIDTH, purpose="grad")


def drive_backward(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run backward through the units; write down the order and what each got; then again for the peak of memory."""
    rank = dist.get_rank()
    inputs, log = units.inputs_of(rank)[:-1], []

    def noted(unit: int, whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        log.append((unit, whole.numel(), torch.equal(whole, units.weights_of(unit)), torch.equal(x, inputs[unit])))
        return backward_of(whole, x, grad)

    return units.run_units(fn, (inputs, grad_of(rank)), noted, backward_of) | {"log": log}


def judge_backward(evidence: Evidence) -> Iterator[Fault]:
    """Units in reverse, each rank its shard of the mean gradients, two Psi on the wire, two whole rows at the peak."""
    n = evidence.world_size
    gradients, unpassed = _true_gradients(n)
    for rank, result in enumerate(evidence.results):
        order = [entry[0] for entry in result["log"]]
        if order != list(reversed(range(NUM_UNITS))):
            yield Fault("units", f"rank {rank} ran backward of units {order}; expected the last first, each once")
        yield from units.judge_whole(rank, result["log"], n, bool(calls(evidence, rank)))
        for unit, *_, is_right in result["log"]:
            if not is_right:
                yield Fault("wrong input", f"rank {rank} gave unit {unit} another input than inputs[{unit}]")
        if not result["kept"]:
            text = f"rank {rank}'s shards of parameters were changed by backward: only the optimizer may change them"
            yield Fault("changed argument", f"{text}; put gradients into tensors of their own")
        yield from _judge_gradients(result["got"], gradients, unpassed, (rank, n))
    wanted = 2 * (n - 1) / n * MODEL_BYTES
    yield from units.judge_traffic(evidence, wanted, "an all-gather and a reduce-scatter of each unit")
    for rank, result in enumerate(evidence.results):
        limit = (2 + (NUM_UNITS + 1) / n + 0.6) * UNIT_BYTES
        if result["peak"] > limit:
            text = f"right result, but rank {rank} holds {in_megabytes(result['peak'])} at once, where one unit, its"
            text += f" gradient and all shards of gradients need less than {in_megabytes(limit)}: whole gradients, or"
            text += " whole units, are kept until the end; reduce and drop each at once (a name keeps a tensor until it"
            yield Fault("never freed", f"{text} is given the next; a view, such as a chunk, keeps the whole of it)")


def _true_gradients(n: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return each rank's whole gradients, and those of a backward that gives every unit the last gradient."""
    right, unpassed = [], []
    for rank in range(n):
        inputs, grad = units.inputs_of(rank), grad_of(rank)
        mine: list[Tensor] = []
        for unit in reversed(range(NUM_UNITS)):
            own, grad = backward_of(units.weights_of(unit), inputs[unit], grad)
            mine.insert(0, own)
        right.append(mine)
        wholes = [units.weights_of(unit) for unit in range(NUM_UNITS)]
        unpassed.append([backward_of(wholes[unit], inputs[unit], grad_of(rank))[0] for unit in range(NUM_UNITS)])
    return right, unpassed


def _judge_gradients(
    got: Any, gradients: list[list[Tensor]], unpassed: list[list[Tensor]], where: tuple[int, int]
) -> Iterator[Fault]:
    rank, n = where
    if not isinstance(got, list | tuple) or len(got) != NUM_UNITS:
        yield Fault("returned", f"rank {rank}: expected a list of {NUM_UNITS} tensors, got {describe(got)}")
    for unit, tensor in enumerate(got):
        if n > 1 and isinstance(tensor, Tensor) and tensor.numel() == UNIT:
            text = f"rank {rank} keeps the whole gradient of unit {unit}: {UNIT} elements where its shard has"
            yield Fault("whole gradient", f"{text} {UNIT // n}; scatter_sum leaves it with its own part of the sum")

    def mean_of(ranks: list[list[Tensor]], unit: int) -> Tensor:
        return torch.stack([mine[unit] for mine in ranks]).mean(0).chunk(n)[rank]

    for unit in reversed(range(NUM_UNITS)):
        mean, what = mean_of(gradients, unit), f"rank {rank}'s gradient shard of unit {unit}"
        if fault := compare(got[unit], mean, what, n):
            alone = gradients[rank][unit].chunk(n)[rank]
            text = "is of this rank's samples alone: nothing of the others reached it"
            known = [("not communicated", one, text) for one in (alone, alone / n) if n > 1]
            for other in range(NUM_UNITS):
                text = f"is that of unit {other}: return them in the order of the units, not of backward, and a tensor"
                known.append(("wrong order", mean_of(gradients, other), f"{text} of its own for each"))
            text = "was computed from the gradient of the last unit's output; each unit hands its input's gradient to"
            known.append(("gradient not passed on", mean_of(unpassed, unit), f"{text} the one before"))
            yield known_mistake(got[unit], mean, known, what) or fault


_MEANS = "means = [torch.empty_like(shard) for shard in shards]"
_SCATTER = "scatter_sum(whole_grad, means[index])\nmeans[index] /= world_size"

WRONG_BACKWARDS = (
    Mutant("sum", "sum not mean", "divide by world_size (4)", 4, 9).without("means[index] /= world_size"),
    Mutant("same gradient", "gradient not passed on", "the one before", 1).edit(
        "whole_grad, grad =", "whole_grad, _ ="
    ),
    Mutant("reduced at the end", "never freed", "kept until the end", 4)
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
    Mutant("all-reduce", "all-reduce", "what only one needs", 2).edit(
        _SCATTER,
        "dist.all_reduce(whole_grad)\nmeans[index] = whole_grad.chunk(world_size)[dist.get_rank()] / world_size",
    ),
    Mutant("whole gradients", "whole gradient", "its own part of the sum", 2).edit(
        _SCATTER, "dist.all_reduce(whole_grad)\nmeans[index] = whole_grad / world_size"
    ),
    Mutant("turned round", "wrong order", "not of backward", 2).edit("return means", "return means[::-1]"),
    Mutant("own samples", "not communicated", "this rank's samples alone", 2, 66).edit(
        _SCATTER, "means[index] = whole_grad.chunk(world_size)[dist.get_rank()].clone()"
    ),
)
