"""Choosing elements: the largest, or random ones, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distlab_lesson_05.checks.codes import gradient_of
from torch import Tensor

from distlab.course.grading.cases import Cases, Free
from distlab.course.grading.diagnosis.traffic import in_megabytes, sent_line
from distlab.grading import Evidence, Mutant

TOP_K_LENGTH, TOP_K = 1000, 20
RANDOM_LENGTH, RANDOM_K, RANDOM_STEPS = 120, 12, 3


def _top_k_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    return {f"k = {TOP_K} of {TOP_K_LENGTH}": (gradient_of(rank, TOP_K_LENGTH, purpose="top k"), TOP_K)}


def _random_k_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    return {f"k = {RANDOM_K} of {RANDOM_LENGTH}": (torch.arange(1.0, 1 + RANDOM_LENGTH), float(rank + 1), RANDOM_K)}


def _use_random_k(fn: Callable[..., Any], base: Tensor, times: float, k: int) -> Any:
    """Return what holds for every way to draw the places: how many, the same on all ranks, others in each step."""
    with torch.random.fork_rng():
        torch.manual_seed(int(times))  # ranks that draw without a seed in common must not agree by chance
        steps = [fn(times * base, k, step) for step in range(RANDOM_STEPS)]
    if not all(isinstance(got, Tensor) and got.shape == base.shape for got in steps):
        return steps
    places = [got.nonzero().flatten() for got in steps]
    return {
        "number of elements that are not zero": [len(one) for one in places],
        "places": [Free(one) for one in places],
        "places are others in the next step": not any(map(torch.equal, places[1:], places)),
        "places stand in an even row": [_in_a_row(one) for one in places],
        "elements, as multiples of rank 0's": [got[one] / base[one] for got, one in zip(steps, places, strict=True)],
    }


def _in_a_row(places: Tensor) -> bool:
    """Tell whether the places, seen as a ring, have the same gap everywhere but at one or two spots."""
    gaps = torch.cat([places.diff(), places[:1] - places[-1:] + RANDOM_LENGTH])
    return int(gaps.bincount().max()) >= len(places) - 1


drive_top_k = Cases(_top_k_cases, needs="k pairs of 4 + 4 bytes to each other rank")
drive_random_k = Cases(_random_k_cases, _use_random_k, needs="an all-reduce of k values in each step")


def budget_top_k(evidence: Evidence) -> list[str]:
    """Say what was sent, and what an all-reduce of everything would send."""
    n = evidence.world_size
    line = sent_line(evidence, (n - 1) * 8 * TOP_K, "k pairs to each other rank")
    return [line, f"a ring all-reduce of everything: {in_megabytes(2 * (n - 1) / n * 4 * TOP_K_LENGTH)}"]


def budget_random_k(evidence: Evidence) -> list[str]:
    """Say what was sent in all steps."""
    n = evidence.world_size
    return [sent_line(evidence, RANDOM_STEPS * 2 * (n - 1) / n * 4 * RANDOM_K, f"k values in {RANDOM_STEPS} steps")]


_KEPT = """
kept = torch.zeros_like(gradient)
indices = gradient.abs().topk(k).indices
kept[indices] = gradient[indices] / dist.get_world_size()
""".strip()
_OWN = "nothing of the others reached a rank: it returns its own elements alone"
_MIXED = (
    "it adds values that belong to different elements: each rank chose its own k places, so the values must travel "
    "with their indices (all_gather), not be summed (all_reduce)"
)
_ZEROS = "zeros cost as many bytes as numbers"
WRONG_TOP_K = (
    Mutant("zeros travel", "dense on the wire", f"{_ZEROS}; send k indices and k values", 2, 64).body(
        f"{_KEPT}\ndist.all_reduce(kept)\nreturn kept"
    ),
    Mutant("all-reduce of values", "indices differ", _MIXED, 2, 48)
    .edit("total = torch.zeros_like(gradient)", "dist.all_reduce(values)\ntotal = torch.zeros_like(gradient)")
    .edit("zip(all_indices, all_values, strict=True)", "[(indices, values)]"),
    Mutant(
        "added once",
        "overwritten",
        "where several ranks chose the same element one of them counts: `a[indices] = values` overwrites, and "
        "`a[indices] += values` adds a place once; use index_add_",
        2,
        48,
    )
    .edit("total.index_add_(0, their_indices, their_values)", "pass")
    .edit("return total", "total[torch.cat(all_indices)] += torch.cat(all_values)\nreturn total"),
    Mutant(
        "largest, signed", "not by magnitude", "large negative elements are lacking: gradient.abs().topk(k)", 1
    ).without(".abs()"),
    Mutant("signs lost", "signs lost", "the signs are lost: choose by magnitude, but send gradient[indices]", 1).edit(
        "gradient[indices]", "gradient.abs()[indices]"
    ),
    Mutant("smallest", "smallest", "elements of smallest magnitude are sent; k of the largest are asked for", 1).edit(
        "topk(k)", "topk(k, largest=False)"
    ),
    Mutant("own", "not communicated", _OWN, 2).body(f"{_KEPT}\nreturn kept * dist.get_world_size()"),
    Mutant("own, divided", "not communicated", _OWN, 2).body(f"{_KEPT}\nreturn kept"),
    Mutant("sum", "sum not mean", "divide by world_size (3)", 3, 9).edit("total / dist.get_world_size()", "total"),
    Mutant(
        "mean of who sent", "mean of who sent", "it divides by how many ranks sent an element; divide by all ranks", 2
    ).edit(
        "return total / dist.get_world_size()",
        "return total / torch.cat(all_indices).bincount(minlength=total.numel()).clamp(min=1)",
    ),
    Mutant("rank 0's places", "rank 0's places", "rank 0's places serve for all; each sends its own largest", 2).edit(
        "indices.int()", "indices.int()\ndist.broadcast(indices, src=0)"
    ),
    Mutant(
        "8-byte indices", "wide indices", "indices travel as int64: fewer than 2**31 elements need int32 alone", 2
    ).without(".int()"),
    Mutant(
        "top-k of the mean",
        "top-k of the mean",
        "it takes the k largest of the mean: whoever knows the mean has sent everything before",
        2,
        64,
    ).body(f"gradient = gradient.clone()\ndist.all_reduce(gradient)\n{_KEPT}\nreturn kept"),
)
WRONG_RANDOM_K = (
    Mutant(
        "seeded by rank", "choices differ", "ranks fill different places: seed with what all share, the step", 2, 49
    ).edit("manual_seed(step)", "manual_seed(1000 * step + dist.get_rank())"),
    Mutant(
        "always the same", "same places", "the same places in every step: the others never learn; seed by step", 1, 49
    ).edit("manual_seed(step)", "manual_seed(0)"),
    Mutant("not scaled", "not scaled", "an element is chosen in k of L steps, so multiply it by L / k", 1).without(
        " * (gradient.numel() / k)"
    ),
    Mutant("divided by L/k", "divided by L/k", "multiply by L / k, do not divide by it", 1).edit("* (grad", "/ (grad"),
    Mutant("zeros travel", "dense on the wire", f"{_ZEROS}; send the k values alone", 2, 64)
    .without("dist.all_reduce(values)")
    .edit("return estimate", "dist.all_reduce(estimate)\nreturn estimate"),
    Mutant(
        "own elsewhere", "own elsewhere", "places that were not drawn hold this rank's own gradient, not zero", 1
    ).edit("torch.zeros_like(gradient)", "gradient / dist.get_world_size()"),
    Mutant(
        "indices travel", "indices travel", "all ranks draw the same places: send no indices, all_reduce values", 2
    ).edit(
        "dist.all_reduce(values)",
        """
        everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather([torch.empty_like(places) for _ in everyone], places)
        dist.all_gather(everyone, values)
        values = torch.stack(everyone).sum(0)
        """,
    ),
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).without(" / dist.get_world_size()"),
    Mutant("own", "not communicated", _OWN, 2).without("dist.all_reduce(values)").without(" / dist.get_world_size()"),
    Mutant("own, divided", "not communicated", _OWN, 2).without("dist.all_reduce(values)"),
    Mutant(
        "drawn twice", "not k elements", "a place is drawn more than once: k places are asked for, each once", 1
    ).edit("torch.randperm(gradient.numel(), ", "torch.randint(gradient.numel(), (k,), "),
    Mutant("in a row", "not random", "places stand in an even row: take the first k of torch.randperm", 1).edit(
        "torch.randperm(gradient.numel(), generator=torch.Generator().manual_seed(step))[:k]",
        "(torch.arange(k) + step * k) % gradient.numel()",
    ),
)
