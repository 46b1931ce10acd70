"""Name what is wrong with units that are gathered, used and let go: contents, order, bytes, and memory at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_07 import cases
from distlab_lesson_07.judges import DOUBLE, sent_between
from torch import Tensor

from distlab.comm.record.read import Call
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes
from distlab.grading.values import compare, describe, equal

UNIT = cases.WIDTH * cases.WIDTH
UNIT_BYTES = DOUBLE * UNIT
MODEL_BYTES = cases.NUM_UNITS * UNIT_BYTES


def judge_forward(evidence: Evidence) -> Iterator[Fault]:
    """Right output, each unit gathered once, and one whole unit at a time."""
    yield from _judge_runs(evidence)
    n = evidence.world_size
    yield from _judge_traffic(evidence, (n - 1) / n * MODEL_BYTES, "one all-gather of each unit")
    for rank, result in enumerate(evidence.results):
        peak = result["peak"]
        if peak > 0.95 * MODEL_BYTES:
            yield _never_let_go(rank, peak, 1)
        elif peak > 1.6 * UNIT_BYTES:
            text = f"right result, but rank {rank} holds {in_megabytes(peak)} at once, two whole units. Either a name"
            text += " keeps the old one until it is given the next, which is made first: del it after compute. Or"
            text += " parts lie beside the row that they are joined into: gather_into fills the row itself"
            yield Fault("two at a time", text)


def judge_ahead(evidence: Evidence) -> Iterator[Fault]:
    """As forward, with the next unit on its way while one computes, and two whole units at most."""
    yield from _judge_runs(evidence)
    n = evidence.world_size
    yield from _judge_traffic(evidence, (n - 1) / n * MODEL_BYTES, "one all-gather of each unit")
    for rank, result in enumerate(evidence.results):
        made = [
            call for call in calls(evidence, rank, "all_gather") if _within(call, result["run_ns"])
        ]  # the run with the log; the second run looks at memory
        if len(made) != cases.NUM_UNITS:
            text = f"rank {rank} made {len(made)} all-gathers for {cases.NUM_UNITS} units"
            yield Fault("calls", f"{text}: start one a unit, gather_into(whole, shard, async_op=True)")
            return
        yield from _judge_overlap(rank, made, result["log"])
        advice = "start the gather of the next one only, and let each go after it computed"
        begins = [entry[3] for entry in result["log"]]
        early = [unit for unit in range(2, cases.NUM_UNITS) if made[unit].start_ns < begins[unit - 2]]
        if early:  # told by order: beside three units, what the library lends a gather may look like the whole model
            text = f"right result, but rank {rank} gathers unit {early[0]} before unit {early[0] - 2} computes, so that"
            yield Fault("three at a time", f"{text} three units are whole at once: {advice}")
        elif result["peak"] > 0.95 * MODEL_BYTES:
            yield _never_let_go(rank, result["peak"], 2)
        elif result["peak"] > 2.6 * UNIT_BYTES:
            text = f"right result, but rank {rank} holds {in_megabytes(result['peak'])} at once, three whole units"
            yield Fault("three at a time", f"{text}: {advice}")


def _judge_overlap(rank: int, made: list[Call], log: list[Any]) -> Iterator[Fault]:
    first = log[0][3]
    if all(call.start_ns < first for call in made) and cases.NUM_UNITS > 2:
        text = f"rank {rank} starts the gathers of all {cases.NUM_UNITS} units before the first computes: all of them"
        yield Fault("all at once", f"{text} are whole at the same time; start only the next one")
    for unit in range(cases.NUM_UNITS - 1):
        start_ns, end_ns = log[unit][3], log[unit][4]
        call = made[unit + 1]
        if call.start_ns >= end_ns:
            text = f"rank {rank} gathers unit {unit + 1} only after unit {unit} has computed: nothing runs beside it"
            yield Fault("not ahead", f"{text}; start the next gather before compute, wait for it after")
            return
        if 0 < call.wait_ns < start_ns:
            text = f"rank {rank} starts the gather of unit {unit + 1} ahead, and waits for it before unit {unit}"
            yield Fault("waits at once", f"{text} computes; wait for it when its turn has come")
            return


def _judge_runs(evidence: Evidence) -> Iterator[Fault]:
    n = evidence.world_size
    for rank, result in enumerate(evidence.results):
        order = [entry[0] for entry in result["log"]]
        if order != list(range(cases.NUM_UNITS)):
            text = f"rank {rank} computed units {order}; expected each once, from 0 to {cases.NUM_UNITS - 1}"
            yield Fault("units", text)
            return
        yield from _judge_whole(rank, result["log"], n, bool(calls(evidence, rank)))
        want = cases.inputs_of(rank)[-1]
        for place, words in enumerate(("its input x", "the output of unit 0")):
            if isinstance(result["got"], Tensor) and equal(result["got"], cases.inputs_of(rank)[place]):
                text = f"rank {rank} returns {words}"
                yield Fault(
                    "input not passed on", f"{text}: each unit reads what the one before gave: x = compute(...)"
                )
                return
        alone = cases.forward_of(cases.weights_of(cases.NUM_UNITS - 1), cases.input_of(rank))
        if isinstance(result["got"], Tensor) and equal(result["got"], alone):
            text = f"rank {rank}: the last unit read the first input"
            yield Fault("input not passed on", f"{text}: each unit reads what the one before gave: x = compute(...)")
            return
        fault = compare(result["got"], want, f"rank {rank}'s output", n)
        if fault is not None:
            yield fault
            return
        if not result["kept"]:
            text = f"rank {rank}'s shards were changed by forward; gather into a row of its own"
            yield Fault("changed argument", text)
            return


def _judge_whole(rank: int, log: list[Any], n: int, gathered: bool) -> Iterator[Fault]:
    for unit, size, right, *_ in log:
        if size != UNIT:
            part = "its own shard" if size == UNIT // n else f"{size} elements"
            text = f"rank {rank} computes unit {unit} with {part}, where the unit has {UNIT} elements"
            yield Fault("not whole", f"{text}: gather_into(torch.empty(n * len(shard)), shard)")
            return
        if not right and not gathered and n > 1:
            text = f"rank {rank} computes unit {unit} with other parameters than the unit's: it gathered nothing,"
            yield Fault(
                "not gathered", f"{text} and has its own shard only; gather_into(whole, shard) brings the others'"
            )
            return
        if not right:
            text = f"rank {rank} computes unit {unit} with other parameters than the unit's: was the row read before"
            yield Fault("read too early", f"{text} the gather was over (wait), or written to after it?")
            return


def _judge_traffic(evidence: Evidence, wanted: float, what: str) -> Iterator[Fault]:
    for rank, result in enumerate(evidence.results):
        sent = sent_between(evidence, rank, *result["run_ns"])
        if sent <= 1.01 * wanted:
            continue
        text = f"right result, but rank {rank} sent {in_megabytes(sent)} where {what} needs {in_megabytes(wanted)}"
        if any(call.op == "all_reduce" for call in calls(evidence, rank)):
            text += ": an all-reduce brings every rank what only one needs, or moves zeros; gather and scatter instead"
            yield Fault("all-reduce", text)
        else:
            yield Fault("too many bytes", f"{text}; is a unit gathered more than once?")
        return


def _never_let_go(rank: int, peak: int, allowed: int) -> Fault:
    held = f"{allowed} unit{'s are' if allowed > 1 else ' is'} {in_megabytes(allowed * UNIT_BYTES)}"
    text = f"right result, but rank {rank} holds {in_megabytes(peak)} at once where {held}: the peak is that of the"
    return Fault("never let go", f"{text} whole model; units are not let go after they computed (a list of them?)")


def _within(call: Call, run_ns: tuple[int, int]) -> bool:
    return run_ns[0] <= call.start_ns <= run_ns[1]


def judge_backward(evidence: Evidence) -> Iterator[Fault]:
    """Units in reverse, each rank its shard of the mean gradients, two Psi on the wire, two whole rows at the peak."""
    n = evidence.world_size
    gradients, unpassed = _true_gradients(n)
    for rank, result in enumerate(evidence.results):
        order = [entry[0] for entry in result["log"]]
        if order != list(reversed(range(cases.NUM_UNITS))):
            text = f"rank {rank} ran backward of units {order}; expected the last first, each once"
            yield Fault("units", text)
            return
        yield from _judge_whole(rank, result["log"], n, bool(calls(evidence, rank)))
        if not all(entry[3] for entry in result["log"]):
            unit = next(entry[0] for entry in result["log"] if not entry[3])
            yield Fault("wrong input", f"rank {rank} gave unit {unit} another input than inputs[{unit}]")
            return
        if not result["kept"]:
            text = f"rank {rank}'s shards of parameters were changed by backward: only the optimizer may change them"
            yield Fault("changed argument", f"{text}; put gradients into tensors of their own")
            return
        fault = _judge_gradients(result["got"], gradients, unpassed, (rank, n))
        if fault is not None:
            yield fault
            return
    wanted = 2 * (n - 1) / n * MODEL_BYTES
    yield from _judge_traffic(evidence, wanted, "an all-gather and a reduce-scatter of each unit")
    for rank, result in enumerate(evidence.results):
        limit = (2 + (cases.NUM_UNITS + 1) / n + 0.6) * UNIT_BYTES
        if result["peak"] > limit:
            text = f"right result, but rank {rank} holds {in_megabytes(result['peak'])} at once, where one unit, its"
            text += f" gradient and all shards of gradients need less than {in_megabytes(limit)}: whole gradients, or"
            text += " whole units, are kept until the end; reduce and drop each at once (a name keeps a tensor until it"
            yield Fault("never let go", f"{text} is given the next; a view, such as a chunk, keeps the whole of it)")
            return


def _true_gradients(n: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return each rank's whole gradients, and those of a backward that gives every unit the last gradient."""
    right, unpassed = [], []
    for rank in range(n):
        inputs, grad = cases.inputs_of(rank), cases.grad_of(rank)
        mine: list[Tensor] = [torch.empty(0)] * cases.NUM_UNITS
        same: list[Tensor] = [torch.empty(0)] * cases.NUM_UNITS
        for unit in reversed(range(cases.NUM_UNITS)):
            whole = cases.weights_of(unit)
            same[unit] = cases.backward_of(whole, inputs[unit], cases.grad_of(rank))[0]
            mine[unit], grad = cases.backward_of(whole, inputs[unit], grad)
        right.append(mine)
        unpassed.append(same)
    return right, unpassed


