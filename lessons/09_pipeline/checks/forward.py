"""Forward passes through all stages, and the bug in them: stages that wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from distlab_lesson_09.checks import stages
from distlab_lesson_09.checks.stages import M
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import each_rank
from distlab.grading.diagnosis.values import compare, describe, equal


def drive_forward(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run all micro-batches forward."""
    rank = dist.get_rank()
    stage = stages.Stage(rank)
    begin_ns = time.monotonic_ns()
    got = fn(stage, stages.inputs() if rank == 0 else [], M, stages.like())
    return {"got": got, "log": stage.log, "run_ns": (begin_ns, time.monotonic_ns())}


def judge_forward(evidence: Evidence) -> Iterator[Fault]:
    """Right outputs on every rank, and stages that work side by side."""
    last = evidence.world_size - 1
    given = stages.whole_step(evidence.world_size)[2]

    def look(rank: int, result: dict[str, Any]) -> Iterator[Fault]:
        got = result["got"]
        if not isinstance(got, list | tuple) or len(got) != M:
            yield Fault("returned", f"rank {rank}: expected a list of {M} tensors, got {describe(got)}")
        for i, (mine, want) in enumerate(zip(got, given[last], strict=True)):
            fault = compare(mine, want, f"rank {rank}'s output of micro-batch {i}", 1)
            if fault is None:
                continue
            if isinstance(mine, Tensor) and mine.shape == want.shape:
                if rank < last and equal(mine, given[rank][i]):
                    text = f"rank {rank} returns what its own stage gave, not the last stage's output"
                    yield Fault("own output", f"{text}; broadcast it from rank {last} when all are through")
                if any(equal(mine, one) for one in given[last]):
                    yield Fault("order", f"rank {rank} returns another micro-batch's output in place {i}")
            yield fault

    yield from each_rank(evidence, look)
    runs = list(evidence.results)
    forward = stages.forward_passes(runs)
    for rank, passes in enumerate(forward):
        if len(passes) != M:
            text = f"rank {rank} ran its stage {len(passes)} times for {M} micro-batches"
            yield Fault("forward passes", f"{text}: one pass for each, handed on at once")
    yield from stages.judge_overlap(evidence, runs)
    sends = [stages.made_in(evidence, rank, run, "send") for rank, run in enumerate(runs[:-1])]
    for rank, made in enumerate(sends):
        if made and all(call.start_ns > forward[rank][-1][3] for call in made):
            text = f"right result, but rank {rank} sends its first activation only after it has run all {M}"
            text = f"{text} micro-batches: stage {rank + 1} idles until then; send each as soon as it is made"
            yield Fault("sent at the end", text)
    for rank, made in enumerate(sends):
        alone = sum(not call.wait_ns for call in made)
        if alone:
            text = f"right result this time, but rank {rank} never waits for {alone} of its {len(made)} sends: the"
            text = f"{text} broadcasts may write into a tensor that is still on its way"
            yield Fault("sends left alone", f"{text}; keep what isend returns, and wait() before you broadcast")


def budget_forward(evidence: Evidence) -> list[str]:
    """Say how many ran at the same time."""
    n = evidence.world_size
    return [f"{M} micro-batches through {n} stage{'s' * (n > 1)} in {M + n - 1} slots, where {M * n} are one by one"]


_SERIAL = "micro-batch 1 enters stage 0 only after micro-batch 0 left stage"
_WAIT, _TELL = "for work in leaving:\n    work.wait()", "for y in outputs:\n    dist.broadcast(y, last)"
_SEND = "leaving.append(dist.isend(y, rank + 1))"

WRONG_FORWARDS = (
    Mutant("told at once", "stages never overlap", f"{_SERIAL} 1", 2, 25)
    .edit("outputs, leaving = [], []", "outputs = []")
    .edit(_SEND, "dist.send(y, rank + 1)")
    .edit("outputs.append(y)", "dist.broadcast(y, last)\noutputs.append(y)")
    .edit(f"{_WAIT}\n{_TELL}\nreturn", "return"),
    Mutant("barrier", "stages never overlap", f"{_SERIAL} 2", 3, 25).edit(
        "outputs.append(y)", "outputs.append(y)\ndist.barrier()"
    ),
    Mutant("sent at the end", "sent at the end", "idles until then", 2, 59)
    .edit(_SEND, "pass")
    .edit(_WAIT, f"if rank < last:\n    leaving = [dist.isend(y, rank + 1) for y in outputs]\n{_WAIT}"),
    Mutant("sends left alone", "sends left alone", "never waits for 4 of its 4", 2).edit(
        _SEND, "dist.isend(y.clone(), rank + 1)"
    ),
    Mutant("one batch", "forward passes", "ran its stage 1 times for 4", 2, 58).body("""
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        x = torch.cat(inputs) if rank == 0 else torch.cat([like] * num_microbatches)
        if rank > 0:
            dist.recv(x, rank - 1)
        y = stage(x).detach()
        if rank < last:
            dist.send(y, rank + 1)
        dist.broadcast(y, last)
        return list(y.chunk(num_microbatches))
    """),
    Mutant("own output", "own output", "broadcast it from rank 2", 3, 28).without(_TELL),
)
