"""Name what is wrong in rates, in accumulated gradients, and in rates after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distlab_lesson_04 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import num_calls, over_budget, sent_line
from distlab.grading.values import describe, equal, times_of

NUM_GRADIENTS = 4


def judge_rate(evidence: Evidence) -> Iterator[Fault]:
    """Every rate must be the base rate times the batches' ratio, and rise to that in equal steps."""
    for case, got in zip(cases.RATES, evidence.results[0], strict=True):
        step, base_lr, batch, base_batch, num_warmup = case
        asked = f"batch {batch}, base_batch {base_batch}, base_lr {base_lr}, step {step}, num_warmup {num_warmup}"
        if not isinstance(got, int | float | Tensor) or isinstance(got, bool):
            yield Fault("returned", f"{asked}: expected a number, got {describe(got)}")
            return
        peak = base_lr * batch / base_batch
        want = peak * min(1.0, (step + 1) / num_warmup) if num_warmup else peak
        if _near(float(got), want):
            continue
        yield _wrong_rate(float(got), want, case, asked)
        return


def _near(got: float, want: float) -> bool:
    return abs(got - want) <= 1e-9 * max(abs(want), 1e-9)


def _wrong_rate(got: float, want: float, case: tuple[int, float, int, int, int], asked: str) -> Fault:
    step, base_lr, batch, base_batch, num_warmup = case
    peak, text = base_lr * batch / base_batch, f"{asked}: expected {want:.6g}, got {got:.6g}"
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
        return Fault("no warmup", f"{text}: the full rate from the start")
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


def judge_accumulate(evidence: Evidence) -> Iterator[Fault]:
    """Every gradient must be that of the mean over all samples, and must have been sent once."""
    for rank, result in enumerate(evidence.results):
        if result["changed"]:
            name = result["changed"][0]
            yield Fault("weights changed", f"rank {rank}'s {name} itself has changed; only gradients are asked for")
            return
        missing = [name for name, gradient in result["gradients"].items() if gradient is None]
        if missing:
            yield Fault("no gradient", f"rank {rank}'s gradient of {missing[0]} is None: was backward called?")
            return
    wanted = combined(evidence, _by_samples, 1 / evidence.world_size)
    if _all_equal(evidence, wanted):
        yield from _sent_once(evidence)
        return
    yield _wrong_sum(evidence, wanted)


