"""Name what is wrong with a rank that runs its actions: order, hand-overs, scaling, gradients, overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_09 import cases
from torch import Tensor

from distlab.comm import RankError
from distlab.comm.record.read import Call
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes
from distlab.grading.values import compare, describe, equal

DOUBLE = 8
MESSAGE_BYTES = DOUBLE * cases.SAMPLES * cases.WIDTH
M = cases.NUM_MICROBATCHES


def made_in(evidence: Evidence, rank: int, run_ns: tuple[int, int]) -> list[Call]:
    """Return the calls that a rank made in a run."""
    return [call for call in calls(evidence, rank) if run_ns[0] <= call.start_ns <= run_ns[1]]


def whole_step(world_size: int) -> tuple[float, list[list[Tensor]], list[list[Tensor]]]:
    """Return one process's loss, each stage's gradients, and what each stage gives for each micro-batch."""
    stages = cases.stages_of(world_size)
    given: list[list[Tensor]] = [[] for _ in stages]
    losses = []
    for x, target in zip(cases.inputs(), cases.targets(), strict=True):
        for stage, outputs in zip(stages, given, strict=True):
            x = stage(x)
            outputs.append(x.detach())
        losses.append(cases.plain_loss(x, target))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = [[p.grad for p in stage.parameters() if p.grad is not None] for stage in stages]
    return loss.item(), gradients, given


def judge_run(evidence: Evidence) -> Iterator[Fault]:
    """Equal to one process, in the order that was asked, stages side by side, no message too many."""
    n = evidence.world_size
    loss, gradients, given = whole_step(n)
    for name in ("GPipe", "1F1B"):
        results = [result[name] for result in evidence.results]
        yield from _judge_pairs(results[-1]["pairs"], given[-1], name)
        for rank, result in enumerate(results):
            yield from _judge_inputs(result["log"], rank, given, name)
        for rank, result in enumerate(results):
            yield from _judge_order(result["log"], rank, n, name)
        yield from _judge_gradients(results, gradients, name)
        for rank, result in enumerate(results):
            if rank < n - 1 and result["loss"] is not None:
                text = f"{name}: rank {rank} returned {describe(result['loss'])}"
                yield Fault("returned", f"{text}; the last rank alone knows the loss, so the others return None")
                return
        fault = compare(results[-1]["loss"], loss, f"{name}: what rank {n - 1} returned", 1)
        if fault is not None:
            yield fault
            return
        if name == "GPipe":
            yield from _judge_overlap(evidence, results)
        yield from _judge_bytes(evidence, results, name)


def _judge_pairs(pairs: list[tuple[Tensor, Tensor]], outputs: list[Tensor], name: str) -> Iterator[Fault]:
    targets = cases.targets()
    for output, target in pairs:
        if output.shape != outputs[0].shape or target.shape != targets[0].shape:
            text = f"{name}: loss_fn got an output of {list(output.shape)} and a target of {list(target.shape)}"
            yield Fault("all at once", f"{text}; call it for each micro-batch, in its forward pass")
            return
        one = next((i for i, other in enumerate(outputs) if equal(output, other)), None)
        other = next((i for i, mine in enumerate(targets) if equal(target, mine)), None)
        if one is not None and other is not None and one != other:
            text = f"{name}: micro-batch {one}'s output met micro-batch {other}'s target"
            yield Fault("wrong target", f"{text}: targets go by action.microbatch")
            return


def _judge_inputs(log: list[Any], rank: int, given: list[list[Tensor]], name: str) -> Iterator[Fault]:
    wanted = cases.inputs() if rank == 0 else given[rank - 1]
    passes = [entry for entry in log if entry[0] == "F"]
    if len(passes) != M:
        text = f"{name}: rank {rank} ran its stage {len(passes)} times for {M} micro-batches"
        yield Fault("forward passes", f"{text}; once for each action of kind F")
        return
    for i, entry in enumerate(passes):
        if entry[4].shape == wanted[i].shape and equal(entry[4], wanted[i]):
            continue
        found = [j for j in range(M) if entry[4].shape == wanted[j].shape and equal(entry[4], wanted[j])]
        what = f"micro-batch {found[0]}'s" if found else "none that the stage before has made"
        text = f"{name}: rank {rank}'s forward pass of micro-batch {i} read {what if found else what + ','} input"
        yield Fault("wrong input", f"{text}: was it read before it had arrived, or in another order than it was sent?")
        return


def _judge_order(log: list[Any], rank: int, n: int, name: str) -> Iterator[Fault]:
    wanted = [(action.kind, action.microbatch) for action in cases.orders_of(rank, n)[name]]
    found = [(entry[0], entry[1]) for entry in log]
    if found == wanted:
        return
    backward = [number for kind, number in found if kind == "B"]
    held = most = 0
    for kind, _ in found:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    need = min(n - rank, M) if name == "1F1B" else M
    if len(backward) < M and rank < n - 1:
        text = f"{name}: rank {rank} ran {len(backward)} backward passes of {M}"
        yield Fault("backward passes", f"{text}: y.backward(grad) with the gradient that the next rank sends")
    elif most > need:
        text = f"{name}: peak in flight {most} on rank {rank} where {name} needs {need}: backward passes wait until all"
        yield Fault("one backward at the end", f"{text} forward passes are over; run each when its action comes")
    elif sorted(backward) == list(range(M)) and [kind for kind, _ in found] == [kind for kind, _ in wanted]:
        place = next(k for k, pair in enumerate(found) if pair != wanted[k])
        (kind, i), (_, j) = wanted[place], found[place]
        text = f"{name}: at action {rank}{kind}{i} rank {rank} went back through micro-batch {j}: its gradient met what"
        yield Fault("micro-batches mixed up", f"{text} another forward pass had kept; keep (x, y) by microbatch")
    else:
        ran, asked = (", ".join(f"{kind}{i}" for kind, i in pairs) for pairs in (found, wanted))
        yield Fault("order", f"{name}: rank {rank} ran {ran}; its actions are {asked}: run them one by one, in order")


def _judge_gradients(results: list[dict[str, Any]], gradients: list[list[Tensor]], name: str) -> Iterator[Fault]:
    last = len(results) - 1
    for rank in reversed(range(len(results))):  # a fault travels from the last stage to the first: name it at its start
        for got, want in zip(results[rank]["gradients"], gradients[rank], strict=True):
            if rank < last and (got is None or not bool(got.any())):
                text = f"{name}: no gradient reached stage {rank}: the activation that stage {rank + 1} received does"
                yield Fault("no gradient", f"{text} not require grad, so its x.grad is None; call x.requires_grad_()")
                return
            if got is None:
                yield Fault(
                    "no gradient", f"{name}: stage {rank}'s parameters have no gradient: nobody called backward"
                )
                return
            if equal(got, M * want):
                text = f"{name}: stage {rank}'s gradients are {M}x too large: the loss of each micro-batch must be"
                yield Fault("loss not scaled", f"{text} divided by {M}")
                return
            if equal(M * got, want):
                text = f"{name}: stage {rank}'s gradients are {M}x too small: divide by the number of micro-batches"
                yield Fault("scaled twice", f"{text} once, in the loss; a gradient that is passed on has it already")
                return
            fault = compare(got, want, f"{name}: stage {rank}'s gradient", 1)
            if fault is None:
                continue
            if rank and equal(results[rank]["gradients"][-1], gradients[rank][-1]):  # the bias, which needs no input
                text = (
                    f"{fault.message}. Its bias is right and its weight is not: the x that was kept has changed since"
                )
                fault = Fault("one buffer", f"{text}. Receive each micro-batch into a tensor of its own")
            yield fault
            return


def _judge_overlap(evidence: Evidence, results: list[dict[str, Any]]) -> Iterator[Fault]:
    """A rank 0 that waits for the last stage between micro-batches: by the order of what was recorded."""
    forward = [[entry for entry in result["log"] if entry[0] == "F"] for result in results]
    yield from overlap_fault(evidence, forward, results[0]["run_ns"])


def overlap_fault(evidence: Evidence, forward: list[list[Any]], run_ns: tuple[int, int]) -> Iterator[Fault]:
    """Say that stages never overlap.

    It takes two signs, so that a slow machine accuses nobody: each micro-batch entered after the one before had left,
    and rank 0 made calls between the two that can wait for another rank.
    """
    last = evidence.world_size - 1
    if last < 1:
        return
    for i in range(M - 1):
        left_ns, enters_ns = forward[last][i][3], forward[0][i + 1][2]
        made = made_in(evidence, 0, run_ns)
        waits = [call for call in made if call.op != "send" and forward[0][i][3] < call.start_ns < enters_ns]
        if enters_ns < left_ns or not waits:
            return
    words = ", ".join(dict.fromkeys(call.op for call in waits))
    text = "right result, but stages never overlap: micro-batch 1 enters stage 0 only after micro-batch 0 left stage"
    yield Fault("stages never overlap", f"{text} {last}: rank 0 waits for it ({words}) between the two")


def _judge_bytes(evidence: Evidence, results: list[dict[str, Any]], name: str) -> Iterator[Fault]:
    n = evidence.world_size
    for rank, result in enumerate(results):
        made = made_in(evidence, rank, result["run_ns"])
        sent = sum(call.num_bytes for call in made if call.op not in ("recv", "barrier"))
        wanted = M * MESSAGE_BYTES * ((rank < n - 1) + (rank > 0))
        if sent > wanted:
            ops = ", ".join(sorted({call.op for call in made if call.op != "recv"}))
            text = f"right result, but rank {rank} sent {in_megabytes(sent)} ({ops}) in {name} where {M} activations to"
            yield Fault("too many bytes", f"{text} the next and {M} gradients back need {in_megabytes(wanted)}")
            return


def run_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a gradient that is not there, and sends that wait for each other."""
    text = str(error)
    if "NoneType" in text or "does not require grad" in text:
        words = (
            f"no gradient reached stage {world_size - 2}: the received activation does not require grad, so backward"
        )
        return Fault(
            "no gradient", f"{words} leaves nothing in x.grad to send; call x.requires_grad_() once it is there"
        )
    if "deadlock" in text and "waits in send" in text:
        words = (
            "two neighbours wait in send, each for the other to receive: one hands an activation forward, the other a"
        )
        return Fault("blocking sends", f"{words} gradient back. Start sends (dist.isend) and wait for them at the end")
    return None


