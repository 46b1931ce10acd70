"""One rank of a pipeline that follows its actions: order, hand-overs, scaling, gradients, overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from distlab_lesson_09.checks import stages
from distlab_lesson_09.checks.stages import SAMPLES, WIDTH, M
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import in_megabytes
from distlab.grading.diagnosis.values import compare, describe, equal
from distlab.plan import Action

MESSAGE_BYTES = 8 * SAMPLES * WIDTH  # float64


def orders_of(rank: int, world_size: int) -> dict[str, list[Action]]:
    """Return what a rank is asked to run: GPipe, then 1F1B."""
    warm_up = min(world_size - 1 - rank, M)
    pairs = [("F", i) for i in range(warm_up)]
    for i in range(M):
        pairs += [("F", warm_up + i)] * (warm_up + i < M) + [("B", i)]
    gpipe = [(kind, i) for kind in "FB" for i in range(M)]
    return {name: [Action(rank, *one) for one in order] for name, order in (("GPipe", gpipe), ("1F1B", pairs))}


def drive_run(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run a rank in the order of GPipe and in that of 1F1B."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, actions in orders_of(rank, n).items():
        stage, pairs = stages.Stage(rank), []

        def loss_fn(output: Tensor, target: Tensor, pairs: list[Any] = pairs) -> Tensor:
            pairs.append((output.detach().clone(), target.clone()))
            return stages.plain_loss(output, target)

        mine, wanted = (stages.inputs() if rank == 0 else []), (stages.targets() if rank == n - 1 else [])
        begin_ns = time.monotonic_ns()
        loss = fn(stage, list(actions), mine, wanted, loss_fn, stages.like())
        results[name] = {
            "loss": loss,
            "gradients": [parameter.grad for parameter in stage.parameters()],
            "log": sorted(stage.log, key=lambda entry: entry[2]),
            "pairs": pairs,
            "run_ns": (begin_ns, time.monotonic_ns()),
        }
        dist.barrier()
    return results


def judge_run(evidence: Evidence) -> Iterator[Fault]:
    """Equal to one process, in the order that was asked, stages side by side, no message too many."""
    n = evidence.world_size
    loss, gradients, given = stages.whole_step(n)
    for name in ("GPipe", "1F1B"):
        runs = [result[name] for result in evidence.results]
        yield from _judge_pairs(runs[-1]["pairs"], given[-1], name)
        for rank, passes in enumerate(stages.forward_passes(runs)):
            yield from _judge_inputs(passes, rank, given, name)
        for rank, run in enumerate(runs):
            yield from _judge_order(run["log"], rank, n, name)
        yield from _judge_gradients(runs, gradients, name)
        for rank, run in enumerate(runs[:-1]):
            if run["loss"] is not None:
                text = f"{name}: rank {rank} returned {describe(run['loss'])}"
                yield Fault("returned", f"{text}; the last rank alone knows the loss, so the others return None")
        if isinstance(runs[-1]["loss"], Tensor):
            text = f"{name}: rank {n - 1} returned {describe(runs[-1]['loss'])}; expected a number: add up y.item()"
            yield Fault("returned", f"{text} of each. A sum of tensors keeps every micro-batch's graph, and its memory")
        yield from found(compare(runs[-1]["loss"], loss, f"{name}: what rank {n - 1} returned", 1))
        if name == "GPipe":
            yield from stages.judge_overlap(evidence, runs)
        yield from _judge_bytes(evidence, runs, name)


def _judge_pairs(pairs: list[tuple[Tensor, Tensor]], outputs: list[Tensor], name: str) -> Iterator[Fault]:
    targets = stages.targets()
    for output, target in pairs:
        if output.shape != outputs[0].shape or target.shape != targets[0].shape:
            text = f"{name}: loss_fn got an output of {list(output.shape)} and a target of {list(target.shape)}"
            yield Fault("all at once", f"{text}; call it for each micro-batch, in its forward pass")
        if any(equal(output, one) for one in targets) and any(equal(target, one) for one in outputs):
            yield Fault("loss turned round", f"{name}: loss_fn got the target first; call loss_fn(output, target)")
        for i, mine in enumerate(outputs):
            for j, other in enumerate(targets):
                if i != j and equal(output, mine) and equal(target, other):
                    text = f"{name}: micro-batch {i}'s output met micro-batch {j}'s target"
                    yield Fault("wrong target", f"{text}: inputs and targets both go by action.microbatch")


def _judge_inputs(passes: list[Any], rank: int, given: list[list[Tensor]], name: str) -> Iterator[Fault]:
    wanted = stages.inputs() if rank == 0 else given[rank - 1]
    if len(passes) != M:
        text = f"{name}: rank {rank} ran its stage {len(passes)} times for {M} micro-batches"
        yield Fault("forward passes", f"{text}; once for each action of kind F")
    for i, (*_, got) in enumerate(passes):
        same = [j for j in range(M) if got.shape == wanted[j].shape and equal(got, wanted[j])]
        if i not in same:
            what = f"micro-batch {same[0]}'s" if same else "none that the stage before has made,"
            text = f"{name}: rank {rank}'s forward pass of micro-batch {i} read {what} input: was it read before it had"
            yield Fault("wrong input", f"{text} arrived, or in another order than it was sent?")


def _judge_order(log: list[Any], rank: int, n: int, name: str) -> Iterator[Fault]:
    wanted = [(action.kind, action.microbatch) for action in orders_of(rank, n)[name]]
    ran = [(entry[0], entry[1]) for entry in log]
    backward = [number for kind, number in ran if kind == "B"]
    held = [sum(1 if kind == "F" else -1 for kind, _ in ran[: end + 1]) for end in range(len(ran))]
    need = min(n - rank, M) if name == "1F1B" else M
    if ran == wanted:
        return
    if len(backward) < M and rank < n - 1:
        text = f"{name}: rank {rank} ran {len(backward)} backward passes of {M}"
        yield Fault("backward passes", f"{text}: y.backward(grad) with the gradient that the next rank sends")
    if max(held) > need:
        text = f"{name}: peak in flight {max(held)} on rank {rank} where {name} needs {need}: backward passes wait"
        text = f"{text} until all forward passes are over; run each when its action comes"
        yield Fault("one backward at the end", text)
    if sorted(backward) == list(range(M)) and [kind for kind, _ in ran] == [kind for kind, _ in wanted]:
        (kind, i), j = next((want, got[1]) for want, got in zip(wanted, ran, strict=True) if want != got)
        text = f"{name}: at action {rank}{kind}{i} rank {rank} went back through micro-batch {j}: its gradient met what"
        yield Fault("micro-batches mixed up", f"{text} another forward pass had kept; keep (x, y) by microbatch")
    did, asked = (", ".join(f"{kind}{i}" for kind, i in order) for order in (ran, wanted))
    yield Fault("order", f"{name}: rank {rank} ran {did}; its actions are {asked}: run them one by one, in order")


def _judge_gradients(runs: list[dict[str, Any]], gradients: list[list[Tensor]], name: str) -> Iterator[Fault]:
    last = len(runs) - 1
    for rank in reversed(range(len(runs))):  # a fault travels from the last stage to the first: name it at its start
        for got, want in zip(runs[rank]["gradients"], gradients[rank], strict=True):
            if rank < last and (got is None or not bool(got.any())):
                text = f"{name}: no gradient reached stage {rank}: the activation that stage {rank + 1} received does"
                yield Fault("no gradient", f"{text} not require grad, so its x.grad is None; call x.requires_grad_()")
            if got is None:
                text = f"{name}: stage {rank}'s parameters have no gradient: call y.backward() for each action B"
                yield Fault("no gradient", text)
            if equal(got, M * want):
                text = f"{name}: stage {rank}'s gradients are {M}x too large: the loss of each micro-batch must be"
                yield Fault("loss not scaled", f"{text} divided by {M}")
            if equal(M * got, want):
                text = f"{name}: stage {rank}'s gradients are {M}x too small: divide by the number of micro-batches"
                yield Fault("scaled twice", f"{text} once, in the loss; a gradient that is passed on has it already")
            fault = compare(got, want, f"{name}: stage {rank}'s gradient", 1)
            if fault and rank and equal(runs[rank]["gradients"][-1], gradients[rank][-1]):  # the bias needs no input
                text = f"{fault.message}. Its bias is right and its weight is not: the x that was kept has changed"
                yield Fault("one buffer", f"{text} since. Receive each micro-batch into a tensor of its own")
            yield from found(fault)


def _judge_bytes(evidence: Evidence, runs: list[dict[str, Any]], name: str) -> Iterator[Fault]:
    for rank, run in enumerate(runs):
        made = [call for call in stages.made_in(evidence, rank, run) if call.op != "recv"]
        sent = sum(call.num_bytes for call in made if call.op != "barrier")
        wanted = M * MESSAGE_BYTES * ((rank < len(runs) - 1) + (rank > 0))
        if sent > wanted:
            ops = ", ".join(sorted({call.op for call in made}))
            text = f"right result, but rank {rank} sent {in_megabytes(sent)} ({ops}) in {name} where {M} activations to"
            yield Fault("too many bytes", f"{text} the next and {M} gradients back need {in_megabytes(wanted)}")


def run_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a gradient that is not there, and sends that wait for each other."""
    text = str(error)
    if "NoneType" in text or "does not require grad" in text:
        words = f"no gradient reached stage {world_size - 2}: the received activation does not require grad, so"
        words = f"{words} backward leaves nothing in x.grad to send; call x.requires_grad_() after x has arrived"
        return Fault("no gradient", words)
    if "deadlock" in text and "waits in send" in text:
        words = "two neighbours wait in send, each for the other to receive: one hands an activation forward, the other"
        return Fault(
            "blocking sends", f"{words} a gradient back. Start sends (dist.isend) and wait for them at the end"
        )
    return None


