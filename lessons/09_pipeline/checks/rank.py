"""One rank of a pipeline that follows its actions: order, hand-overs, scaling, gradients, overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distlab_lesson_09.checks import stages
from distlab_lesson_09.checks.stages import SAMPLES, WIDTH, Layer, M
from torch import Tensor, nn

from distlab.comm import RankError
from distlab.course.grading.cases import Cases, Noted
from distlab.course.grading.diagnosis.traffic import in_megabytes
from distlab.course.grading.exercise import Refused
from distlab.course.grading.variation.draw import Draw, Vary, lopsided_loss
from distlab.grading import Evidence, Fault, Mutant
from distlab.plan import Action


def _one_f_one_b(ahead: list[int], warm_up: int) -> list[tuple[str, int]]:
    """Return 1F1B's passes of micro-batches in this order."""
    order = [("F", i) for i in ahead[:warm_up]]
    for place, i in enumerate(ahead):
        order += [("F", other) for other in ahead[warm_up + place : warm_up + place + 1]] + [("B", i)]
    return order


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    given = stages.microbatches("input", rank == 0), stages.microbatches("target", rank == n - 1)
    like = torch.zeros(SAMPLES, WIDTH, dtype=torch.float64)
    orders = {"GPipe": [(kind, i) for kind in "FB" for i in range(M)]}
    orders["1F1B"] = _one_f_one_b(list(range(M)), min(n - 1 - rank, M))
    return {
        name: (stages.stage_of(rank), [Action(rank, *one) for one in order], *given, lopsided_loss, like)
        for name, order in orders.items()
    }


def _draw_order(draw: Draw, count: int) -> list[tuple[str, int]]:
    """Return an order of passes, of one rank: GPipe, 1F1B, the newest back first; from any micro-batch on."""
    kind, turn = draw.one_of("GPipe", "1F1B", "newest first", "another order"), draw.integer(0, count - 1)
    ahead = [*range(turn, count), *range(turn)]
    if kind == "1F1B":
        return _one_f_one_b(ahead, min(draw.world_size - 1 - draw.rank, count))
    back = {"GPipe": ahead, "newest first": ahead[::-1], "another order": sorted(ahead, key=lambda i: (i % 2, i))}[kind]
    return [("F", i) for i in ahead] + [("B", i) for i in back]


def _draw(draw: Draw) -> tuple[Any, ...]:
    count = draw.one_of(1, 2, 3, draw.integer(5, 6))
    lead = draw.one_of((3,), (), (draw.integer(1, 3), 2), (2, draw.integer(1, 3), 2))
    loss_fn, last_width = draw.one_of(lopsided_loss, nn.functional.smooth_l1_loss), draw.integer(1, 4)
    actions = [Action(draw.rank, kind, i) for kind, i in _draw_order(draw, count)]
    stage, shape, like = stages.draw_stage(draw, "float64", "float32", lead=lead, last_width=last_width)
    inputs = [draw.tensor(*shape, dtype=like.dtype, strided=True) for _ in range(count)]
    targets = [draw.tensor(*lead, last_width, dtype=like.dtype) for _ in range(count)]
    is_last = draw.rank == draw.world_size - 1
    return stage, actions, inputs if draw.rank == 0 else [], targets if is_last else [], loss_fn, like


