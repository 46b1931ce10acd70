"""The mean of gradients, one all-reduce per parameter or one for all: cases, judges and wrong versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_03.checks.shared import (
    Net,
    averaged_parameters,
    filled,
    judge_means,
    names_of_calls,
    state_of,
    told,
)
from torch import Tensor, nn

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import each_rank, found
from distlab.grading.diagnosis.traffic import num_calls, over_budget, sent_bytes, sent_line
from distlab.grading.diagnosis.values import equal, joined, seeded


def drive_gradients(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Give every rank other gradients, and none to the branch on rank 0 when there are others; then call fn."""
    rank, net = dist.get_rank(), Net()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(filled(rank, parameter, name))
    own: dict[str, Tensor] = {}
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith("branch") and rank == 0 and dist.get_world_size() > 1:
            own[name] = torch.zeros_like(parameter)  # what a missing gradient counts as
            continue
        own[name] = seeded(rank, *parameter.shape, purpose=name)
        parameter.grad = own[name].clone()
    before = state_of(net)
    fn(net)
    changed = [name for name, tensor in state_of(net).items() if not torch.equal(tensor, before[name])]
    gradients = {name: parameter.grad for name, parameter in net.named_parameters() if name in own}
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad and p.grad is not None]
    return {"own": own, "gradients": gradients, "changed": changed, "frozen": frozen}


def judge_average(evidence: Evidence) -> Iterator[Fault]:
    """Every gradient must be the mean over ranks, on every rank, and nothing else may have changed."""
    yield from each_rank(evidence, _changed_something_else)
    yield from judge_means([result["own"] for result in evidence.results], [r["gradients"] for r in evidence.results])


def _changed_something_else(rank: int, result: dict[str, Any]) -> Fault | None:
    if result["changed"]:
        return averaged_parameters(rank, result["changed"])
    if result["frozen"]:
        text = f"rank {rank} gave the frozen parameter {result['frozen'][0]} a gradient"
        return Fault("frozen parameter", f"{text}: an optimizer would then move it; skip requires_grad=False")
    return None


def judge_flat(evidence: Evidence) -> Iterator[Fault]:
    """As judge_average, with one all-reduce of no more than the gradients' bytes."""
    for fault in judge_average(evidence):
        yield from found(_pieces_mixed(evidence))
        if fault.code == "not communicated" and num_calls(evidence):
            text = f"{fault.message}, though it was sent: copy the pieces of the flat tensor back into the gradients"
            yield Fault("never copied back", text)
        yield fault
    gradient_bytes = _gradient_bytes(evidence)
    wanted = _ring_bytes(gradient_bytes, evidence.world_size)
    tied_bytes = 8 * evidence.results[0]["own"]["first.weight"].numel()
    both = _ring_bytes(gradient_bytes + tied_bytes, evidence.world_size)
    if wanted and round(max(sent_bytes(evidence, rank) for rank in evidence.records.ranks)) == round(both):
        text = f"right result, but {both:.0f} bytes sent per rank where {wanted:.0f} are enough: the weight that"
        yield Fault("tied weight twice", f"{text} two layers share travels twice; module.parameters() has it once")
    for rank in evidence.records.ranks:
        number = num_calls(evidence, rank=rank)
        if number > 1:
            text = f"right result, but rank {rank} made {number} calls ({names_of_calls(evidence, rank)}) where one"
            yield Fault("too many calls", f"{text} all_reduce is asked: each pays the latency once more")
    yield from found(over_budget(evidence, wanted, "one all-reduce of all gradients, as a ring,"))


def _pieces_mixed(evidence: Evidence) -> Fault | None:
    """Say so where the gradients hold the right numbers, in the wrong parameters."""
    own, held = [result["own"] for result in evidence.results], evidence.results[0]["gradients"]
    means = {name: torch.stack([one[name] for one in own]).mean(0) for name in own[0]}
    if not all(isinstance(held[name], Tensor) and held[name].shape == mean.shape for name, mean in means.items()):
        return None
    got, want = joined(held[name] for name in means), joined(means.values())
    if equal(got, want) or not equal(got.sort().values, want.sort().values):
        return None
    name = next(name for name, mean in means.items() if not equal(held[name], mean))
    text = f"rank 0's gradients hold the right numbers, but that of {name} holds other parameters' numbers"
    return Fault("pieces mixed", f"{text}: split the flat tensor in the order in which it was put together")


