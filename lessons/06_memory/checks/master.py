"""Master weights: a float32 copy that remembers what 16-bit weights round away."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import known_mistake
from distlab.grading.diagnosis.memory import peak_bytes
from distlab.grading.diagnosis.traffic import in_megabytes
from distlab.grading.diagnosis.values import compare, equal, joined, seeded

LEARNING_RATE, MASTER_STEPS, MASTER_SHAPES = 0.01, 3, ((40, 8), (40, 8), (320,), (40, 8))


def master_case() -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Return weights, masters and each step's gradients: a step's last bits are below a weight's."""
    masters = [0.5 * seeded(i, *shape, purpose="master").float() for i, shape in enumerate(MASTER_SHAPES)]
    weights = [master.bfloat16() for master in masters]
    steps = [
        [3 * seeded(step, *master.shape, purpose=f"gradient {i}").bfloat16() for i, master in enumerate(masters)]
        for step in range(MASTER_STEPS)
    ]
    return weights, masters, steps


def drive_master(fn: Callable[..., Any]) -> dict[str, Any]:
    """Take some steps; return what weights and masters are after each, and the peak of one step."""
    weights, masters, steps = master_case()
    seen, peaks = [], []
    for gradients in steps:
        given = copy.deepcopy(gradients)
        places = [tensor.data_ptr() for tensor in (*weights, *masters)]
        peaks.append(peak_bytes(fn, list(weights), list(masters), given, LEARNING_RATE)[1])
        kept = all(torch.equal(one, other) for one, other in zip(given, gradients, strict=True))
        moved = places != [tensor.data_ptr() for tensor in (*weights, *masters)]
        now = {"weights": copy.deepcopy(weights), "masters": copy.deepcopy(masters)}
        seen.append(now | {"kept": kept, "moved": moved})
    return {"steps": seen, "peak": max(peaks)}


def judge_master(evidence: Evidence) -> Iterator[Fault]:
    """Masters as float32 SGD makes them, weights as their rounded copies, in every step, in place."""
    result = evidence.results[0]
    weights, masters, steps = master_case()
    for step, (row, gradients) in enumerate(zip(result["steps"], steps, strict=True)):
        wanted = [m - LEARNING_RATE * g.float() for m, g in zip(masters, gradients, strict=True)]
        for index, weight in enumerate(row["weights"]):
            if weight.dtype != torch.bfloat16:
                text = f"weight {index} is {weight.dtype} after step {step}, was bfloat16"
                advice = "copy the values into it (copy_), do not replace its data"
                yield Fault("weights turned float32", f"{text}: {advice}")
        if row["moved"]:
            text = f"step {step}: weights or masters are in new memory, but model and optimizer still hold the old"
            yield Fault("replaced", f"{text}; write into the old (sub_, copy_), do not replace .data")
        got, right = joined(row["masters"]), joined(wanted)
        if not equal(got, right):
            yield _explain_master(step, row, (weights, masters, gradients), right)
        want = [master.bfloat16() for master in row["masters"]]  # within a last bit of ours
        if not torch.equal(joined(row["weights"]), joined(want)):
            if torch.equal(joined(row["weights"]), joined(weights)):
                text = f"after step {step} the masters are right and the weights are as before"
                advice = "forward would never see an update; copy each master into its weight after its update"
                yield Fault("not copied back", f"{text}: {advice}")
            text = f"step {step}: the masters are right, and the weights are not the masters rounded to 16 bits"
            yield Fault("not the copy", f"{text}: do not update the weights too; copy_ each master into its weight")
        if not row["kept"]:
            yield Fault("changed gradients", f"step {step}: the gradients were written to; leave them as they are")
        weights, masters = want, wanted
    limit = 2 * 4 * max(master.numel() for master in masters)
    if result["peak"] > limit * 1.05:
        text = f"right values, but {in_megabytes(result['peak'])} of new memory at the peak"
        advice = "two float32 tensors: all gradients in float32 at once cost 4 bytes per parameter again"
        yield Fault("all at once", f"{text}, where {in_megabytes(limit)} are allowed, {advice}")


def _explain_master(
    step: int, row: dict[str, Any], before: tuple[list[Tensor], list[Tensor], list[Tensor]], want: Tensor
) -> Fault:
    weights, masters, gradients = before
    got, lr = joined(row["masters"]), LEARNING_RATE
    what = f"step {step}: the masters"
    if torch.equal(got, joined(masters)):
        if torch.equal(joined(row["weights"]), joined(weights)):
            text = f"{what} and the weights are as before: write into the tensors that you were given"
            return Fault("nothing written", f"{text}; `master = ...` only gives the name to a new tensor")
        text = f"{what} are as before, the update went into the 16-bit weights, where most of it is rounded away"
        return Fault("updated in 16 bits", f"{text}: update the masters, then copy them into the weights")
    if torch.equal(got, got.bfloat16().float()):
        advice = "then float32 is of no use; copy masters into weights, not back"
        return Fault("rounded", f"{what} are rounded to 16 bits: {advice}")
    old, gradient, step_16 = joined(masters), joined(gradients).float(), (lr * joined(gradients)).float()
    lost = "begin at the 16-bit weights: what the last steps added below their last bit is lost; keep the masters"
    known = (
        ("rebuilt from 16 bits", joined(weights).float() - lr * gradient, lost),
        ("multiplied in 16 bits", old - step_16, "take a step that was rounded to 16 bits: gradient.float()"),
        ("wrong sign", old + lr * gradient, "go up the slope: subtract lr x gradient"),
        ("without lr", old - gradient, "take a step of the whole gradient: multiply it by lr"),
    )
    return known_mistake(got, want, known, what) or compare(got, want, what) or Fault("values", what)


def budget_master(evidence: Evidence) -> list[str]:
    """Say what was needed for a moment."""
    text = f"new memory at the peak: {in_megabytes(evidence.results[0]['peak'])}"
    return [f"{text}, in addition to the masters' 4 bytes per parameter"]


_UPDATE = "master.sub_(lr * gradient.float())"
WRONG_MASTERS = (
    Mutant("16-bit update", "updated in 16 bits", "rounded away", 1, "popular claim").edit(
        f"{_UPDATE}\nweight.copy_(master)", "weight.sub_(lr * gradient)"
    ),
    Mutant("rebuilt", "rebuilt from 16 bits", "keep the masters", 1).edit(
        _UPDATE, "master.copy_(weight.float() - lr * gradient.float())"
    ),
    Mutant("not copied back", "not copied back", "never see an update", 1).without("weight.copy_(master)"),
    Mutant("16-bit product", "multiplied in 16 bits", "gradient.float()", 1).edit("gradient.float()", "gradient"),
    Mutant("float32 weights", "weights turned float32", "copy_", 1).edit(
        "weight.copy_(master)", "weight.data = master.clone()"
    ),
    Mutant("new tensors", "nothing written", "gives the name", 1)
    .edit(_UPDATE, "master = master - lr * gradient.float()")
    .edit("weight.copy_(master)", "weight = master.bfloat16()"),
    Mutant("all in float32 first", "all at once", "4 bytes per parameter again", 1).edit(
        "for weight,", "gradients = [gradient.float() for gradient in gradients]\nfor weight,"
    ),
)
