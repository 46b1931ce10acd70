"""Choosing elements: the largest, or random ones, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_05.checks.shared import Known, called, explain, gradient_of, unchanged
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import in_megabytes, most_sent, num_calls, over_budget, sent_bytes, sent_line
from distlab.grading.diagnosis.values import compare

TOP_K_LENGTH, TOP_K = 1000, 20
RANDOM_LENGTH, RANDOM_K, RANDOM_STEPS = 120, 12, 3


def drive_top_k(fn: Callable[[Tensor, int], Any]) -> dict[str, Any]:
    """Call fn on a gradient that is different on each rank."""
    return called(fn, gradient_of(dist.get_rank(), TOP_K_LENGTH, purpose="top k"), TOP_K)


def drive_random_k(fn: Callable[[Tensor, int, int], Any]) -> dict[str, Any]:
    """Call fn in some steps, with the same gradient, which has no zeros."""
    own = gradient_of(dist.get_rank(), RANDOM_LENGTH, purpose="random k")
    given = own.clone()
    with torch.random.fork_rng():
        torch.manual_seed(dist.get_rank())  # ranks that draw without a seed in common must not agree by chance
        steps = [fn(given, RANDOM_K, step) for step in range(RANDOM_STEPS)]
    return {"own": own, "steps": steps, "kept": torch.equal(own, given)}


def scattered(indices: Tensor, values: Tensor, length: int) -> Tensor:
    """Return zeros with these values at these places."""
    whole = torch.zeros(length, dtype=values.dtype)
    whole[indices] = values
    return whole


def chosen(own: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Return each rank's gradient with zeros at all other places than these."""
    return torch.stack([scattered(i, vector[i], len(vector)) for i, vector in zip(indices, own, strict=True)])


def dense(evidence: Evidence, num_bytes: int, wanted: float, instead: str) -> Fault | None:
    """Complain where as much was sent as without compression: 2(n-1)/n times the bytes of the whole, or more."""
    n = evidence.world_size
    ring = 2 * (n - 1) / n * num_bytes
    most = most_sent(evidence)
    if n == 1 or most < 0.99 * ring or wanted >= ring:
        return None
    text = f"right values, but {in_megabytes(most)} sent per rank, as much as without compression: zeros cost as many"
    return Fault("dense on the wire", f"{text} bytes as numbers; send {instead}, which needs {in_megabytes(wanted)}")


def top_k_bytes(world_size: int) -> int:
    """Return what a rank must send: its k pairs of 8 bytes to each of the others."""
    return (world_size - 1) * 8 * TOP_K


