"""The loss scale of float16: a decision that all ranks share, and gradients without the scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import each_rank
from distlab.grading.diagnosis.traffic import calls, in_megabytes
from distlab.grading.diagnosis.values import compare, equal, joined, seeded

INTERVAL, FIRST_SCALE = 3, 64.0
# What happens in each step of the scaler: nothing, or a number that is not finite on one rank (from the end).
EVENTS = ("fine", "inf on the last rank", "fine", "fine", "fine", "nan on rank 0", "fine")


def scaled_gradients(rank: int, world_size: int, step: int, scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """Return a rank's true gradients and those of the scaled loss, with what the step's event puts into the last."""
    true = [seeded(rank, *shape, purpose=f"scaler {step} {shape}").float() for shape in ((3, 2), (5,), (4,))]
    given = [gradient * scale for gradient in true]
    if EVENTS[step].startswith("inf") and rank == world_size - 1:
        given[-1][2] = torch.inf
    if EVENTS[step].startswith("nan") and rank == 0:
        given[-1][1] = torch.nan
    return true, given


def drive_scaler(fn: Callable[..., Any]) -> dict[str, Any]:
    """Take some steps; fn's own scale and streak go into the next, the gradients are made for them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    scale, streak, steps = FIRST_SCALE, 0, []
    for step in range(len(EVENTS)):
        _, given = scaled_gradients(rank, world_size, step, scale)
        returned = fn(list(given), scale, streak, INTERVAL)  # a list of its own: what counts is in the tensors
        steps.append({"returned": returned, "gradients": given, "scale": scale, "streak": streak})
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            return {"shape": repr(returned)[:80]}
        scale, streak = float(returned[1]), int(returned[2])
    return {"steps": steps}


def scaler_course() -> list[tuple[bool, float, int]]:
    """Return what each step must answer."""
    scale, streak, course = FIRST_SCALE, 0, []
    for event in EVENTS:
        if event != "fine":
            scale, streak = scale / 2, 0
        elif streak + 1 == INTERVAL:
            scale, streak = scale * 2, 0
        else:
            streak += 1
        course.append((event == "fine", scale, streak))
    return course


def judge_scaler(evidence: Evidence) -> Iterator[Fault]:
    """The same right decision on every rank in every step, true gradients, and one small call per step."""
    for rank, result in enumerate(evidence.results):
        if "shape" in result:
            text = f"rank {rank}: got {result['shape']}"
            yield Fault("returned", f"{text}; expected (whether to update, next scale, next streak)")
    yield from _judge_together(evidence)
    for step, want in enumerate(scaler_course()):
        yield from _judge_decision(evidence, step, want)
        if want[0]:
            rows = [result["steps"][step] for result in evidence.results]
            yield from each_rank(rows, lambda rank, row, step=step: _judge_true(evidence, rank, row, step))
    yield from _judge_calls(evidence)


def _judge_together(evidence: Evidence) -> Iterator[Fault]:
    """Ranks that decide differently never again hold the same model."""
    n, num_steps = evidence.world_size, len(EVENTS)
    made = [len(calls(evidence, rank)) for rank in range(n)]
    for step in range(num_steps):
        answers = [bool(result["steps"][step]["returned"][0]) for result in evidence.results]
        if len(set(answers)) == 1:
            continue
        skips, goes = answers.index(False), answers.index(True)
        text = f"step {step} ({EVENTS[step]}): rank {skips} skips, rank {goes} updates"
        if min(made) > 0 and max(made) < num_steps:
            advice = f"rank {skips} made {made[skips]} calls in {num_steps} steps: a collective inside a branch meets"
            yield Fault("call in a branch", f"{text}; {advice} another step's; call it on every rank in every step")
        advice = "each looks at its own gradients alone, so weights differ from now on; share the decision (all_reduce)"
        yield Fault("decided alone", f"{text}: {advice}")


def _judge_decision(evidence: Evidence, step: int, want: tuple[bool, float, int]) -> Iterator[Fault]:
    event, result = EVENTS[step], evidence.results[0]["steps"]
    update, scale, streak = result[step]["returned"]
    when = f"step {step} ({event})"
    if bool(update) != want[0]:
        yield _explain_update(result, step, bool(update), when, evidence.world_size)
    if float(scale) != want[1]:
        yield _explain_scale(result[step], float(scale), want, when)
    if int(streak) != want[2]:
        text = f"{when}: the next streak is {streak}, expected {want[2]}"
        if not want[0]:
            yield Fault("streak goes on", f"{text}: only good steps *in a row* count; an overflow begins again at 0")
        yield Fault("streak", f"{text}: it counts good steps since the scale last changed")


def _explain_update(steps: list[dict[str, Any]], step: int, update: bool, when: str, n: int) -> Fault:
    if not update:
        return Fault("skips a good step", f"{when}: every gradient on every rank is finite, but no rank updates")
    skipped = [EVENTS[i] for i, row in enumerate(steps) if not row["returned"][0]]
    text = f"{when}: all ranks update, and the weights are infinite or NaN from now on"
    if any(event.startswith("nan") for event in skipped):
        return Fault("infinity missed", f"{text}: NaN is looked for, infinity is not; ask isfinite")
    if n > 1 and not skipped:
        advice = "one rank with an overflow is enough to skip: share it with MAX (or SUM), not with MIN"
        return Fault("one is enough", f"{text}: {advice}")
    return Fault("overflow missed", f"{text}: look at all gradients, it is in the last one")


