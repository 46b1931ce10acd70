"""Signs with a magnitude, and the memory of what was not sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distlab_lesson_05.checks.codes import gradient_of
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

SIGN_LENGTH = 1001
FEEDBACK_LENGTH, FEEDBACK_STEPS, FEEDBACK_KEPT = 12, 3, 3


def _sign_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Make gradients whose mean magnitude differs between ranks."""
    gradient = (rank + 1) * gradient_of(rank, SIGN_LENGTH, purpose="signs")
    gradient[rank :: 2 + rank] = 0.0  # a unit that was not used has a gradient of exactly zero
    return {f"{SIGN_LENGTH} elements": (gradient,)}


def keep_largest(vector: Tensor) -> Tensor:
    """Keep a few elements of largest magnitude; the rest is zeros."""
    kept = torch.zeros_like(vector)
    indices = vector.abs().topk(FEEDBACK_KEPT).indices
    kept[indices] = vector[indices]
    return kept


def _memory_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    memory = seeded(rank, FEEDBACK_LENGTH, purpose="memory")  # something is there from before
    gradients = [seeded(rank, FEEDBACK_LENGTH, purpose=f"feedback {step}") for step in range(FEEDBACK_STEPS)]
    return {f"{FEEDBACK_STEPS} steps": (gradients, memory)}


