"""Codes of few bits: rounding to levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

QUANTIZE_LENGTH = 1001
QUANTIZE_CASES = (("drawn", 8), ("drawn", 4), ("tiny", 1), ("equal", 4))


def gradient_of(rank: int, *shape: int, purpose: str) -> Tensor:
    """Make a rank's gradient: what all ranks share, and something of its own; float32.

    What ranks share makes their largest elements coincide in part, as they do in training.
    """
    return (seeded(-1, *shape, purpose=purpose) + 0.7 * seeded(rank, *shape, purpose=purpose)).float()


def _quantize_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Make gradients whose range differs between ranks, and whose values are not centred; and one of equal values."""
    drawn = (rank + 1) * (gradient_of(rank, QUANTIZE_LENGTH, purpose="quantize") + 0.4)
    kinds = {"drawn": drawn, "tiny": 1e-12 * drawn, "equal": torch.full((QUANTIZE_LENGTH,), 0.5 + rank)}
    return {f"{kind} numbers, {bits} bits": (kinds[kind], bits) for kind, bits in QUANTIZE_CASES}


drive_quantize = Cases(_quantize_cases, needs="two numbers and packed codes")


def budget_quantize(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = (evidence.world_size - 1) * sum(8 + -(-QUANTIZE_LENGTH * bits // 8) for _, bits in QUANTIZE_CASES)
    line = sent_line(evidence, wanted, "two numbers and packed codes")
    return [f"{line}, in {len(QUANTIZE_CASES)} calls of {QUANTIZE_LENGTH} elements"]


_BITS_LOST = "codes are cut off, not rounded, half a step too small on average; .round() before .to(torch.uint8)"
_STEPS = "its steps are range / 2**bits: 2**bits levels have one step less between them, so divide by 2**bits - 1"
WRONG_QUANTIZE = (
    Mutant("cut off", "rounded down", _BITS_LOST, 1, 52).without(".round()"),
    Mutant("rounded up", "rounded up", "codes are rounded up; .round() takes the nearest", 1).edit(
        ".round()", ".ceil()"
    ),
    Mutant(
        "step of zero", "step of zero", "where all are equal, max - min is 0, and 0 / 0 is NaN: every code is 0", 1, 65
    )
    .edit(
        "((gradient - low) / step).round() if step > 0 else torch.zeros_like(gradient)",
        "((gradient - low) / step).round()",
    )
    .edit("total / dist", "(total + 0 * codes) / dist"),
    Mutant(
        "signed bytes", "int8 overflow", "codes above 127 come out 256 steps too low: int8 ends there, use uint8", 1, 52
    ).edit("gradient.numel())", "gradient.numel()).to(torch.int8)"),
    Mutant(
        "sign of the offset", "sign of the offset", "encoding subtracts the smallest value, decoding adds it", 1, 52
    ).edit("their_low + their_step", "-their_low + their_step"),
    Mutant(
        "no offset", "offset forgotten", "it starts at 0 instead of the smallest value: decoding must add it again", 1
    ).edit("their_low + their_step", "their_step"),
    Mutant(
        "codes summed", "codes summed", "codes count in each rank's own steps: all_gather, decode each, then add", 2, 65
    ).edit(
        "payload = torch.cat([",
        "dist.all_reduce(codes)\nreturn low + step * codes / dist.get_world_size()\npayload = torch.cat([",
    ),
    Mutant(
        "own step for all", "own step for all", "others' codes are decoded with own numbers: use those that came", 2, 65
    ).edit("theirs[:8].view(torch.float32)", "low, step"),
    Mutant("own", "not communicated", "nothing of the others reached a rank: it rounds its own gradient alone", 2).edit(
        "payload = torch.cat([", "return low + step * codes\npayload = torch.cat(["
    ),
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).edit("total / dist.get_world_size()", "total"),
    Mutant("one step more", "a step too many", _STEPS, 1)
    .edit("(2**bits - 1)", "2**bits")
    .edit("/ step).round()", "/ step).round().clamp(max=2**bits - 1)"),
    Mutant(
        "not packed", "not packed", "a byte or more travels for each code, however few bits it has: pack_bits", 2, 51
    )
    .edit("to(torch.uint8), bits)", "to(torch.uint8), 8)")
    .edit("theirs[8:], bits,", "theirs[8:], 8,"),
    Mutant(
        "one level too many",
        "a step too many, wrapped",
        "the largest value wraps round to code 0: 2**bits - 1 steps",
        1,
    ).edit("(2**bits - 1)", "2**bits"),
    Mutant(
        "decoded otherwise", "decoded otherwise", "codes are made in 2**bits - 1 steps, and decoded in 2**bits", 1
    ).edit("their_step * unpack", "their_step * (1 - 2.0**-bits) * unpack"),
    Mutant("one range", "one range for all", "all ranks share one range; each has its own levels, min to max", 2)
    .edit(
        "low = gradient.min()",
        "ends = torch.stack([-gradient.min(), gradient.max()])\ndist.all_reduce(ends, dist.ReduceOp.MAX)\nlow = "
        "-ends[0]",
    )
    .edit("(gradient.max() - low)", "(ends[1] - low)"),
    Mutant("symmetric levels", "symmetric levels", "levels are symmetric about 0; they go from min to max", 1)
    .edit("low = gradient.min()", "low = -gradient.abs().max()")
    .edit("(gradient.max() - low)", "(-2 * low)"),
    Mutant(
        "own lowest", "own lowest", "it adds its own lowest value to all codes: use the one that came with them", 2
    ).edit("total += their_low +", "total += low +"),
    Mutant("half a step", "half a step", "it adds half a step; codes are rounded to the nearest level", 1).edit(
        "their_low + their_step * unpack", "their_low + 0.5 * their_step + their_step * unpack"
    ),
)
