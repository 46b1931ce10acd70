"""Two attentions that are merged, and the positions that ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found, known_mistake
from distlab.grading.diagnosis.values import compare, describe, seeded

HEADS, SIZE = 2, 3
STEEP = 400.0  # makes scores of hundreds: exp of them overflows
ZIGZAG_CASES = ((16, 4), (8, 2), (12, 3), (6, 1))


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean over the visible keys and the log_sum; zero and -inf where none is visible."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()
    return weights @ value, log_sum


def merge_cases() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """Return two parts by name, and what they make together."""
    found = {}
    for name, steep in (("two parts", 1.0), ("large scores", STEEP), ("a part without visible keys", 1.0)):
        query = steep * seeded(-1, HEADS, 5, SIZE, purpose="merge query")
        key, value = (seeded(-1, HEADS, 7, SIZE, purpose=f"merge {what}") for what in ("key", "value"))
        visible = torch.ones(5, 7, dtype=torch.bool)
        if name.startswith("a part"):
            visible[:2, 4:] = visible[3, :4] = False
        first = attend(query, key[:, :4], value[:, :4], visible[:, :4])
        second = attend(query, key[:, 4:], value[:, 4:], visible[:, 4:])
        found[name] = (*first, *second, attend(query, key, value, visible))
    return found


def drive_merge(fn: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Merge each case; say whether the arguments were left as they were."""
    results = {}
    for name, (*parts, _) in merge_cases().items():
        kept = [part.clone() for part in parts]
        got = fn(*parts)
        results[name] = (got, all(map(torch.equal, kept, parts)))
    return results


def judge_merge(evidence: Evidence) -> Iterator[Fault]:
    """The mean and the log_sum over both, with large scores and with none visible."""
    for name, (*parts, want) in merge_cases().items():
        got, kept = evidence.results[0][name]
        if not isinstance(got, tuple | list) or len(got) != 2:
            yield Fault("returned", f"{name}: expected (mean, log_sum), got {describe(got)}")
        if not kept:
            yield Fault("changed argument", f"{name}: an argument was changed in place; make new tensors")
        if all(isinstance(one, Tensor) for one in got) and not all(bool(one.isfinite().all()) for one in got):
            if name == "large scores":
                text = f"{name}: exp({float(want[1].max()):.0f}) is infinite, and inf / inf is NaN; only differences"
                text = f"{text} may go through exp: subtract the larger log_sum first (torch.logaddexp does)"
                yield Fault("overflow", text)
            if name.startswith("a part"):
                text = f"{name}: NaN where one log_sum is -inf: that part has a share of exp(-inf) = 0,"
                yield Fault("nothing visible", f"{text} and the other one counts alone")
        for one, expected, what, known in zip(got, want, ("mean", "log_sum"), _known(*parts), strict=True):
            if fault := compare(one, expected, f"{name}: the {what}"):
                yield known_mistake(one, expected, known, f"{name}: the {what}") or fault