def judge_top_k(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must have the mean of all ranks' largest elements, for no more than pairs of 8 bytes."""
    n = evidence.world_size
    own = [result["own"] for result in evidence.results]
    parts = chosen(own, [vector.abs().topk(TOP_K).indices for vector in own])
    want = parts.sum(0) / n
    got = evidence.results[0]["mean"]
    if n == 1 and isinstance(got, Tensor) and got.shape == want.shape and int((got != 0).sum()) != TOP_K:
        text = f"one rank alone returned {int((got != 0).sum())} elements that are not zero, expected k = {TOP_K}"
        yield Fault("not k elements", text)
    for rank, result in enumerate(evidence.results):
        known = _top_k_mistakes(own, parts, rank)
        yield from found(explain(result["mean"], want, known, f"rank {rank}: the mean", n))
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = top_k_bytes(n)
    yield from found(dense(evidence, 4 * TOP_K_LENGTH, wanted, "k indices and k values"))
    for rank in evidence.records.ranks:
        if n > 1 and sent_bytes(evidence, rank) == (n - 1) * 12 * TOP_K:
            text = f"right values, but 12 bytes per pair where 8 are enough: rank {rank}'s indices travel as int64"
            yield Fault("wide indices", f"{text}; a tensor of fewer than 2**31 elements needs int32")
    yield from found(over_budget(evidence, wanted, "k pairs of 4 + 4 bytes to each other rank"))


def _top_k_mistakes(own: list[Tensor], parts: Tensor, rank: int) -> Known:
    n, length = len(own), len(own[0])
    indices = [vector.abs().topk(TOP_K).indices for vector in own]
    values = torch.stack([vector[i] for vector, i in zip(own, indices, strict=True)])
    last = torch.zeros(length)
    for i, row in zip(indices, values, strict=True):
        last[i] = row
    signed = chosen(own, [vector.topk(TOP_K).indices for vector in own]).sum(0)
    small = chosen(own, [vector.abs().topk(TOP_K, largest=False).indices for vector in own]).sum(0)
    summed = scattered(indices[rank], values.sum(0), length)
    mixed = "adds values that belong to different elements: each rank chose its own k places, so the values must"
    mixed += " travel with their indices (all_gather), not be summed (all_reduce)"
    lost = "holds one rank's value where several ranks chose the same element: `a[indices] = values` overwrites, and"
    lost += " `a[indices] += values` adds a place only once; use index_add_ (or a loop over ranks that adds)"
    total = torch.stack(own).sum(0)
    largest = total.abs().topk(TOP_K).indices
    mine = "is this rank's own k elements: nothing of the others reached it"
    by_size = "lacks the large negative elements: choose by magnitude, gradient.abs().topk(k)"
    no_signs = "has lost the signs: choose by magnitude, but send gradient[indices], not gradient.abs()[indices]"
    smallest = "is made of the elements of smallest magnitude; k of the largest are asked for"
    of_mean = "holds the k largest of the mean: whoever knows the mean has sent everything before"
    return [
        ("indices differ", summed / n, mixed),
        ("indices differ, summed", summed, mixed),
        ("overwritten", last / n, lost),
        ("not by magnitude", signed / n, by_size),
        ("signs lost", parts.abs().sum(0) / n, no_signs),
        ("smallest", small / n, smallest),
        ("not communicated", parts[rank], mine),
        ("not communicated, divided", parts[rank] / n, mine),
        ("top-k of the mean", scattered(largest, total[largest] / n, length), of_mean),
    ]


def budget_top_k(evidence: Evidence) -> list[str]:
    """Say what was sent, and what an all-reduce of everything would send."""
    n = evidence.world_size
    line = sent_line(evidence, top_k_bytes(n), "k pairs to each other rank")
    return [line, f"a ring all-reduce of everything: {in_megabytes(2 * (n - 1) / n * 4 * TOP_K_LENGTH)}"]


def random_k_bytes(world_size: int) -> float:
    """Return what a ring all-reduce of k values sends, in all steps."""
    return RANDOM_STEPS * 2 * (world_size - 1) / world_size * 4 * RANDOM_K


def judge_random_k(evidence: Evidence) -> Iterator[Fault]:
    """The same k places on all ranks, others in each step, right on average, and values alone on the wire."""
    n = evidence.world_size
    yield from _judge_places(evidence)
    mean = torch.stack([result["own"] for result in evidence.results]).mean(0)
    for rank, result in enumerate(evidence.results):
        for step, got in enumerate(result["steps"]):
            places = got.nonzero().flatten()
            want = scattered(places, mean[places] * (RANDOM_LENGTH / RANDOM_K), RANDOM_LENGTH)
            known = _random_mistakes(result["own"], mean, places, n)
            yield from found(explain(got, want, known, f"rank {rank}: the estimate of step {step}", n))
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = random_k_bytes(n)
    yield from found(dense(evidence, 4 * RANDOM_LENGTH * RANDOM_STEPS, wanted, "the k values alone"))
    if num_calls(evidence, "all_gather"):
        text = "right values, but all_gather is called: as all ranks draw the same places, no rank needs indices, and"
        yield Fault("indices travel", f"{text} values at the same place can be summed on the way (all_reduce)")
    yield from found(over_budget(evidence, wanted, "an all-reduce of k values in each step"))


def _judge_places(evidence: Evidence) -> Iterator[Fault]:
    first = evidence.results[0]["steps"]
    for rank, result in enumerate(evidence.results):
        for step, got in enumerate(result["steps"]):
            fault = compare(got, torch.zeros(RANDOM_LENGTH), f"rank {rank}'s estimate")
            if fault is not None and fault.code in ("returned", "shape", "dtype", "nan"):
                yield fault
            num_chosen = int((got != 0).sum())
            if num_chosen == RANDOM_K and _in_a_row(got.nonzero().flatten()):
                text = f"rank {rank}'s places of step {step} stand in an even row: they are not drawn at random"
                yield Fault("not random", f"{text}; take the first k of a random permutation (torch.randperm)")
            if num_chosen != RANDOM_K:
                text = f"rank {rank}'s estimate of step {step} has {num_chosen} elements that are not zero, expected"
                yield Fault("not k elements", f"{text} k = {RANDOM_K}, each place once")
            if not torch.equal(got != 0, first[step] != 0):
                text = f"in step {step} rank {rank} and rank 0 fill different places: their draws differ, so the sums"
                text += " mix different elements; seed a generator with what all ranks share, the step, not the rank"
                yield Fault("choices differ", text)
    if all(torch.equal(got != 0, first[0] != 0) for got in first):
        text = f"the same {RANDOM_K} places in every step: the other elements never learn; seed with the step"
        yield Fault("same places", text)


def _in_a_row(places: Tensor) -> bool:
    """Tell whether the places, seen as a ring, have the same gap everywhere but at one or two spots."""
    gaps = torch.cat([places.diff(), places[:1] - places[-1:] + RANDOM_LENGTH])
    return int(gaps.bincount().max()) >= len(places) - 1


def _random_mistakes(own: Tensor, mean: Tensor, places: Tensor, n: int) -> Known:
    length, factor = RANDOM_LENGTH, RANDOM_LENGTH / RANDOM_K

    def at(values: Tensor) -> Tensor:
        return scattered(places, values[places], length)

    sums = f"is {n}x too large: it is the sum over ranks, not the mean: divide by world_size ({n})"
    mine = "is this rank's own values: nothing of the others reached it"
    shrinks = "holds the chosen elements as they are. An element is chosen in k of L steps, so on average it comes out"
    return [
        ("not scaled", at(mean), f"{shrinks} {factor:.0f}x too small: multiply by L / k"),
        ("divided twice", at(mean) / factor, f"{shrinks} too small: multiply by L / k, do not divide by it"),
        ("sum not mean", at(mean * n * factor), sums),
        ("not communicated", at(own * factor), mine),
        ("not communicated, divided", at(own * factor / n), mine),
    ]


def budget_random_k(evidence: Evidence) -> list[str]:
    """Say what was sent in all steps."""
    return [sent_line(evidence, random_k_bytes(evidence.world_size), f"k values in {RANDOM_STEPS} steps")]


_KEPT = """
kept = torch.zeros_like(gradient)
indices = gradient.abs().topk(k).indices
kept[indices] = gradient[indices] / dist.get_world_size()
""".strip()
WRONG_TOP_KS = (
    Mutant("zeros travel", "dense on the wire", "zeros cost as many", 2, 64).body(
        f"{_KEPT}\ndist.all_reduce(kept)\nreturn kept"
    ),
    Mutant("all-reduce of values", "indices differ", "different elements", 2, 48)
    .edit("total = torch.zeros_like(gradient)", "dist.all_reduce(values)\ntotal = torch.zeros_like(gradient)")
    .edit("zip(all_indices, all_values, strict=True)", "[(indices, values)]"),
    Mutant("added once", "overwritten", "adds a place only once", 2, 48)
    .edit("total.index_add_(0, their_indices, their_values)", "pass")
    .edit("return total", "total[torch.cat(all_indices)] += torch.cat(all_values)\nreturn total"),
    Mutant("largest, signed", "not by magnitude", "choose by magnitude", 1).without(".abs()"),
    Mutant("sum", "sum not mean", "divide by world_size (3)", 3, 9).edit("total / dist.get_world_size()", "total"),
    Mutant("8-byte indices", "wide indices", "12 bytes per pair", 2).without(".int()"),
    Mutant("top-k of the mean", "top-k of the mean", "has sent everything before", 2, 64).body(
        f"gradient = gradient.clone()\ndist.all_reduce(gradient)\n{_KEPT}\nreturn kept"
    ),
)
WRONG_RANDOM_KS = (
    Mutant("seeded by rank", "choices differ", "not the rank", 2, 49).edit(
        "manual_seed(step)", "manual_seed(1000 * step + dist.get_rank())"
    ),
    Mutant("always the same", "same places", "seed with the step", 1, 49).edit("manual_seed(step)", "manual_seed(0)"),
    Mutant("not scaled", "not scaled", "multiply by L / k", 1).without(" * (gradient.numel() / k)"),
    Mutant("zeros travel", "dense on the wire", "zeros cost as many", 2, 64)
    .without("dist.all_reduce(values)")
    .edit("return estimate", "dist.all_reduce(estimate)\nreturn estimate"),
    Mutant("indices travel", "indices travel", "no rank needs indices", 2).edit(
        "dist.all_reduce(values)",
        """
        everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather([torch.empty_like(places) for _ in everyone], places)
        dist.all_gather(everyone, values)
        values = torch.stack(everyone).sum(0)
        """,
    ),
    Mutant("sum", "sum not mean", "divide by world_size (2)", 2, 9).without(" / dist.get_world_size()"),
    Mutant("drawn twice", "not k elements", "each place once", 1).edit(
        "torch.randperm(gradient.numel(), ", "torch.randint(gradient.numel(), (k,), "
    ),
)
