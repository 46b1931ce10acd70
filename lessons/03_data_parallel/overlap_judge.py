"""Name what is wrong with an overlap: values, when all-reduces start, who waits where, and the order on all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_03 import cases
from distlab_lesson_03.judges import judge_means, told

from distlab.comm import RankError
from distlab.comm.record.read import Call
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls

NUM_BUCKETS = 2
LAYER_AFTER_BUCKET_0 = 0  # backward of layer 0 begins when all gradients of bucket 0 (layers 3 and 2) are there


def judge_overlap(evidence: Evidence) -> Iterator[Fault]:
    """Right means in four different steps, and in each the first bucket travels while backward goes on."""
    for rank, result in enumerate(evidence.results):
        if "returned" in result:
            text = f"on rank {rank} overlap returned {result['returned']}"
            yield Fault("returned", f"{text}; expected the function to call after backward: return synchronize")
            return
    yield from _judge_run(evidence, cases.PLAIN, "")
    again = next(_judge_run(evidence, cases.AGAIN, "in the second step "), None)
    if again is not None:
        text = f"the first step is right, not the second: {again.message}"
        yield Fault("second step", f"{text}. Is every count set back after a step?")
        return
    yield from _judge_order(evidence)
    yield from _judge_values(evidence, cases.UNUSED)


def _judge_run(evidence: Evidence, name: str, when: str) -> Iterator[Fault]:
    yield from _judge_values(evidence, name)
    for rank, result in enumerate(evidence.results):
        made, run = _calls_of(evidence, rank, name), result[name]
        if len(made) != NUM_BUCKETS:
            text = f"{when}rank {rank} made {len(made)} calls for {NUM_BUCKETS} buckets"
            yield Fault("calls", f"{text}: one all_reduce a bucket, bucket.start(None)")
            return
        yield from _judge_times(rank, made, run, when)


def _judge_times(rank: int, made: list[Call], run: dict[str, Any], when: str) -> Iterator[Fault]:
    """The first bucket must leave before backward reaches the next layer, and nobody may wait inside backward."""
    start_ns, end_ns = run["backward_ns"]
    reached = dict(run["log"])[LAYER_AFTER_BUCKET_0]
    if made[0].start_ns >= end_ns:
        text = f"{when}rank {rank}'s first all-reduce starts {_ms(made[0].start_ns - end_ns)} after backward has ended"
        yield Fault(
            "starts after backward", f"{text}: nothing overlaps; start a bucket in the hook of its last gradient"
        )
    elif made[0].start_ns > reached:
        text = (
            f"{when}rank {rank} has all gradients of bucket 0 {_ms(reached - start_ns)} into backward and sends it at"
        )
        yield Fault("starts late", f"{text} {_ms(made[0].start_ns - start_ns)}: start it as soon as none is missing")
    for index, call in enumerate(made):
        if 0 < call.wait_ns < end_ns:
            text = f"{when}rank {rank} waits for bucket {index}'s all-reduce inside backward"
            yield Fault(
                "waits in backward", f"{text}: compute stands still meanwhile; wait after backward, in finish()"
            )


def _judge_values(evidence: Evidence, name: str) -> Iterator[Fault]:
    runs = [result[name] for result in evidence.results]
    for fault in judge_means([run["own"] for run in runs], [run["gradients"] for run in runs]):
        if fault.code == "zeros" or (fault.code == "missing gradient" and name != cases.UNUSED):
            text = f"{fault.message}. Its bucket left before this gradient was there"
            fault = Fault("starts too early", f"{text}: count all gradients of a bucket, not one of them")
        yield fault
        return


def _judge_order(evidence: Evidence) -> Iterator[Fault]:
    """Odd ranks fill their second bucket first; all must send in the order of the list all the same."""
    runs = [result[cases.REORDERED] for result in evidence.results]
    if _mixed(runs):
        text = (
            "when rank 1's second bucket was full first, rank 1 sent it first: rank 0's bucket 0 met rank 1's bucket 1"
        )
        yield Fault("order differs", f"{text}. Buckets must be started in one order on all ranks; a full one may wait")
        return
    yield from _judge_values(evidence, cases.REORDERED)


def _mixed(runs: list[dict[str, Any]]) -> bool:
    """Whether a gradient is the mean of another layer's on the odd ranks."""
    pairs = ((3, 1), (2, 0), (3, 0), (2, 1))
    for one, other in pairs:
        names = [f"layers.{layer}.weight" for layer in (one, other)]
        parts = [run["own"][names[rank % 2]] for rank, run in enumerate(runs)]
        got = runs[0]["gradients"][names[0]]
        if len(runs) > 1 and got is not None and torch.allclose(got, torch.stack(parts).mean(0), rtol=0, atol=1e-12):
            return True
    return False


def _calls_of(evidence: Evidence, rank: int, name: str) -> list[Call]:
    run = evidence.results[rank][name]
    begin = run["backward_ns"][0]
    return [call for call in calls(evidence, rank) if begin <= call.start_ns <= run["done_ns"]]


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"


def overlap_failure(error: RankError, world_size: int) -> Fault | None:
    """Name the hang of the last step, in which rank 0 does not use a layer, and calls that do not meet."""
    text = str(error)
    waiting = re.search(r"all_reduce #(\d+)", text)
    lines = told(text)
    if waiting is not None and "deadlock" in text and int(waiting[1]) > NUM_BUCKETS * cases.RUNS.index(cases.UNUSED):
        cause = "rank 0 did not use layer 0 in the last step, so its hooks did not run and its bucket never left"
        return Fault("unused parameter", f"{cause}: start what is left in synchronize().\n{lines}")
    if "do not make the same call" in text:
        return Fault("order differs", f"start buckets in one order on all ranks.\n{lines}")
    if "of a bucket that was not started" in text:
        cause = "a bucket is finished that was not started in this step. Three causes are common: a function made in a"
        cause += " loop sees the loop's last bucket, not its own; the counts are not set back after a step;"
        cause += " what is left is not started before finish()"
        return Fault("not started", f"{cause}.\n{lines}")
    return None


def budget_overlap(evidence: Evidence) -> list[str]:
    """Say how much of backward the first bucket travelled under."""
    early = []
    for rank, result in enumerate(evidence.results):
        end_ns = result[cases.PLAIN]["backward_ns"][1]
        early.append((end_ns - _calls_of(evidence, rank, cases.PLAIN)[0].start_ns) / 1e6)
    return [f"{NUM_BUCKETS} all-reduces a step, the first under way {min(early):.1f} ms before backward ended"]
