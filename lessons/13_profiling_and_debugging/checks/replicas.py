"""Functions that run on real ranks: the search for a flipped bit, and the sections of a step (the bug to spot)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import compare, describe, near, seeded
from distlab.grading import Evidence, Fault, Mutant

STEPS, TENSORS = 64, 5
FLIPS: tuple[tuple[int, int, int] | None, ...] = ((37, 2, 1), (0, 0, 0), (63, 4, 2), (20, 3, 0), None)
SEARCH = STEPS.bit_length() + 1  # a look at the last step, one for each halving, and one at the tensors


def checksums(flip: tuple[int, int, int] | None, rank: int) -> Tensor:
    """Return this rank's checksums; after a flip all later steps of that rank and the tensors after it differ."""
    sums = (seeded(0, STEPS, TENSORS, purpose="sums") * 1e6).long()
    if flip is not None and rank == flip[2]:
        sums[flip[0], flip[1] :] += 2 ** torch.arange(20, 20 + TENSORS - flip[1])
        sums[flip[0] + 1 :] += 1
    return sums


def _use_flip(fn: Callable[..., Any], sums: Tensor) -> dict[str, Any]:
    got = fn(sums)
    parts = got if isinstance(got, list | tuple) and len(got) == 3 else (got, None, None)
    return dict(zip(("the step", "the tensor", "the rank"), parts, strict=True))