def budget_run(evidence: Evidence) -> list[str]:
    """Say what was sent, and the most in flight on rank 0."""
    n = evidence.world_size
    most = in_megabytes(M * MESSAGE_BYTES * (2 if n > 2 else min(n - 1, 1)))
    flight = f"in flight on rank 0: {M} in GPipe, {min(n, M)} in 1F1B"
    return [f"sent {most} per rank at most: {M} activations on, {M} gradients back", flight]


_ACTIONS, _RECEIVE = "i in actions", "dist.recv(x, rank - 1)"
_SEND_ON = "leaving.append(dist.isend(y.detach(), rank + 1))"

WRONG_RUNS = (
    Mutant("unscaled", "loss not scaled", "must be divided by 4", 2, 26).without(" / num_microbatches"),
    Mutant("no grad", "no gradient", "does not require grad", 2, 29).without("x.requires_grad_()"),
    Mutant("no grad, zeros", "no gradient", "no gradient reached stage 2", 4, 29)
    .without("x.requires_grad_()")
    .edit("isend(x.grad", "isend(torch.zeros_like(x)"),
    Mutant("last in first out", "micro-batches mixed up", "through micro-batch 3", 2, 27).edit(
        "kept.pop(i)", "kept.pop(max(kept))"
    ),
    Mutant("next target", "wrong target", "output met micro-batch 1's", 1, 27).edit(
        "targets[i]", "targets[(i + 1) % num_microbatches]"
    ),
    Mutant("blocking", "blocking sends", "dist.isend", 2, 3).edit("leaving.append(dist.isend(", "(dist.send(", times=2),
    Mutant("backward last", "one backward at the end", "where 1F1B needs 3", 3, 59).edit(
        _ACTIONS, 'i in sorted(actions, key=lambda action: action.kind == "B")'
    ),
    Mutant("own order", "order", "its actions are F0, F1, F2, F3", 1).edit(
        _ACTIONS, "i in sorted(actions, key=lambda action: action.microbatch)"
    ),
    Mutant("one buffer", "one buffer", "a tensor of its own", 2, 27)
    .edit("kept, leaving, total", "buffer = torch.empty_like(like)\nkept, leaving, total")
    .edit(f"x = torch.empty_like(like)\n{_RECEIVE}", "dist.recv(buffer, rank - 1)\nx = buffer.detach()"),
    Mutant("loss everywhere", "returned", "the others return None", 2).without(" if rank == last else None"),
    Mutant(
        "one by one", "stages never overlap", "micro-batch 1 enters stage 0 only after micro-batch 0 left", 4, 25
    ).edit("kept[i] = x, y", "kept[i] = x, y\ndist.barrier()"),
    Mutant("twice the bytes", "too many bytes", "activations to the next", 2)
    .edit(_SEND_ON, f"{_SEND_ON}\n{_SEND_ON}")
    .edit(_RECEIVE, f"{_RECEIVE}\n{_RECEIVE}"),
)
