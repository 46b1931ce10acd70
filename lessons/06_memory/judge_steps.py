"""Name what is wrong in lesson 6's loss scaling and master weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_06 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes
from distlab.grading.values import compare, equal


def scaler_course() -> list[tuple[bool, float, int]]:
    """Return what each step must answer."""
    scale, streak, course = cases.FIRST_SCALE, 0, []
    for event in cases.EVENTS:
        if event != "fine":
            scale, streak = scale / 2, 0
        elif streak + 1 == cases.INTERVAL:
            scale, streak = scale * 2, 0
        else:
            streak += 1
        course.append((event == "fine", scale, streak))
    return course


def judge_scaler(evidence: Evidence) -> Iterator[Fault]:
    """The same right decision on every rank in every step, true gradients, and one small call a step."""
    for rank, result in enumerate(evidence.results):
        if "shape" in result:
            text = f"rank {rank}: got {result['shape']}"
            yield Fault("returned", f"{text}; expected (whether to update, next scale, next streak)")
            return
    yield from _judge_together(evidence)
    for step, want in enumerate(scaler_course()):
        yield from _judge_decision(evidence, step, want)
        for rank, result in enumerate(evidence.results):
            fault = _judge_true(evidence, rank, result["steps"][step], step) if want[0] else None
            if fault is not None:
                yield fault
                return
    yield from _judge_calls(evidence)


def _judge_together(evidence: Evidence) -> Iterator[Fault]:
    """Ranks that decide differently never again hold the same model."""
    n, num_steps = evidence.world_size, len(cases.EVENTS)
    made = [len(calls(evidence, rank)) for rank in range(n)]
    for step in range(num_steps):
        answers = [bool(result["steps"][step]["returned"][0]) for result in evidence.results]
        if len(set(answers)) == 1:
            continue
        skips, goes = answers.index(False), answers.index(True)
        text = f"step {step} ({cases.EVENTS[step]}): rank {skips} skips, rank {goes} updates"
        if min(made) > 0 and max(made) < num_steps:
            advice = f"rank {skips} made {made[skips]} calls in {num_steps} steps: a collective inside a branch meets"
            yield Fault("call in a branch", f"{text}; {advice} another step's; call it on every rank in every step")
        advice = "each looks at its own gradients alone, so weights differ from now on; share the decision (all_reduce)"
        yield Fault("decided alone", f"{text}: {advice}")
        return


def _judge_decision(evidence: Evidence, step: int, want: tuple[bool, float, int]) -> Iterator[Fault]:
    event, result = cases.EVENTS[step], evidence.results[0]["steps"]
    update, scale, streak = result[step]["returned"]
    when = f"step {step} ({event})"
    if bool(update) != want[0]:
        yield _explain_update(result, step, bool(update), when, evidence.world_size)
        return
    if float(scale) != want[1]:
        yield _explain_scale(result, step, float(scale), want, when)
        return
    if int(streak) != want[2]:
        text = f"{when}: the next streak is {streak}, expected {want[2]}"
        if not want[0]:
            yield Fault("streak goes on", f"{text}: only good steps *in a row* count; an overflow begins again at 0")
            return
        yield Fault("streak", f"{text}: it counts good steps since the scale last changed")


def _explain_update(steps: list[dict[str, Any]], step: int, update: bool, when: str, n: int) -> Fault:
    if not update:
        return Fault("skips a good step", f"{when}: every gradient on every rank is finite, but nobody updates")
    skipped = [cases.EVENTS[i] for i, row in enumerate(steps) if not row["returned"][0]]
    text = f"{when}: everybody updates, and the weights are infinite or NaN from now on"
    if any(event.startswith("nan") for event in skipped):
        return Fault("infinity missed", f"{text}: NaN is looked for, infinity is not; ask isfinite")
    if n > 1 and not skipped:
        advice = "one rank with an overflow is enough to skip: share it with MAX (or SUM), not with MIN"
        return Fault("one is enough", f"{text}: {advice}")
    return Fault("overflow missed", f"{text}: look at all gradients, it is in the last one")


def _explain_scale(
    steps: list[dict[str, Any]], step: int, got: float, want: tuple[bool, float, int], when: str
) -> Fault:
    text = f"{when}: the next scale is {got:g}, expected {want[1]:g}"
    before = steps[step]["scale"]
    if not want[0] and got >= before:
        return Fault("not lowered", f"{text}: an overflow halves it, or it overflows again in each step")
    if want[0] and want[1] > before and got == before and int(steps[step]["returned"][2]) == cases.INTERVAL:
        return Fault(
            "doubles late", f"{text}: this is good step {cases.INTERVAL} in a row; count it before you compare"
        )
    if want[0] and want[1] > before and got == before:
        return Fault("never grows", f"{text}: {cases.INTERVAL} good steps in a row double it, or it stays low for ever")
    if want[0] and want[1] == before and got > before:
        advice = f"{cases.INTERVAL} good steps *in a row* double it; an overflow, and a doubling, begin the count again"
        return Fault("streak goes on", f"{text}: {advice}")
    return Fault("scale", text)


def _judge_true(evidence: Evidence, rank: int, row: dict[str, Any], step: int) -> Fault | None:
    true, _ = cases.scaled_gradients(rank, evidence.world_size, step, row["scale"])
    got, want = _row(row["gradients"]), _row(true)
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
    every = [_row(cases.scaled_gradients(other, n, step, row["scale"])[0]) for other in range(n)]
    if n > 1 and any(equal(got, torch.stack(every).sum(0) / parts) for parts in (1, n)):
        advice = "each holds other pieces of the model; share the finding, not the gradients"
        return Fault("gradients mixed", f"{what} are put together with those of the other ranks: {advice}")
    return compare(got, want, what, n)


def _judge_calls(evidence: Evidence) -> Iterator[Fault]:
    n, num_steps = evidence.world_size, len(cases.EVENTS)
    for rank in range(n) if n > 1 else ():
        made = calls(evidence, rank)
        sent = sum(call.num_bytes for call in made)
        if len(made) <= num_steps and sent <= 8 * num_steps:
            continue
        text = f"right answers, but rank {rank} makes {len(made)} calls with {in_megabytes(sent)} in {num_steps} steps"
        yield Fault(
            "too many calls", f"{text}: one number a step is enough; look at all gradients first, then all_reduce"
        )
        return


def budget_scaler(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    made = calls(evidence, 0)
    return [f"{len(made)} calls in {len(cases.EVENTS)} steps, {sum(call.num_bytes for call in made)} bytes in all"]


def master_course() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return weights and masters after each step."""
    _, masters, steps = cases.master_case()
    course = []
    for gradients in steps:
        masters = [m - cases.LEARNING_RATE * g.float() for m, g in zip(masters, gradients, strict=True)]
        course.append(([master.bfloat16() for master in masters], masters))
    return course


