"""The norm of gradients that lie on the ranks in three ways: in parts, whole, and in summands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_08.checks.shared import DOUBLE, plain, reduce_bytes
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.norms import Term, explain_norms, of_copies, of_parts
from distlab.grading.diagnosis.traffic import calls, over_budget
from distlab.grading.diagnosis.values import close, compare, describe, equal, numbers_differ, seeded

CLIP_SPLIT, CLIP_WHOLE, CLIP_PARTIAL = (6, 10), (4,), (5, 3)
CLIP_FACTORS = (1 / 3, 3.0)
LIMITS = ("a third of the norm", "three times the norm")


def clip_lists(rank: int) -> dict[str, list[Tensor]]:
    """Return a rank's gradients; ranks differ in size, so that no rank's own norm is the mean."""
    return {
        "split": [(rank + 1) * seeded(rank, size, purpose=f"split {size}") for size in CLIP_SPLIT],
        "whole": [3 * seeded(-1, size, purpose=f"whole {size}") for size in CLIP_WHOLE],
        "partial": [2 * seeded(rank, size, purpose=f"partial {size}") for size in CLIP_PARTIAL],
    }


def summed(world_size: int) -> list[Tensor]:
    """Return the sums of the partial gradients."""
    ranks = [clip_lists(rank)["partial"] for rank in range(world_size)]
    return [torch.stack(list(same)).sum(0) for same in zip(*ranks, strict=True)]


def true_norm(world_size: int) -> float:
    """Return the norm as one process would have it."""
    split = [one for rank in range(world_size) for one in clip_lists(rank)["split"]]
    return float(torch.cat([*split, *clip_lists(0)["whole"], *summed(world_size)]).norm())


def drive_clip(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Clip to a third of the norm; then with a limit of three times the norm, where nothing is scaled."""
    results = []
    for factor in CLIP_FACTORS:
        lists = clip_lists(dist.get_rank())
        norm = fn(*lists.values(), factor * true_norm(dist.get_world_size()))
        results.append({"norm": plain(norm), **lists})
    return results


def judge_clip(evidence: Evidence) -> Iterator[Fault]:
    """Partial gradients summed; the norm of all, each once; scaled where it is too large."""
    n = evidence.world_size
    for index, (factor, limit) in enumerate(zip((1 / 3, 1.0), LIMITS, strict=True)):
        yield from _judge_norms([result[index]["norm"] for result in evidence.results])
        for rank, result in enumerate(evidence.results):
            yield from _judge_scaled(result[index], (rank, n), factor, limit)
    wanted = len(LIMITS) * reduce_bytes(DOUBLE + DOUBLE * sum(CLIP_PARTIAL), n)
    fault = over_budget(evidence, wanted, "the sum of the partial gradients and of one number", slack=0.05)
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: whole gradients travel, for the sake of one number"
        yield Fault("gradients gathered", f"{text}; each rank adds up the squares of its own first")
    yield from found(fault)


def _judge_norms(got: list[Any]) -> Iterator[Fault]:
    n, true = len(got), true_norm(len(got))
    for rank, one in enumerate(got):
        if not (isinstance(one, Tensor) and one.numel() == 1) and not isinstance(one, float):
            yield Fault("returned", f"rank {rank}: expected the norm, a tensor of one number, got {describe(one)}")
    norms = {rank: float(one) for rank, one in enumerate(got) if not close(float(one), true)}
    if not norms:
        return
    rank, norm = next(iter(norms.items()))
    if close(norm, true**2):
        text = f"rank {rank}'s norm {norm:.4g} is the sum of squares; its root {true:.4g} is the norm"
        yield Fault("no root", text)
    for slips in zip(*(_wrong_norms(each, n) for each in norms), strict=True) if n > 1 else ():
        if all(close(one, value**0.5) for one, (_, value, _) in zip(norms.values(), slips, strict=True)):
            yield Fault(slips[0][0], f"rank {rank}'s norm {norm:.4g} (expected {true:.4g}) {slips[0][2]}")
    if close(norm, true * CLIP_FACTORS[0]):
        text = f"rank {rank} returns {norm:.4g}, the norm after clipping"
        yield Fault("norm after", f"{text}; return the norm that the gradients had before, {true:.4g}")
    if norm == 0:
        text = (
            f"rank {rank}'s norm is 0, expected {true:.6g}: these tensors are the gradients, and have no .grad, where"
        )
        yield Fault("gradients of gradients", f"{text} torch.nn.utils.clip_grad_norm_ looks; sum up their own squares")
    lists = [clip_lists(r) for r in range(n)]
    squares, whole = [_squares(one["split"]) for one in lists], of_copies("whole", _squares(lists[0]["whole"]), n)
    partial = _term_of_partial([one["partial"] for one in lists], n)
    terms = [(of_parts("split", squares, each), whole, partial) for each in norms]
    if words := explain_norms([*norms.values()], terms):
        yield Fault("norm of other parts", f"rank {rank}'s norm {norm:.4g} (expected {true:.4g}) {words}")
    yield Fault("values", f"rank {rank}'s norm: {numbers_differ(norm, true)}")


