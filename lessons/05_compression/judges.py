"""Name what is wrong in what the ranks of lesson 5's checks brought back: choosing elements.

Judges of the error memory are in judge_memory.py, of rounding in judge_codes.py, of thin factors in judge_factors.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from distlab_lesson_05 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import in_megabytes, num_calls, over_budget, sent_bytes, sent_line
from distlab.grading.values import compare, equal

Explanations = Mapping[str, tuple[Tensor, str]]


def explain(got: Any, want: Tensor, known: Explanations, *, what: str, world_size: int) -> Fault | None:
    """Say how a result differs from what was expected, in the words of the known mistake that gives this very result.

    Args:
        got: what the learner's function returned.
        want: what was expected.
        known: for each code of a fault, what a function with this fault returns, and what to say.
        what: a name for the result.
        world_size: number of ranks.
    """
    fault = compare(got, want, what, world_size)
    if fault is None or fault.code in ("returned", "shape", "dtype", "device", "layout"):
        return fault
    for code, (result, words) in known.items():
        if result.shape == got.shape and equal(got.detach(), result.to(got.dtype)) and not equal(want, result):
            return Fault(code, f"{what} {words}")
    return fault


def unchanged(kept: Sequence[bool], what: str = "gradient") -> Iterator[Fault]:
    """Complain where the argument was written to."""
    for rank, same in enumerate(kept):
        if not same:
            text = f"rank {rank}'s {what} was changed; what is left out of the message must stay where it is"
            yield Fault("changed argument", f"{text}: work on a copy")
            return


def dense(evidence: Evidence, num_bytes: int, wanted: float, instead: str) -> Fault | None:
    """Complain where as much was sent as without compression: 2(n-1)/n times the bytes of the whole, or more."""
    n = evidence.world_size
    ring = 2 * (n - 1) / n * num_bytes
    most = max((sent_bytes(evidence, rank) for rank in evidence.records.ranks), default=0)
    if n == 1 or most < 0.99 * ring or wanted >= ring:
        return None
    text = f"right values, but {in_megabytes(most)} sent a rank, as much as without compression: zeros cost as many"
    return Fault("dense on the wire", f"{text} bytes as numbers; send {instead}, which needs {in_megabytes(wanted)}")


def scattered(indices: Tensor, values: Tensor, length: int) -> Tensor:
    """Return zeros with these values at these places."""
    whole = torch.zeros(length, dtype=values.dtype)
    whole[indices] = values
    return whole


def top_k_bytes(world_size: int) -> int:
    """Return what a rank must send: its k pairs of 8 bytes to each of the others."""
    return (world_size - 1) * 8 * cases.TOP_K


def judge_top_k(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must have the mean of all ranks' largest elements, for no more than pairs of 8 bytes."""
    n = evidence.world_size
    own = [result["own"] for result in evidence.results]
    indices = [vector.abs().topk(cases.TOP_K).indices for vector in own]
    parts = [scattered(i, vector[i], len(vector)) for i, vector in zip(indices, own, strict=True)]
    want = torch.stack(parts).sum(0) / n
    got = evidence.results[0]["mean"]
    if n == 1 and isinstance(got, Tensor) and got.shape == want.shape and int((got != 0).sum()) != cases.TOP_K:
        text = f"one rank alone returned {int((got != 0).sum())} elements that are not zero, expected k = {cases.TOP_K}"
        yield Fault("not k elements", text)
        return
    for rank, result in enumerate(evidence.results):
        fault = explain(result["mean"], want, _top_k_mistakes(own, parts, rank), what="the mean", world_size=n)
        if fault is not None:
            yield Fault(fault.code, f"rank {rank}: {fault.message}")
            return
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = top_k_bytes(n)
    fault = dense(evidence, 4 * cases.TOP_K_LENGTH, wanted, "k indices and k values")
    if fault is not None:
        yield fault
    for rank in evidence.records.ranks:
        if n > 1 and sent_bytes(evidence, rank) == (n - 1) * 12 * cases.TOP_K:
            text = f"right values, but 12 bytes a pair where 8 are enough: rank {rank}'s indices travel as int64"
            yield Fault("wide indices", f"{text}; a tensor of fewer than 2**31 elements needs int32")
            return
    over = over_budget(evidence, wanted, "k pairs of 4 + 4 bytes to each other rank")
    if over is not None:
        yield over


