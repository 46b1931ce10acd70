"""What the checks of lesson 3 share: a model whose ranks differ in all that matters, and the mean of gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading import Evidence, Fault
from distlab.grading.diagnosis.faults import each_rank, found
from distlab.grading.diagnosis.provenance import explain_sum
from distlab.grading.diagnosis.traffic import calls, num_calls
from distlab.grading.diagnosis.values import equal, seeded


class Net(nn.Module):
    """A shared (tied) weight, a frozen layer, buffers, and a branch that is last, so that a rank may leave it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(3, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.branch = nn.Linear(5, 2)
        self.double()


def filled(rank: int, tensor: Tensor, name: str) -> Tensor:
    """Return values for a tensor that no other rank has; whole numbers where it holds such."""
    return seeded(rank, *(tensor.shape or (1,)), purpose=name).mul(10).view_as(tensor).to(tensor.dtype)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy parameters and buffers, by name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def judge_means(own: Sequence[dict[str, Tensor]], gradients: Sequence[dict[str, Any]]) -> Iterator[Fault]:
    """Compare gradients with the mean of the ranks' own; name the first that is wrong."""
    world_size = len(own)
    wanted = {name: torch.stack([part[name] for part in own]).mean(0) for name in own[0]}
    right = [all(_right(part.get(name), want) for name, want in wanted.items()) for part in gradients]
    if all(right):
        return
    if any(right):
        good, bad = right.index(True), right.index(False)
        wrong = [name for name, want in wanted.items() if not _right(gradients[bad].get(name), want)]
        if all(gradients[bad].get(name) is None for name in wrong):
            text = f"rank {bad}'s gradient of {wrong[0]} is None still, rank {good}'s is the mean"
            yield Fault("missing gradient", f"{text}: a rank without one counts as zeros, and needs the mean as well")
        text = f"rank {good} holds the means, rank {bad} does not: replicas will differ after the next update"
        yield Fault("only some ranks", f"{text}; all ranks need the result (all_reduce, not reduce)")
    yield from found(_missing_counted(own, gradients, wanted))
    for name in own[0]:
        parts = [part[name] for part in own]

        def look(rank: int, held: dict[str, Any], name: str = name, parts: list[Tensor] = parts) -> Fault | None:
            got, what = held.get(name), f"rank {rank}'s gradient of {name}"
            if got is None:
                text = f"{what} is None: count a missing gradient as zeros and average it"
                return Fault("missing gradient", text)
            return explain_sum(got, parts, expected=[1 / world_size] * world_size, what=what, rank=rank)

        yield from each_rank(gradients, look)


def _missing_counted(
    own: Sequence[dict[str, Tensor]], gradients: Sequence[dict[str, Any]], wanted: dict[str, Tensor]
) -> Fault | None:
    """Say what a missing gradient counts as, where all others are averaged as they should be."""
    world_size, held = len(own), gradients[0]
    lacks = {name: [rank for rank, part in enumerate(own) if not bool(part[name].any())] for name in wanted}
    wrong = [name for name, want in wanted.items() if not _right(held.get(name), want)]
    if not wrong or any(not lacks[name] or not isinstance(held.get(name), Tensor) for name in wrong):
        return None
    name = wrong[0]
    got, want, rank = held[name], wanted[name], lacks[name][0]
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return None
    have = world_size - len(lacks[name])
    text = f"rank {rank} has no gradient of {name}, which counts as zeros, and every other gradient is right; but"
    if have and equal(got, want * world_size / have):
        text = f"{text} this one is divided by the {have} that have it, not by all {world_size} ranks"
        return Fault("missing gradient", f"{text}: divide by world_size")
    counted = (got - want) * world_size
    shown = ", ".join(f"{value:.4g}" for value in counted.flatten()[:3].tolist())
    return Fault("missing gradient", f"{text} in this mean it counts as {shown}, ...: fill in zeros (torch.zeros_like)")


def _right(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and equal(got, want)


def averaged_parameters(rank: int, names: list[str]) -> Fault:
    """Say that a parameter was averaged, not its gradient."""
    text = f"rank {rank}'s {names[0]} itself has changed, not only its gradient"
    return Fault("averages parameters", f"{text}: what is averaged must be parameter.grad, not the parameter")


def names_of_calls(evidence: Evidence, rank: int) -> str:
    """Return how often a rank called what, such as "2 all_reduce, 1 barrier"."""
    made = [call.op for call in calls(evidence, rank)]
    return ", ".join(f"{made.count(op)} {op}" for op in dict.fromkeys(made))


def budget_calls(evidence: Evidence) -> list[str]:
    """Say how many calls a rank made."""
    number = num_calls(evidence, rank=0)
    return [f"{number} call{'' if number == 1 else 's'} per rank: {names_of_calls(evidence, 0)}"]


def told(text: str) -> str:
    """Return what a failure says before the stacks, without times."""
    return re.sub(r" for \d+\.\d s", "", text.partition("\n---")[0]).strip()
