"""Numbers of 16 bits: masters that remember what weights round away, and a loss scale that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases, Noted
from distlab.course.grading.diagnosis.memory import peak_bytes
from distlab.course.grading.diagnosis.traffic import calls, in_megabytes
from distlab.course.grading.diagnosis.values import seeded, whole
from distlab.grading import Evidence, Fault, Mutant

MASTER_SHAPES = ((40, 8), (40, 8), (320,), (40, 8))
TWO, MORE = "two float32 tensors or less", "more than two float32 tensors"
INTERVAL, FIRST_SCALE = 3, 64.0
# What happens in each step of the scaler: nothing, or a number that is not finite on one rank (from the end).
EVENTS = ("fine", "inf on the last rank", "fine", "fine", "fine", "nan on rank 0", "fine")


def _master_case() -> tuple[Any, ...]:
    """Return weights, masters, each step's gradients and a learning rate: a step's last bits are below a weight's."""
    masters = [0.5 * seeded(i, *shape, purpose="master").float() for i, shape in enumerate(MASTER_SHAPES)]
    steps = [[3 * seeded(step, *shape, purpose="gradient").bfloat16() for shape in MASTER_SHAPES] for step in range(3)]
    return [master.bfloat16() for master in masters], masters, steps, 0.01


def use_master(
    fn: Callable[..., Any], weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float
) -> dict[str, Any]:
    """Take a step; masters of two right answers differ by a rounding, so each weight is compared with its own."""
    every = [*weights, *masters]
    places = [tensor.data_ptr() for tensor in every]
    _, peak = peak_bytes(fn, [*weights], [*masters], [*gradients], lr)
    return {
        "the masters": [master.clone() for master in masters],
        "the weights' types": [str(weight.dtype) for weight in weights],
        "each weight is its master, rounded": [
            torch.equal(w, m.to(w.dtype)) for w, m in zip(weights, masters, strict=True)
        ],
        "weights and masters keep their memory": places == [tensor.data_ptr() for tensor in every],
        "new memory at the peak": TWO if peak <= 1.05 * 8 * max(master.numel() for master in masters) else MORE,
        "peak": Noted(peak),
    }


def _use_masters(
    fn: Callable[..., Any], weights: list[Tensor], masters: list[Tensor], steps: list[list[Tensor]], lr: float
) -> dict[str, Any]:
    return {f"step {at}": use_master(fn, weights, masters, given, lr) for at, given in enumerate(steps)}


def _use_scaler(fn: Callable[..., Any], rank: int, n: int) -> dict[str, Any]:
    """Take some steps; fn's own scale and streak go into the next, the gradients are made for them."""
    scale, streak, result = FIRST_SCALE, 0, {}
    for step, event in enumerate(EVENTS):
        given = [scale * seeded(rank, *shape, purpose=f"scaler {step}").float() for shape in ((3, 2), (5,), (4,))]
        if (event.startswith("inf") and rank == n - 1) or (event.startswith("nan") and rank == 0):
            given[-1][2] = torch.inf if event.startswith("inf") else torch.nan
        got = fn([*given], scale, streak, INTERVAL)  # a list of its own: what counts is in the tensors
        is_whole = isinstance(got, tuple | list) and len(got) == 3
        update, scale, streak = (bool(got[0]), float(got[1]), whole(got[2])) if is_whole else (got, scale, streak)
        seen = {"whether to update": update, "the next scale": scale, "the next streak": streak}
        result[f"step {step} ({event})"] = seen | {"the gradients": given if update is True else []}
    return result


drive_master = Cases({"": _master_case()}, _use_masters)
drive_scaler = Cases(lambda rank, n: {"": (rank, n)}, _use_scaler, most_bytes=0)


