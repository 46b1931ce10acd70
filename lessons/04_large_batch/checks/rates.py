"""Rates: of any update of any batch, and of a run that was saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import describe, numbers_differ

# (step, base rate, batch, base batch, updates of warmup)
RATES = (
    (100, 0.1, 32, 32, 10),  # nothing scaled, warmup over
    (100, 0.1, 1024, 32, 10),
    (100, 0.1, 16, 32, 10),
    (9, 0.1, 64, 32, 10),  # the last of the warmup has all of it
    (10, 0.1, 64, 32, 10),
    (4, 0.1, 64, 32, 10),
    (0, 0.1, 64, 32, 10),
    (0, 0.1, 64, 32, 0),
    (5, 0.1, 1437, 32, 0),
)
PEAK_LR, NUM_WARMUP, NUM_UPDATES = 0.8, 5, 9
CUTS = (0, 2, 7)


def drive_rate(fn: Callable[..., Any]) -> list[Any]:
    """Ask for every rate."""
    return [
        fn(step, base_lr, batch=batch, base_batch=base_batch, num_warmup=num_warmup)
        for step, base_lr, batch, base_batch, num_warmup in RATES
    ]


def optimizer_of(lr: float) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.SGD([{"params": [weight]} for weight in weights], lr=lr)


def drive_warm_up(fn: Callable[..., Any]) -> dict[int, Any]:
    """Run whole, and cut at some updates: saved, loaded into a new optimizer and resumed. Log both groups' rates."""
    return {cut: _rates(fn, cut) for cut in CUTS}


def _rates(fn: Callable[..., Any], cut: int) -> list[Any]:
    logged: list[Any] = []
    state = None
    for first, last in ((0, cut), (cut, NUM_UPDATES)):
        if first == last:
            continue
        optimizer = optimizer_of(PEAK_LR)
        if state is not None:
            optimizer.load_state_dict(state)
        before_update = fn(optimizer, PEAK_LR, num_warmup=NUM_WARMUP, first_step=first)
        for _ in range(first, last):
            before_update()
            logged.append([group["lr"] for group in optimizer.param_groups])
        state = optimizer.state_dict()
    return logged


def judge_rate(evidence: Evidence) -> Iterator[Fault]:
    """Every rate must be the base rate times the batches' ratio, and rise to that in equal steps."""
    for case, got in zip(RATES, evidence.results[0], strict=True):
        step, base_lr, batch, base_batch, num_warmup = case
        asked = f"batch {batch}, base_batch {base_batch}, base_lr {base_lr}, step {step}, num_warmup {num_warmup}"
        if not isinstance(got, int | float | Tensor) or isinstance(got, bool):
            yield Fault("returned", f"{asked}: expected a number, got {describe(got)}")
        peak = base_lr * batch / base_batch
        want = peak * min(1.0, (step + 1) / num_warmup) if num_warmup else peak
        if _near(float(got), want):
            continue
        yield _wrong_rate(float(got), want, case, asked)


def _near(got: float, want: float) -> bool:
    return abs(got - want) <= 1e-9 * max(abs(want), 1e-9)


