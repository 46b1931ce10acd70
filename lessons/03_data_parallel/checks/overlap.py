"""Sending buckets during backward: layers that sleep there, four steps on them, and when each all-reduce must start."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_03.checks.layers import (
    AGAIN,
    EARLY_HOOK,
    GRADIENTS_PER_BUCKET,
    LAYER_AFTER_BUCKET_0,
    NUM_BUCKETS,
    PLAIN,
    REORDERED,
    RUNS,
    UNUSED,
    Hooks,
    Layers,
    WatchedBucket,
    orders,
)
from distlab_lesson_03.checks.shared import judge_means, told
from torch import Tensor, nn

from distlab.comm import RankError
from distlab.comm.record.read import Call
from distlab.data_parallel.steps import FlatBucket
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import each_rank
from distlab.grading.diagnosis.traffic import calls
from distlab.grading.diagnosis.values import seeded


def drive_overlap(fn: Callable[[list[FlatBucket]], Callable[[], Any]]) -> dict[str, Any]:
    """Run four steps on layers that sleep in backward; two buckets of two layers each, the last layers first."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, alone = Layers(), Layers()
    members = [[*model.layers[a].parameters(), *model.layers[b].parameters()] for a, b in ((3, 2), (1, 0))]
    buckets = [WatchedBucket(parameters) for parameters in members]
    synchronize = fn(list(buckets))
    hooks = [tuple(Hooks.of(parameters)) for parameters in members]
    if not callable(synchronize):
        return {"returned": repr(synchronize)}
    runs = {}
    for number, (name, order) in enumerate(orders(rank, world_size)):
        x = seeded(rank, 3, 4, purpose=name)
        for module in (alone, model):
            module.zero_grad()
            module.log.clear()
        for bucket in buckets:
            bucket.starts.clear()
        alone(x, order).backward()
        loss = model(x, order)
        loss.backward()
        end_ns = time.monotonic_ns()
        try:
            synchronize()
        except RuntimeError as error:
            seen = f"step {number + 1}, starts {[bucket.starts for bucket in buckets]}, hooks {hooks}"
            raise RuntimeError(f"{error}; {seen}") from error
        runs[name] = {
            "number": number,
            "own": {key: _zeros_if_none(p) for key, p in alone.named_parameters()},
            "gradients": {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()},
            "log": list(model.log),
            "starts": [list(bucket.starts) for bucket in buckets],
            "hooks": hooks,
            "backward_ns": (model.log[0][1], end_ns),
            "done_ns": time.monotonic_ns(),
        }
    return runs


