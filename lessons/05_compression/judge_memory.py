"""Name what is wrong in what the ranks of lesson 5's checks sent and remembered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_05 import cases
from distlab_lesson_05.judges import explain, unchanged
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls
from distlab.grading.values import compare, equal


def judge_memory(evidence: Evidence) -> Iterator[Fault]:
    """What is sent and what is kept must be the gradient and what was kept before, on each rank, in every step."""
    n = evidence.world_size
    for step in range(cases.FEEDBACK_STEPS):
        rows = [result[step] for result in evidence.results]
        wanted = torch.stack([row["own"] + row["before"] for row in rows]).mean(0)
        for rank, row in enumerate(rows):
            fault = _judge_compressed(row, wanted, step, rank)
            if fault is not None:
                yield fault
                return
        sent = [cases.keep_largest(row["seen"][0]) for row in rows]
        mean = torch.stack(sent).mean(0)
        for rank, row in enumerate(rows):
            mine = {"not communicated": (sent[rank], "is what this rank sent: nothing of the others reached it")}
            fault = explain(row["mean"], mean, mine, what=f"rank {rank}'s mean in step {step}", world_size=n)
            fault = fault or _judge_kept(
                row, sent[rank], (mean, wanted - mean), f"step {step}: rank {rank}'s memory", n
            )
            if fault is not None:
                yield fault
                return
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
        return Fault("compressed the mean", f"{text} before; compress this rank's own, then all_reduce what is left")
    text = f"in step {step} rank {rank} compresses something else than gradient + memory"
    return Fault("wrong input", f"{text}: {_named(compare(got, row['own'] + row['before'], 'it'))}")


def _judge_kept(row: dict[str, Any], sent: Tensor, means: tuple[Tensor, Tensor], what: str, n: int) -> Fault | None:
    wanted, (mean, rest) = row["own"] + row["before"], means
    known = {
        "never remembered": (
            row["before"],
            "is as before the step: write into the tensor that you were given (memory.copy_), since `memory = ...` only"
            " gives the name to a new tensor",
        ),
        "older rest forgotten": (
            row["own"] - sent,
            "lacks what was there before: the rest is gradient + memory - sent, not gradient - sent",
        ),
        "sent is kept too": (wanted, "still holds what was sent: it would be sent again; subtract it"),
        "wrong sign": (sent - wanted, "has the wrong sign: what was dropped would be subtracted in the next step"),
        "rest of the mean": (
            wanted - mean,
            "is what the mean lacks, not what this rank dropped: each rank would then correct for all; subtract what"
            " this rank sent, before the all-reduce",
        ),
        "rest of the sum": (wanted - n * mean, "subtracts the sum over ranks; subtract what it sent"),
        "memory averaged": (
            rest,
            "is the mean of all ranks' memories: what this rank did not send is its own business; do not all_reduce it",
        ),
        "memory emptied": (
            torch.zeros_like(wanted),
            "is all zeros: what was not sent is lost; keep gradient + memory - sent",
        ),
        "piled up": (row["before"] + wanted - sent, "counts what was there before twice: replace it, do not add to it"),
    }
    return explain(row["after"], wanted - sent, known, what=what, world_size=n)


def _named(fault: Fault | None) -> str:
    return "" if fault is None else fault.message


def budget_memory(evidence: Evidence) -> list[str]:
    """Say that nothing was lost."""
    sent_and_kept = [
        sum((cases.keep_largest(row["seen"][0]) for row in steps), torch.zeros(cases.FEEDBACK_LENGTH))
        + steps[-1]["after"]
        for steps in evidence.results
    ]
    gradients = [sum((row["own"] for row in steps), steps[0]["before"]) for steps in evidence.results]
    gap = max(float((a - b).abs().max()) for a, b in zip(sent_and_kept, gradients, strict=True))
    made = [call.op for call in calls(evidence, 0)]
    return [
        f"in {cases.FEEDBACK_STEPS} steps, sent + remembered = all gradients, to {max(gap, 1e-15):.0e}",
        f"{len(made)} calls a rank",
    ]
