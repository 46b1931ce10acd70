"""Name what is wrong in what the ranks of lesson 3's checks brought back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from distlab_lesson_03 import cases
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, num_calls, over_budget, sent_bytes, sent_line
from distlab.grading.values import equal, explain_sum


def judge_broadcast(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must hold rank 0's parameters and buffers, in the tensors that it had."""
    root = evidence.results[0]
    for name, tensor in root["after"].items():
        if not torch.equal(tensor, root["before"][name]):
            yield Fault("rank 0 changed", _changed_root(name, evidence))
            return
    for rank, result in enumerate(evidence.results):
        wrong = [name for name, tensor in result["after"].items() if not torch.equal(tensor, root["before"][name])]
        if wrong:
            yield _not_equal(rank, wrong, result)
            return
    for rank, result in enumerate(evidence.results):
        if not result["kept"]:
            text = f"rank {rank}'s module has new parameter objects; an optimizer built before would keep the old ones"
            yield Fault("new objects", f"{text}: write into the tensors that are there (copy_, or broadcast itself)")
            return


def _changed_root(name: str, evidence: Evidence) -> str:
    after = evidence.results[0]["after"][name]
    parts = torch.stack([result["before"][name].double() for result in evidence.results])
    if after.is_floating_point() and torch.allclose(after.double(), parts.mean(0)):
        return f"rank 0's {name} is now the mean over ranks: nobody's start; send rank 0's own, with broadcast"
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


def judge_average(evidence: Evidence) -> Iterator[Fault]:
    """Every gradient must be the mean over ranks, on every rank, and nothing else may have changed."""
    for rank, result in enumerate(evidence.results):
        if result["changed"]:
            yield _averaged_parameters(rank, result["changed"])
            return
        if result["frozen"]:
            text = f"rank {rank} gave the frozen parameter {result['frozen'][0]} a gradient"
            yield Fault("frozen parameter", f"{text}: an optimizer would then move it; skip requires_grad=False")
            return
    yield from judge_means([result["own"] for result in evidence.results], [r["gradients"] for r in evidence.results])


def judge_means(own: Sequence[dict[str, Tensor]], gradients: Sequence[dict[str, Any]]) -> Iterator[Fault]:
    """Compare gradients with the mean of the ranks' own; name the first that is wrong."""
    world_size = len(own)
    wanted = {name: torch.stack([part[name] for part in own]).mean(0) for name in own[0]}
    right = [all(_right(part.get(name), want) for name, want in wanted.items()) for part in gradients]
    if all(right):
        return
    if any(right):
        good, bad = right.index(True), right.index(False)
        text = f"rank {good} holds the means, rank {bad} does not: replicas will differ after the next update"
        yield Fault("only some ranks", f"{text}; all ranks need the result (all_reduce, not reduce)")
        return
    for name in own[0]:
        for rank in range(world_size):
            got, what = gradients[rank].get(name), f"rank {rank}'s gradient of {name}"
            if got is None:
                yield Fault("missing gradient", f"{what} is None: count a missing gradient as zeros and average it")
                return
            parts = [part[name] for part in own]
            fault = explain_sum(got, parts, expected=[1 / world_size] * world_size, what=what, rank=rank)
            if fault is not None:
                yield fault
                return


