"""Numbers of 16 bits and of 8: masters that remember what weights round away, and a scale that all ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases, Noted
from distlab.course.grading.diagnosis.memory import peak_bytes
from distlab.course.grading.diagnosis.traffic import calls, in_megabytes
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

MASTER_SHAPES = ((40, 8), (40, 8), (320,), (40, 8))
TWO, MORE = "two float32 tensors or less", "more than two float32 tensors"
EIGHT = torch.float8_e4m3fn


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


def near_codes(codes: Tensor, largest: float, jitter: Tensor) -> Tensor:
    """Return a weight near 8-bit numbers whose largest is 448, scaled: no rounding of right answers is a close call.

    Shapes: codes uint8 and jitter (in [-1, 1]) of one shape; the same
    """
    numbers = codes.view(EIGHT).float().nan_to_num(nan=0.0).clamp(-416, 416)
    return numbers * (1 + jitter.float().clamp(-1, 1) / 64) * (largest / 448)


def _eight_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Make weights whose largest magnitude, a negative number, is on one rank; on the others all is far smaller."""
    given = {}
    for name, owner, largest in (("", n - 1, 3.0), ("largest on rank 0", 0, 0.02), ("large", n // 2, 9000.0)):
        codes = (seeded(rank, 5, 7, purpose=f"codes {name}").abs() * 1e6).long() % 256
        part = near_codes(codes.to(torch.uint8), largest, seeded(rank, 5, 7, purpose="jitter"))
        if rank == owner:
            part[2, 3] = -largest
        else:
            part = torch.where(part.abs() < largest / 8, part, part / 64)
        given[name] = (part,)
    return given | {"zeros": (torch.zeros(5, 7),)}


def _use_eight(fn: Callable[..., Any], part: Tensor) -> Any:
    """Return the whole weight; of one of zeros whether it is zeros."""
    whole = fn(part)
    is_zeros = isinstance(whole, Tensor) and not bool(part.any())
    return {"a weight of zeros stays zeros": bool(whole.eq(0).all())} if is_zeros else whole


drive_eight = Cases(
    _eight_cases, _use_eight, most_bytes=1.25, needs="one number to agree on, and one byte an element to gather,"
)
drive_master = Cases({"": _master_case()}, _use_masters)


def budget_master(evidence: Evidence) -> list[str]:
    """Say what was needed for a moment."""
    peak = max(step["peak"].value for step in evidence.results[0][""]["result"].values())
    return [f"new memory at the peak: {in_megabytes(peak)}, in addition to the masters' 4 bytes per parameter"]


def budget_eight(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    made = calls(evidence, 0)
    return [f"{len(made)} calls in 4 weights of 35 numbers a rank: {sum(call.num_bytes for call in made)} bytes in all"]


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

_SHARE = "dist.all_reduce(largest, dist.ReduceOp.MAX)"
_SCALE, _CAST = "scale = 448 / largest if largest > 0 else torch.tensor(1.0)", "(part * scale).to(torch.float8_e4m3fn)"
_BACK = ".view(torch.float8_e4m3fn).float() / scale"
_OWN = "each rank multiplies by a scale of its own part, and all divide by theirs: agree on the largest magnitude first"
WRONG_EIGHT = (
    Mutant("own scale", "own scale", _OWN, 2, "popular claim").without(_SHARE),
    Mutant("summed", "largest added up", "the ranks' largest are added up: all_reduce them with MAX", 2).edit(
        "dist.ReduceOp.MAX", "dist.ReduceOp.SUM"
    ),
    Mutant("smallest", "the smallest of the largest", "numbers of other ranks pass over 448: MAX, not MIN", 2).edit(
        "ReduceOp.MAX", "ReduceOp.MIN"
    ),
    Mutant("no magnitude", "sign forgotten", "the largest number is not the largest magnitude: abs() first", 1).edit(
        "part.abs().max()", "part.max()"
    ),
    Mutant("division by zero", "values", "a weight of zeros stays zeros: expected True", 1).edit(
        " if largest > 0 else torch.tensor(1.0)", ""
    ),
    Mutant(
        "cast first", "cast first", "it is cast before it is scaled, and small numbers are gone: multiply, then cast", 1
    ).edit(_CAST, "(part.to(torch.float8_e4m3fn).float() * scale).to(torch.float8_e4m3fn)"),
    Mutant(
        "not scaled back", "not scaled back", "the numbers are still those of the scaled weight: divide by scale", 1
    ).edit(_BACK, ".view(torch.float8_e4m3fn).float()"),
    Mutant("to one", "scaled to 1", "the largest becomes 1, and not 448: the type's small numbers round away", 1).edit(
        "448 / largest", "1 / largest"
    ),
    Mutant("no scale", "no scale", "without a scale small weights round to 0 and large ones pass over 448", 1).edit(
        _SCALE, "scale = torch.tensor(1.0)"
    ),
    Mutant("other type", "the type with fewer digits", "float8_e5m2 has 2 binary digits after the point, e4m3fn 3", 1)
    .edit(_CAST, "(part * scale).to(torch.float8_e5m2)")
    .edit(_BACK, ".view(torch.float8_e5m2).float() / scale"),
    Mutant("own part exact", "own part exact", "the own part was not rounded, so each rank uses other numbers", 1).edit(
        f"return torch.cat(parts){_BACK}",
        f"""
        whole = torch.cat(parts){_BACK}
        rows = len(part)
        whole[dist.get_rank() * rows : (dist.get_rank() + 1) * rows] = part
        return whole
        """,
    ),
    Mutant("in full", "too many bytes", "the numbers travel in 32 bits, and are cast where they arrive: cast first", 2)
    .edit(f"eight = {_CAST}.view(torch.uint8)", "eight = part")
    .edit(f"torch.cat(parts){_BACK}", "(torch.cat(parts) * scale).to(torch.float8_e4m3fn).float() / scale"),
    Mutant(
        "own order", "order of ranks", "parts are in the order of ranks, on every rank: do not put the own one first", 2
    ).edit("torch.cat(parts)", "torch.cat(parts[dist.get_rank() :] + parts[: dist.get_rank()])"),
    Mutant(
        "whole numbers",
        "whole numbers",
        "to(torch.uint8) rounds to whole numbers; view(torch.uint8) keeps the bytes",
        1,
    ).edit(f"{_CAST}.view(torch.uint8)", f"{_CAST}.float().abs().to(torch.uint8)"),
    Mutant("a scale a part", "a scale a part", "each part has a scale of its own: the weight needs one for all", 2)
    .without(_SHARE)
    .edit(
        f"return torch.cat(parts){_BACK}",
        """
        scales = [torch.empty(1) for _ in parts]
        dist.all_gather(scales, scale.reshape(1))
        return torch.cat([p.view(torch.float8_e4m3fn).float() / s for p, s in zip(parts, scales, strict=True)])
        """,
    ),
)
