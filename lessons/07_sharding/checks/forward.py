"""Forward through units, one whole unit at a time; and with the next one on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_07.checks import units
from distlab_lesson_07.checks.units import MODEL_BYTES, NUM_UNITS, UNIT, UNIT_BYTES
from torch import Tensor

from distlab.comm.record.read import Call
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import calls, in_megabytes
from distlab.grading.diagnosis.values import compare, same

SLEEP_S = 0.004


def drive_forward(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run the units, write down when each computes and with what; then again for the peak of memory."""
    log: list[Any] = []

    def plain(whole: Tensor, x: Tensor) -> Tensor:
        return units.forward_of(whole, x) if whole.numel() == UNIT else x

    def noted(unit: int, whole: Tensor, x: Tensor) -> Tensor:
        start_ns = time.monotonic_ns()
        time.sleep(SLEEP_S)  # long enough that a gather which was started before runs at the same time
        result, right = plain(whole, x), torch.equal(whole, units.weights_of(unit))
        log.append((unit, whole.numel(), right, start_ns, time.monotonic_ns()))
        return result

    return units.run_units(fn, (units.input_of(dist.get_rank()),), noted, plain) | {"log": log}


def judge_forward(evidence: Evidence) -> Iterator[Fault]:
    """Right output, each unit gathered once, and one whole unit at a time."""
    yield from _judge_runs(evidence)
    for rank, result in enumerate(evidence.results):
        yield from _judge_freed(rank, result["peak"], 1)
        if result["peak"] > 1.6 * UNIT_BYTES:
            text = (
                f"right result, but rank {rank} holds {in_megabytes(result['peak'])} at once, two whole units. Either"
            )
            text += (
                " a name keeps the old one until it is given the next, which is made first: del it after compute. Or"
            )
            text += " the parts are kept as well as the row that they are joined into: gather_into fills the row itself"
            yield Fault("two at a time", text)


def judge_ahead(evidence: Evidence) -> Iterator[Fault]:
    """As forward, with the next unit on its way while one computes, and two whole units at most."""
    yield from _judge_runs(evidence)
    advice = "three units are whole at once: start the gather of the next one only, and free each after it computed"
    for rank, result in enumerate(evidence.results):
        begin_ns, end_ns = result["run_ns"]  # the run with the log; the others look at memory
        made = [call for call in calls(evidence, rank, "all_gather") if begin_ns <= call.start_ns <= end_ns]
        if len(made) != NUM_UNITS:
            text = f"rank {rank} made {len(made)} all-gathers for {NUM_UNITS} units"
            yield Fault("calls", f"{text}: start one per unit, gather_into(whole, shard, async_op=True)")
        yield from _judge_overlap(rank, made, result["log"])
        for unit in range(2, NUM_UNITS):  # told by order: what the library lends a gather may look like a whole unit
            if made[unit].start_ns < result["log"][unit - 2][3]:
                text = f"right result, but rank {rank} gathers unit {unit} before unit {unit - 2} computes, so that"
                yield Fault("three at a time", f"{text} {advice}")
        yield from _judge_freed(rank, result["peak"], 2)
        if result["peak"] > 2.6 * UNIT_BYTES:
            text = f"right result, but rank {rank} holds {in_megabytes(result['peak'])} at once, so that"
            yield Fault("three at a time", f"{text} {advice}")


def _judge_overlap(rank: int, made: list[Call], log: list[Any]) -> Iterator[Fault]:
    if all(call.start_ns < log[0][3] for call in made):
        text = f"rank {rank} starts the gathers of all {NUM_UNITS} units before the first computes: all of them"
        yield Fault("all at once", f"{text} are whole at the same time; start only the next one")
    for unit, call in enumerate(made[1:]):
        start_ns, end_ns = log[unit][3:]
        if call.start_ns >= end_ns:
            text = f"rank {rank} gathers unit {unit + 1} only after unit {unit} has computed: the two do not overlap"
            yield Fault("not ahead", f"{text}; start the next gather before compute, wait for it after")
        if 0 < call.wait_ns < start_ns:
            text = f"rank {rank} starts the gather of unit {unit + 1} ahead, and waits for it before unit {unit}"
            yield Fault("waits at once", f"{text} computes; wait for it when its turn has come")