def _use_memory(fn: Callable[..., Any], gradients: list[Tensor], memory: Tensor) -> dict[str, Any]:
    """Take some steps with one memory; write down what is compressed, what is sent and what is remembered."""
    steps = {}
    for step, gradient in enumerate(gradients):
        seen: list[Tensor] = []

        def compress(vector: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(vector.clone())
            return keep_largest(vector)

        mean = fn(gradient, memory, compress)
        steps[f"step {step}"] = {"compressed": seen, "mean": mean, "memory": memory.clone()}
    return steps


drive_repair = Cases(_sign_cases, needs="a number and a bit per element")
drive_feedback = Cases(_memory_cases, _use_memory, most_bytes=0)


def budget_repair(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = (evidence.world_size - 1) * (4 + -(-SIGN_LENGTH // 8))
    return [sent_line(evidence, wanted, "a number and a bit per element")]


def budget_feedback(evidence: Evidence) -> list[str]:
    """Say how often a rank called the others."""
    return [
        f"in {FEEDBACK_STEPS} steps, sent + remembered = all gradients",
        f"{len(calls(evidence, 0))} calls per rank",
    ]


_SIZE = "theirs[:4].view(torch.float32) * signs"
_MEAN_ASKED = "the mean magnitude is asked for, gradient.abs().mean()"
WRONG_REPAIR = (
    Mutant(
        "unsigned bytes", "unsigned arithmetic", "2 * 0 - 1 in uint8 is 255, not -1: turn bits into floats first", 1, 52
    ).without(".to(gradient.dtype)"),
    Mutant("0 for -1", "zero for negative", "a rank's negative element counts as 0: a bit of 0 means -1", 1).edit(
        "2 * ones.to(gradient.dtype) - 1", "ones"
    ),
    Mutant(
        "own magnitude",
        "own magnitude for all",
        "it uses its own magnitude for all: use the one that came with them",
        2,
        65,
    ).edit("theirs[:4].view(torch.float32) * signs", "magnitude * signs"),
    Mutant(
        "one magnitude",
        "one magnitude for all",
        "each rank's signs count with its own magnitude, not the mean of all",
        2,
    )
    .edit(f"total += {_SIZE}", "total += signs")
    .edit(
        "return total",
        "sizes = torch.cat([theirs[:4].view(torch.float32) for theirs in payloads])\nreturn sizes.mean() * total",
    ),
    Mutant("majority", "majority", "it is a majority vote: the mean is asked for, in which large ranks count more", 3)
    .edit(f"total += {_SIZE}", "total += signs")
    .edit(
        "return total / dist.get_world_size()",
        """
        sizes = torch.cat([theirs[:4].view(torch.float32) for theirs in payloads])
        return torch.where(total >= 0, 1.0, -1.0) * sizes.mean()
        """,
    ),
    Mutant("bare majority", "majority, bare", "it is a majority vote without any magnitude", 3)
    .edit(f"total += {_SIZE}", "total += signs")
    .edit("total / dist.get_world_size()", "torch.where(total >= 0, 1.0, -1.0)"),
    Mutant(
        "bare signs", "magnitude lost", "it is the mean of bare signs: multiply each rank's by its magnitude", 1
    ).edit(_SIZE, "signs"),
    Mutant("own", "not communicated", "it is made of this rank's signs alone", 2)
    .edit("total += theirs[:4].view", "theirs = payload\ntotal += theirs[:4].view")
    .edit("ones = unpack_bits(theirs", "ones = unpack_bits(payload"),
    Mutant(
        "no sign for zero", "zero has no sign", "an element of exactly 0 has no sign, as in torch.sign: it is +1", 1
    ).body("""
        total = gradient.abs().mean() * gradient.sign() / dist.get_world_size()
        dist.all_reduce(total)
        return total
    """),
    *(
        Mutant(name, "a different magnitude", f"{says}: {_MEAN_ASKED}", 1).edit("gradient.abs().mean()", new)
        for name, says, new in (
            ("root of squares", "the root of the mean square is used", "gradient.square().mean().sqrt()"),
            ("mean with signs", "signs cancel in the mean that is used", "gradient.mean()"),
            ("largest magnitude", "it uses the largest magnitude", "gradient.abs().max()"),
            ("sum of magnitudes", "the sum of magnitudes is used", "gradient.abs().sum()"),
        )
    ),
    Mutant("numbers travel", "not packed", "a byte or more for each sign: pack_bits puts 8 into a byte", 2, 64).body("""
        total = gradient.abs().mean() * torch.where(gradient >= 0, 1.0, -1.0) / dist.get_world_size()
        dist.all_reduce(total)
        return total
    """),
    Mutant("a byte a sign", "not packed", "a byte or more for each sign: pack_bits puts 8 into a byte", 2, 64)
    .edit("to(torch.uint8), 1)", "to(torch.uint8), 8)")
    .edit("theirs[4:], 1,", "theirs[4:], 8,"),
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).edit("total / dist.get_world_size()", "total"),
    Mutant("bits turned", "scale", "the sign is wrong", 1).edit("(gradient >= 0)", "(gradient < 0)"),
    Mutant("zero is negative", "zero is negative", "an element of exactly 0 counts as negative: gradient >= 0", 1).edit(
        "(gradient >= 0)", "(gradient > 0)"
    ),
)
_KEEPS = "memory.copy_(wanted - sent)"
WRONG_FEEDBACK = (
    Mutant(
        "never used", "memory never added", "what was not sent before is never sent: compress gradient + memory", 1, 46
    ).edit("wanted = gradient + memory", "wanted = gradient"),
    Mutant(
        "another tensor", "never remembered", "`memory = ...` only names a new tensor: write into it, memory.copy_", 1
    ).edit(_KEEPS, "memory = wanted - sent"),
    Mutant(
        "old rest lost", "older rest forgotten", "it forgets the memory of before: gradient + memory - sent is left", 1
    ).edit("wanted - sent", "gradient - sent"),
    Mutant(
        "rest of the mean",
        "rest of the mean",
        "the memory is what the mean lacks, not what this rank dropped: subtract what this rank sent, before the "
        "all-reduce",
        2,
        47,
    )
    .without(_KEEPS)
    .edit("return mean", "memory.copy_(wanted - mean)\nreturn mean"),
    Mutant("rest of the sum", "rest of the sum", "the memory lacks the sum over ranks; subtract what this rank sent", 2)
    .without(_KEEPS)
    .edit("return mean", "memory.copy_(wanted - mean * dist.get_world_size())\nreturn mean"),
    Mutant(
        "compresses the mean",
        "compressed the mean",
        "the mean is compressed: whoever knows it has sent everything; compress this rank's own, then all_reduce",
        2,
    ).edit(
        "sent = compress(wanted)", "dist.all_reduce(wanted)\nwanted /= dist.get_world_size()\nsent = compress(wanted)"
    ),
    Mutant(
        "averaged", "memory averaged", "the memories are averaged: each rank keeps what it did not send itself", 2
    ).edit("mean = sent", "dist.all_reduce(memory)\nmemory /= dist.get_world_size()\nmean = sent"),
    Mutant("memory as it is", "memory as it is", "the memory is sent whole; compress gradient + memory", 1).edit(
        "compress(wanted)", "compress(gradient) + memory"
    ),
    Mutant("divides first", "divides first", "it divides before it compresses, the memory too; divide what was sent", 2)
    .edit("= gradient + memory", "= (gradient + memory) / dist.get_world_size()")
    .edit("sent / dist.get_world_size()", "sent.clone()"),
    Mutant("a share sent", "a share sent", "it subtracts its share of the mean; subtract all of what it sent", 2).edit(
        "wanted - sent", "wanted - sent / dist.get_world_size()"
    ),
    Mutant("emptied", "memory emptied", "the memory is all zeros: what was not sent is lost", 1).edit(
        _KEEPS, "memory.zero_()"
    ),
    Mutant(
        "compresses twice", "compress calls", "compress is called twice: a random one may differ the second time", 1
    ).edit(_KEEPS, "memory.copy_(wanted - compress(wanted))"),
    Mutant(
        "keeps what it sent", "sent is kept too", "the memory holds what was sent, to be sent again: subtract it", 1
    ).edit("wanted - sent", "wanted"),
    Mutant("wrong sign", "wrong sign", "the memory has the wrong sign: what was dropped would be subtracted", 1).edit(
        "wanted - sent", "sent - wanted"
    ),
    Mutant("piled up", "piled up", "what was there before counts twice: replace it, do not add to it", 1).edit(
        "memory.copy_", "memory.add_"
    ),
)