def _right(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and equal(got, want)


def _averaged_parameters(rank: int, names: list[str]) -> Fault:
    text = f"rank {rank}'s {names[0]} itself has changed, not only its gradient"
    return Fault("averages parameters", f"{text}: what is averaged must be parameter.grad, not the parameter")


def judge_flat(evidence: Evidence) -> Iterator[Fault]:
    """As judge_average, with one all-reduce of no more than the gradients' bytes."""
    for fault in judge_average(evidence):
        if fault.code == "not communicated" and num_calls(evidence):
            text = f"{fault.message}, though it was sent: copy the pieces of the flat tensor back into the gradients"
            fault = Fault("never copied back", text)
        yield fault
        return
    gradient_bytes = _gradient_bytes(evidence)
    wanted = _ring_bytes(gradient_bytes, evidence.world_size)
    tied_bytes = 8 * evidence.results[0]["own"]["first.weight"].numel()
    both = _ring_bytes(gradient_bytes + tied_bytes, evidence.world_size)
    if wanted and round(max(sent_bytes(evidence, rank) for rank in evidence.records.ranks)) == round(both):
        text = f"right result, but {both:.0f} bytes sent a rank where {wanted:.0f} are enough: the weight that"
        yield Fault("tied weight twice", f"{text} two layers share travels twice; module.parameters() has it once")
    for rank in evidence.records.ranks:
        number = num_calls(evidence, rank=rank)
        if number > 1:
            text = f"right result, but rank {rank} made {number} calls ({', '.join(_ops(evidence, rank))}) where one"
            yield Fault("too many calls", f"{text} all_reduce is asked: each pays the latency once more")
            break
    over = over_budget(evidence, wanted, "one all-reduce of all gradients, as a ring,")
    if over is not None:
        yield over


def _ops(evidence: Evidence, rank: int) -> list[str]:
    made = [call.op for call in calls(evidence, rank)]
    return [f"{made.count(op)} {op}" for op in dict.fromkeys(made)]


def _gradient_bytes(evidence: Evidence) -> int:
    return sum(8 * tensor.numel() for tensor in evidence.results[0]["own"].values())


def _ring_bytes(num_bytes: int, world_size: int) -> float:
    return 2 * (world_size - 1) / world_size * num_bytes


def budget_flat(evidence: Evidence) -> list[str]:
    """Say what the one all-reduce sent."""
    wanted = _ring_bytes(_gradient_bytes(evidence), evidence.world_size)
    return ["1 all-reduce", sent_line(evidence, wanted, "a ring")]


def budget_calls(evidence: Evidence) -> list[str]:
    """Say how many calls a rank made."""
    number = num_calls(evidence, rank=0)
    return [f"{number} call{'' if number == 1 else 's'} a rank: {', '.join(_ops(evidence, 0))}"]


def told(text: str) -> str:
    """Return what a failure says before the stacks, without times."""
    return re.sub(r" for \d+\.\d s", "", text.partition("\n---")[0]).strip()


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


def broadcast_failure(error: RankError, world_size: int) -> Fault | None:
    """Name the two ways in which a broadcast hangs or breaks."""
    text = str(error)
    if "do not make the same call" in text or len(set(re.findall(r"root (\d+)", text))) > 1:
        return Fault("different calls", f"every rank must name the same root, src=0. {told(text)}")
    if "deadlock" in text:
        return Fault("deadlock", f"all ranks must call broadcast, the receivers too. {told(text)}")
    return None


def judge_buckets(evidence: Evidence) -> Iterator[Fault]:
    """Every parameter once, the last first, and each bucket closed when it holds enough."""
    for (sizes, capacity), (buckets, left) in zip(cases.BUCKET_CASES, evidence.results[0], strict=True):
        asked = f"fill_buckets({sizes}, {capacity})"
        if left != sizes:
            yield Fault(
                "changed argument", f"{asked} left {left} in the caller's list: do not change what you are given"
            )
            return
        fault = _wrong_shape(buckets, asked) or _wrong_members(buckets, sizes, asked)
        fault = fault or _wrong_closing(buckets, sizes, capacity, asked)
        if fault is not None:
            yield fault
            return


def _wrong_shape(buckets: Any, asked: str) -> Fault | None:
    good = isinstance(buckets, list) and all(isinstance(bucket, list | tuple) for bucket in buckets)
    if not good or not all(isinstance(index, int) for bucket in buckets for index in bucket):
        return Fault("returned", f"{asked} returned {buckets!r}; expected a list of lists of indices")
    if [] in buckets:
        return Fault(
            "empty bucket", f"{asked} returned {buckets}, with an empty bucket: it would cost a call for nothing"
        )
    return None


def _wrong_members(buckets: list[list[int]], sizes: list[int], asked: str) -> Fault | None:
    walked = [index for bucket in buckets for index in bucket]
    text = f"{asked} returned {buckets}"
    lost = [index for index in range(len(sizes)) if index not in walked]
    if lost:
        return Fault("parameter lost", f"{text}: parameter {lost[0]} is in no bucket, nobody would average it")
    if len(walked) != len(sizes):
        return Fault(
            "parameter twice", f"{text}: expected each of {len(sizes)} parameters once, got {len(walked)} entries"
        )
    if walked == list(range(len(sizes))) and len(walked) > 1:
        return Fault("forward order", f"{text}: backward makes the last parameter's gradient first; start at the end")
    if walked != list(reversed(range(len(sizes)))):
        return Fault("order", f"{text}: expected the parameters from last to first, got {walked}")
    return None


def _wrong_closing(buckets: list[list[int]], sizes: list[int], capacity: int, asked: str) -> Fault | None:
    for number, bucket in enumerate(buckets):
        num_bytes = sum(sizes[index] for index in bucket)
        before_last = num_bytes - sizes[bucket[-1]]
        text = f"{asked} returned {buckets}: bucket {number}"
        if before_last >= capacity:
            reached = "exactly" if before_last == capacity else "more than"
            return Fault("closed too late", f"{text} held {reached} {capacity} bytes and was not closed then")
        if num_bytes < capacity and number < len(buckets) - 1:
            return Fault(
                "closed too early", f"{text} was closed at {num_bytes} bytes, below its capacity of {capacity}"
            )
    return None


def judge_hooks(evidence: Evidence) -> Iterator[Fault]:
    """After each backward every gradient must be the mean over ranks, and no parameter may have changed."""
    for step in range(len(evidence.results[0]["steps"])):
        for rank, result in enumerate(evidence.results):
            if result["steps"][step]["changed"]:
                yield _averaged_parameters(rank, result["steps"][step]["changed"])
                return
    if num_calls(evidence) == 0:
        text = f"{evidence.world_size} ranks ran backward and no rank called torch.distributed"
        yield Fault("never communicates", f"{text}: no hook of this module's own parameters was reached")
        return
    for rank in evidence.records.ranks:
        if any(call.wait_ns == 0 for call in calls(evidence, rank)):
            text = f"rank {rank} started an all_reduce and never waited for it"
            yield Fault("not waited", f"{text}: whoever reads the gradient next may read it half summed")
            return
    for step in range(len(evidence.results[0]["steps"])):
        steps = [result["steps"][step] for result in evidence.results]
        fault = next(judge_means([s["own"] for s in steps], [s["gradients"] for s in steps]), None)
        if fault is not None:
            yield fault
            return
