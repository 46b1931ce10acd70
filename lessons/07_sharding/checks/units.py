"""Units that are gathered, used and freed: what they compute, what was sent, and memory at the peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.record.operations import ring_bytes
from distlab.grading import Evidence, Fault
from distlab.grading.diagnosis.memory import peak_bytes
from distlab.grading.diagnosis.traffic import calls, in_megabytes
from distlab.grading.diagnosis.values import seeded

WIDTH = 48  # a unit has WIDTH x WIDTH parameters
NUM_UNITS = 4
SAMPLES = 2
UNIT = WIDTH * WIDTH
UNIT_BYTES = 8 * UNIT  # float64
MODEL_BYTES = NUM_UNITS * UNIT_BYTES


def weights_of(unit: int) -> Tensor:
    """Return a unit's whole row of parameters."""
    return seeded(-1, WIDTH * WIDTH, purpose=f"unit {unit}") / WIDTH**0.5


def shards_here() -> list[Tensor]:
    """Return this rank's shard of each unit; only the shard lives on."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return [weights_of(unit).chunk(n)[rank].clone() for unit in range(NUM_UNITS)]


def forward_of(whole: Tensor, x: Tensor) -> Tensor:
    """Run a unit."""
    return torch.tanh(x @ whole.view(WIDTH, WIDTH))


def input_of(rank: int) -> Tensor:
    """Return a rank's own samples."""
    return seeded(rank, SAMPLES, WIDTH, purpose="x")


def inputs_of(rank: int) -> list[Tensor]:
    """Return what each unit of a rank reads, and last what the last one gives."""
    found = [input_of(rank)]
    for unit in range(NUM_UNITS):
        found.append(forward_of(weights_of(unit), found[-1]))
    return found


def settle(whole: Tensor) -> None:
    """Wait until gloo's thread, which has filled a row, has freed it: it may do so a moment after the call."""
    end_s = time.monotonic() + 0.05
    while torch._C._storage_Use_Count(whole.untyped_storage()._cdata) > 2 and time.monotonic() < end_s:
        time.sleep(0.0005)


def run_units(fn: Callable[..., Any], args: tuple[Any, ...], noted: Any, plain: Any) -> dict[str, Any]:
    """Run units once with a compute that takes notes, and then for the least peak of memory of three runs.

    What a function holds itself, it holds in each of the three.
    """
    shards = shards_here()
    kept = [shard.clone() for shard in shards]
    begin_ns = time.monotonic_ns()
    got = fn(shards, *args, noted)
    run_ns = (begin_ns, time.monotonic_ns())

    def settled(unit: int, whole: Tensor, *others: Tensor) -> Any:
        settle(whole)
        return plain(whole, *others)

    is_kept = len(kept) == len(shards) and all(map(torch.equal, kept, shards))
    shards = kept
    peak = min(peak_bytes(fn, shards, *args, settled)[1] for _ in range(3))
    return {"got": got, "peak": peak, "kept": is_kept, "run_ns": run_ns}


def sent_between(evidence: Evidence, rank: int, start_ns: int, end_ns: int) -> int:
    """Return the bytes that a rank sent between two moments; native collectives count as rings."""
    sent = 0
    for call in calls(evidence, rank):
        if start_ns <= call.start_ns <= end_ns:
            is_root, before_root = call.peer == rank, call.peer == (rank + 1) % len(call.group)
            ring = ring_bytes(call.op, call.num_bytes, len(call.group), is_root=is_root, before_root=before_root)
            sent += call.num_bytes if call.op == "send" else ring
    return sent


def judge_whole(rank: int, log: list[Any], n: int, gathered: bool) -> Iterator[Fault]:
    """Each unit computes with its whole row of parameters."""
    for unit, size, right, *_ in log:
        if size != UNIT:
            part = "its own shard" if size == UNIT // n else f"{size} elements"
            text = f"rank {rank} computes unit {unit} with {part}, where the unit has {UNIT} elements"
            yield Fault("not whole", f"{text}: gather_into(torch.empty(n * len(shard)), shard)")
        text = f"rank {rank} computes unit {unit} with other parameters than the unit's:"
        if not right and not gathered and n > 1:
            text = f"{text} it gathered nothing, and has its own shard only; gather_into(whole, shard) brings the"
            yield Fault("not gathered", f"{text} others'")
        if not right:
            text = f"{text} was the row read before the gather was over (wait), written to after it, or gathered from"
            text = f"{text} another unit's shard?"
            yield Fault("read too early", text)


def judge_traffic(evidence: Evidence, wanted: float, what: str) -> Iterator[Fault]:
    """No rank sends more than it needs to."""
    for rank, result in enumerate(evidence.results):
        sent = sent_between(evidence, rank, *result["run_ns"])
        if sent > 1.01 * wanted:
            text = f"right result, but rank {rank} sent {in_megabytes(sent)} where {what} needs {in_megabytes(wanted)}"
            if calls(evidence, rank, "all_reduce"):
                text += ": an all-reduce brings every rank what only one needs, or moves zeros; gather and scatter"
                yield Fault("all-reduce", f"{text} instead")
            yield Fault("too many bytes", f"{text}; is a unit gathered more than once?")


def budget_units(evidence: Evidence) -> list[str]:
    """Say what was sent and what was held at the peak."""
    sent = max(sent_between(evidence, rank, *result["run_ns"]) for rank, result in enumerate(evidence.results))
    peak = max(result["peak"] for result in evidence.results)
    sizes = f"the model has {in_megabytes(MODEL_BYTES)}, a unit {in_megabytes(UNIT_BYTES)}"
    return [
        f"sent {in_megabytes(sent)} per rank; {sizes}",
        f"held {in_megabytes(peak)} more than the shards at the peak",
    ]
