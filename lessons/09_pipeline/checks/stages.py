"""What both runs of a pipeline share: stages that sleep and note what they do, one process's results, and overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm.record.read import Call
from distlab.grading import Evidence, Fault
from distlab.grading.diagnosis.traffic import calls
from distlab.grading.diagnosis.values import seeded

WIDTH, SAMPLES = 6, 2
M = 4  # micro-batches
SLEEP_S = 0.004


class Noted(torch.autograd.Function):
    """The identity; sleeps in backward and writes down which forward pass it belongs to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[Any], number: int, sleep_s: float) -> Tensor:  # noqa: D102
        ctx.log, ctx.number, ctx.sleep_s = log, number, sleep_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: D102
        start_ns = time.monotonic_ns()
        time.sleep(ctx.sleep_s)
        ctx.log.append(("B", ctx.number, start_ns, time.monotonic_ns(), grad.clone()))
        return grad, None, None, None


class Stage(nn.Module):
    """A layer that sleeps, and notes each pass: kind, which forward it was, start, end, what came in."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(seeded(rank, WIDTH, WIDTH, purpose="stage weight") / WIDTH**0.5)
            self.layer.bias.copy_(seeded(rank, WIDTH, purpose="stage bias"))
        self.log: list[Any] = []
        self.count = 0
        self.is_noted = True

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        if not self.is_noted:
            return torch.tanh(self.layer(x))
        number, start_ns = self.count, time.monotonic_ns()
        self.count += 1
        time.sleep(SLEEP_S)
        y = torch.tanh(self.layer(x))
        self.log.append(("F", number, start_ns, time.monotonic_ns(), x.detach().clone()))
        return Noted.apply(y, self.log, number, SLEEP_S)  # type: ignore[no-any-return, no-untyped-call]


def inputs() -> list[Tensor]:
    """Return the micro-batches."""
    return [seeded(-1, SAMPLES, WIDTH, purpose=f"input {i}") for i in range(M)]


def targets() -> list[Tensor]:
    """Return a target for each micro-batch."""
    return [seeded(-1, SAMPLES, WIDTH, purpose=f"target {i}") for i in range(M)]


def like() -> Tensor:
    """Return a tensor shaped as what is handed over."""
    return torch.zeros(SAMPLES, WIDTH, dtype=torch.float64)


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared distance from twice the target: not the same where the two change places."""
    return (output - 2 * target).square().mean()


def whole_step(world_size: int) -> tuple[float, list[list[Tensor]], list[list[Tensor]]]:
    """Return one process's loss, each stage's gradients, and what each stage gives for each micro-batch."""
    stages = [Stage(rank) for rank in range(world_size)]
    given: list[list[Tensor]] = [[] for _ in stages]
    losses = []
    for x, target in zip(inputs(), targets(), strict=True):
        for stage, outputs in zip(stages, given, strict=True):
            x = torch.tanh(stage.layer(x))
            outputs.append(x.detach())
        losses.append(plain_loss(x, target))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = [[p.grad for p in stage.parameters() if p.grad is not None] for stage in stages]
    return loss.item(), gradients, given


def made_in(evidence: Evidence, rank: int, run: dict[str, Any], *ops: str) -> list[Call]:
    """Return the calls that a rank made in a run."""
    begin_ns, end_ns = run["run_ns"]
    return [call for call in calls(evidence, rank, *ops) if begin_ns <= call.start_ns <= end_ns]


def forward_passes(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """Return what each rank noted of its forward passes."""
    return [[entry for entry in run["log"] if entry[0] == "F"] for run in runs]


def judge_overlap(evidence: Evidence, runs: list[dict[str, Any]]) -> Iterator[Fault]:
    """Say that stages never overlap.

    It takes two signs, because a slow machine alone gives one of them: each micro-batch entered after the one before
    had left, and between the two rank 0 made calls that can wait for another rank.
    """
    forward, last = forward_passes(runs), evidence.world_size - 1
    waits: list[Call] = []
    for i in range(M - 1 if last else 0):
        left_ns, enters_ns = forward[last][i][3], forward[0][i + 1][2]
        made = made_in(evidence, 0, runs[0])
        waits = [call for call in made if call.op != "send" and forward[0][i][3] < call.start_ns < enters_ns]
        if enters_ns < left_ns or not waits:
            return
    if waits:
        words = ", ".join(dict.fromkeys(call.op for call in waits))
        text = "right result, but stages never overlap: micro-batch 1 enters stage 0 only after micro-batch 0 left"
        yield Fault("stages never overlap", f"{text} stage {last}: rank 0 waits for it ({words}) between the two")