def _judge_gradients(
    got: Any, gradients: list[list[Tensor]], unpassed: list[list[Tensor]], where: tuple[int, int]
) -> Fault | None:
    rank, n = where
    if not isinstance(got, list | tuple) or len(got) != cases.NUM_UNITS:
        return Fault("returned", f"rank {rank}: expected a list of {cases.NUM_UNITS} tensors, got {describe(got)}")
    for unit, tensor in enumerate(got):
        if n > 1 and isinstance(tensor, Tensor) and tensor.numel() == UNIT:
            text = f"rank {rank} keeps the whole gradient of unit {unit}: {UNIT} elements where its shard has"
            return Fault("whole gradient", f"{text} {UNIT // n}; scatter_sum leaves it with its own part of the sum")
    for unit in reversed(range(cases.NUM_UNITS)):
        mean = torch.stack([mine[unit] for mine in gradients]).mean(0).chunk(n)[rank]
        tensor, what = got[unit], f"rank {rank}'s gradient shard of unit {unit}"
        fault = compare(tensor, mean, what, n)
        if fault is None:
            continue
        if fault.code in ("returned", "shape", "dtype"):
            return fault
        alone = gradients[rank][unit].chunk(n)[rank]
        if n > 1 and (equal(tensor, alone) or equal(tensor, alone / n)):
            text = f"{what} is of this rank's samples alone"
            return Fault("not communicated", f"{text}: nothing of the others reached it")
        for other in range(cases.NUM_UNITS):
            if equal(tensor, torch.stack([mine[other] for mine in gradients]).mean(0).chunk(n)[rank]):
                text = f"{what} is that of unit {other}: return them in the order of the units, not of backward"
                return Fault("wrong order", f"{text}, and a tensor of its own for each")
        same = torch.stack([mine[unit] for mine in unpassed]).mean(0).chunk(n)[rank]
        if equal(tensor, same):
            text = f"{what} was computed from the gradient of the last unit's output"
            return Fault("gradient not passed on", f"{text}; each unit hands its input's gradient to the one before")
        return fault
    return None


def budget_units(evidence: Evidence) -> list[str]:
    """Say what was sent and what was held at the peak."""
    sent = max(sent_between(evidence, rank, *result["run_ns"]) for rank, result in enumerate(evidence.results))
    peak = max(result["peak"] for result in evidence.results)
    sizes = f"the model has {in_megabytes(MODEL_BYTES)}, a unit {in_megabytes(UNIT_BYTES)}"
    return [
        f"sent {in_megabytes(sent)} a rank; {sizes}",
        f"held {in_megabytes(peak)} more than the shards at the peak",
    ]
