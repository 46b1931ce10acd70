"""Equal starts: every rank gets other parameters and buffers, and must end with those of rank 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_03.checks.shared import Net, filled, state_of, told
from torch import nn

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import each_rank


def drive_broadcast(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Give every rank other parameters and buffers, then call fn."""
    rank, net = dist.get_rank(), Net()
    with torch.no_grad():
        for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
            tensor.copy_(filled(rank, tensor, name))
    before, objects = state_of(net), {id(tensor) for tensor in net.parameters()}
    fn(net)
    kept = objects == {id(tensor) for tensor in net.parameters()}
    return {"before": before, "after": state_of(net), "kinds": _kinds_of(net), "kept": kept}


def _kinds_of(module: nn.Module) -> dict[str, str]:
    """Say of every tensor whether it is a parameter, a frozen parameter or a buffer."""
    kinds = {name: "parameter" if p.requires_grad else "frozen parameter" for name, p in module.named_parameters()}
    return kinds | {name: "buffer" for name, _ in module.named_buffers()}


def judge_broadcast(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must hold rank 0's parameters and buffers, in the tensors that it had."""
    wanted = evidence.results[0]["before"]
    for name, tensor in evidence.results[0]["after"].items():
        if not torch.equal(tensor, wanted[name]):
            yield Fault("rank 0 changed", _changed_root(name, evidence))
    for rank, result in enumerate(evidence.results):
        wrong = [name for name, tensor in result["after"].items() if not torch.equal(tensor, wanted[name])]
        if wrong:
            yield _not_equal(rank, wrong, result)
    yield from each_rank(evidence, _new_objects)


def _new_objects(rank: int, result: dict[str, Any]) -> Fault | None:
    if result["kept"]:
        return None
    text = f"rank {rank}'s module has new parameter objects; an optimizer built before would keep the old ones"
    return Fault("new objects", f"{text}: write into the tensors that are there (copy_, or broadcast itself)")


def _changed_root(name: str, evidence: Evidence) -> str:
    after = evidence.results[0]["after"][name]
    parts = torch.stack([result["before"][name].double() for result in evidence.results])
    if after.is_floating_point() and torch.allclose(after.double(), parts.mean(0)):
        return f"rank 0's {name} is now the mean over ranks: no rank's start; send rank 0's own, with broadcast"
    for rank, result in enumerate(evidence.results[1:], start=1):
        if torch.equal(after, result["before"][name]):
            return f"rank 0's {name} is now rank {rank}'s: broadcast from src=0"
    return f"rank 0's {name} has changed: it gives its own values to the others and keeps them"


def _not_equal(rank: int, wrong: list[str], result: dict[str, Any]) -> Fault:
    kinds = result["kinds"]
    kept = [name for name in wrong if torch.equal(result["after"][name], result["before"][name])]
    shown = ", ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else "")
    if len(kept) == len(kinds):
        return Fault("not broadcast", f"rank {rank} still has its own values everywhere: nothing of rank 0 reached it")
    for kind, code in (("buffer", "buffers forgotten"), ("frozen parameter", "frozen forgotten")):
        if kept == wrong and {kinds[name] for name in wrong} == {kind}:
            text = f"rank {rank}'s {kind}s still are its own ({shown}), its other tensors are rank 0's"
            return Fault(code, f"{text}: replicas must agree in everything that forward reads")
    return Fault("replicas differ", f"{len(wrong)} of {len(kinds)} tensors on rank {rank} are not rank 0's: {shown}")


def broadcast_failure(error: RankError, world_size: int) -> Fault | None:
    """Name the two ways in which a broadcast hangs or breaks."""
    text = str(error)
    if "do not make the same call" in text or len(set(re.findall(r"root (\d+)", text))) > 1:
        return Fault("different calls", f"every rank must name the same root, src=0. {told(text)}")
    if "deadlock" in text:
        return Fault("deadlock", f"all ranks must call broadcast, the receivers too. {told(text)}")
    return None


WRONG_BROADCASTS = (
    Mutant("buffers forgotten", "buffers forgotten", "buffers still are its own", 2, 11).without(", *module.buffers()"),
    Mutant("frozen forgotten", "frozen forgotten", "frozen parameters still are", 3, 11).edit(
        "*module.parameters()", "*(p for p in module.parameters() if p.requires_grad)"
    ),
    Mutant("fills copies", "not broadcast", "nothing of rank 0 reached it", 2, 11).edit(
        ".detach()", ".detach().clone()"
    ),
    Mutant("averages instead", "rank 0 changed", "mean over ranks: no rank's start", 2, 10).edit(
        "dist.broadcast(tensor.detach(), src=0)",
        """
        dist.all_reduce(tensor.detach())
        tensor.detach().copy_((tensor.detach() / dist.get_world_size()).to(tensor.dtype))
        """,
    ),
    Mutant("only rank 0 calls", "deadlock", "the receivers too", 2, 5).edit(
        "dist.broadcast(", "dist.get_rank() == 0 and dist.broadcast("
    ),
    Mutant("each its own root", "different calls", "the same root, src=0", 2, 7).edit("src=0", "src=dist.get_rank()"),
)