def _gradient_bytes(evidence: Evidence) -> int:
    return sum(8 * tensor.numel() for tensor in evidence.results[0]["own"].values())


def _ring_bytes(num_bytes: int, world_size: int) -> float:
    return 2 * (world_size - 1) / world_size * num_bytes


def budget_flat(evidence: Evidence) -> list[str]:
    """Say what the one all-reduce sent."""
    wanted = _ring_bytes(_gradient_bytes(evidence), evidence.world_size)
    return ["1 all-reduce", sent_line(evidence, wanted, "a ring")]


def missing_gradient(error: RankError, world_size: int) -> Fault | None:
    """Name a hang, a mismatch or an error that comes from a gradient that is None."""
    text = str(error)
    if "NoneType" in text:
        cause = "rank 0 did not use the branch, so its gradients are None there: count a missing gradient as zeros"
        return Fault("missing gradient", f"{cause}.\n{told(text)}")
    if world_size == 1 or not ("do not make the same call" in text or "rank 0 has returned without it" in text):
        return None
    lines = [line.strip() for line in told(text).splitlines() if line.strip().startswith("rank ") and "#" in line]
    cause = "rank 0 did not use the branch, so its gradients are None there; a rank that leaves a parameter out makes"
    cause += " other calls than the rest: count a missing gradient as zeros"
    return Fault("missing gradient", "\n".join([cause, *lines[:4]]))


WRONG_AVERAGES = (
    Mutant("sum", "sum not mean", "4x too large: it is the sum over ranks", 4, 9).without(
        "parameter.grad /= dist.get_world_size()"
    ),
    Mutant("skips None", "missing gradient", "count a missing gradient as zeros", 2, 15)
    .edit("if parameter.requires_grad:", "if parameter.requires_grad and parameter.grad is not None:")
    .without("if parameter.grad is None:\n    parameter.grad = torch.zeros_like(parameter)"),
    Mutant("weights", "averages parameters", "parameter.grad, not the parameter", 2, 10)
    .edit("parameter.grad /=", "parameter.data /=")
    .edit("all_reduce(parameter.grad)", "all_reduce(parameter.data)"),
    Mutant("divides twice", "divided twice", "once too often", 3, 63).edit(
        "parameter.grad /= dist.get_world_size()", "parameter.grad /= dist.get_world_size() ** 2"
    ),
    Mutant("reduce to rank 0", "only some ranks", "all_reduce, not reduce", 2, 4).edit(
        "dist.all_reduce(parameter.grad)", "dist.reduce(parameter.grad, dst=0)"
    ),
    Mutant("frozen too", "frozen parameter", "skip requires_grad=False", 2, 17).edit("parameter.requires_grad", "True"),
    Mutant("averages copies", "not communicated", "nothing of the others reached it", 2, 63)
    .edit("parameter.grad /= dist.get_world_size()", "mean = parameter.grad / dist.get_world_size()")
    .edit("dist.all_reduce(parameter.grad)", "dist.all_reduce(mean)"),
)
WRONG_FLATS = (
    Mutant("one a parameter", "too many calls", "where one all_reduce is asked", 2, 1).body("""
        for parameter in module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
    """),
    Mutant("sum", "sum not mean", "3x too large: it is the sum over ranks", 3, 9).without(
        "flat /= dist.get_world_size()"
    ),
    Mutant("another order", "pieces mixed", "in which it was put together", 2, 8).edit(
        "parameter.grad.flatten() for parameter in parameters",
        "parameter.grad.flatten() for parameter in parameters[::-1]",
    ),
    Mutant("never unpacked", "never copied back", "copy the pieces", 2, 63).edit(
        "parameter.grad.copy_(piece.view_as(parameter))", "pass"
    ),
    Mutant("skips None", "missing gradient", "count a missing gradient as zeros", 2, 15).edit(
        "if parameter.requires_grad]", "if parameter.grad is not None]"
    ),
    Mutant("tied twice", "tied weight twice", "two layers share travels twice", 2, 17).edit(
        "parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]",
        """
        layers = [layer for layer in module.modules() if layer is not module]
        parameters = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad]
        """,
    ),
    Mutant("gathers all", "too many bytes", "sent per rank where one all-reduce", 4, 1)
    .without("flat /= dist.get_world_size()")
    .edit(
        "dist.all_reduce(flat)",
        """
        everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, flat)
        flat = torch.stack(everyone).mean(0)
        """,
    ),
)