def _term_of_partial(lists: list[list[Tensor]], n: int) -> Term:
    """Return the term of the sums of the partial gradients, with other ways to put the ranks' together."""
    stacks = [torch.stack(list(same)) for same in zip(*lists, strict=True)]
    sums = of_copies("partial", _squares([stack.sum(0) for stack in stacks]), n)
    largest = (_squares([stack.amax(0) for stack in stacks]), "the largest of the ranks' values (MAX)")
    first = (_squares([stack[0] for stack in stacks]), "rank 0's values")
    ways = [(square, f"has in `partial` {words}: sum it over ranks") for square, words in (largest, first)]
    return sums._replace(wrong=[*sums.wrong, *(ways if n > 1 else ())])


def _squares(gradients: list[Tensor]) -> float:
    return sum(float(gradient.square().sum()) for gradient in gradients)


def _wrong_norms(rank: int, n: int) -> Iterator[tuple[str, float, str]]:
    """Known mistakes: the square that each makes, and what to say."""
    lists = [clip_lists(r) for r in range(n)]
    split, partial = ([_squares(one[name]) for one in lists] for name in ("split", "partial"))
    whole, sums, parts = _squares(lists[0]["whole"]), _squares(summed(n)), sum(split)
    times = f"{n} times, once for each rank that holds them: add their squares behind the all-reduce"
    own = "is of this rank's own part: ranks scale by different factors, and what all hold drifts apart; all_reduce"
    yield "own part only", split[rank] + whole + sums, f"{own} the squares of `split`"
    yield "whole counted t times", parts + n * whole + n * sums, f"counts what every rank holds {times}"
    yield "whole counted t times", parts + n * whole + sums, f"counts `whole` {times}"
    text = "sums `whole` over ranks: that is the same gradient on each already, whole"
    yield "whole summed", parts + n * n * whole + sums, text
    text = "takes the mean of `partial`; each rank's is a part of one gradient, and parts are added up"
    yield "mean of partial", parts + whole + sums / n**2, text
    yield "partial counted t times", parts + whole + n * sums, f"counts the sums of `partial` {times}"
    text = "adds up the squares of the ranks' partial gradients; the gradient is their sum, and its square is not"
    yield "squares of parts", parts + whole + sum(partial), f"{text} the sum of squares: all_reduce `partial` first"
    text = "has this rank's positions alone of `partial`: it is not summed over ranks"
    yield "partial not summed", parts + whole + partial[rank], text
    yield "own part only", split[rank] + whole + partial[rank], f"{own} `partial`, and the squares of `split`"


def _judge_scaled(row: dict[str, Any], where: tuple[int, int], factor: float, limit: str) -> Iterator[Fault]:
    rank, n = where
    before, alone = clip_lists(rank) | {"partial": summed(n)}, clip_lists(rank)["partial"]
    for name, gradients in before.items():
        for index, (old, new) in enumerate(zip(gradients, row[name], strict=True)):
            what = f"with a limit of {limit}, rank {rank}'s {name}[{index}]"
            if torch.allclose(new, old * factor, rtol=1e-6, atol=0):
                continue  # torch's clip_grad_norm_ adds 1e-6 to the norm, and so may a learner
            if name == "partial" and n > 1 and any(equal(new, alone[index] * one) for one in (1.0, factor)):
                text = f"{what} has the gradient of its own positions still: replicas of the norm drift apart"
                yield Fault("partial not summed", f"{text}; all_reduce it in place")
            if factor < 1 and equal(new, old):
                yield Fault("not scaled", f"{what} is as before: scale in place, all three lists alike")
            if factor == 1.0 and equal(new, old * 3):
                yield Fault("scaled up", f"{what} was made 3x longer; clamp the factor at 1")
            yield from found(compare(new, old * factor, what, n))


def budget_clip(evidence: Evidence) -> list[str]:
    """Say what it cost."""
    made = len(calls(evidence, 0)) // len(LIMITS)
    return [f"{made} all-reduces: the partial gradients, and one number"]


_ADD_PARTIAL = "for gradient in partial:\n    dist.all_reduce(gradient)"

WRONG_CLIPS = (
    Mutant("own", "own part only", "different factors", 2, 30).without("dist.all_reduce(square)"),
    Mutant("all summed", "whole counted t times", "once for each rank", 3, 31)
    .edit("in [*whole, *partial])", "in [])")
    .edit("in split)", "in [*split, *whole, *partial])"),
    Mutant("partial as parts", "squares of parts", "not the sum of squares", 2)
    .edit(_ADD_PARTIAL, "pass")
    .edit("in split)", "in [*split, *partial])")
    .edit("in [*whole, *partial])", "in whole)"),
    Mutant("partial forgotten", "partial not summed", "positions alone", 2, 31).edit(_ADD_PARTIAL, "pass"),
    Mutant("no root", "no root", "sum of squares", 1).edit("square.sqrt()", "square"),
    Mutant("mean of partial", "mean of partial", "parts are added up", 2).edit(
        "dist.all_reduce(gradient)", "dist.all_reduce(gradient)\ngradient /= dist.get_world_size()"
    ),
    Mutant("whole summed", "whole summed", "the same gradient on each", 2).edit(
        "in partial:", "in [*partial, *whole]:"
    ),
    Mutant("stretches", "scaled up", "clamp the factor at 1", 1).without(".clamp(max=1.0)"),
)