def _zeros_if_none(parameter: nn.Parameter) -> Tensor:
    """Return a copy of the gradient, or what a missing one counts as."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def judge_overlap(evidence: Evidence) -> Iterator[Fault]:
    """Right means in four different steps, and in each the first bucket travels while backward goes on."""
    yield from each_rank(evidence, _returned)
    yield from _judge_run(evidence, PLAIN, "")
    again = next(_judge_run(evidence, AGAIN, "in the second step "), None)
    if again is not None:
        text = f"the first step is right, not the second: {again.message}"
        yield Fault("second step", f"{text}. Is every count set back after a step?")
    yield from _judge_order(evidence)
    yield from _judge_values(evidence, UNUSED)


def _returned(rank: int, result: dict[str, Any]) -> Fault | None:
    if "returned" not in result:
        return None
    text = f"on rank {rank} overlap returned {result['returned']}"
    return Fault("returned", f"{text}; expected the function to call after backward: return synchronize")


def _judge_run(evidence: Evidence, name: str, when: str) -> Iterator[Fault]:
    yield from _judge_values(evidence, name)
    for rank, result in enumerate(evidence.results):
        made, run = _calls_of(evidence, rank, name), result[name]
        if len(made) != NUM_BUCKETS:
            text = f"{when}rank {rank} made {len(made)} calls for {NUM_BUCKETS} buckets"
            yield Fault("calls", f"{text}: one all_reduce a bucket, bucket.start(None)")
        yield from _judge_times(rank, made, run, when)


def _judge_times(rank: int, made: list[Call], run: dict[str, Any], when: str) -> Iterator[Fault]:
    """The first bucket must leave before backward reaches the next layer, and no rank may wait inside backward."""
    start_ns, end_ns = run["backward_ns"]
    reached = dict(run["log"])[LAYER_AFTER_BUCKET_0]
    if made[0].start_ns >= end_ns:
        text = f"{when}rank {rank}'s first all-reduce starts {_ms(made[0].start_ns - end_ns)} after backward has ended"
        text = f"{text}: nothing overlaps; start a bucket in the hook of its last gradient"
        yield Fault("starts after backward", f"{text}. {Hooks(*run['hooks'][0]).why_not_started()}")
    elif made[0].start_ns > reached:
        text = (
            f"{when}rank {rank} has all gradients of bucket 0 {_ms(reached - start_ns)} into backward and sends it at"
        )
        yield Fault("starts late", f"{text} {_ms(made[0].start_ns - start_ns)}: start it as soon as none is missing")
    for index, call in enumerate(made):
        if call.start_ns >= end_ns:
            text = f"{when}rank {rank} sends bucket {index} after backward has ended: start it in a hook, as bucket 0"
            yield Fault("starts after backward", f"{text}. {Hooks(*run['hooks'][index]).why_not_started()}")
        if 0 < call.wait_ns < end_ns:
            text = f"{when}rank {rank} waits for bucket {index}'s all-reduce inside backward"
            yield Fault(
                "waits in backward", f"{text}: compute stands still meanwhile; wait after backward, in finish()"
            )


def _judge_values(evidence: Evidence, name: str) -> Iterator[Fault]:
    runs = [result[name] for result in evidence.results]
    for fault in judge_means([run["own"] for run in runs], [run["gradients"] for run in runs]):
        if fault.code == "zeros" or (fault.code == "missing gradient" and name != UNUSED):
            fault = Fault("starts too early", f"{fault.message}. {_too_early(runs)}")
        yield fault


def _too_early(runs: list[dict[str, Any]]) -> str:
    """Say which bucket left before all its gradients were there, as far as it was seen."""
    for rank, run in enumerate(runs):
        for index, (starts, hooks) in enumerate(zip(run["starts"], run["hooks"], strict=True)):
            if starts and starts[0] < GRADIENTS_PER_BUCKET:
                text = f"On rank {rank} bucket {index} left when {starts[0]} of its {GRADIENTS_PER_BUCKET} gradients"
                if hooks[1] and not hooks[0]:
                    return f"{text} were there. {EARLY_HOOK}"
                return f"{text} were there: count all gradients of a bucket, not one of them"
    return "Its bucket left before this gradient was there: count all gradients of a bucket, not one of them"


def _judge_order(evidence: Evidence) -> Iterator[Fault]:
    """Odd ranks fill their second bucket first; all must send in the order of the list all the same."""
    runs = [result[REORDERED] for result in evidence.results]
    if _mixed(runs):
        text = (
            "when rank 1's second bucket was full first, rank 1 sent it first: rank 0's bucket 0 met rank 1's bucket 1"
        )
        yield Fault("order differs", f"{text}. Buckets must be started in one order on all ranks; a full one may wait")
    yield from _judge_values(evidence, REORDERED)


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
    if waiting is not None and "deadlock" in text and int(waiting[1]) > NUM_BUCKETS * RUNS.index(UNUSED):
        cause = "rank 0 did not use layer 0 in the last step, so its hooks did not run and its bucket never left"
        return Fault("unused parameter", f"{cause}: start the rest in synchronize().\n{lines}")
    if "do not make the same call" in text:
        return Fault("order differs", f"start buckets in one order on all ranks.\n{lines}")
    seen = re.search(r"of a bucket that was not started.*; step (\d+), starts (\[.*\]), hooks (\[.*\])", text)
    if seen is not None:
        starts, hooks = ast.literal_eval(seen[2]), [Hooks(*one) for one in ast.literal_eval(seen[3])]
        return Fault("not started", f"{_not_started(int(seen[1]), starts, hooks)}.")
    return None


def _not_started(step: int, starts: list[list[int]], hooks: list[Hooks]) -> str:
    """Say what was seen where finish() met a bucket that was not started.

    Args:
        step: from 1.
        starts: for each bucket and each of its starts in this step, how many of its gradients were there.
        hooks: of each bucket.
    """
    never = next(index for index, one in enumerate(starts) if not one)
    text = f"step {step}: finish() of bucket {never}, which was not started in this step"
    for index, one in enumerate(starts):
        if len(one) > 1:
            text += f"; bucket {index} was started {len(one)} times"
        elif one and one[0] < GRADIENTS_PER_BUCKET:
            text += f"; bucket {index} was started when {one[0]} of its {GRADIENTS_PER_BUCKET} gradients were there"
    if any(len(one) > 1 or min(one, default=GRADIENTS_PER_BUCKET) < GRADIENTS_PER_BUCKET for one in starts):
        advice = "A hook starts another bucket than its own: a function made in a loop sees the loop's last bucket"
        return f"{text}. {advice}, not its own"
    if step == RUNS.index(UNUSED) + 1:
        return f"{text}. Rank 0 does not use layer 0 in this step, so no hook starts its bucket: start the rest first"
    if step > 1:
        return f"{text}, while step 1 was right. Set the counts of missing gradients back after each step"
    return f"{text}. All its gradients were there. {hooks[never].why_not_started()}"


def budget_overlap(evidence: Evidence) -> list[str]:
    """Say how much of backward the first bucket travelled under."""
    early = []
    for rank, result in enumerate(evidence.results):
        end_ns = result[PLAIN]["backward_ns"][1]
        early.append((end_ns - _calls_of(evidence, rank, PLAIN)[0].start_ns) / 1e6)
    return [f"{NUM_BUCKETS} all-reduces a step, the first under way {min(early):.1f} ms before backward ended"]


WRONG_OVERLAPS = (
    Mutant("all after backward", "starts after backward", "nothing overlaps", 2, 25).without(
        """
        for index, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: gradient_ready(index))
        """
    ),
    Mutant("waits in the hook", "waits in backward", "compute stands still", 2, 25)
    .edit("buckets[len(started)].start(None)", "buckets[len(started)].start(None)\nbuckets[len(started)].finish()")
    .edit("bucket.start(None)", "bucket.start(None)\nbucket.finish()")
    .edit("for bucket in buckets:\n    bucket.finish()", ""),
    Mutant("first full first", "order differs", "one order on all ranks", 2, 16)
    .edit(
        """
        while len(started) < len(buckets) and missing[len(started)] == 0:
            buckets[len(started)].start(None)
            started.append(len(started))
        """,
        """
        if missing[index] == 0:
            buckets[index].start(None)
            started.append(index)
        """,
    )
    .edit(
        "for bucket in buckets[len(started) :]:",
        "for bucket in [bucket for index, bucket in enumerate(buckets) if index not in started]:",
    ),
    Mutant("never set back", "second step", "every count set back", 2, 50).without(
        "missing[:] = [len(bucket.parameters) for bucket in buckets]"
    ),
    Mutant("unused hangs", "unused parameter", "did not use layer 0", 2, 15)
    .without("for bucket in buckets[len(started) :]:\n    bucket.start(None)")
    .edit("for bucket in buckets:\n    bucket.finish()", "for index in started:\n    buckets[index].finish()"),
    Mutant("last of the loop", "not started", "sees the loop's last bucket", 2, 16).body("""
        for bucket in buckets:
            missing = len(bucket.parameters)

            def hook(_):
                nonlocal missing
                missing -= 1
                if missing == 0:
                    bucket.start(None)

            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(hook)
        return lambda: [bucket.finish() for bucket in buckets] and None
    """),
    Mutant("one hook a bucket", "starts too early", "count all gradients", 2, 16)
    .edit(
        "missing = [len(bucket.parameters) for bucket in buckets]\nstarted", "missing = [1 for _ in buckets]\nstarted"
    )
    .edit("for parameter in bucket.parameters:", "for parameter in bucket.parameters[-1:]:")
    .edit("missing[:] = [len(bucket.parameters) for bucket in buckets]", "missing[:] = [1 for _ in buckets]"),
)
