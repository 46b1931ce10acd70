"""Forward through units, one whole unit at a time; and with the next one on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distlab_lesson_07.checks import units
from distlab_lesson_07.checks.units import MODEL_BYTES, NUM_UNITS, UNIT_BYTES
from torch import Tensor

from distlab.comm.record.read import Call
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, in_megabytes
from distlab.grading import Evidence, Fault, Mutant


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    return {"": (units.shards_of(rank, n), units.inputs_of(rank)[0])}


def _use_ahead(fn: Callable[..., Any], shards: list[Tensor], x: Tensor) -> dict[str, Any]:
    def compute(unit: int, whole: Tensor, x: Tensor) -> Tensor:
        return units.forward_of(whole, x)

    return units.run_units(fn, shards, x, compute=compute, gives="the output")


def _use_forward(fn: Callable[..., Any], shards: list[Tensor], x: Tensor) -> dict[str, Any]:
    """Run units; count those that are whole at the peak: less than 0.6 of a unit may be activations and shards."""
    found = _use_ahead(fn, shards, x)
    return found | {"whole units held at once": max(1, int(found["measured"].peak / UNIT_BYTES + 0.4))}


drive_forward = Cases(_cases, _use_forward, needs="one all-gather of each unit, in each of 4 runs,")
drive_ahead = Cases(_cases, _use_ahead, needs=drive_forward.needs)
budget_forward = budget_ahead = units.budget_of_units


def judge_ahead(evidence: Evidence) -> Iterator[Fault]:
    """The next unit is on its way while one computes, and two units are whole at most."""
    advice = "start the gather of the next one only, and free each after it computed"
    for rank, seen in enumerate(units.measured(evidence)):
        begin_ns, end_ns = seen.run_ns  # the run with notes; the others look at memory
        made = [call for call in calls(evidence, rank, "all_gather") if begin_ns <= call.start_ns <= end_ns]
        if evidence.world_size == 1 and not made:  # nobody to gather from
            return
        if len(made) != NUM_UNITS:
            text = f"right result, but rank {rank} made {len(made)} all-gathers for {NUM_UNITS} units"
            yield Fault("calls", f"{text}: start one per unit, gather_into(whole, shard, async_op=True)")
        yield from _judge_overlap(rank, made, seen.computes_ns)
        for unit in range(2, NUM_UNITS):  # told by order: what the library lends a gather may look like a whole unit
            if made[unit].start_ns < seen.computes_ns[unit - 2][0]:
                text = f"right result, but rank {rank} gathers unit {unit} before unit {unit - 2} computes, so that"
                yield Fault("three at a time", f"{text} three units are whole at once: {advice}")
        held = f"right result, but rank {rank} holds {in_megabytes(seen.peak)} at once"
        if seen.peak > 0.95 * MODEL_BYTES:
            yield Fault("never freed", f"{held}, as much as the whole model: free each unit after it computed")
        if seen.peak > 2.6 * UNIT_BYTES:
            text = f"{held}, where two units are {in_megabytes(2 * UNIT_BYTES)}: three units are whole at once"
            yield Fault("three at a time", f"{text}: {advice}")


def _judge_overlap(rank: int, made: list[Call], computes_ns: list[tuple[int, int]]) -> Iterator[Fault]:
    if all(call.start_ns < computes_ns[0][0] for call in made):
        text = f"rank {rank} starts the gathers of all {NUM_UNITS} units before the first computes: all of them"
        yield Fault("all at once", f"{text} are whole at the same time; start only the next one")
    for unit, call in enumerate(made[1:]):
        start_ns, end_ns = computes_ns[unit]
        if call.start_ns >= end_ns:
            text = f"rank {rank} gathers unit {unit + 1} only after unit {unit} has computed: the two do not overlap"
            yield Fault("not ahead", f"{text}; start the next gather before compute, wait for it after")
        if 0 < call.wait_ns < start_ns:
            text = f"rank {rank} starts the gather of unit {unit + 1} ahead, and waits for it before unit {unit}"
            yield Fault("waits at once", f"{text} computes; wait for it when its turn has come")


_GATHER, _COMPUTE = "gather_into(whole, shard)", "x = compute(index, whole, x)"
_OWN_IN_ZEROS = "whole.zero_()\nwhole.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)"
_START_NEXT = "coming = start(shards[index + 1]) if index + 1 < len(shards) else None"
_NOT_WAITED = "a unit computes before its gather is over: call wait() of what gather_into returned, then compute"
_NOT_GATHERED = "it has its own shard only; gather_into(torch.empty(n * len(shard)), shard) brings the others'"
_NOT_PASSED = "each unit reads what the one before gave: x = compute(...)"

WRONG_FORWARD = (
    Mutant(
        "never freed", "never freed", "all units are whole at once: free each after it computed (a list of them?)", 1
    )
    .edit("for index, shard", "wholes = []\nfor index, shard")
    .edit("del whole", "wholes.append(whole)"),
    Mutant(
        "freed too late",
        "two at a time",
        "two whole units are held at once: by a name that keeps the old one until it is given the next (del it after "
        "compute), by parts beside the row that they are joined into (gather_into fills the row itself), or by a "
        "gather "
        "that nobody waited for",
    ).without("del whole"),
    Mutant("shard alone", "not gathered", _NOT_GATHERED, 2).edit(_GATHER, _OWN_IN_ZEROS),
    Mutant("shard as it is", "not gathered", _NOT_GATHERED, 2).edit(_GATHER, "whole = shard"),
    Mutant("does not wait", "read too early", _NOT_WAITED, 1, 2)
    .edit(_GATHER, "work = gather_into(whole, shard, async_op=True)\nseen = torch.zeros_like(whole)")
    .edit(_COMPUTE, "x = compute(index, seen, x)\nwork.wait()"),
    Mutant("all-reduce of zeros", "all-reduce", "it moves zeros too; gather_into moves the shards alone", 2, 64).edit(
        _GATHER, f"{_OWN_IN_ZEROS}\ndist.all_reduce(whole)"
    ),
    Mutant("first input", "input not passed on", f"the last unit read the first input: {_NOT_PASSED}")
    .edit("for index, shard", "first = x\nfor index, shard")
    .edit(_COMPUTE, "x = compute(index, whole, first)"),
    Mutant("result dropped", "input not passed on", f"it returns its input x: {_NOT_PASSED}").edit(
        _COMPUTE, "compute(index, whole, x)"
    ),
    Mutant("gathered twice", "gathered twice", "a unit is gathered more than once: once is enough", 2, 1).edit(
        _GATHER, f"{_GATHER}\n{_GATHER}"
    ),
)
WRONG_AHEAD = (
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
    Mutant("does not wait", "read too early", _NOT_WAITED, 1, 2)
    .edit("work.wait()", "seen = torch.zeros_like(whole)  # what a reader may see who does not wait")
    .edit("compute(index, whole, x)", "compute(index, seen, x)")
    .edit("del whole", "work.wait()\ndel whole"),
    Mutant("two ahead", "three at a time", "the next one only", 2)
    .edit("coming = start(shards[0])", "coming = [start(shard) for shard in shards[:2]]")
    .edit("whole, work = coming", "whole, work = coming.pop(0)")
    .edit(_START_NEXT, "if index + 2 < len(shards):\n    coming.append(start(shards[index + 2]))"),
    Mutant("never freed", "never freed", "as much as the whole model", 1)
    .edit("coming = start(shards[0])", "wholes, coming = [], start(shards[0])")
    .edit("del whole", "wholes.append(whole)"),
    Mutant("first input", "input not passed on", f"the last unit read the first input: {_NOT_PASSED}")
    .edit("coming = start(shards[0])", "first, coming = x, start(shards[0])")
    .edit(_COMPUTE, "x = compute(index, whole, first)"),
    Mutant("result dropped", "input not passed on", f"it returns its input x: {_NOT_PASSED}").edit(
        _COMPUTE, "compute(index, whole, x)"
    ),
)
