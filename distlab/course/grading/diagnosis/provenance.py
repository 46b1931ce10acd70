"""Find which ranks' tensors are in a result, and how often: what a sum lacks, what it counts twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.diagnosis.values import apart, compare, times_of, tolerance_of, what_a_factor_shows
from distlab.course.grading.exercise import Fault
from distlab.plan import split_evenly

MAX_PATTERNS = 4096  # how many ways of adding the ranks' tensors are tried where least squares cannot tell


def explain_sum(
    got: Any,
    contributions: Sequence[Tensor],
    *,
    expected: Sequence[float],
    what: str = "the result",
    rank: int | None = None,
) -> Fault | None:
    """Say how often each rank's tensor is in `got`, where that is not what was expected.

    `got` should be the sum of expected[r] * contributions[r]. Where it is not, least squares find
    which multiples it holds, first in the whole tensor, then in each of as many even chunks as there are ranks.

    Args:
        got: what the learner's function produced.
        contributions: each rank's tensor before, in the order of ranks.
        expected: how often each should be in it: 1 each for a sum, 1/n each for a mean.
        what: a name for it in the message.
        rank: whose result it is, to recognise a tensor that never met those of others.
    """
    shape = contributions[0].shape
    parts = torch.stack([part.detach().to(torch.float64).flatten() for part in contributions])
    wanted = torch.tensor(list(expected), dtype=torch.float64)
    want = (wanted @ parts).reshape(shape).to(contributions[0].dtype)
    fault = compare(got, want, what, len(contributions))
    if fault is None or fault.code in ("returned", "shape", "dtype", "device", "layout", "nan"):
        return fault
    found, tolerance = got.detach().to(torch.float64).flatten(), 10 * tolerance_of(got.dtype)
    multiples = _multiples(found, parts, wanted, tolerance)
    if multiples is not None:
        return _name(multiples, wanted, what, rank)
    chosen = _by_element(found, parts, tolerance, what)
    if chosen is not None:
        return chosen
    wrong = []
    for index, (start, stop) in enumerate(split_evenly(found.numel(), len(wanted))):
        if start == stop:
            continue
        chunk = _multiples(found[start:stop], parts[:, start:stop], wanted, tolerance)
        if chunk is None or float((chunk - wanted).abs().max()) > 1e-5 * float(wanted.abs().max()):
            wrong.append((index, start, stop, chunk))
    for index, start, stop, multiples in wrong:
        if multiples is not None:
            named = _name(multiples, wanted, f"chunk {index} of {what} (elements {start} to {stop - 1})", rank)
            others = [str(other) for other, *_ in wrong if other != index]
            more = (
                f"; chunk{'s' * (len(others) > 1)} {', '.join(others)} {'is' if len(others) == 1 else 'are'} wrong too"
            )
            return Fault(named.code, named.message + more * bool(others))
    return fault


def _by_element(found: Tensor, parts: Tensor, tolerance: float, what: str) -> Fault | None:
    """Say so where each element comes from the ranks' elements by a different reduction than a sum, maybe divided."""
    n = len(parts)
    if n == 1:
        return None
    for op, words, reduced in (
        ("MAX", "the largest", parts.amax(0)),
        ("MIN", "the smallest", parts.amin(0)),
        ("PRODUCT", "the product", parts.prod(0)),
        ("", "the median", parts.median(0).values),
    ):
        most, by = float(reduced.abs().max()), f" (ReduceOp.{op})" if op else ""
        for divided, text in ((1.0, ""), (float(n), f", divided by {n}"), (float(n) ** n, f", each divided by {n}")):
            if most and float((found - reduced / divided).abs().max()) <= tolerance * most:
                seen = f"{what} holds in each element {words} of the ranks' values{by}{text}"
                return Fault("not a sum", f"{seen}: add them up")
    return None


def weights_of(got: Tensor, contributions: Sequence[Tensor]) -> list[float] | None:
    """Return how often each tensor is in a sum `got`, some equally often; None: it is none, or several weights fit."""
    parts = torch.stack([part.detach().to(torch.float64).flatten() for part in contributions])
    nothing = torch.zeros(len(parts), dtype=torch.float64)
    found = _multiples(got.detach().to(torch.float64).flatten(), parts, nothing, 10 * tolerance_of(got.dtype))
    return None if found is None or len({*found.tolist()} - {0.0}) != 1 else found.tolist()