def _known(
    mean: Tensor, log_sum: Tensor, new: Tensor, new_log_sum: Tensor
) -> tuple[list[tuple[str, Tensor, str]], ...]:
    """Return known mistakes in the mean, and in the log_sum."""
    share = torch.sigmoid(log_sum - new_log_sum)[..., None]
    largest, total = torch.maximum(log_sum, new_log_sum), torch.logaddexp(log_sum, new_log_sum)
    by_largest = (log_sum - largest).exp()[..., None] * mean + (new_log_sum - largest).exp()[..., None] * new
    by_logs = (log_sum[..., None] * mean + new_log_sum[..., None] * new) / (log_sum + new_log_sum)[..., None]
    first_kept = mean + (new_log_sum - total).exp()[..., None] * new
    second_kept = (log_sum - total).exp()[..., None] * mean + new
    without_largest = torch.log1p((log_sum - new_log_sum).abs().neg().exp())
    exact = "(exp(log_sum) + exp(new_log_sum))"
    means = [
        ("plain mean", (mean + new) / 2, "counts both parts alike, however much weight their keys have"),
        ("plain sum", mean + new, "is the sum of both means; weights must add up to 1 over all keys"),
        ("shares not divided", by_largest, "weighs with exp(its log_sum - the larger one), which do not add up to 1"),
        (
            "first mean not rescaled",
            first_kept,
            "leaves the first mean the weight it had alone, though keys were added",
        ),
        (
            "second mean not rescaled",
            second_kept,
            "gives the second mean the weight it had alone, though it joins other keys",
        ),
        ("shares swapped", (1 - share) * mean + share * new, "gives each part the other's share"),
        ("logarithms as shares", by_logs, "takes logarithms for shares; exp of them are the sums"),
    ]
    log_sums = [
        ("log_sum added", log_sum + new_log_sum, "adds two logarithms, which multiplies the sums: log(a b), not"),
        ("larger log_sum", largest, "is the larger of the two; the smaller counts too:"),
        ("old log_sum", log_sum, "is that of the first part alone:"),
        ("new log_sum", new_log_sum, "is that of the second part alone:"),
        ("maximum not added back", without_largest, "had the larger one subtracted, for exp, and never added back:"),
        ("no logarithm", log_sum.exp() + new_log_sum.exp(), "is the sum itself, which overflows; keep its logarithm,"),
    ]
    return (
        [(code, wrong, f"{words}: each counts with exp(its log_sum - the total)") for code, wrong, words in means],
        [(code, wrong, f"{words} log{exact}") for code, wrong, words in log_sums],
    )


def budget_merge(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"exact on {len(evidence.results[0])} cases: scores of hundreds, and queries that see no key of a part"]


