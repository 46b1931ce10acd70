"""The loss over a vocabulary that no rank holds whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from distlab_lesson_08.checks.shared import CUT, DOUBLE, FILLING, JOIN, TWO_SUMS, reduce_bytes, there_and_back
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, in_megabytes, over_budget, sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Fault, Mutant

VOCABULARIES = (41, 5)  # odd; with 4 ranks and 5 tokens, rank 3 has none
LARGE = 800.0  # scores for which exp overflows
NUM_TARGETS = 10
NUM_CASES = 2 * len(VOCABULARIES)


def _scores(vocab_size: int, is_large: bool) -> Tensor:
    """Return the scores of all tokens; large ones lie on the last token, so that ranks' own maxima differ.

    Every second position has scores that are LARGE smaller, so that no number serves as the largest of two positions.
    """
    scores = 2 * seeded(-1, NUM_TARGETS, vocab_size, purpose=f"scores {vocab_size}")
    if not is_large:
        return scores
    smaller = LARGE * (torch.arange(NUM_TARGETS, dtype=torch.float64) % 2)[:, None]
    return scores + LARGE * torch.linspace(0.9, 1.0, vocab_size, dtype=torch.float64) - smaller


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Make a rank's columns, those beyond the vocabulary filled up; the first and the last token are targets."""
    cases = {}
    for words in ("", ", large scores"):
        for size in VOCABULARIES:
            filled = F.pad(_scores(size, bool(words)), (0, -size % n), value=FILLING)
            targets = torch.arange(NUM_TARGETS) * (size - 1) // (NUM_TARGETS - 1)
            own = filled.chunk(n, 1)[rank].contiguous()
            cases[f"{size} tokens{words}"] = own, targets, size, torch.ones((), dtype=torch.float64)
    return cases


def use_entropy(
    fn: Callable[..., Any], logits: Tensor, targets: Tensor, vocab_size: int, grad: Tensor
) -> dict[str, Any]:
    """Return the loss and the gradient of the own scores, for some gradient of the loss."""
    return there_and_back(lambda logits: fn(logits, targets, vocab_size), "the loss", grad, logits=logits)


drive_cross_entropy = Cases(_cases, use_entropy, most_bytes=0)


def _wanted_bytes(n: int) -> float:
    return NUM_CASES * reduce_bytes(3 * DOUBLE * NUM_TARGETS, n)


def judge_cross_entropy(evidence: Evidence) -> Iterator[Fault]:
    """Three numbers per position travel; an all-gather of them will do as well."""
    n = evidence.world_size
    fault = over_budget(evidence, max(1, n / 2) * _wanted_bytes(n), "three numbers per position", slack=0.05)
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: scores travel, so that every rank holds [N, V] again"
        yield Fault("logits gathered", f"{text}; exchange the largest, the sum of exponentials, the target's score")
    yield from filter(None, [fault])


def budget_cross_entropy(evidence: Evidence) -> list[str]:
    """Say what was sent, and what gathering would cost."""
    n = evidence.world_size
    whole = (n - 1) / n * DOUBLE * NUM_TARGETS * 2 * sum(VOCABULARIES)
    return [
        sent_line(evidence, _wanted_bytes(n), "three numbers per position"),
        f"the scores would be {in_megabytes(whole)}",
    ]


_MAXIMUM = "dist.all_reduce(largest, dist.ReduceOp.MAX)"
_OTHERS = "a rank adds a score for targets that are a different rank's: mask what is not here with 0"
_OWN, _EXP = "reduce_from_ranks(own)", ".exp().sum(1))"