def judge_scaler(evidence: Evidence) -> Iterator[Fault]:
    """One call a step, of one number."""
    for rank in range(evidence.world_size) if evidence.world_size > 1 else ():
        made = calls(evidence, rank)
        sent = sum(call.num_bytes for call in made)
        if len(made) > len(EVENTS) or sent > 8 * len(EVENTS):
            text = f"rank {rank} makes {len(made)} calls with {in_megabytes(sent)} in {len(EVENTS)} steps"
            advice = "one number per step is enough: look at all gradients first"
            yield Fault("too many calls", f"right answers, but {text}: {advice}")


def budget_master(evidence: Evidence) -> list[str]:
    """Say what was needed for a moment."""
    peak = max(step["peak"].value for step in evidence.results[0][""]["result"].values())
    return [f"new memory at the peak: {in_megabytes(peak)}, in addition to the masters' 4 bytes per parameter"]


def budget_scaler(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    made = calls(evidence, 0)
    return [f"{len(made)} calls in {len(EVENTS)} steps, {sum(call.num_bytes for call in made)} bytes in all"]


_UPDATE, _COPY = "master.sub_(lr * gradient.float())", "weight.copy_(master)"
WRONG_MASTER = (
    Mutant(
        "16-bit update",
        "updated in 16 bits",
        "the update went into the 16-bit weights, where most of it is rounded away: update the masters, then copy them",
        1,
        "popular claim",
    ).edit(f"{_UPDATE}\n{_COPY}", "weight.sub_(lr * gradient)"),
    Mutant(
        "rebuilt",
        "rebuilt from 16 bits",
        "it begins at the 16-bit weights, which have lost what is below their last bit: keep the masters",
        1,
    ).edit(_UPDATE, "master.copy_(weight.float() - lr * gradient.float())"),
    Mutant(
        "16-bit, copied", "updated in 16 bits", "the 16-bit weights are updated, then copied; update the masters", 1
    ).edit(f"{_UPDATE}\n{_COPY}", "weight.sub_(lr * gradient)\nmaster.copy_(weight)"),
    Mutant(
        "not copied back",
        "not copied back",
        "forward never sees this update: copy each master into its weight, after it",
        1,
    ).without(_COPY),
    Mutant(
        "16-bit product", "multiplied in 16 bits", "the step is rounded to 16 bits: gradient.float() comes first", 1
    ).edit("gradient.float()", "gradient"),
    Mutant(
        "float32 weights", "weights turned float32", "the weights are float32 now: copy the values into them, copy_", 1
    ).edit(_COPY, "weight.data = master.clone()"),
    Mutant(
        "new memory",
        "replaced",
        "weights are in new memory, and model and optimizer still hold the old: write into it, copy_",
        1,
    ).edit(_COPY, "weight.data = master.to(weight.dtype)"),
    Mutant(
        "new tensors",
        "nothing written",
        "nothing is written: `master = ...` only gives the name to a new tensor; use sub_ and copy_",
        1,
    )
    .edit(_UPDATE, "master = master - lr * gradient.float()")
    .edit(_COPY, "weight = master.bfloat16()"),
    Mutant("masters rounded", "rounded", "the masters are rounded to 16 bits, then float32 is of no use", 1).edit(
        _COPY, f"{_COPY}\nmaster.copy_(weight)"
    ),
    Mutant(
        "weights updated too",
        "not the copy",
        "the weights take a step of their own; copy_ each master into its weight",
        1,
    ).edit(_COPY, "weight.sub_(lr * gradient)"),
    Mutant("uphill", "wrong sign", "it goes up the slope: subtract lr x gradient", 1).edit("sub_(", "add_("),
    Mutant("whole gradient", "without lr", "it takes a step of the whole gradient: multiply it by lr", 1).without(
        "lr * "
    ),
    Mutant("first alone", "first alone", "it updates the first tensor alone: go through all of them", 1).edit(
        _COPY, f"{_COPY}\nbreak"
    ),
    Mutant(
        "all in float32 first",
        "all at once",
        "all gradients in float32 at once cost 4 bytes per parameter again: take one tensor at a time",
        1,
    ).edit("for weight,", "gradients = [gradient.float() for gradient in gradients]\nfor weight,"),
)

_UNSCALE = "for gradient in gradients:\n    gradient.div_(scale)"
_SHARE = "dist.all_reduce(overflow, dist.ReduceOp.MAX)"
_SCALED = "they are still those of the scaled loss: divide each by the scale, in place, before clipping"
_IN_A_ROW = "good steps *in a row* count: an overflow begins the count again at 0"
WRONG_SCALER = (
    Mutant(
        "alone",
        "decided alone",
        "each rank looks at its own gradients alone, so weights differ: share the decision",
        2,
        4,
    ).without(_SHARE),
    Mutant(
        "in a branch",
        "call in a branch",
        "a collective inside a branch meets one of another step: call it on every rank in every step",
        2,
        5,
    ).edit("dist.all_reduce(", "if overflow.item() > 0:\n    dist.all_reduce("),
    Mutant(
        "all must overflow", "one is enough", "one rank with an overflow is enough: share it with MAX, not with MIN", 2
    ).edit("ReduceOp.MAX", "ReduceOp.MIN"),
    Mutant("NaN alone", "infinity missed", "NaN is looked for, infinity is not: ask isfinite", 1).edit(
        "gradient.isfinite().all()", "(~gradient.isnan()).all()"
    ),
    Mutant("infinity alone", "NaN missed", "infinity is looked for, NaN is not: ask isfinite", 1).edit(
        "gradient.isfinite().all()", "(~gradient.isinf()).all()"
    ),
    Mutant("first gradient", "overflow missed", "an overflow is missed: look at all gradients", 1).edit(
        "in gradients]", "in gradients[:1]]"
    ),
    Mutant("not unscaled", "not unscaled", _SCALED, 1).without(_UNSCALE),
    Mutant("into the list", "not unscaled", _SCALED, 1).edit(
        _UNSCALE, "gradients[:] = [gradient / scale for gradient in gradients]"
    ),
    Mutant("next scale", "next scale", "they are divided by the next scale: change the scale afterwards", 1).edit(
        "div_(scale)", "div_(scale * 2 if streak + 1 == interval else scale)"
    ),
    Mutant("multiplied", "multiplied", "they are multiplied by the scale once more; divide by it", 1).edit(
        "div_", "mul_"
    ),
    Mutant(
        "averaged",
        "gradients mixed",
        "each rank holds other pieces of the model: share the finding, not the gradients",
        2,
    ).edit("gradient.div_(scale)", "gradient.div_(scale)\ndist.all_reduce(gradient)"),
    Mutant("not in a row", "streak goes on", _IN_A_ROW, 1).edit("scale / 2, 0", "scale / 2, streak"),
    Mutant("counts on", "streak goes on", "a doubling begins the count again at 0", 1).edit(
        "scale * 2, 0", "scale * 2, streak + 1"
    ),
    Mutant(
        "never grows", "never grows", "so many good steps in a row double the scale, or it stays low forever", 1
    ).edit("scale * 2, 0", "scale, 0"),
    Mutant(
        "doubles late", "doubles late", "this good step counts too: add it before you compare with the interval", 1
    ).edit("streak + 1 == interval", "streak == interval"),
    Mutant("not lowered", "not lowered", "an overflow halves the scale, or it overflows again in each step", 1).edit(
        "scale / 2, 0", "scale, 0"
    ),
    Mutant("a call per gradient", "too many calls", "one number per step is enough: look at all gradients first", 2)
    .edit("in gradients]).all()", "in gradients])")
    .edit(
        f"overflow = (~finite).float()\n{_SHARE}\nif overflow.item() > 0:",
        """
        overflows = (~finite).float()
        for overflow in overflows:
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        if overflows.any():
        """,
    ),
)
