"""Two attentions that are merged, and the positions that ranks hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

HEADS, SIZE = 2, 3
STEEP = 400.0  # makes scores of hundreds: exp of them overflows
ZIGZAG_CASES = ((16, 4), (8, 2), (12, 3), (6, 1))


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the visible keys and the log_sum; zero and -inf where none is visible."""
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None]).exp()
    return weights @ value, log_sum


def _merge_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, steep in (("two parts", 1.0), ("large scores", STEEP), ("a part without visible keys", 1.0)):
        query = steep * seeded(-1, HEADS, 5, SIZE, purpose="merge query")
        key, value = (seeded(-1, HEADS, 7, SIZE, purpose=f"merge {what}") for what in ("key", "value"))
        visible = torch.ones(5, 7, dtype=torch.bool)
        if name.startswith("a part"):
            visible[:2, 4:] = visible[3, :4] = False
        first = attend(query, key[:, :4], value[:, :4], visible[:, :4])
        found[name] = (*first, *attend(query, key[:, 4:], value[:, 4:], visible[:, 4:]))
    return found


def _zigzag_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    every = ((length, ranks, one) for length, ranks in ZIGZAG_CASES for one in range(ranks))
    return {f"{length} positions, rank {one} of {ranks}": (length, ranks, one) for length, ranks, one in every}


drive_merge = Cases(_merge_cases)
drive_zigzag = Cases(_zigzag_cases)


def budget_merge(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"exact on {len(evidence.results[0])} cases: scores of hundreds, and queries that see no key of a part"]


def budget_zigzag(evidence: Evidence) -> list[str]:
    """Say how even it is."""
    length, n = ZIGZAG_CASES[0]
    work = int((next(iter(evidence.results[0].values()))["result"] + 1).sum())
    straight = [int((one + 1).sum()) for one in torch.arange(length).view(n, -1)]
    return [f"{length} positions on {n} ranks: queries of each see {work} keys (straight: {straight})"]


_SHARES = "(log_sum - total).exp(), (new_log_sum - total).exp()"
_SUM = "share[..., None] * mean + new_share[..., None] * new"