def budget_run(evidence: Evidence) -> list[str]:
    """Say what was sent, and the most in flight on rank 0."""
    n = evidence.world_size
    most = M * MESSAGE_BYTES * (2 if n > 2 else min(n - 1, 1))
    flight = f"in flight on rank 0: {M} in GPipe, {min(n, M)} in 1F1B"
    return [f"sent {in_megabytes(most)} a rank at most: {M} activations on, {M} gradients back", flight]


def judge_forward(evidence: Evidence) -> Iterator[Fault]:
    """Right outputs on every rank, and stages that work side by side."""
    n = evidence.world_size
    outputs = whole_step(n)[2][-1]
    for rank, result in enumerate(evidence.results):
        got = result["got"]
        if not isinstance(got, list | tuple) or len(got) != M:
            yield Fault("returned", f"rank {rank}: expected a list of {M} tensors, got {describe(got)}")
            return
        for i, (mine, want) in enumerate(zip(got, outputs, strict=True)):
            fault = compare(mine, want, f"rank {rank}'s output of micro-batch {i}", 1)
            if fault is None:
                continue
            if n > 1 and rank < n - 1 and isinstance(mine, Tensor):
                own = whole_step(n)[2][rank]
                if mine.shape == want.shape and equal(mine, own[i]):
                    text = f"rank {rank} returns what its own stage gave, not the last stage's output"
                    yield Fault("own output", f"{text}; broadcast it from rank {n - 1} when all are through")
                    return
            if isinstance(mine, Tensor) and any(mine.shape == one.shape and equal(mine, one) for one in outputs):
                yield Fault("order", f"rank {rank} returns another micro-batch's output in place {i}")
                return
            yield fault
            return
    forward = [[entry for entry in result["log"] if entry[0] == "F"] for result in evidence.results]
    if any(len(passes) != M for passes in forward):
        rank = next(rank for rank, passes in enumerate(forward) if len(passes) != M)
        text = f"rank {rank} ran its stage {len(forward[rank])} times for {M} micro-batches"
        yield Fault("forward passes", f"{text}: one pass for each, handed on at once")
        return
    yield from overlap_fault(evidence, forward, evidence.results[0]["run_ns"])
    yield from _judge_sent_late(evidence, forward)
    yield from _judge_left_alone(evidence)


