"""Rates: of any update of any batch, and of a run that was saved and resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distlab.course.grading.cases import Cases
from distlab.grading import Fault, Mutant

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


def _use_rate(fn: Callable[..., Any], step: int, base_lr: float, named: dict[str, int]) -> Any:
    return fn(step, base_lr, **named)


def use_warm_up(
    fn: Callable[..., Callable[[], Any]],
    left: list[float],
    peak_lr: float,
    num_warmup: int,
    first_step: int,
    num_updates: int,
) -> dict[str, Any]:
    """Return the rate of every group before each update, which were `left` before; a second warmup runs beside."""
    runs = []
    for times in (1, 2):
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": times * lr} for lr in left]
        optimizer = torch.optim.SGD(groups)
        runs.append((optimizer, fn(optimizer, times * peak_lr, num_warmup=num_warmup, first_step=first_step)))
    rates = {}
    for step in range(first_step, first_step + num_updates):
        for (optimizer, before_update), whose in zip(runs, ("", " in a second optimizer"), strict=True):
            before_update()
            rates[f"update {step}, the groups' rates{whose}"] = [float(one["lr"]) for one in optimizer.param_groups]
    return rates


drive_rate = Cases(
    {
        f"batch {batch}, base_batch {base}, base_lr {lr}, step {step}, num_warmup {num}": (
            step,
            lr,
            {"batch": batch, "base_batch": base, "num_warmup": num},
        )
        for step, lr, batch, base, num in RATES
    },
    _use_rate,
)
drive_repair = Cases(
    {
        "a new run": ([0.8, 0.8], 0.8, 5, 0, 9),
        "resumed at update 2 from a checkpoint with rates of 0.32": ([0.32, 0.32], 0.8, 5, 2, 7),
        "resumed at update 7 from a checkpoint with rates of 0.5": ([0.5, 0.5], 0.8, 5, 7, 2),
    },
    use_warm_up,
)


def failure_rate(error: Exception, world_size: int) -> Fault | None:
    """Name the division by the length of no warmup."""
    if "ZeroDivisionError" in str(error) and "num_warmup" in str(error):
        return Fault("divides by zero", "num_warmup 0 means no warmup, and is divided by: the full rate from the start")
    return None


_SHARE = "the warmup begins at the base rate; here it is a share of the peak, (step + 1) / num_warmup"
_TIMES, _HAS = "batch / base_batch", "update `step` has (step + 1) / num_warmup of the peak"
WRONG_RATE = (
    Mutant("jumps", "warms up to the base rate", "the warmup ends at the base rate and then jumps", 1, 68).edit(
        "peak * (step", "base_lr * (step"
    ),
    Mutant("divides by zero", "divides by zero", "num_warmup 0 means no warmup", 1, ends=True).edit(
        "if step", "if num_warmup == 0 or step"
    ),
    Mutant("base batch of 256", "scale", "too small", 1, "one set of arguments").edit("/ base_batch", "/ 256"),
    *(
        Mutant(name, name, says, 1).edit(old, new)
        for name, says, old, new in (
            ("not scaled", "it is the rate of the base batch; multiply by batch / base_batch", _TIMES, "1"),
            ("inverse", "a larger batch has a smaller rate; it is batch / base_batch", _TIMES, "base_batch / batch"),
            ("square root", "that is square-root scaling; linear is asked here", _TIMES, f"({_TIMES}) ** 0.5"),
            ("whole multiples", "batch // base_batch cuts the fraction off; use /", _TIMES, "(batch // base_batch)"),
            ("warmup starts at zero", f"the warmup is one update late; {_HAS}", "(step + 1)", "step"),
            ("above the peak", "the warmup goes on beyond the full rate; stop it there", "step < num", "num"),
            (
                "one above",
                "update num_warmup is above the peak; it has the peak",
                "step < num_warmup",
                "0 < num_warmup >= step",
            ),
            ("no warmup", f"an update of the warmup has the full rate; {_HAS}", " * (step + 1) / num_warmup", ""),
            ("never lowered", "a smaller batch keeps the base rate; it is scaled down", _TIMES, f"max(1, {_TIMES})"),
            ("warms up from the base rate", _SHARE, "peak * (step + 1)", "base_lr + (peak - base_lr) * (step + 1)"),
            ("begins at the base rate", _SHARE, "peak * (step + 1)", "base_lr + (peak - base_lr) * step"),
            (
                "warmup one longer",
                "the warmup is one update too long; update num_warmup - 1 has the peak",
                "/ num_warmup",
                "/ (num_warmup + 1)",
            ),
        )
    ),
)
_ANEW = "min(1.0, (step - first_step + 1) / max(num_warmup - first_step, 1))"
_SETS = "sets the rate; set it before every update"
_ALL, _RISES = "in optimizer.param_groups:", "min(1.0, (step + 1) / num_warmup)"
WRONG_REPAIR = (
    Mutant(
        "from what it finds",
        "wrong base",
        "the rate that a checkpoint left in the optimizer is taken for the peak; it was on its way up: use peak_lr",
        1,
        68,
    )
    .edit("step = first_step", 'step, base_lr = first_step, optimizer.param_groups[0]["lr"]')
    .edit(
        f'for group in optimizer.param_groups:\n    group["lr"] = peak_lr * {_RISES}',
        """
        if step < num_warmup:
            for group in optimizer.param_groups:
                group["lr"] = base_lr * (step + 1) / num_warmup
        """,
    ),
    Mutant("new defaults", "state left behind", "it changed optimizer.defaults['lr']", 1, "state").edit(
        "step = first_step", 'step, optimizer.defaults["lr"] = first_step, peak_lr'
    ),
    Mutant(
        "one step for all",
        "one count for all",
        "two warmups share one count of updates; each needs its own",
        1,
        preamble="_steps = {}",
    )
    .edit("step = first_step", "_steps[0] = first_step")
    .edit("nonlocal step", "step = _steps[0]")
    .edit("step += 1", "_steps[0] += 1"),
    *(
        Mutant(name, name, says, 1).edit(old, new)
        for name, says, old, new in (
            ("warms up again", "the count of updates begins at 0 again; begin at first_step", "= first_step", "= 0"),
            ("does not count", "each update has the rate of the first; count the updates", "step += 1", "pass"),
            ("one group only", "the second group is left as it was; set every group", _ALL, _ALL[:-1] + "[:1]:"),
            ("starts at zero", "the first update has 1/num_warmup of the peak, not 0", "(step + 1)", "step"),
            ("stays where it was", f"when resumed nothing {_SETS}", _ALL, _ALL[:-1] + " if first_step == 0 else ():"),
            ("set in the warmup alone", f"later nothing {_SETS}", _ALL, _ALL[:-1] + " if step < num_warmup else ():"),
            (
                "above the peak",
                "it goes on rising after the warmup; stop it at peak_lr",
                _RISES,
                "((step + 1) / num_warmup)",
            ),
            ("one update ahead", "the count goes up before the rate is set; set the rate first", "ep + 1", "ep + 2"),
            ("what is left", "the warmup begins anew over the updates left; go on where it was", _RISES, _ANEW),
            ("builds on itself", "the last rate is taken for the peak; use peak_lr", "= peak_lr *", "*="),
        )
    ),
)