def _by_samples(sizes: tuple[int, ...]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


def combined(evidence: Evidence, weights_of: Any, rank_weight: float, only: int | None = None) -> dict[str, Tensor]:
    """Add the gradients of all micro-batches, each with its weight; of all ranks, or of one only."""
    weights = weights_of(cases.SIZES)
    chosen = evidence.results if only is None else [evidence.results[only]]
    names = evidence.results[0]["gradients"]
    return {
        name: rank_weight
        * sum(w * part[name] for result in chosen for w, part in zip(weights, result["parts"], strict=True))
        for name in names
    }


def _all_equal(evidence: Evidence, wanted: dict[str, Tensor]) -> bool:
    return all(_is(result, wanted) for result in evidence.results)


def _is(result: dict[str, Any], wanted: dict[str, Tensor]) -> bool:
    return all(equal(result["gradients"][name], want) for name, want in wanted.items())


def _wrong_sum(evidence: Evidence, wanted: dict[str, Tensor]) -> Fault:
    n, sizes = evidence.world_size, cases.SIZES
    if _all_equal(evidence, combined(evidence, lambda s: [1 / len(s)] * len(s), 1 / n)):
        text = f"micro-batches of {', '.join(map(str, sizes))} samples count equally: a sample of the last one counts"
        return Fault("uneven micro-batches", f"{text} 3 times; weight each by its samples over all samples")
    if _all_equal(evidence, combined(evidence, lambda s: [1.0] * len(s), 1 / n)):
        text = f"the gradients of {len(sizes)} micro-batches are added, not averaged: divide each loss, or weight it"
        return Fault("sum of micro-batches", f"{text} by its samples over all samples")
    if _all_equal(evidence, combined(evidence, lambda s: [0.0] * (len(s) - 1) + [1.0], 1 / n)) or _all_equal(
        evidence, combined(evidence, lambda s: [0.0] * (len(s) - 1) + [s[-1] / sum(s)], 1 / n)
    ):
        text = "only the last micro-batch's gradient is left: something sets gradients back between micro-batches"
        return Fault("only the last", f"{text}; backward adds to what is there")
    if n > 1 and _all_equal(evidence, combined(evidence, _by_samples, 1.0)):
        return Fault("sum not mean", f"gradients are {n}x too large: the sum over ranks; divide by world_size ({n})")
    if n > 1 and all(_is(r, combined(evidence, _by_samples, 1.0, only=k)) for k, r in enumerate(evidence.results)):
        return Fault("not communicated", "each rank holds the gradient of its own samples: nothing of the others")
    if n > 1 and num_calls(evidence, rank=0) > NUM_GRADIENTS:
        text = f"rank 0 made {num_calls(evidence, rank=0)} calls for {NUM_GRADIENTS} gradients: what was summed after"
        return Fault("sums again", f"{text} one micro-batch is summed again after the next; exchange once, at last")
    if n > 1 and _all_equal(evidence, combined(evidence, _by_samples, 1 / n**2)):
        return Fault("divided twice", f"gradients are {n}x too small: divided by world_size ({n}) twice")
    if _all_equal(evidence, combined(evidence, lambda s: [float(size) for size in s], 1 / n)):
        text = f"gradients are {sum(sizes)}x too large: each loss is multiplied by its samples, but not divided"
        return Fault("sum of samples", f"{text} by all samples ({sum(sizes)} a rank)")
    for rank, result in enumerate(evidence.results):
        for name, want in wanted.items():
            got = result["gradients"][name]
            if not equal(got, want):
                ratio = float(got.flatten() @ want.flatten() / (want.flatten() @ want.flatten()))
                factor = f", {times_of(ratio)}" if equal(got, ratio * want) else ""
                return Fault("values", f"rank {rank}'s gradient of {name} is not that of all samples{factor}")
    return Fault("only some ranks", "some ranks hold the right gradients, others do not; all need them")


def _sent_once(evidence: Evidence) -> Iterator[Fault]:
    num_bytes = sum(8 * gradient.numel() for gradient in evidence.results[0]["gradients"].values())
    n = evidence.world_size
    over = over_budget(evidence, 2 * (n - 1) / n * num_bytes, "one exchange of all gradients, as a ring,")
    if over is not None:
        text = f"{over.message}: it sends after every micro-batch what only the last one completes"
        yield Fault("sends every micro-batch", text)
        return
    for rank, result in enumerate(evidence.results):
        if max(result["calls"], default=0) > max(cases.SIZES):
            text = f"rank {rank} ran {max(result['calls'])} samples at once; accumulation is for memory that holds one"
            yield Fault("one large batch", f"{text} micro-batch only: run them one after the other")
            return


def accumulate_budget(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    num_bytes = sum(8 * gradient.numel() for gradient in evidence.results[0]["gradients"].values())
    wanted = 2 * (evidence.world_size - 1) / evidence.world_size * num_bytes
    return [f"{len(cases.SIZES)} micro-batches, {sent_line(evidence, wanted, 'one exchange')}"]


def judge_warm_up(evidence: Evidence) -> Iterator[Fault]:
    """The rates of a run cut at any update must be those of the whole run."""
    results = evidence.results[0]
    peak, num = cases.PEAK_LR, cases.NUM_WARMUP
    want = [peak * min(1.0, (step + 1) / num) for step in range(cases.NUM_UPDATES)]
    for cut in cases.CUTS:
        got = results[cut]
        if any(not isinstance(rate, int | float) for rates in got for rate in rates):
            yield Fault("returned", f"rates must be numbers, got {got}")
            return
        for step, (rates, rate) in enumerate(zip(got, want, strict=True)):
            if all(_near(own, rate) for own in rates):
                continue
            yield _wrong_warmup(cut, step, rates, rate, [r[0] for r in got])
            return


def _wrong_warmup(cut: int, step: int, rates: list[float], want: float, all_rates: list[float]) -> Fault:
    got, peak, num = rates[0], cases.PEAK_LR, cases.NUM_WARMUP
    resumed = cut and step >= cut
    where = f"update {step}{f', resumed at {cut} from a checkpoint' if resumed else ''}"
    text = f"{where}: expected a rate of {want:.4g}, got {', '.join(f'{rate:.4g}' for rate in rates)}"
    if _near(got, want):
        return Fault("one group only", f"{text}: the second parameter group is left as it was; set every group")
    if not resumed:
        if step == 0 and _near(got, 0.0):
            return Fault("starts at zero", f"{text}: the first update has 1/num_warmup of the peak, not nothing")
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