def _judge_runs(evidence: Evidence) -> Iterator[Fault]:
    n = evidence.world_size
    for rank, result in enumerate(evidence.results):
        order = [entry[0] for entry in result["log"]]
        if order != list(range(NUM_UNITS)):
            yield Fault("units", f"rank {rank} computed units {order}; expected each once, from 0 to {NUM_UNITS - 1}")
        yield from units.judge_whole(rank, result["log"], n, bool(calls(evidence, rank)))
        first, second, *_, want = units.inputs_of(rank)
        last_alone = units.forward_of(units.weights_of(NUM_UNITS - 1), first)
        for wrong, words in (
            (first, " returns its input x"),
            (second, " returns the output of unit 0"),
            (last_alone, ": the last unit read the first input"),
        ):
            if same(result["got"], wrong):
                text = f"rank {rank}{words}: each unit reads what the one before gave: x = compute(...)"
                yield Fault("input not passed on", text)
        yield from found(compare(result["got"], want, f"rank {rank}'s output", n))
        if not result["kept"]:
            text = f"rank {rank}'s shards were changed by forward; gather into a row of its own"
            yield Fault("changed argument", text)
    yield from units.judge_traffic(evidence, (n - 1) / n * MODEL_BYTES, "one all-gather of each unit")


def _judge_freed(rank: int, peak: int, allowed: int) -> Iterator[Fault]:
    if peak > 0.95 * MODEL_BYTES:
        held = f"{allowed} unit{'s are' if allowed > 1 else ' is'} {in_megabytes(allowed * UNIT_BYTES)}"
        text = f"right result, but rank {rank} holds {in_megabytes(peak)} at once where {held}: the peak is that of the"
        yield Fault("never freed", f"{text} whole model; units are not freed after they computed (a list of them?)")


_GATHER, _COMPUTE = "gather_into(whole, shard)", "x = compute(index, whole, x)"
_OWN_IN_ZEROS = "whole.zero_()\nwhole.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)"
_START_NEXT = "coming = start(shards[index + 1]) if index + 1 < len(shards) else None"

WRONG_FORWARDS = (
    Mutant("never freed", "never freed", "that of the whole model", 2)
    .edit("for index, shard", "wholes = []\nfor index, shard")
    .edit("del whole", "wholes.append(whole)"),
    Mutant("freed too late", "two at a time", "del it after compute", 1).without("del whole"),
    Mutant("shard alone", "not gathered", "it gathered nothing", 2).edit(_GATHER, _OWN_IN_ZEROS),
    Mutant("all-reduce of zeros", "all-reduce", "moves zeros", 2, 64).edit(
        _GATHER, f"{_OWN_IN_ZEROS}\ndist.all_reduce(whole)"
    ),
    Mutant("first input", "input not passed on", "x = compute(...)", 1)
    .edit("for index, shard", "first = x\nfor index, shard")
    .edit(_COMPUTE, "x = compute(index, whole, first)"),
    Mutant("gathered twice", "too many bytes", "more than once", 3, 1).edit(_GATHER, f"{_GATHER}\n{_GATHER}"),
)
WRONG_AHEADS = (
    Mutant("not ahead", "not ahead", "only after unit 0 has computed", 2, 25)
    .edit(_START_NEXT, "pass")
    .edit("del whole", f"del whole\n{_START_NEXT}"),
    Mutant("all at once", "all at once", "start only the next one", 2)
    .edit("coming = start(shards[0])", "coming = [start(shard) for shard in shards]")
    .edit("whole, work = coming", "whole, work = coming[index]")
    .edit(_START_NEXT, "pass"),
    Mutant("waits at once", "waits at once", "when its turn has come", 2, 25).edit(
        _START_NEXT, f"{_START_NEXT}\nif coming:\n    coming[1].wait()"
    ),
    Mutant("does not wait", "read too early", "was the row read before", 2, 2)
    .edit("work.wait()", "seen = torch.zeros_like(whole)  # what a reader may see who does not wait")
    .edit("compute(index, whole, x)", "compute(index, seen, x)")
    .edit("del whole", "work.wait()\ndel whole"),
    Mutant("two ahead", "three at a time", "the next one only", 2)
    .edit("coming = start(shards[0])", "coming = [start(shard) for shard in shards[:2]]")
    .edit("whole, work = coming", "whole, work = coming.pop(0)")
    .edit(_START_NEXT, "if index + 2 < len(shards):\n    coming.append(start(shards[index + 2]))"),
    Mutant("never freed", "never freed", "that of the whole model", 2)
    .edit("coming = start(shards[0])", "wholes, coming = [], start(shards[0])")
    .edit("del whole", "wholes.append(whole)"),
)