WRONG_CROSS_ENTROPY = (
    Mutant(
        "padding",
        "padding counted",
        "columns beyond the vocabulary got a share of the probability; set them to -inf before anything else",
        2,
        37,
    ).edit("(beyond, -torch.inf)", "(beyond, 3.0)"),
    Mutant(
        "zero padding", "padding counted", "columns beyond the vocabulary count as exp(0) = 1; set them to -inf", 2, 37
    ).edit("(beyond, -torch.inf)", "(beyond, 0.0)"),
    Mutant(
        "own maximum",
        "own maximum",
        "each rank subtracted its own largest score: different scales are added; all_reduce the largest with MAX",
        2,
    )
    .without(_MAXIMUM)
    .edit("here = (targets", f"{_MAXIMUM}\nhere = (targets"),
    Mutant(
        "own maximum twice", "own maximum", "each rank's largest score is its own: all_reduce it with MAX", 2
    ).without(_MAXIMUM),
    Mutant(
        "largest summed", "own maximum", "the ranks' largest scores are added up: all_reduce with ReduceOp.MAX", 2
    ).edit(_MAXIMUM, "dist.all_reduce(largest)"),
    Mutant(
        "largest forgotten", "largest not added", "the largest was subtracted before exp: add it to the logarithm"
    ).edit("total.log() + largest -", "total.log() -"),
    Mutant("unmasked", "others' targets", _OTHERS, 2).without(".masked_fill(~here, 0.0)"),
    Mutant("clamped", "others' targets", _OTHERS, 2)
    .without(".masked_fill(~here, 0.0)")
    .edit(".where(here, 0)", ".clamp(0, width - 1)"),
    Mutant("no maximum", "overflow", "exp of a large score is infinite: subtract the largest of each position").edit(
        "logits.detach().amax(1)", "torch.zeros_like(logits[:, 0])"
    ),
    Mutant("one largest for all", "underflow", "exp is 0 in some position: take the largest of each position").edit(
        "amax(1)", "amax().repeat(len(logits))"
    ),
    Mutant("summed", "summed over positions", "the loss is summed over positions: take the mean").edit(
        ").mean()", ").sum()"
    ),
    Mutant("gathered", "logits gathered", "scores travel", 2)
    .setup(JOIN)
    .body("return F.cross_entropy(Join.apply(logits)[:, :vocab_size], targets)"),
    Mutant("two sums", "gradient t times", "a sum in backward counts every rank's loss: g's hands it on", 2, 33).setup(
        TWO_SUMS
    ),
    Mutant("plain call", "half a graph", f"through the sum of exponentials {CUT}; use g", 1, 32).edit(
        _EXP, ".exp().sum(1).detach())"
    ),
    Mutant("plain target", "half a graph", f"through the target's score {CUT}; use g", 1, 32).edit(
        _OWN, "reduce_from_ranks(own.detach())"
    ),
    Mutant("cut", "graph cut", f"{CUT}; use g (reduce_from_ranks)", 1, 32).edit(
        "logits.masked_fill(beyond", "logits.detach().masked_fill(beyond"
    ),
    Mutant(
        "own targets", "target not summed", "only the rank of a target has its score: sum it over ranks (g)", 2
    ).edit(_OWN, "own"),
    Mutant(
        "own exponentials",
        "sum of its own columns",
        "exponentials of own columns are summed alone: sum over ranks (g)",
        2,
    ).edit("reduce_from_ranks((logits", "((logits"),
    Mutant("bits", "in bits", "it divides by log 2 somewhere; nats are asked, the natural logarithm").edit(
        "(total.log() + largest", "(total.log2() + largest"
    ),
    Mutant("ten positions", "values", "the loss").edit(").mean()", ").sum() / 10"),
    Mutant("own losses", "own losses", "a loss over own columns alone: exponentials are summed over all ranks", 2)
    .edit(
        "reduce_from_ranks((logits - largest.unsqueeze(1)).exp().sum(1))",
        "(logits - largest.unsqueeze(1)).exp().sum(1)",
    )
    .edit(
        "(total.log() + largest - reduce_from_ranks(own)).mean()",
        "reduce_from_ranks((total.log() + largest - own) * here).mean()",
    ),
)