def _multiples(found: Tensor, parts: Tensor, wanted: Tensor, tolerance: float) -> Tensor | None:
    """Return how often each part is in `found`, or None where no answer or more than one fits.

    Nobody can tell how often a part of zeros is in it: it counts as often as the others have it.
    """
    seen = parts.any(dim=1)
    if not bool(seen.all()):
        some = _multiples(found, parts[seen], wanted[seen], tolerance) if bool(seen.any()) else None
        if some is None:
            return None
        filled = wanted * _base(_ratios(some, wanted[seen]))
        filled[seen] = some
        return filled
    n, size = parts.shape
    scale = float(parts.abs().max()) or 1.0
    if size > n:  # with as many unknowns as numbers, anything fits
        solved = torch.linalg.lstsq(parts.T, found[:, None], driver="gelsd")
        answer = solved.solution[:, 0]
        if int(solved.rank) == n:
            fits = float((answer @ parts - found).abs().max()) <= max(tolerance, 1e-10) * scale * n
            return torch.round(answer, decimals=9) if fits else None  # without the last digits of least squares
    if 4**n * 3 > MAX_PATTERNS:
        return None
    unit = float(wanted.abs().max()) or 1.0
    times = torch.tensor(list(itertools.product((0.0, 1.0, 2.0, 3.0), repeat=n)), dtype=torch.float64)
    fitting = []
    for factor in dict.fromkeys((unit, unit * n, unit / n)):
        close = ((times * factor) @ parts - found).abs().amax(dim=1) <= max(tolerance, 1e-10) * scale * n
        fitting += [row * factor for row in times[close]]
    distinct = {tuple(row.tolist()) for row in fitting}
    return torch.tensor(distinct.pop(), dtype=torch.float64) if len(distinct) == 1 else None


def _name(multiples: Tensor, wanted: Tensor, what: str, rank: int | None) -> Fault:
    """Put in words what is wrong with the multiples of the ranks' tensors."""
    n = len(wanted)
    ratios = _ratios(multiples, wanted)
    present = [r for r in range(n) if abs(float(multiples[r])) > 1e-6]
    if not present:
        return Fault("zeros", f"{what} is all zeros: no rank's tensor is in it")
    only = present[0]
    if len(present) == 1 and any(float(want) for rank, want in enumerate(wanted) if rank != only):
        times = "" if abs(float(multiples[only]) - 1) < 1e-5 else f" times {float(multiples[only]):.4g}"
        if only == rank:
            text = f"{what} is this rank's own tensor{times}: nothing of the others reached it"
            return Fault("not communicated", text)
        due = [r for r in range(n) if float(wanted[r])]
        also = f", not rank {due[0]}'s" if len(due) == 1 else " alone: the others' parts are not in it"
        return Fault("one rank only", f"{what} is rank {only}'s tensor{times}{also}")
    base = _base(ratios)
    code, shows = what_a_factor_shows(base, n, is_mean=bool((wanted - 1 / n).abs().max() < 1e-9))
    scale = "" if abs(base - 1) < 1e-5 else f"; besides, all of it is {times_of(base)}{shows}"
    missing = [r for r in range(n) if r not in present and float(wanted[r]) != 0]
    if missing:
        return Fault("missing rank", f"{what} lacks {_whose(missing)}{scale}")
    uneven = [r for r in range(n) if abs(ratios[r] / base - 1) > 1e-5]
    if not uneven:
        return Fault(code, f"{what} is {times_of(base)}{shows}")
    counted = [r for r in uneven if 1 < ratios[r] / base < math.inf and abs(math.remainder(ratios[r] / base, 1)) < 1e-5]
    if counted == uneven:
        often = {round(ratios[r] / base) for r in counted}
        words = "twice" if often == {2} else f"{max(often)} times"
        return Fault("counted twice", f"{what} holds {_whose(counted)} {words}{scale}")
    exact = zip(multiples.round(decimals=5).tolist(), wanted.round(decimals=5).tolist(), strict=True)
    texts = [apart(got + 0.0, want + 0.0, digits=4) for got, want in exact]  # + 0.0: no -0
    listed = ", ".join(f"rank {r}'s tensor {got} times" for r, (got, _) in enumerate(texts))
    return Fault("wrong weights", f"{what} holds {listed}; expected {', '.join(want for _, want in texts)}")


def _ratios(multiples: Tensor, wanted: Tensor) -> list[float]:
    pairs = zip(multiples.tolist(), wanted.tolist(), strict=True)
    return [got / want if want else 1.0 if abs(got) < 1e-6 else math.inf for got, want in pairs]


def _base(ratios: Sequence[float]) -> float:
    """Return the ratio that most ranks have; of two as frequent, the one nearer to 1."""
    found = [ratio for ratio in ratios if abs(ratio) > 1e-6 and math.isfinite(ratio)]
    if not found:
        return 1.0
    alike = {ratio: sum(abs(other / ratio - 1) < 1e-5 for other in found) for ratio in found}
    return max(found, key=lambda ratio: (alike[ratio], -abs(math.log(abs(ratio)))))


def _whose(ranks: Sequence[int]) -> str:
    parts = " and ".join(f"rank {rank}'s" for rank in ranks)
    return f"{parts} {'part' if len(ranks) == 1 else 'parts'}"