def _top_k_mistakes(own: list[Tensor], parts: list[Tensor], rank: int) -> dict[str, tuple[Tensor, str]]:
    n, length = len(own), len(own[0])
    indices = [vector.abs().topk(cases.TOP_K).indices for vector in own]
    values = torch.stack([vector[i] for vector, i in zip(own, indices, strict=True)])
    last = torch.zeros(length)
    for i, row in zip(indices, values, strict=True):
        last[i] = row
    signed = [vector.topk(cases.TOP_K).indices for vector in own]
    small = [vector.abs().topk(cases.TOP_K, largest=False).indices for vector in own]
    summed = scattered(indices[rank], values.sum(0), length)
    mixed = "adds values that belong to different elements: each rank chose its own k places, so the values must"
    mixed += " travel with their indices (all_gather), not be summed (all_reduce)"
    lost = "holds one rank's value where several ranks chose the same element: `a[indices] = values` overwrites, and"
    lost += " `a[indices] += values` adds a place only once; use index_add_ (or a loop over ranks that adds)"
    total = torch.stack(own).sum(0)
    largest = total.abs().topk(cases.TOP_K).indices
    mine = "is this rank's own k elements: nothing of the others reached it"
    of_mean = "holds the k largest of the mean: whoever knows the mean has sent everything before"
    return {
        "indices differ": (summed / n, mixed),
        "indices differ, summed": (summed, mixed),
        "overwritten": (last / n, lost),
        "not by magnitude": (
            torch.stack([scattered(i, v[i], length) for i, v in zip(signed, own, strict=True)]).sum(0) / n,
            "lacks the large negative elements: choose by magnitude, gradient.abs().topk(k)",
        ),
        "signs lost": (
            torch.stack(parts).abs().sum(0) / n,
            "has lost the signs: choose by magnitude, but send gradient[indices], not gradient.abs()[indices]",
        ),
        "smallest": (
            torch.stack([scattered(i, v[i], length) for i, v in zip(small, own, strict=True)]).sum(0) / n,
            "is made of the elements of smallest magnitude; k of the largest are asked for",
        ),
        "not communicated": (parts[rank], mine),
        "not communicated, divided": (parts[rank] / n, mine),
        "top-k of the mean": (scattered(largest, total[largest] / n, length), of_mean),
    }


def budget_top_k(evidence: Evidence) -> list[str]:
    """Say what was sent, beside what an all-reduce of everything would send."""
    n = evidence.world_size
    line = sent_line(evidence, top_k_bytes(n), "k pairs to each other rank")
    return [line, f"a ring all-reduce of everything: {in_megabytes(2 * (n - 1) / n * 4 * cases.TOP_K_LENGTH)}"]


def random_k_bytes(world_size: int) -> float:
    """Return what a ring all-reduce of k values sends, in all steps."""
    return cases.RANDOM_STEPS * 2 * (world_size - 1) / world_size * 4 * cases.RANDOM_K