def _explain_scale(row: dict[str, Any], got: float, want: tuple[bool, float, int], when: str) -> Fault:
    text = f"{when}: the next scale is {got:g}, expected {want[1]:g}"
    before = row["scale"]
    if not want[0] and got >= before:
        return Fault("not lowered", f"{text}: an overflow halves it, or it overflows again in each step")
    if want[0] and want[1] > before and got == before and int(row["returned"][2]) == INTERVAL:
        return Fault("doubles late", f"{text}: this is good step {INTERVAL} in a row; count it before you compare")
    if want[0] and want[1] > before and got == before:
        return Fault("never grows", f"{text}: {INTERVAL} good steps in a row double it, or it stays low forever")
    if want[0] and want[1] == before and got > before:
        advice = f"{INTERVAL} good steps *in a row* double it; an overflow, and a doubling, begin the count again"
        return Fault("streak goes on", f"{text}: {advice}")
    return Fault("scale", text)


def _judge_true(evidence: Evidence, rank: int, row: dict[str, Any], step: int) -> Fault | None:
    true, _ = scaled_gradients(rank, evidence.world_size, step, row["scale"])
    got, want = joined(row["gradients"]), joined(true)
    if equal(got, want):
        return None
    what = f"step {step}: rank {rank}'s gradients"
    if equal(got, want * row["scale"]):
        text = f"{what} are still those of {row['scale']:g} times the loss"
        return Fault("not unscaled", f"{text}: divide by the scale, in place, before clipping and the update")
    if equal(got, want * row["scale"] / float(row["returned"][1])):
        text = f"{what} were divided by the next scale"
        return Fault("next scale", f"{text}: they were made with {row['scale']:g}; change the scale afterwards")
    n = evidence.world_size
    every = [joined(scaled_gradients(other, n, step, row["scale"])[0]) for other in range(n)]
    if n > 1 and any(equal(got, torch.stack(every).sum(0) / parts) for parts in (1, n)):
        advice = "each holds other pieces of the model; share the finding, not the gradients"
        return Fault("gradients mixed", f"{what} are put together with those of the other ranks: {advice}")
    return compare(got, want, what, n)


def _judge_calls(evidence: Evidence) -> Iterator[Fault]:
    n, num_steps = evidence.world_size, len(EVENTS)
    for rank in range(n) if n > 1 else ():
        made = calls(evidence, rank)
        sent = sum(call.num_bytes for call in made)
        if len(made) <= num_steps and sent <= 8 * num_steps:
            continue
        text = f"right answers, but rank {rank} makes {len(made)} calls with {in_megabytes(sent)} in {num_steps} steps"
        advice = "one number per step is enough; look at all gradients first, then all_reduce"
        yield Fault("too many calls", f"{text}: {advice}")


def budget_scaler(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    made = calls(evidence, 0)
    return [f"{len(made)} calls in {len(EVENTS)} steps, {sum(call.num_bytes for call in made)} bytes in all"]


_UNSCALE = "for gradient in gradients:\n    gradient.div_(scale)"
WRONG_SCALERS = (
    Mutant("alone", "decided alone", "share the decision", 2, 4).without(
        "dist.all_reduce(overflow, dist.ReduceOp.MAX)"
    ),
    Mutant("in a branch", "call in a branch", "on every rank in every step", 2, 5).edit(
        "dist.all_reduce(", "if overflow.item() > 0:\n    dist.all_reduce("
    ),
    Mutant("all must overflow", "one is enough", "not with MIN", 2).edit("ReduceOp.MAX", "ReduceOp.MIN"),
    Mutant("NaN alone", "infinity missed", "isfinite", 1).edit(
        "gradient.isfinite().all()", "(~gradient.isnan()).all()"
    ),
    Mutant("first gradient", "overflow missed", "look at all gradients", 1).edit("in gradients]", "in gradients[:1]]"),
    Mutant("not unscaled", "not unscaled", "before clipping", 1).without(_UNSCALE),
    Mutant("into the list", "not unscaled", "in place", 1).edit(
        _UNSCALE, "gradients[:] = [gradient / scale for gradient in gradients]"
    ),
    Mutant("next scale", "next scale", "afterwards", 1).edit(
        "div_(scale)", "div_(scale * 2 if streak + 1 == interval else scale)"
    ),
    Mutant("not in a row", "streak goes on", "in a row", 1).edit("scale / 2, 0", "scale / 2, streak"),
    Mutant("never grows", "never grows", "stays low forever", 1).edit("scale * 2, 0", "scale, 0"),
    Mutant("a call per gradient", "too many calls", "one number per step", 2)
    .edit("in gradients]).all()", "in gradients])")
    .edit(
        "overflow = (~finite).float()\ndist.all_reduce(overflow, dist.ReduceOp.MAX)\nif overflow.item() > 0:",
        """
        overflows = (~finite).float()
        for overflow in overflows:
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        if overflows.any():
        """,
    ),
)