def _wrong_rate(got: float, want: float, case: tuple[int, float, int, int, int], asked: str) -> Fault:
    step, base_lr, batch, base_batch, num_warmup = case
    peak, text = base_lr * batch / base_batch, f"{asked}: {numbers_differ(got, want)}"
    if _near(got, base_lr) and step >= num_warmup:
        return Fault("not scaled", f"{text}: the rate of the base batch; multiply by batch / base_batch")
    if _near(got, base_lr * base_batch / batch):
        return Fault("scaled inversely", f"{text}: the larger batch has the smaller rate; it is batch / base_batch")
    if _near(got, base_lr * (batch / base_batch) ** 0.5):
        return Fault("square root", f"{text}: that is square-root scaling; linear is asked here")
    if batch % base_batch and _near(got, base_lr * (batch // base_batch)):
        return Fault("whole multiples", f"{text}: batch // base_batch cuts the fraction off; use /")
    if got > peak * (1 + 1e-9):
        return Fault("above the peak", f"{text}: the warmup goes on beyond the full rate; stop it there")
    if step < num_warmup and _near(got, peak * step / num_warmup):
        what = "its first update is at zero, and wasted" if step == 0 else "it is one update late"
        return Fault("warmup starts at zero", f"{text}: {what}; update `step` has (step + 1) / num_warmup of the peak")
    if step < num_warmup and _near(got, peak):
        return Fault("no warmup", f"{text}: the full rate in update {step}, though the warmup has {num_warmup}")
    if step < num_warmup and _near(got, base_lr * (step + 1) / num_warmup):
        return Fault("warms up to the base rate", f"{text}: the warmup ends at the base rate and then jumps")
    if step < num_warmup and any(_near(got, base_lr + (peak - base_lr) * (step + k) / num_warmup) for k in (0, 1)):
        what = "the warmup begins at the base rate; here it is a share of the peak"
        return Fault("warms up from the base rate", f"{text}: {what}, (step + 1) / num_warmup")
    if step < num_warmup and _near(got, peak * (step + 1) / (num_warmup + 1)):
        what = "the warmup is one update too long; update num_warmup - 1 has the peak"
        return Fault("warmup one longer", f"{text}: {what}")
    return Fault("values", text)


def rate_failure(error: Exception, world_size: int) -> Fault | None:
    """Name the division by zero."""
    if "ZeroDivisionError" in str(error):
        return Fault("divides by zero", "num_warmup 0 means no warmup, and is divided by: the full rate from the start")
    return None


def judge_warm_up(evidence: Evidence) -> Iterator[Fault]:
    """The rates of a run cut at any update must be those of the whole run."""
    results = evidence.results[0]
    peak, num = PEAK_LR, NUM_WARMUP
    want = [peak * min(1.0, (step + 1) / num) for step in range(NUM_UPDATES)]
    for cut in CUTS:
        got = results[cut]
        if any(not isinstance(rate, int | float) for rates in got for rate in rates):
            yield Fault("returned", f"rates must be numbers, got {got}")
        for step, (rates, rate) in enumerate(zip(got, want, strict=True)):
            if all(_near(own, rate) for own in rates):
                continue
            yield _wrong_warmup(cut, step, rates, rate, [r[0] for r in got])


def _wrong_warmup(cut: int, step: int, rates: list[float], want: float, all_rates: list[float]) -> Fault:
    got, peak, num = rates[0], PEAK_LR, NUM_WARMUP
    resumed = cut and step >= cut
    where = f"update {step}{f', resumed at {cut} from a checkpoint' if resumed else ''}"
    wrong = next((rate for rate in rates if not _near(rate, want)), got)
    text = f"{where}, a group's rate: {numbers_differ(wrong, want)}"
    if _near(got, want):
        return Fault("one group only", f"{text}: the second parameter group is left as it was; set every group")
    if not resumed:
        if step == 0 and _near(got, 0.0):
            return Fault("starts at zero", f"{text}: the first update has 1/num_warmup of the peak, not 0")
        if _near(got, peak * (step + 1) / num):
            return Fault("above the peak", f"{text}: it goes on rising after the warmup; stop it at peak_lr")
        if _near(got, peak * min(1.0, (step + 2) / num)):
            return Fault("one update ahead", f"{text}: the count goes up before the rate is set; set it first")
        if step > 0 and _near(got, all_rates[step - 1]):
            return Fault("does not count", f"{text}: the rate of the update before; count the updates")
        if step > 0 and _near(got, all_rates[step - 1] * min(1.0, (step + 1) / num)):
            return Fault("builds on itself", f"{text}: the last rate is taken for the peak; use peak_lr")
        return Fault("values", text)
    left = all_rates[cut - 1]
    if _near(got, peak * min(1.0, (step - cut + 1) / num)):
        return Fault("warms up again", f"{text}: the count begins at 0 again; begin at first_step")
    if _near(got, left * min(1.0, (step + 1) / num)):
        text += f": the rate that the checkpoint left in the optimizer ({left:.4g}) is taken for the peak"
        return Fault("wrong base", f"{text}; it was on its way up; use peak_lr")
    if _near(got, left):
        text += f": nothing sets it, so it stays where the checkpoint left it ({left:.4g})"
        return Fault("stays where it was", f"{text}; set the rate before every update, also after the warmup")
    return Fault("values", text)


WRONG_RATES = (
    Mutant("not scaled", "not scaled", "multiply by batch / base_batch", 1, "common").without(" * batch / base_batch"),
    Mutant("inverse", "scaled inversely", "the larger batch has the smaller rate", 1, "common").edit(
        "batch / base_batch", "base_batch / batch"
    ),
    Mutant("square root", "square root", "square-root scaling; linear is asked", 1, "common").edit(
        "batch / base_batch", "(batch / base_batch) ** 0.5"
    ),
    Mutant("from zero", "warmup starts at zero", "one update late", 1, "common").edit("(step + 1)", "step"),
    Mutant("beyond the peak", "above the peak", "beyond the full rate", 1, "common").edit(
        "step < num_warmup", "num_warmup"
    ),
    Mutant("divides by zero", "divides by zero", "num_warmup 0 means no warmup", 1, "common").edit(
        "if step", "if num_warmup == 0 or step"
    ),
    Mutant("no warmup", "no warmup", "the full rate in update 4", 1, "common").without(" * (step + 1) / num_warmup"),
    Mutant("from the base rate", "warms up from the base rate", "a share of the peak", 1, "Goyal et al.").edit(
        "peak * (step + 1)", "base_lr + (peak - base_lr) * (step + 1)"
    ),
    Mutant("jumps", "warms up to the base rate", "and then jumps", 1, 68).edit("peak * (step", "base_lr * (step"),
)
WRONG_WARMUPS = (
    Mutant("from what it finds", "wrong base", "taken for the peak", 1, 68)
    .edit("step = first_step", 'step, base_lr = first_step, optimizer.param_groups[0]["lr"]')
    .edit(
        'for group in optimizer.param_groups:\n    group["lr"] = peak_lr * min(1.0, (step + 1) / num_warmup)',
        """
        if step < num_warmup:
            for group in optimizer.param_groups:
                group["lr"] = base_lr * (step + 1) / num_warmup
        """,
    ),
    Mutant("again", "warms up again", "begin at first_step", 1, 68).edit("step = first_step", "step = 0"),
    Mutant("does not count", "does not count", "count the updates", 1, "common").without("step += 1"),
    Mutant("one group", "one group only", "set every group", 1, "common").edit("param_groups:", "param_groups[:1]:"),
    Mutant("from zero", "starts at zero", "of the peak, not 0", 1, "common").edit("(step + 1)", "step"),
    Mutant("new runs only", "stays where it was", "before every update", 1, "common").edit(
        "optimizer.param_groups:", "optimizer.param_groups if first_step == 0 else ():"
    ),
)