def judge_random_k(evidence: Evidence) -> Iterator[Fault]:
    """The same k places on all ranks, others in each step, right on average, and values alone on the wire."""
    n = evidence.world_size
    yield from _judge_places(evidence)
    mean = torch.stack([result["own"] for result in evidence.results]).mean(0)
    for rank, result in enumerate(evidence.results):
        for step, got in enumerate(result["steps"]):
            places = got.nonzero().flatten()
            want = scattered(places, mean[places] * (cases.RANDOM_LENGTH / cases.RANDOM_K), cases.RANDOM_LENGTH)
            known = _random_mistakes(result["own"], mean, places, n)
            what = f"the estimate of step {step}"
            fault = explain(got, want, known, what=what, world_size=n)
            if fault is not None:
                yield Fault(fault.code, f"rank {rank}: {fault.message}")
                return
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = random_k_bytes(n)
    fault = dense(evidence, 4 * cases.RANDOM_LENGTH * cases.RANDOM_STEPS, wanted, "the k values alone")
    if fault is not None:
        yield fault
    if num_calls(evidence, "all_gather"):
        text = "right values, but all_gather is called: as all ranks draw the same places, nobody needs indices, and"
        yield Fault("indices travel", f"{text} values at the same place can be summed on the way (all_reduce)")
        return
    over = over_budget(evidence, wanted, "an all-reduce of k values in each step")
    if over is not None:
        yield over


def _judge_places(evidence: Evidence) -> Iterator[Fault]:
    first = evidence.results[0]["steps"]
    for rank, result in enumerate(evidence.results):
        for step, got in enumerate(result["steps"]):
            fault = compare(got, torch.zeros(cases.RANDOM_LENGTH), f"rank {rank}'s estimate")
            if fault is not None and fault.code in ("returned", "shape", "dtype", "nan"):
                yield fault
                return
            chosen = int((got != 0).sum())
            if chosen == cases.RANDOM_K and _in_a_row(got.nonzero().flatten()):
                text = f"rank {rank}'s places of step {step} stand in an even row: they are not drawn at random"
                yield Fault("not random", f"{text}; take the first k of a random permutation (torch.randperm)")
                return
            if chosen != cases.RANDOM_K:
                text = f"rank {rank}'s estimate of step {step} has {chosen} elements that are not zero, expected"
                yield Fault("not k elements", f"{text} k = {cases.RANDOM_K}, each place once")
                return
            if not torch.equal(got != 0, first[step] != 0):
                text = f"in step {step} rank {rank} and rank 0 fill different places: their draws differ, so the sums"
                text += " mix different elements; seed a generator with what all ranks share, the step, not the rank"
                yield Fault("choices differ", text)
                return
    if all(torch.equal(got != 0, first[0] != 0) for got in first):
        text = f"the same {cases.RANDOM_K} places in every step: the other elements never learn; seed with the step"
        yield Fault("same places", text)


def _in_a_row(places: Tensor) -> bool:
    """Tell whether the places, seen as a ring, have the same gap everywhere but at one or two spots."""
    gaps = torch.cat([places.diff(), places[:1] - places[-1:] + cases.RANDOM_LENGTH])
    return int(gaps.bincount().max()) >= len(places) - 1


def _random_mistakes(own: Tensor, mean: Tensor, places: Tensor, n: int) -> dict[str, tuple[Tensor, str]]:
    length, factor = cases.RANDOM_LENGTH, cases.RANDOM_LENGTH / cases.RANDOM_K

    def at(values: Tensor) -> Tensor:
        return scattered(places, values[places], length)

    sums = f"is {n}x too large: it is the sum over ranks, not the mean: divide by world_size ({n})"
    mine = "is this rank's own values: nothing of the others reached it"
    shrinks = "holds the chosen elements as they are. An element is chosen in k of L steps, so on average it comes out"
    return {
        "not scaled": (at(mean), f"{shrinks} {factor:.0f}x too small: multiply by L / k"),
        "divided twice": (at(mean) / factor, f"{shrinks} too small: multiply by L / k, do not divide by it"),
        "sum not mean": (at(mean * n * factor), sums),
        "not communicated": (at(own * factor), mine),
        "not communicated, divided": (at(own * factor / n), mine),
    }


def budget_random_k(evidence: Evidence) -> list[str]:
    """Say what was sent in all steps."""
    return [sent_line(evidence, random_k_bytes(evidence.world_size), f"k values in {cases.RANDOM_STEPS} steps")]
