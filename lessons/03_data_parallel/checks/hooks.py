"""Averaging in hooks, the function to repair: two backward passes, after which gradients must be means."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_03.checks.shared import averaged_parameters, judge_means, state_of
from torch import nn

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.traffic import calls, num_calls
from distlab.grading.diagnosis.values import seeded


def drive_hooks(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Register hooks on a model, then run two backward passes of different data a rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].bias.requires_grad_(False)
    alone, before = copy.deepcopy(model), state_of(model)
    fn(model)
    early = [name for name, p in model.named_parameters() if p._backward_hooks]
    hooked = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks or p._backward_hooks]
    steps = []
    for step in range(2):
        if step == 1:  # what hooks do to weights shows only where ranks hold different ones
            with torch.no_grad():
                for parameter in (*model.parameters(), *alone.parameters()):
                    parameter += 0.1 * rank
            before = state_of(model)
        x = seeded(rank, 5, 3, purpose=f"step {step}")
        for module in (alone, model):
            module.zero_grad()
            module(x).square().mean().backward()
        steps.append(
            {
                "own": {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None},
                "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
                "changed": [name for name, tensor in state_of(model).items() if not torch.equal(tensor, before[name])],
            }
        )
    return {"steps": steps, "hooked": hooked, "early": early}


def judge_hooks(evidence: Evidence) -> Iterator[Fault]:
    """After each backward every gradient must be the mean over ranks, and no parameter may have changed."""
    steps = list(zip(*(result["steps"] for result in evidence.results), strict=True))
    for step in steps:
        for rank, made in enumerate(step):
            if made["changed"]:
                yield averaged_parameters(rank, made["changed"])
    if num_calls(evidence) == 0:
        ranks = "one rank" if evidence.world_size == 1 else f"{evidence.world_size} ranks"
        text = f"{ranks} ran backward, and none called torch.distributed"
        hooked = evidence.results[0]["hooked"]
        if hooked:
            text = (
                f"{text}: {len(hooked)} parameters have a hook ({hooked[0]} is the first), which must send the gradient"
            )
        else:
            text = f"{text}: no parameter of this module's own has a hook"
        yield Fault("never communicates", text)
    for rank in evidence.records.ranks:
        if any(call.wait_ns == 0 for call in calls(evidence, rank)):
            text = f"rank {rank} started an all_reduce and never waited for it"
            yield Fault("not waited", f"{text}: whoever reads the gradient next may read it half summed")
    for step in steps:
        for fault in judge_means([made["own"] for made in step], [made["gradients"] for made in step]):
            yield _sent_for_nothing(fault, evidence) if fault.code == "not communicated" else fault


def _sent_for_nothing(fault: Fault, evidence: Evidence) -> Fault:
    """Say that hooks sent something, of which nothing came into the gradients."""
    text = f"{fault.message}, though rank 0 made {num_calls(evidence, rank=0)} calls"
    if evidence.results[0]["early"]:
        why = "register_hook takes the new gradient from what the hook returns: return the mean"
    else:
        why = "the mean must be written into parameter.grad, which the hook finds there"
    return Fault(fault.code, f"{text}: {why}")


WRONG_HOOKS = (
    Mutant("weights, not gradients", "averages parameters", "itself has changed", 2, 10)
    .edit("parameter: nn.Parameter", "gradient: torch.Tensor")
    .edit("parameter.grad /=", "gradient /=")
    .edit("all_reduce(parameter.grad)", "all_reduce(gradient)"),
    Mutant("divides later", "sum not mean", "divide by world_size (2)", 2, 63).without(
        "parameter.grad /= dist.get_world_size()"
    ),
    Mutant("returns nothing", "not communicated", "nothing of the others", 2, 63)
    .edit("parameter: nn.Parameter", "gradient: torch.Tensor")
    .edit("parameter.grad /=", "mean = gradient /")
    .edit("all_reduce(parameter.grad)", "all_reduce(mean)")
    .edit("register_post_accumulate_grad_hook", "register_hook"),
    Mutant("another module", "never communicates", "of this module's own", 2, 12)
    .setup("import copy")
    .edit("in module.parameters()", "in copy.deepcopy(module).parameters()"),
    Mutant("a hook that does not send", "never communicates", "parameters have a hook", 2, "common slip").without(
        "dist.all_reduce(parameter.grad)"
    ),
    Mutant("never waits", "not waited", "half summed", 2, 63).edit(
        "all_reduce(parameter.grad)", "all_reduce(parameter.grad, async_op=True)"
    ),
)
