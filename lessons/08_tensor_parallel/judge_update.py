"""Name what is wrong with masks of dropout, and with the norm of gradients that lie on the ranks in three ways."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import torch
from distlab_lesson_08 import cases
from distlab_lesson_08.judges import DOUBLE, reduce_bytes
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, over_budget
from distlab.grading.values import compare, describe, equal

LIMITS = ("a third of the norm", "three times the norm")


def judge_drop(evidence: Evidence) -> Iterator[Fault]:
    """Common masks where ranks hold the same, independent ones where they do not; from the seed and nothing else."""
    masks: list[dict[tuple[bool, int], Tensor]] = []
    for rank, result in enumerate(evidence.results):
        fault = _judge_values(result, rank)
        if fault is not None:
            yield fault
            return
        masks.append({key: pair[0] != 0 for key, pair in result["got"].items()})
    yield from _judge_masks(masks)
    for rank, result in enumerate(evidence.results):
        if not result["state"]:
            text = f"rank {rank}: right masks, but torch's own generator has moved: what draws from it next, such as"
            yield Fault(
                "generator moved", f"{text} nn.Dropout, differs between ranks. Use a torch.Generator of its own"
            )
            return


def _judge_values(result: dict[str, Any], rank: int) -> Fault | None:
    for (is_split, seed), pair in result["got"].items():
        what = f"rank {rank}, is_split={is_split}, seed {seed}"
        ones = torch.ones(cases.DROP_SIZE, dtype=torch.float64)
        for got in pair:
            if not isinstance(got, Tensor) or got.shape != ones.shape:
                return Fault("returned", f"{what}: expected a tensor of shape {list(ones.shape)}, got {describe(got)}")
        kept = pair[0][pair[0] != 0]
        share = 1 - len(kept) / len(ones)
        if len(kept) and equal(kept, torch.ones_like(kept)):
            text = f"{what}: what stays is as before; divide it by 1 - p = {1 - cases.DROPPED}"
            return Fault("not scaled", f"{text}, or activations are smaller in training than later")
        if abs(share - (1 - cases.DROPPED)) < 0.1:
            return Fault("keeps p", f"{what}: {share:.0%} are dropped; p is the probability of dropping")
        if abs(share - cases.DROPPED) > 0.1:
            return Fault("share", f"{what}: {share:.0%} are dropped, expected about {cases.DROPPED:.0%}")
        if (fault := compare(kept, torch.full_like(kept, 1 / (1 - cases.DROPPED)), f"{what}: what stays")) is not None:
            return fault
        if not torch.equal(*pair):
            text = f"{what}: the same call twice gives two masks: recomputed activations would not be those of forward"
            return Fault("not repeatable", f"{text}; draw from a generator that is seeded with `seed`")
    return None


def _judge_masks(masks: list[dict[tuple[bool, int], Tensor]]) -> Iterator[Fault]:
    first, second, *_ = cases.DROP_SEEDS
    for rank, mask in enumerate(masks[1:], start=1):
        if not torch.equal(mask[False, first], masks[0][False, first]):
            text = f"is_split=False: ranks 0 and {rank} drop different numbers of what both hold"
            yield Fault("whole, masks differ", f"{text}: their copies drift apart. All draw with the same seed")
            return
        if torch.equal(mask[True, first], masks[0][True, first]):
            text = f"is_split=True: ranks 0 and {rank} have the same mask, for different numbers"
            yield Fault("split, masks equal", f"{text}: the pattern repeats along the tensor. Derive the seed by rank")
            return
    for rank, mask in enumerate(masks):
        for is_split in (False, True):
            if torch.equal(mask[is_split, first], mask[is_split, second]):
                text = f"rank {rank}: seeds {first} and {second} give the same mask"
                yield Fault("same every step", f"{text}: every step drops the same numbers; use `seed`")
                return
    drawn = [(seed, rank, mask[True, seed]) for rank, mask in enumerate(masks) for seed in cases.DROP_SEEDS]
    for (seed, rank, mask), (other_seed, other, same) in combinations(drawn, 2):
        if torch.equal(mask, same):
            text = f"seed {other_seed} on rank {other} is seed {seed} on rank {rank}: sums or products as seeds collide"
            yield Fault("seeds collide", f"{text}; derive_seed(seed, rank, purpose) mixes them")
            return
    for seed, (rank, mask) in product(cases.DROP_SEEDS, enumerate(masks)):
        common = [other for other in cases.DROP_SEEDS if torch.equal(mask[True, seed], mask[False, other])]
        if common:
            text = (
                f"rank {rank}: the mask of its own part with seed {seed} is the one that all ranks draw for what they"
            )
            text += f" hold in common, with seed {common[0]}: one layer drops the same places as another"
            yield Fault("split equals whole", f"{text}. Derive the two seeds for different purposes")
            return


def budget_drop(evidence: Evidence) -> list[str]:
    """Say that nothing was sent."""
    made = sum(len(calls(evidence, rank)) for rank in range(evidence.world_size))
    return [f"{made} calls: masks need no communication"]


def judge_clip(evidence: Evidence) -> Iterator[Fault]:
    """Partial gradients summed; the norm of all, each once; scaled where it is too large."""
    n = evidence.world_size
    for rank, result in enumerate(evidence.results):
        for row, factor, limit in zip(result, (1 / 3, 1.0), LIMITS, strict=True):
            fault = _judge_norm(row["norm"], rank, n) or _judge_scaled(row, (rank, n), factor, limit)
            if fault is not None:
                yield fault
                return
    partial = DOUBLE * sum(cases.CLIP_PARTIAL)
    wanted = len(LIMITS) * reduce_bytes(DOUBLE + partial, n)
    fault = over_budget(evidence, wanted, "the sum of the partial gradients and of one number", slack=0.05)
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: whole gradients travel, for the sake of one number"
        fault = Fault("gradients gathered", f"{text}; each rank adds up the squares of its own first")
    if fault is not None:
        yield fault


def _judge_norm(got: Any, rank: int, n: int) -> Fault | None:
    if not (isinstance(got, Tensor) and got.numel() == 1) and not isinstance(got, float):
        return Fault("returned", f"rank {rank}: expected the norm, a tensor of one number, got {describe(got)}")
    norm, true = float(got), cases.true_norm(n)
    if _close(norm, true):
        return None
    if _close(norm, true**2):
        return Fault("no root", f"rank {rank}'s norm {norm:.4g} is the sum of squares; its root {true:.4g} is the norm")
    for code, (value, words) in _wrong_norms(rank, n).items():
        if _close(norm, value**0.5):
            return Fault(code.strip(), f"rank {rank}'s norm {norm:.4g} (expected {true:.4g}) {words}")
    return Fault("values", f"rank {rank}'s norm is {norm:.6g}, expected {true:.6g}")


def _squares(gradients: list[Tensor]) -> float:
    return sum(float(gradient.square().sum()) for gradient in gradients)


def _wrong_norms(rank: int, n: int) -> dict[str, tuple[float, str]]:
    """Return the square that each known fault makes, and words for it."""
    if n == 1:
        return {}
    lists = [cases.clip_lists(r) for r in range(n)]
    split, partial = ([_squares(one[name]) for one in lists] for name in ("split", "partial"))
    whole, sums = _squares(lists[0]["whole"]), _squares(cases.summed(n))
    times = f"{n} times, once for each rank that holds them: add their squares behind the all-reduce"
    own = "is of this rank's own part: ranks scale by different factors, and what all hold drifts apart; all_reduce"
    return {
        "own part only": (split[rank] + whole + sums, f"{own} the squares of `split`"),
        "whole counted t times": (sum(split) + n * whole + n * sums, f"counts what every rank holds {times}"),
        "whole counted t times ": (sum(split) + n * whole + sums, f"counts `whole` {times}"),
        "whole summed": (
            sum(split) + n * n * whole + sums,
            "sums `whole` over ranks: that is the same gradient on each already, whole",
        ),
        "mean of partial": (
            sum(split) + whole + sums / n**2,
            "takes the mean of `partial`; each rank's is a part of one gradient, and parts are added up",
        ),
        "partial counted t times": (sum(split) + whole + n * sums, f"counts the sums of `partial` {times}"),
        "squares of parts": (
            sum(split) + whole + sum(partial),
            "adds up the squares of the ranks' partial gradients; the gradient is their sum, and its square is not"
            " the sum of squares: all_reduce `partial` first",
        ),
        "partial not summed": (
            sum(split) + whole + partial[rank],
            "has this rank's positions alone of `partial`: it is not summed over ranks",
        ),
        "own part only ": (split[rank] + whole + partial[rank], f"{own} `partial`, and the squares of `split`"),
    }


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * abs(other)


def _judge_scaled(row: dict[str, Any], where: tuple[int, int], factor: float, limit: str) -> Fault | None:
    rank, n = where
    before = cases.clip_lists(rank) | {"partial": cases.summed(n)}
    alone = cases.clip_lists(rank)["partial"]
    for name, gradients in before.items():
        for index, (old, new) in enumerate(zip(gradients, row[name], strict=True)):
            what = f"with a limit of {limit}, rank {rank}'s {name}[{index}]"
            if torch.allclose(new, old * factor, rtol=1e-6, atol=0):
                continue  # torch's clip_grad_norm_ adds 1e-6 to the norm, and so may a learner
            if name == "partial" and n > 1 and any(equal(new, alone[index] * one) for one in (1.0, factor)):
                text = f"{what} has the gradient of its own positions still: replicas of the norm drift apart"
                return Fault("partial not summed", f"{text}; all_reduce it in place")
            if factor < 1 and equal(new, old):
                return Fault("not scaled", f"{what} is as before: scale in place, all three lists alike")
            if factor == 1.0 and equal(new, old * 3):
                return Fault("scaled up", f"{what} was made 3x longer; clamp the factor at 1")
            return compare(new, old * factor, what, n)
    return None


def budget_clip(evidence: Evidence) -> list[str]:
    """Say what it cost."""
    made = len(calls(evidence, 0)) // len(LIMITS)
    return [f"{made} all-reduces: the partial gradients, and one number"]