def _flips(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    words = (
        "no bit flipped" if flip is None else "step {}, tensor {} of rank {} flipped".format(*flip) for flip in FLIPS
    )
    return {name: (checksums(flip, rank),) for name, flip in zip(words, FLIPS, strict=True)}


drive_flip = Cases(_flips, _use_flip, most_bytes=0)


def judge_flip(evidence: Evidence) -> Iterator[Fault]:
    """A search needs few calls, and sends few numbers in them."""
    made, given = len(calls(evidence, 0)), evidence.records.payload_bytes(0)
    if made > 2 * (most := len(FLIPS) * SEARCH):  # one may ask for the least and for the largest
        text = f"right, but rank 0 makes {made} calls in {len(FLIPS)} searches, where {most} are enough"
        yield Fault("calls", f"{text}: halve the steps that are left with each look")
    if given > 2 * 8 * len(FLIPS) * (SEARCH + TENSORS):
        text = f"right, but rank 0 gives {given:,} bytes to collectives for {len(FLIPS)} tables of {STEPS} steps"
        yield Fault("bytes", f"{text}: send a step's sum to compare, and the tensors of one step alone")


def failure_flip(error: RankError, world_size: int) -> Fault | None:
    """Name what ranks do that decide each by itself; None: anything else."""
    if "do not make the same call" not in str(error):
        return None
    text = f"on {world_size} ranks they make different calls after some looks, since they do not take the same half"
    return Fault("ranks differ", f"{text}: let all ranks decide from the same votes")


def budget_flip(evidence: Evidence) -> list[str]:
    """Say how much the search talked."""
    each = len(calls(evidence, 0)) / len(FLIPS)
    return [f"{each:.1f} calls per search in {STEPS} steps; comparing every step takes {STEPS}"]


WRONG_FLIP = (
    Mutant("rank 0 is right", "rank", "rank 0 may be the one that is wrong: compare with what most ranks have", 3).edit(
        "votes.mode(0).values", "votes[0]"
    ),
    Mutant("step by step", "calls", "halve the steps", 3).edit(
        "while low < high:", "while not differs(low):\n    low += 1\nwhile False:"
    ),
    Mutant("everything at once", "bytes", "the tensors of one step alone", 3)
    .edit("low, high = 0, len(sums) - 1", "low, high = 0, len(sums) - 1\nevery = of_all_ranks(sums.contiguous())")
    .edit("of_all_ranks(sums[step].sum().view(1))", "every[:, step].sum(1, keepdim=True)")
    .edit("of_all_ranks(sums[low].contiguous())", "every[:, low]"),
    Mutant("always someone", "false alarm", "None is for replicas that agree: look at the last step first", 3)
    .edit("if not differs(high):", "if False:")
    .edit("int(wrong.any(0).nonzero()[0])", "int(wrong.any(0).int().argmax())")
    .edit("int(wrong[:, tensor].nonzero()[0])", "int(wrong[:, tensor].int().argmax())"),
    Mutant("last step", "last step", "find the first step in which they differ: all later ones follow from it", 3).edit(
        "while low < high:", "low = high\nwhile low < high:"
    ),
    Mutant("steps from 1", "steps from 1", "steps are numbered from 0", 3).edit(
        "return low, tensor", "return low + 1, tensor"
    ),
    Mutant(
        "last tensor", "last tensor", "find the first of the tensors that differ: later ones follow from it", 3
    ).edit("wrong.any(0).nonzero()[0]", "wrong.any(0).nonzero()[-1]"),
    Mutant("rank before tensor", "another order", "return step, tensor, rank, in this order", 3).edit(
        "low, tensor, int(wrong[:, tensor].nonzero()[0])", "low, int(wrong[:, tensor].nonzero()[0]), tensor"
    ),
    Mutant("each for itself", "ranks differ", "from the same votes", 3, ends=True).edit(
        "(totals != totals[0]).any()", "totals[dist.get_rank()] != totals.mode(0).values"
    ),
    Mutant("itself", "itself", "each rank returns its own number: all return the one that differs from most", 3).edit(
        "int(wrong[:, tensor].nonzero()[0])", "dist.get_rank()"
    ),
    Mutant("rank 0", "rank 0", "the rank is always 0: return the one that differs from most", 3).edit(
        "int(wrong[:, tensor].nonzero()[0])", "0"
    ),
)

SECTION = ("forward", "backward", "sync", "update")
SHAPES = ((3, 2), (4,))


def drive_repair(fn: Callable[..., Any]) -> dict[str, Any]:
    """Time a step whose parts note when they ran, with a clock that notes when it was read, and gradients then."""
    rank, seen, reads, held, ran = dist.get_rank(), {}, [], [], []
    gradients = [torch.zeros(shape) for shape in SHAPES]

    def now() -> int:
        held.append([gradient.clone() for gradient in gradients])
        reads.append(time.monotonic_ns())
        return reads[-1]

    def part(name: str) -> Callable[[], None]:
        def work() -> None:
            start = time.monotonic_ns()
            for number, gradient in enumerate(gradients) if name == "backward" else ():
                gradient += seeded(rank, *gradient.shape, purpose=f"gradient {number}").to(gradient.dtype)
            time.sleep(0.002)
            ran.append(name)
            seen[name] = start, time.monotonic_ns()
            seen[f"gradients in {name}"] = [gradient.clone() for gradient in gradients]

        return work

    times = fn(part("forward"), part("backward"), gradients, part("update"), now)
    return {"times": times, "reads": reads, "held": held, "ran": ran, **seen}


def _read_with(result: dict[str, Any], name: str, begin: int, end: int) -> list[int]:
    """Return when the clock was read between two times, with the gradients as they are at the end of a part."""
    found = zip(result["reads"], result["held"], strict=True)
    return [read for read, held in found if begin <= read <= end and near(held, result[f"gradients in {name}"])]


def judge_repair(evidence: Evidence) -> Iterator[Fault]:
    """Each section holds its own part and nothing of the others; sync all that makes means of the gradients."""
    n = evidence.world_size

    def look(rank: int, result: dict[str, Any]) -> Iterator[Fault]:
        times, reads, who = result["times"], result["reads"], f"rank {rank}"
        missing = [name for name in ("forward", "backward", "update") if name not in result]
        if missing:
            yield Fault("parts", f"{who} never ran {missing[0]}: run forward, backward and update")
        if len(result["ran"]) > len(SECTION) - 1:
            text = f"{who} runs {', '.join(result['ran'])}: a step runs each of them once"
            yield Fault("parts", f"{text}; time the run that the step makes, not a second one")
        if not isinstance(times, list | tuple) or len(times) != len(SECTION):
            yield Fault("returned", f"{who} returns {describe(times)}: return four numbers, one for each section")
        made = calls(evidence, rank)
        given, whole = sum(call.num_bytes for call in made), sum(4 * math.prod(shape) for shape in SHAPES)
        if n > 1 and given < whole:
            yield Fault("no sync", f"{who} sends {given} of {whole} bytes of gradients: average every one")
        if (late := next((call for call in made if not call.end_ns), None)) is not None:
            yield Fault("not waited", f"{who} never waits for {late.op}: what it reads may be half summed")
        forward, backward, update = (result[name] for name in ("forward", "backward", "update"))
        first = min((call.start_ns for call in made), default=update[0])
        last = max((call.end_ns for call in made), default=backward[1])
        if first < backward[1]:
            yield Fault("before backward", f"{who} sends gradients before backward has filled them")
        if last > update[0]:
            yield Fault("waits too late", f"{who} runs update before its gradients have come: wait first")
        if not any(last <= read <= update[0] for read in reads):
            text = f"{who} does not read the clock between the end of its last call, {made[-1].op}, and update"
            yield Fault("sync looks free", f"{text}: that call then counts as update; it is sync")
        if not _read_with(result, "backward", backward[1], first):
            text = f"{who} does not read the clock between backward and the first thing that it does to gradients"
            yield Fault("sections mixed", f"{text}: sync then counts as backward, or backward as sync")
        for at, shape in enumerate(SHAPES):
            parts = [seeded(one, *shape, purpose=f"gradient {at}") for one in range(n)]
            want, got = torch.stack(parts).mean(0).to(torch.float32), result["gradients in update"][at]
            if (fault := compare(got, want, f"{who}'s gradient {at} in update", n)) is not None:
                yield fault
        if not (done := _read_with(result, "update", last, update[0])):
            text = f"{who} does not read the clock between its last work on gradients and update"
            yield Fault("sections mixed", f"{text}: dividing, or copying back, then counts as update; it is sync")
        last = done[0]
        cuts = (0, *forward, *backward, first, last, *update, reads[-1])
        for at, (name, got) in enumerate(zip(SECTION, times, strict=True)):
            before, start, end, after = cuts[2 * at : 2 * at + 4]
            begins = [read for read in reads if before <= read <= start]
            if got not in [read - begin for begin in begins for read in reads if end <= read <= after]:
                told = f"{got / 1e6:.1f} ms" if isinstance(got, int | float) else describe(got)
                text = f"{who} says that {name} took {told}, which ran {(end - start) / 1e6:.1f} ms"
                yield Fault("durations", f"{text}: return how long each section took, in the clock's own unit")

    for rank, result in enumerate(evidence.results):
        yield from look(rank, result)


def budget_repair(evidence: Evidence) -> list[str]:
    """Show rank 0's sections."""
    words = (f"{name} {time / 1e6:.1f} ms" for name, time in zip(SECTION, evidence.results[0]["times"], strict=True))
    return [", ".join(words)]


_WAIT = """
for work in works:
    work.wait()
for gradient in gradients:
    gradient /= dist.get_world_size()
cuts.append(now())
update()
"""
_STARTS = "works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]"

WRONG_REPAIR = (
    Mutant("sync looks free", "sync looks free", "that call then counts as update", 2, 74).edit(
        _WAIT,
        """
        cuts.append(now())
        for work in works:
            work.wait()
        for gradient in gradients:
            gradient /= dist.get_world_size()
        update()
        """,
    ),
    Mutant("never waits", "not waited", "half summed", 2, 57).without("for work in works:\n    work.wait()"),
    Mutant("waits after the update", "waits too late", "wait first", 2, 74)
    .without("for work in works:\n    work.wait()")
    .edit("update()", "update()\nfor work in works:\n    work.wait()"),
    Mutant("started in backward", "sections mixed", "sync then counts as backward", 2)
    .edit("backward()\ncuts.append(now())", "backward()")
    .edit(_STARTS, f"{_STARTS}\ncuts.append(now())"),
    Mutant("before backward", "before backward", "before backward has filled them", 2)
    .without(_STARTS)
    .edit("backward()", f"{_STARTS}\nbackward()"),
    Mutant("sum, not mean", "sum not mean", "divide by world_size (2)", 2, 9).without(
        "for gradient in gradients:\n    gradient /= dist.get_world_size()"
    ),
    Mutant("since the start", "durations", "how long each section took", 2).edit(
        "after - before for before, after in pairwise(cuts)", "cut - cuts[0] for cut in cuts[1:]"
    ),
    Mutant("seconds", "durations", "in the clock's own unit", 2).edit(
        "after - before for", "(after - before) / 1e9 for"
    ),
    Mutant("forward twice", "parts", "a step runs each of them once", 2).edit("forward()", "forward()\nforward()"),
    Mutant("first gradient alone", "no sync", "average every one", 2).edit("in gradients]", "in gradients[:1]]"),
)