def drive_zigzag(fn: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Ask for the positions of each rank in each case."""
    return [[fn(length, num_ranks, rank) for rank in range(num_ranks)] for length, num_ranks in ZIGZAG_CASES]


def work_of(positions: Tensor) -> int:
    """Return how many keys the queries at these positions see, all together."""
    return int((positions + 1).sum())


def judge_zigzag(evidence: Evidence) -> Iterator[Fault]:
    """Every position on one rank, the same work for all, ascending."""
    for (length, n), held in zip(ZIGZAG_CASES, evidence.results[0], strict=True):
        what = f"{length} positions on {n} rank{'s' * (n > 1)}"
        for rank, got in enumerate(held):
            if not isinstance(got, Tensor) or got.dtype != torch.int64 or got.shape != (length // n,):
                text = f"{what}: expected {length // n} whole numbers in a tensor for rank {rank}, got {describe(got)}"
                yield Fault("returned", text)
        yield from found(_placed_fault(held, length, n, what))


def _placed_fault(held: list[Tensor], length: int, n: int, what: str) -> Fault | None:
    chunks = torch.arange(length).view(2 * n, -1)
    want = [torch.cat([chunks[rank], chunks[2 * n - 1 - rank]]) for rank in range(n)]
    wrong = [rank for rank in range(n) if not torch.equal(held[rank], want[rank])]
    if not wrong:
        return None
    work = ", ".join(str(work_of(one)) for one in held)
    every = torch.cat(held)
    missing = sorted(set(range(length)) - set(every.tolist()))
    if missing:
        text = f"{what}: position {missing[0]} is on no rank"
        return Fault("positions lost", f"{text}; each of the 2n chunks belongs to one rank: r and 2n - 1 - r")
    if all(torch.equal(one.sort().values, other) for one, other in zip(held, want, strict=True)):
        text = f"{what}: rank {wrong[0]} holds the right positions, in the order {held[wrong[0]].tolist()}"
        return Fault("not ascending", f"{text}; ascending, its own part is an ordinary causal attention")
    if torch.equal(every, torch.arange(length)):
        text = f"{what}: straight pieces: queries see {work} keys. The last rank has the most, and all wait for it"
        return Fault("uneven work", f"{text}; give a rank an early chunk and a late one")
    if torch.equal(every, torch.arange(length).view(-1, n).T.flatten()):
        text = f"{what}: in stripes queries see {work} keys: nearly even, but the mask cuts through every block"
        return Fault("stripes", f"{text}; two whole chunks per rank leave blocks that are seen in full, or not at all")
    if len({work_of(one) for one in held}) > 1:
        text = f"{what}: queries see {work} keys. Who has the earliest chunk must have the latest: chunks r and"
        return Fault("uneven work", f"{text} 2n - 1 - r, not r and n + r")
    return Fault("other order", f"{what}: even work, but chunks r and 2n - 1 - r were asked for rank r")


def budget_zigzag(evidence: Evidence) -> list[str]:
    """Say how even it is."""
    length, n = ZIGZAG_CASES[0]
    work = {work_of(one) for one in evidence.results[0][0]}
    straight = [work_of(one) for one in torch.arange(length).view(n, -1)]
    return [f"{length} positions on {n} ranks: queries of each see {work.pop()} keys (straight: {straight})"]


_SHARES = "(log_sum - total).exp(), (new_log_sum - total).exp()"
_SUM = "share[..., None] * mean + new_share[..., None] * new"

WRONG_MERGES = (
    Mutant("plain mean", "plain mean", "counts both parts alike", 1).edit(_SUM, "(mean + new) / 2"),
    Mutant("without max", "overflow", "subtract the larger log_sum first", 1).edit(
        "torch.logaddexp(log_sum, new_log_sum)", "(log_sum.exp() + new_log_sum.exp()).log()"
    ),
    Mutant("logarithms as shares", "logarithms as shares", "exp of them", 1).edit(
        _SHARES, "log_sum / (log_sum + new_log_sum), new_log_sum / (log_sum + new_log_sum)"
    ),
    Mutant("logs added", "log_sum added", "multiplies the sums", 1).edit(
        "* new, total", "* new, log_sum + new_log_sum"
    ),
    Mutant("larger log", "larger log_sum", "the smaller counts too", 1).edit(
        "* new, total", "* new, torch.maximum(log_sum, new_log_sum)"
    ),
    Mutant("swapped", "shares swapped", "the other's share", 1).edit("share, new_share =", "new_share, share ="),
    Mutant("not divided", "shares not divided", "do not add up to 1", 1)
    .edit("share, new_share =", "largest = torch.maximum(log_sum, new_log_sum)\nshare, new_share =")
    .edit("- total).exp()", "- largest).exp()", times=2),
    Mutant("not rescaled", "first mean not rescaled", "weight it had alone", 1).edit("share[..., None] * mean", "mean"),
    Mutant("max left out", "maximum not added back", "never added back", 1).edit(
        "* new, total", "* new, torch.log1p((log_sum - new_log_sum).abs().neg().exp())"
    ),
    Mutant("by ratio", "nothing visible", "counts alone", 1).body("""
        ratio = (new_log_sum - log_sum).exp()
        return (mean + ratio[..., None] * new) / (1 + ratio)[..., None], log_sum + (1 + ratio).log()
    """),
    Mutant("in place", "changed argument", "make new tensors", 1, 40).edit(
        f"return {_SUM}", "return mean.mul_(share[..., None]).add_(new_share[..., None] * new)"
    ),
)
WRONG_ZIGZAGS = (
    Mutant("straight", "uneven work", "straight pieces", 1).edit("(rank, late)", "(2 * rank, 2 * rank + 1)"),
    Mutant("stripes", "stripes", "the mask cuts through every block", 1).body(
        "return torch.arange(rank, length, num_ranks)"
    ),
    Mutant("r and n + r", "uneven work", "not r and n + r", 1).edit("2 * num_ranks - 1 - rank", "num_ranks + rank"),
    Mutant("late first", "not ascending", "in the order", 1).edit("(rank, late)", "(late, rank)"),
    Mutant("2n - r", "positions lost", "is on no rank", 1).edit(
        "2 * num_ranks - 1 - rank", "(2 * num_ranks - rank) % (2 * num_ranks)"
    ),
    Mutant("other rank's", "other order", "were asked for rank r", 1).edit(
        "(rank, late)", "(num_ranks - 1 - rank, num_ranks + rank)"
    ),
    Mutant("two late", "positions lost", "is on no rank", 1).edit("2 * num_ranks - 1 - rank", "2 * num_ranks - 1"),
    Mutant("a list", "returned", "whole numbers in a tensor", 1).edit(
        "torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (rank, late)])",
        "[place for chunk in (rank, late) for place in range(chunk * size, (chunk + 1) * size)]",
    ),
)