def _judge_left_alone(evidence: Evidence) -> Iterator[Fault]:
    """Sends that nobody waited for: what is written into their tensors later may be what arrives."""
    for rank in range(evidence.world_size - 1):
        sends = [call for call in made_in(evidence, rank, evidence.results[rank]["run_ns"]) if call.op == "send"]
        alone = [call for call in sends if not call.wait_ns]
        if alone:
            text = (
                f"right result this time, but rank {rank} never waits for {len(alone)} of its {len(sends)} sends: the"
            )
            text = f"{text} broadcasts may write into a tensor that is still on its way"
            yield Fault("sends left alone", f"{text}; keep what isend returns, and wait() before you broadcast")
            return


def _judge_sent_late(evidence: Evidence, forward: list[list[Any]]) -> Iterator[Fault]:
    """Activations that wait until a stage has run all micro-batches."""
    for rank in range(evidence.world_size - 1):
        made = made_in(evidence, rank, evidence.results[rank]["run_ns"])
        sends = [call for call in made if call.op == "send"]
        if sends and all(call.start_ns > forward[rank][-1][3] for call in sends):
            text = (
                f"right result, but rank {rank} sends its first activation only after it has run all {M} micro-batches"
            )
            yield Fault(
                "sent at the end", f"{text}: stage {rank + 1} idles until then; send each as soon as it is made"
            )
            return


def budget_forward(evidence: Evidence) -> list[str]:
    """Say how many ran at the same time."""
    n = evidence.world_size
    return [f"{M} micro-batches through {n} stage{'s' * (n > 1)} in {M + n - 1} slots, where {M * n} are one by one"]
