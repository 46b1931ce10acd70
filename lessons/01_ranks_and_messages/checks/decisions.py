"""Decisions: every rank must stop at the same step, by the mean of all losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from distlab_lesson_01.checks.shared import on_ranks, waiting
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant

if TYPE_CHECKING:
    from distlab.comm import RankError

NUM_STEPS = 5


def losses(rank: int) -> list[float]:
    """Return a rank's loss after each step: falling, and higher on higher ranks."""
    return [4 / (1 + step) + rank for step in range(NUM_STEPS)]


def threshold_of(world_size: int) -> float:
    """Return a threshold that the mean loss passes in the third step."""
    return 1.9 + (world_size - 1) / 2


def drive_should_stop(fn: Callable[[Tensor, float], Any]) -> list[tuple[Any, bool]]:
    """Ask after each step, whatever the answers; return them, and whether the loss stayed as it was."""
    seen, rank, threshold = [], dist.get_rank(), threshold_of(dist.get_world_size())
    for value in losses(rank):
        loss = torch.tensor(value, dtype=torch.float64)
        answer = fn(loss, threshold)
        seen.append((bool(answer) if isinstance(answer, bool | Tensor | np.bool_) else answer, float(loss) == value))
    return seen


def judge_should_stop(evidence: Evidence) -> Iterator[Fault]:
    """Look at what all ranks decided after each step."""
    n, limit = evidence.world_size, threshold_of(evidence.world_size)
    answers = [[answer for answer, _ in result] for result in evidence.results]
    sums = [sum(losses(rank)[step] for rank in range(n)) for step in range(NUM_STEPS)]
    for rank, own in enumerate(answers):
        if any(not isinstance(answer, bool) for answer in own):
            yield Fault("not a decision", f"rank {rank} returns {own[0]!r}; return True or False")
    if n > 1 and not len(evidence.records):
        yield Fault("not communicated", f"on {n} ranks nothing is sent: each rank decides from its own loss alone")
    for step in range(NUM_STEPS):
        decided = [own[step] for own in answers]
        if len(set(decided)) > 1:
            words = ", ".join(f"rank {rank} {'stops' if stop else 'goes on'}" for rank, stop in enumerate(decided))
            text = f"after step {step + 1} the ranks decide differently: {words}. Those that go on wait forever"
            yield Fault("ranks disagree", f"{text} for those that left: every rank needs the same mean")
    wrong = [step for step in range(NUM_STEPS) if answers[0][step] != (sums[step] / n < limit)]
    if wrong and all(answers[0][step] == (sums[step] < limit) for step in range(NUM_STEPS)):
        text = f"after step {wrong[0] + 1} the mean loss is {sums[wrong[0]] / n:.2f}, the threshold {limit:.2f}"
        yield Fault("sum not mean", f"{text}, but the sum over {n} ranks is compared; divide by world_size")
    elif wrong:
        mean, answer = sums[wrong[0]] / n, answers[0][wrong[0]]
        text = f"after step {wrong[0] + 1} the mean loss is {mean:.2f}, the threshold {limit:.2f}"
        yield Fault("wrong decision", f"{text}, and the answer {answer}; return mean < threshold")
    for rank, result in enumerate(evidence.results):
        if not all(unchanged for _, unchanged in result):
            text = f"right answers, but rank {rank}'s loss was overwritten by the collective"
            yield Fault("argument changed", f"{text}: the caller still needs it; communicate a copy (loss.clone())")


def should_stop_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a collective that only some ranks call."""
    text = str(error)
    if "has returned without it" in text or "do not make the same call" in text:
        who = waiting(error) or "one rank waits in a collective"
        advice = "Every rank of the group must call a collective: take it out of the `if`"
        return Fault("not on every rank", f"{on_ranks(world_size)} {who}; the others never call it. {advice}")
    return None


def should_stop_budget(evidence: Evidence) -> list[str]:
    """Say how many collectives it took."""
    return [f"{evidence.records.num_calls() / evidence.world_size / NUM_STEPS:g} call per step and rank, of one number"]


WRONG_STOPS = (
    Mutant("reduce", "ranks disagree", "differently", 2, 4).edit("dist.all_reduce(total)", "dist.reduce(total, dst=0)"),
    Mutant("under if", "not on every rank", "out of the `if`", 2, 5).edit(
        "dist.all_reduce(", "if dist.get_rank() == 0:\n    dist.all_reduce("
    ),
    Mutant("sum, not mean", "sum not mean", "divide by world_size", 2, 9).without(" / dist.get_world_size()"),
    Mutant("own loss", "not communicated", "its own loss alone", 2, 20)
    .without("dist.all_reduce(total)")
    .without(" / dist.get_world_size()"),
    Mutant("overwritten", "argument changed", "loss.clone()", 2, 40).edit("loss.clone()", "loss"),
)
