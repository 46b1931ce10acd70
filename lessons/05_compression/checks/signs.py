"""Signs with a magnitude, and the memory of what was not sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_05.checks.shared import Known, called, explain, gradient_of, unchanged
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import calls, in_megabytes, most_sent, over_budget, sent_line
from distlab.grading.diagnosis.values import compare, equal, seeded

SIGN_LENGTH = 1001
FEEDBACK_LENGTH, FEEDBACK_STEPS, FEEDBACK_KEPT = 12, 3, 3


def drive_signs(fn: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Call fn on gradients whose mean magnitude differs between ranks."""
    rank = dist.get_rank()
    gradient = (rank + 1) * gradient_of(rank, SIGN_LENGTH, purpose="signs")
    gradient[rank :: 2 + rank] = 0.0  # a unit that was not used has a gradient of exactly zero
    return called(fn, gradient)


def keep_largest(vector: Tensor) -> Tensor:
    """Keep a few elements of largest magnitude; the rest is zeros."""
    kept = torch.zeros_like(vector)
    indices = vector.abs().topk(FEEDBACK_KEPT).indices
    kept[indices] = vector[indices]
    return kept


def drive_feedback(fn: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Any]) -> list[dict[str, Any]]:
    """Take some steps with one memory; write down what is compressed, what is sent and what is remembered."""
    rank = dist.get_rank()
    memory = seeded(rank, FEEDBACK_LENGTH, purpose="memory")  # something is there from before
    steps = []
    for step in range(FEEDBACK_STEPS):
        own = seeded(rank, FEEDBACK_LENGTH, purpose=f"feedback {step}")
        before, seen = memory.clone(), []

        def compress(vector: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(vector.clone())
            return keep_largest(vector)

        given = own.clone()
        mean = fn(given, memory, compress)
        kept = torch.equal(own, given)
        steps.append({"own": own, "before": before, "seen": seen, "mean": mean, "after": memory.clone(), "kept": kept})
    return steps


def sign_bytes(world_size: int) -> int:
    """Return what a rank sends to each of the others: a number, and a bit per element."""
    return (world_size - 1) * (4 + -(-SIGN_LENGTH // 8))


def judge_signs(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must have the mean of all ranks' signs times magnitudes, for one bit per element."""
    n, own = evidence.world_size, [result["own"] for result in evidence.results]
    want = _mean([vector.abs().mean() * torch.where(vector >= 0, 1.0, -1.0) for vector in own])
    for rank, result in enumerate(evidence.results):
        yield from found(explain(result["mean"], want, _sign_mistakes(own, rank), f"rank {rank}: the mean", n))
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted, most = sign_bytes(n), most_sent(evidence)
    if n > 1 and most >= 0.99 * min(n - 1, 2) * SIGN_LENGTH:
        text = f"right values, but {in_megabytes(most)} sent per rank: a byte or more for each sign"
        yield Fault("not packed", f"{text}; pack_bits puts 8 into a byte: {in_megabytes(wanted)}")
    yield from found(over_budget(evidence, wanted, "a number and a bit per element"))


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).mean(0)


def _times(sizes: list[Tensor], signs: list[Tensor]) -> list[Tensor]:
    return [size * sign for size, sign in zip(sizes, signs, strict=True)]


def _sign_mistakes(own: list[Tensor], rank: int) -> Known:
    signs = [torch.where(vector >= 0, 1.0, -1.0) for vector in own]
    sizes = [vector.abs().mean() for vector in own]
    wrapped = _mean([size * torch.where(sign > 0, 1.0, 255.0) for size, sign in zip(sizes, signs, strict=True)])
    bits = _mean([size * torch.where(sign > 0, 1.0, 0.0) for size, sign in zip(sizes, signs, strict=True)])
    largest = _mean([vector.abs().max() * sign for vector, sign in zip(own, signs, strict=True)])
    vote = torch.where(torch.stack(signs).sum(0) >= 0, 1.0, -1.0)
    unsigned = "comes out 255 times the magnitude where a rank's element is negative: 2 * 0 - 1 in uint8 is 255, not"
    unsigned += " -1; turn the bits into floating point before you calculate with them"
    mine = "uses this rank's own magnitude for the signs of all ranks; use the one that came with them"
    of_largest = "uses each rank's largest magnitude: the mean magnitude is asked for, gradient.abs().mean()"
    without = [torch.where(vector > 0, 1.0, -1.0) for vector in own]
    below = "counts an element of exactly 0 as negative: the bit is 1 for zero or more, gradient >= 0"
    none = "gives an element of exactly 0 no sign, as torch.sign does: zero or more is +1"
    root = "uses the root of the mean square of each rank's elements: the mean magnitude is asked for"
    signed = "uses each rank's mean, in which signs cancel: the mean magnitude is asked for, gradient.abs().mean()"
    one = "uses the mean of all ranks' magnitudes: each rank's signs count with the one that came with them"
    voted = "is a majority vote: the mean is asked for, in which large ranks count more"
    return [
        ("unsigned arithmetic", wrapped, unsigned),
        ("zero for negative", bits, "counts a rank's negative element as 0: a bit of 0 means -1"),
        ("zero is negative", _mean(_times(sizes, without)), below),
        ("zero has no sign", _mean(_times(sizes, [vector.sign() for vector in own])), none),
        ("another magnitude", _mean(_times([vector.square().mean().sqrt() for vector in own], signs)), root),
        ("another magnitude", _mean(_times([vector.mean() for vector in own], signs)), signed),
        ("own magnitude for all", sizes[rank] * _mean(signs), mine),
        ("largest magnitude", largest, of_largest),
        ("one magnitude for all", _mean(sizes) * _mean(signs), one),
        ("majority", _mean(sizes) * vote, voted),
        ("majority, bare", vote, "is a majority vote without any magnitude"),
        ("magnitude lost", _mean(signs), "is the mean of bare signs: multiply each rank's by its magnitude"),
        ("not communicated", sizes[rank] * signs[rank], "is made of this rank's signs alone"),
    ]


def budget_signs(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    return [sent_line(evidence, sign_bytes(evidence.world_size), "a number and a bit per element")]


def judge_memory(evidence: Evidence) -> Iterator[Fault]:
    """What is sent and what is kept must be the gradient and what was kept before, on each rank, in every step."""
    n = evidence.world_size
    for step in range(FEEDBACK_STEPS):
        rows = [result[step] for result in evidence.results]
        wanted = _mean([row["own"] + row["before"] for row in rows])
        for rank, row in enumerate(rows):
            yield from found(_judge_compressed(row, wanted, step, rank))
        sent = [keep_largest(row["seen"][0]) for row in rows]
        mean = _mean(sent)
        for rank, row in enumerate(rows):
            mine = [("not communicated", sent[rank], "is what this rank sent: nothing of the others reached it")]
            yield from found(explain(row["mean"], mean, mine, f"rank {rank}'s mean in step {step}", n))
            known = _rest_mistakes(row, sent[rank], mean, wanted - mean, n)
            rest = row["own"] + row["before"] - sent[rank]
            yield from found(explain(row["after"], rest, known, f"step {step}: rank {rank}'s memory", n))
        yield from unchanged([row["kept"] for row in rows])


def _judge_compressed(row: dict[str, Any], mean: Tensor, step: int, rank: int) -> Fault | None:
    if len(row["seen"]) != 1:
        times = f"rank {rank} called compress {len(row['seen'])} times in step {step}, expected once"
        return Fault("compress calls", f"{times}: a random compressor would send one thing and remember another")
    got = row["seen"][0]
    if equal(got, row["own"] + row["before"]):
        return None
    if equal(got, row["own"]):
        text = f"in step {step} rank {rank} compresses its gradient alone: what it did not send before is never sent"
        return Fault("memory never added", f"{text}; compress gradient + memory")
    if equal(got, mean):
        text = f"in step {step} rank {rank} compresses the mean of all ranks: whoever knows it has sent everything"
        return Fault("compressed the mean", f"{text} before; compress this rank's own, then all_reduce what is sent")
    wrong = compare(got, row["own"] + row["before"], f"what rank {rank} compresses in step {step}")
    return Fault("wrong input", f"expected gradient + memory; {wrong.message if wrong else ''}")


def _rest_mistakes(row: dict[str, Any], sent: Tensor, mean: Tensor, rest_of_mean: Tensor, n: int) -> Known:
    wanted = row["own"] + row["before"]
    rebound = "is as before the step: write into the tensor that you were given (memory.copy_), since `memory = ...`"
    rebound += " only gives the name to a new tensor"
    older = "lacks what was there before: the rest is gradient + memory - sent, not gradient - sent"
    of_mean = "is what the mean lacks, not what this rank dropped: each rank would then correct for all; subtract what"
    of_mean += " this rank sent, before the all-reduce"
    averaged = "is the mean of all ranks' memories: each rank keeps what it did not send itself; do not all_reduce it"
    empty = "is all zeros: what was not sent is lost; keep gradient + memory - sent"
    return [
        ("never remembered", row["before"], rebound),
        ("older rest forgotten", row["own"] - sent, older),
        ("sent is kept too", wanted, "still holds what was sent: it would be sent again; subtract it"),
        ("wrong sign", sent - wanted, "has the wrong sign: what was dropped would be subtracted in the next step"),
        ("rest of the mean", wanted - mean, of_mean),
        ("rest of the sum", wanted - n * mean, "subtracts the sum over ranks; subtract what it sent"),
        ("memory averaged", rest_of_mean, averaged),
        ("memory emptied", torch.zeros_like(wanted), empty),
        ("piled up", row["before"] + wanted - sent, "counts what was there before twice: replace it, do not add to it"),
    ]


def budget_memory(evidence: Evidence) -> list[str]:
    """Say that nothing was lost."""
    sent_and_kept = [
        sum((keep_largest(row["seen"][0]) for row in steps), torch.zeros(FEEDBACK_LENGTH)) + steps[-1]["after"]
        for steps in evidence.results
    ]
    gradients = [sum((row["own"] for row in steps), steps[0]["before"]) for steps in evidence.results]
    gap = max(float((a - b).abs().max()) for a, b in zip(sent_and_kept, gradients, strict=True))
    text = f"in {FEEDBACK_STEPS} steps, sent + remembered = all gradients, to {max(gap, 1e-15):.0e}"
    return [text, f"{len(calls(evidence, 0))} calls per rank"]


WRONG_SIGNS = (
    Mutant("unsigned bytes", "unsigned arithmetic", "2 * 0 - 1 in uint8 is 255", 1, 52).without(".to(gradient.dtype)"),
    Mutant("0 for -1", "zero for negative", "a bit of 0 means -1", 1).edit("2 * ones.to(gradient.dtype) - 1", "ones"),
    Mutant("own magnitude", "own magnitude for all", "the one that came with them", 2, 65).edit(
        "theirs[:4].view(torch.float32) * signs", "magnitude * signs"
    ),
    Mutant("majority", "majority", "the mean is asked for", 3)
    .edit("total += theirs[:4].view(torch.float32) * signs", "total += signs")
    .edit(
        "return total / dist.get_world_size()",
        """
        sizes = torch.cat([theirs[:4].view(torch.float32) for theirs in payloads])
        return torch.where(total >= 0, 1.0, -1.0) * sizes.mean()
        """,
    ),
    Mutant("numbers travel", "not packed", "a byte or more for each sign", 2, 64).body("""
        total = gradient.abs().mean() * torch.where(gradient >= 0, 1.0, -1.0) / dist.get_world_size()
        dist.all_reduce(total)
        return total
    """),
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).edit("total / dist.get_world_size()", "total"),
)
WRONG_MEMORIES = (
    Mutant("never used", "memory never added", "is never sent", 1, 46).edit(
        "wanted = gradient + memory", "wanted = gradient"
    ),
    Mutant("another tensor", "never remembered", "memory.copy_", 1).edit(
        "memory.copy_(wanted - sent)", "memory = wanted - sent"
    ),
    Mutant("old rest lost", "older rest forgotten", "not gradient - sent", 1).edit("wanted - sent", "gradient - sent"),
    Mutant("rest of the mean", "rest of the mean", "correct for all", 2, 47)
    .without("memory.copy_(wanted - sent)")
    .edit("return mean", "memory.copy_(wanted - mean)\nreturn mean"),
    Mutant("keeps what it sent", "sent is kept too", "subtract it", 1).edit("wanted - sent", "wanted"),
    Mutant("wrong sign", "wrong sign", "would be subtracted", 1).edit("wanted - sent", "sent - wanted"),
    Mutant("piled up", "piled up", "replace it", 1).edit("memory.copy_", "memory.add_"),
)