def _use(
    fn: Callable[..., Any],
    stage: Layer,
    actions: list[Action],
    inputs: list[Tensor],
    targets: list[Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    like: Tensor,
) -> dict[str, Any]:
    """Run a rank; say what its stage did, what was returned, and what gradients there are."""
    forward, begin_ns = [action.microbatch for action in actions if action.kind == "F"], time.monotonic_ns()
    loss = fn(stage, actions, inputs, targets, loss_fn, like)
    times = Noted(((begin_ns, time.monotonic_ns()), stage.times))
    if isinstance(loss, Tensor):
        text = "expected a number or None, got a tensor: add up y.item() of each micro-batch"
        raise Refused("returned", f"{text}. A sum of tensors keeps every micro-batch's graph, and its memory")
    passes = [(kind, forward[number] if number < len(forward) else number) for kind, number in stage.log]
    if loss is not None and like.dtype != torch.float64:
        loss = torch.tensor(float(loss), dtype=like.dtype)  # right to as many digits as its dtype has
    return {
        "passes in order": ", ".join(f"{kind}{i}" for kind, i in passes),
        "inputs of its forward passes": stage.read,
        "gradient of the weight": stage.weight.grad,
        "gradient of the bias": stage.bias.grad,
        "what it returns": loss,
        stages.TIMES: times,
    }


drive_run_rank = Cases(_cases, _use, needs=f"{M} activations on and {M} gradients back, in GPipe and in 1F1B,")
vary_run_rank = Vary(_draw, use=_use, left_out=stages.TAKES_NO_GROUP)


def judge_run_rank(evidence: Evidence) -> Iterator[Fault]:
    """Stages work side by side."""
    yield from stages.judge_overlap(evidence, "GPipe")


def failure_run_rank(error: RankError, world_size: int) -> Fault | None:
    """Name a gradient that is not there, and sends that wait for each other."""
    text = str(error)
    if "NoneType" in text or "does not require grad" in text:
        words = f"no gradient reached stage {world_size - 2}: the received activation does not require grad, so"
        words = f"{words} backward leaves nothing in x.grad to send; call x.requires_grad_() after x has arrived"
        return Fault("no gradient", words)
    if "deadlock" in text and "waits in send" in text:
        words = "two neighbours wait in send, each for the other to receive: one hands an activation forward, the other"
        words = f"{words} a gradient back. Start sends (dist.isend) and wait for them at the end"
        return Fault("blocking sends", words)
    return None


def budget_run_rank(evidence: Evidence) -> list[str]:
    """Say what was sent, and the most in flight on rank 0."""
    n = evidence.world_size
    most = in_megabytes(M * 8 * SAMPLES * WIDTH * (2 if n > 2 else min(n - 1, 1)))
    flight = f"in flight on rank 0: {M} in GPipe, {min(n, M)} in 1F1B"
    return [f"sent {most} per rank at most: {M} activations on, {M} gradients back", flight]


_ACTIONS, _RECEIVE = "i in actions", "dist.recv(x, rank - 1)"
_SEND_ON = "leaving.append(dist.isend(y.detach(), rank + 1))"
_MIXED = "a gradient goes back through a different micro-batch; keep x and y by action.microbatch"
_NO_GRADIENT = (
    "the activation that a stage receives does not require grad, so that no gradient goes back from it; call "
)
WRONG_RUN_RANK = (
    Mutant(
        "unscaled", "not scaled", "the losses are added up; divide each by the number of micro-batches", 1, 26
    ).without(" / num_microbatches"),
    Mutant("no grad", "no gradient", "does not require grad", 2, 29, ends=True).without("x.requires_grad_()"),
    Mutant("no grad, zeros", "no gradient", f"{_NO_GRADIENT}x.requires_grad_() when it has arrived", 2, 29)
    .without("x.requires_grad_()")
    .edit("isend(x.grad", "isend(torch.zeros_like(x)"),
    Mutant("last in first out", "micro-batches mixed up", _MIXED, 1, 27).edit("kept.pop(i)", "kept.pop(max(kept))"),
    Mutant("by age", "values", "the oldest micro-batch", 1, "one set of arguments")
    .edit("kept.pop(i)", "kept.pop(next(iter(kept)))")
    .known("lets each gradient go back through the oldest micro-batch; keep x and y by action.microbatch"),
    Mutant(
        "next target", "target", "an output meets the next micro-batch's target; both go by action.microbatch", 1, 27
    ).edit("targets[i]", "targets[(i + 1) % num_microbatches]"),
    Mutant("zeroed", "zeroed", "gradients of earlier micro-batches are thrown away; they add up in .grad", 1).edit(
        "kept.pop(i)", "kept.pop(i)\nstage.zero_grad()"
    ),
    Mutant("target first", "loss turned round", "loss_fn gets the target first; call loss_fn(output, target)", 1).edit(
        "loss_fn(y, targets[i])", "loss_fn(targets[i], y)"
    ),
    Mutant("blocking", "blocking sends", "dist.isend", 2, 3, ends=True).edit(
        "leaving.append(dist.isend(", "(dist.send(", times=2
    ),
    Mutant(
        "backward last",
        "one backward at the end",
        "all backward passes wait until the forward passes are over, and hold more than 1F1B does; run each when its "
        "action comes",
        2,
        59,
    ).edit(_ACTIONS, 'i in sorted(actions, key=lambda action: action.kind == "B")'),
    Mutant(
        "own order", "own order", "it goes from micro-batch to micro-batch; run the actions in their own order", 1
    ).edit(_ACTIONS, "i in sorted(actions, key=lambda action: action.microbatch)"),
    Mutant(
        "one buffer",
        "one buffer",
        "all micro-batches are received into one tensor, so that an x that was kept has changed; give each a tensor of "
        "its own",
        2,
        27,
    )
    .edit("kept, leaving, total", "buffer = torch.empty_like(like)\nkept, leaving, total")
    .edit(f"x = torch.empty_like(like)\n{_RECEIVE}", "dist.recv(buffer, rank - 1)\nx = buffer.detach()"),
    Mutant(
        "loss everywhere", "loss", "all ranks return a loss; the last one alone knows it, the others return None", 2
    ).without(" if rank == last else None"),
    Mutant(
        "scaled twice", "scaled twice", "a gradient that is passed on is divided again; the loss has been already", 2
    ).edit("y.backward(grad)", "y.backward(grad / num_microbatches)"),
    Mutant("one by one", "stages never overlap", "only after micro-batch 0 left", 4, 25).edit(
        "kept[i] = x, y", "kept[i] = x, y\ndist.barrier()"
    ),
    Mutant("twice the bytes", "too many bytes", "each activation is sent twice; the next rank needs it once", 2)
    .edit(_SEND_ON, f"{_SEND_ON}\n{_SEND_ON}")
    .edit(_RECEIVE, f"{_RECEIVE}\n{_RECEIVE}"),
    Mutant("four micro-batches", "scale", "too small", 1, "one set of arguments").edit("/ num_microbatches", "/ 4"),
    Mutant("inputs graded", "argument changed", "require a gradient", 2, "state").edit(
        "x = inputs[i]", "x = inputs[i].requires_grad_()"
    ),
    Mutant("float64 written down", "mismatch", "float64[", 2, "one dtype").edit(
        "x = torch.empty_like(like)", "x = torch.empty(like.shape, dtype=torch.float64)"
    ),
)