def judge_master(evidence: Evidence) -> Iterator[Fault]:
    """Masters as float32 SGD makes them, weights as their rounded copies, in every step, in place."""
    result = evidence.results[0]
    weights, masters, steps = cases.master_case()
    for step, (row, (want, wanted)) in enumerate(zip(result["steps"], master_course(), strict=True)):
        for index, weight in enumerate(row["weights"]):
            if weight.dtype != torch.bfloat16:
                text = f"weight {index} is {weight.dtype} after step {step}, was bfloat16"
                yield Fault(
                    "weights turned float32", f"{text}: copy the values into it (copy_), do not replace its data"
                )
                return
        if row["moved"]:
            text = f"step {step}: weights or masters lie in new memory, which model and optimizer know nothing of"
            yield Fault("replaced", f"{text}; write into the old (sub_, copy_), do not replace .data")
            return
        got, right = _row(row["masters"]), _row(wanted)
        if not equal(got, right):
            yield _explain_master(step, row, (weights, masters, steps[step]), right)
            return
        want = [master.bfloat16() for master in row["masters"]]  # within a last bit of ours
        if not torch.equal(_row(row["weights"]), _row(want)):
            if torch.equal(_row(row["weights"]), _row(weights)):
                text = f"after step {step} the masters are right and the weights are as before"
                yield Fault(
                    "not copied back",
                    f"{text}: forward would never see an update; copy each master into its weight after its update",
                )
                return
            text = f"step {step}: the masters are right, and the weights are not the masters rounded to 16 bits"
            yield Fault("not the copy", f"{text}: do not update the weights too; copy_ each master into its weight")
            return
        if not row["kept"]:
            yield Fault("changed gradients", f"step {step}: the gradients were written to; leave them as they are")
        weights, masters = want, wanted
    limit = 2 * 4 * max(master.numel() for master in masters)
    if result["peak"] > limit * 1.05:
        text = (
            f"right values, but {in_megabytes(result['peak'])} of new memory at the peak, where {in_megabytes(limit)}"
        )
        yield Fault(
            "all at once",
            f"{text} are allowed, two float32 tensors: all gradients in float32 at once cost 4 bytes a parameter again",
        )


def _explain_master(
    step: int, row: dict[str, Any], before: tuple[list[Tensor], list[Tensor], list[Tensor]], want: Tensor
) -> Fault:
    weights, masters, gradients = before
    got, lr = _row(row["masters"]), cases.LEARNING_RATE
    what = f"step {step}: the masters"
    if torch.equal(got, _row(masters)):
        if torch.equal(_row(row["weights"]), _row(weights)):
            text = f"{what} and the weights are as before: write into the tensors that you were given"
            return Fault("nothing written", f"{text}; `master = ...` only gives the name to a new tensor")
        text = f"{what} are as before, the update went into the 16-bit weights, where most of it is rounded away"
        return Fault("updated in 16 bits", f"{text}: update the masters, then copy them into the weights")
    step_16 = torch.cat([(lr * gradient).float().flatten() for gradient in gradients])
    flat, gradient = _row(weights).float(), _row(gradients).float()
    known = (
        (
            "rebuilt from 16 bits",
            flat - lr * gradient,
            "begin at the 16-bit weights: what the last steps added below their last bit is lost; keep the masters",
        ),
        ("multiplied in 16 bits", _row(masters) - step_16, "take a step that was rounded to 16 bits: gradient.float()"),
        ("wrong sign", _row(masters) + lr * gradient, "go up the slope: subtract lr x gradient"),
        ("without lr", _row(masters) - gradient, "take a step of the whole gradient: multiply it by lr"),
    )
    for code, version, words in known:
        if torch.allclose(got, version, rtol=0, atol=1e-6):
            return Fault(code, f"{what} {words}")
    if torch.equal(got, got.bfloat16().float()):
        advice = "then there is no use in float32; copy masters into weights, not back"
        return Fault("rounded", f"{what} are rounded to 16 bits: {advice}")
    return compare(got, want, what) or Fault("values", what)


def budget_master(evidence: Evidence) -> list[str]:
    """Say what was needed for a moment."""
    return [f"new memory at the peak: {in_megabytes(evidence.results[0]['peak'])}, beside 4 bytes a parameter for ever"]


def _row(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