WRONG_MERGE = (
    Mutant("plain mean", "plain mean", "both parts count alike: each counts with exp(its log_sum - the total)", 1).edit(
        _SUM, "(mean + new) / 2"
    ),
    Mutant(
        "without max", "overflow", "exp of hundreds is infinite: subtract the larger log_sum, or use logaddexp", 1
    ).edit("torch.logaddexp(log_sum, new_log_sum)", "(log_sum.exp() + new_log_sum.exp()).log()"),
    Mutant(
        "logarithms as shares", "logarithms as shares", "logarithms are no shares: exp(its log_sum - the total) is", 1
    ).edit(_SHARES, "log_sum / (log_sum + new_log_sum), new_log_sum / (log_sum + new_log_sum)"),
    Mutant(
        "logs added", "log_sum added", "log_sum is added: it is log(exp(log_sum) + exp(new_log_sum)), logaddexp", 1
    ).edit("* new, total", "* new, log_sum + new_log_sum"),
    Mutant(
        "larger log", "larger log_sum", "the smaller log_sum counts too: log(exp(log_sum) + exp(new_log_sum))", 1
    ).edit("* new, total", "* new, torch.maximum(log_sum, new_log_sum)"),
    Mutant(
        "swapped", "shares swapped", "each gets the other's share: each counts with exp(its log_sum - the total)", 1
    ).edit("share, new_share =", "new_share, share ="),
    Mutant("not divided", "shares not divided", "the shares do not add up to 1: exp(its log_sum - the total)", 1)
    .edit("share, new_share =", "largest = torch.maximum(log_sum, new_log_sum)\nshare, new_share =")
    .edit("- total).exp()", "- largest).exp()", times=2),
    Mutant("not rescaled", "first mean not rescaled", "the first mean keeps its weight, though keys are added", 1).edit(
        "share[..., None] * mean", "mean"
    ),
    Mutant(
        "max left out", "maximum not added back", "the larger log_sum was subtracted, for exp, and never added back", 1
    ).edit("* new, total", "* new, torch.log1p((log_sum - new_log_sum).abs().neg().exp())"),
    Mutant(
        "by ratio", "nothing visible", "where one log_sum is -inf, its share is 0 and the other one counts alone", 1
    ).body("""
        ratio = (new_log_sum - log_sum).exp()
        return (mean + ratio[..., None] * new) / (1 + ratio)[..., None], log_sum + (1 + ratio).log()
    """),
    Mutant("plain sum", "plain sum", "both means are added; weights must add up to 1 over all keys", 1).edit(
        _SUM, "mean + new"
    ),
    Mutant(
        "second not rescaled", "second mean not rescaled", "the second mean keeps its weight, though it joins others", 1
    ).edit("new_share[..., None] * new", "new"),
    Mutant("old log_sum", "old log_sum", "the log_sum is that of the first part alone", 1).edit(
        "* new, total", "* new, log_sum"
    ),
    Mutant("new log_sum", "new log_sum", "the log_sum is that of the second part alone", 1).edit(
        "* new, total", "* new, new_log_sum"
    ),
    Mutant(
        "no logarithm", "no logarithm", "the log_sum is the sum itself, which overflows; keep its logarithm", 1
    ).edit("* new, total", "* new, total.exp()"),
    Mutant("in place", "changed argument", "work on a copy", 1, 40).edit(
        f"return {_SUM}", "return mean.mul_(share[..., None]).add_(new_share[..., None] * new)"
    ),
    Mutant("base 2", "base 2", "it adds up powers of 2 (logaddexp2); log_sum is of exp", 1).edit(
        "torch.logaddexp(", "torch.logaddexp2("
    ),
    Mutant("larger alone", "larger alone", "it takes the mean with the larger log_sum alone", 1).edit(
        "share, new_share = (log_sum - total).exp(), (new_log_sum - total).exp()",
        "share, new_share = (log_sum >= new_log_sum).to(mean.dtype), (log_sum < new_log_sum).to(mean.dtype)",
    ),
    Mutant("exp first", "overflow", "exp of hundreds is infinite: subtract the larger log_sum, or use logaddexp", 1)
    .edit("torch.logaddexp(log_sum, new_log_sum)", "(log_sum.exp() + new_log_sum.exp()).log()")
    .edit(
        "(log_sum - total).exp(), (new_log_sum - total).exp()",
        "log_sum.exp() / total.exp(), new_log_sum.exp() / total.exp()",
    ),
)
WRONG_ZIGZAG = (
    Mutant(
        "straight",
        "uneven work",
        "the last rank's queries see the most keys, and all wait for it: give a rank an early chunk and a late one",
        1,
    ).edit("(rank, late)", "(2 * rank, 2 * rank + 1)"),
    Mutant(
        "stripes",
        "stripes",
        "in stripes the work is nearly even, but the mask cuts every block; whole chunks are seen in full, or not at "
        "all",
        1,
    ).body("return torch.arange(rank, length, num_ranks)"),
    Mutant(
        "r and n + r", "uneven work", "who has the earliest chunk needs the latest: chunks r and 2n - 1 - r", 1
    ).edit("2 * num_ranks - 1 - rank", "num_ranks + rank"),
    Mutant(
        "late first",
        "not ascending",
        "the positions are right, in the order late, early; ascending, its own part is an ordinary causal attention",
        1,
    ).edit("(rank, late)", "(late, rank)"),
    Mutant(
        "2n - r", "positions lost", "a chunk is on no rank, and one twice on rank 0: rank r has r and 2n - 1 - r", 1
    ).edit("2 * num_ranks - 1 - rank", "(2 * num_ranks - rank) % (2 * num_ranks)"),
    Mutant("other rank's", "other order", "even work, but chunks r and 2n - 1 - r were asked for rank r", 1).edit(
        "(rank, late)", "(num_ranks - 1 - rank, num_ranks + rank)"
    ),
    Mutant(
        "two late", "positions lost", "one chunk is on no rank, the last on all: rank r has r and 2n - 1 - r", 1
    ).edit("2 * num_ranks - 1 - rank", "2 * num_ranks - 1"),
    Mutant("a list", "returned", "expected a int64 tensor", 1).edit(
        "torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in (rank, late)])",
        "[place for chunk in (rank, late) for place in range(chunk * size, (chunk + 1) * size)]",
    ),
    Mutant("n chunks", "n chunks", "it cuts n chunks: with two of them a rank has twice its part; cut 2n", 1)
    .edit("(2 * num_ranks)", "num_ranks")
    .edit("late = 2 * num_ranks", "late = num_ranks"),
)
