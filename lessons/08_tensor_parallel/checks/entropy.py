"""The loss over a vocabulary that no rank holds whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distlab_lesson_08.checks.shared import (
    CUT,
    DOUBLE,
    FILLING,
    JOIN,
    TWO_SUMS,
    backward,
    is_times,
    plain,
    reduce_bytes,
    total,
)
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found, known_mistake
from distlab.grading.diagnosis.traffic import calls, in_megabytes, most_sent, over_budget, sent_line
from distlab.grading.diagnosis.values import compare, describe, same, seeded

VOCABULARIES = (41, 5)  # odd; with 4 ranks and 5 tokens, rank 3 has none
LARGE = 800.0  # scores for which exp overflows
NUM_TARGETS = 10
ENTROPY_CASES = tuple((vocab_size, is_large) for is_large in (False, True) for vocab_size in VOCABULARIES)


def scores(vocab_size: int, is_large: bool) -> Tensor:
    """Return the scores of all tokens; large ones lie on the last token, so that ranks' own maxima differ.

    Every second position has scores that are LARGE smaller, so that no number serves as the largest of two positions.
    """
    found = 2 * seeded(-1, NUM_TARGETS, vocab_size, purpose=f"scores {vocab_size}")
    if not is_large:
        return found
    smaller = LARGE * (torch.arange(NUM_TARGETS, dtype=torch.float64) % 2)[:, None]
    return found + LARGE * torch.linspace(0.9, 1.0, vocab_size, dtype=torch.float64) - smaller


def targets_of(vocab_size: int) -> Tensor:
    """Return targets, the first and the last token among them."""
    return torch.arange(NUM_TARGETS) * (vocab_size - 1) // (NUM_TARGETS - 1)


def own_scores(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a rank's columns; those beyond the vocabulary hold FILLING."""
    width = -(-full.shape[1] // world_size)
    return F.pad(full, (0, width * world_size - full.shape[1]), value=FILLING).split(width, 1)[rank].contiguous()


def drive_entropy(fn: Callable[[Tensor, Tensor, int], Any]) -> list[dict[str, Any]]:
    """Compute the loss and the gradient of the own scores in each case."""
    results = []
    for vocab_size, is_large in ENTROPY_CASES:
        own = own_scores(scores(vocab_size, is_large), dist.get_rank(), dist.get_world_size()).requires_grad_()
        loss = fn(own, targets_of(vocab_size), vocab_size)
        value = plain(loss)
        went = backward(loss, torch.ones((), dtype=torch.float64))
        results.append({"out": value, "went": went, "grad": plain(own.grad)})
    return results


def entropy_bytes(n: int) -> float:
    """Return what the largest, the sum and the target's score of each position cost, in all cases together."""
    return len(ENTROPY_CASES) * reduce_bytes(3 * DOUBLE * NUM_TARGETS, n)


def scores_bytes(n: int) -> float:
    """Return what all scores of all positions cost, in all cases together."""
    return (n - 1) / n * DOUBLE * NUM_TARGETS * 2 * sum(VOCABULARIES)


def judge_entropy(evidence: Evidence) -> Iterator[Fault]:
    """The loss and the own columns' gradient of the whole vocabulary, from three numbers per position."""
    n = evidence.world_size
    for place, (vocab_size, is_large) in enumerate(ENTROPY_CASES):
        logits = scores(vocab_size, is_large).requires_grad_()
        loss = F.cross_entropy(logits, targets_of(vocab_size))
        (grad,) = torch.autograd.grad(loss, logits)
        wanted = F.pad(grad, (0, -vocab_size % n)).chunk(n, 1)
        for rank, result in enumerate(evidence.results):
            what = f"{vocab_size} tokens{', large scores' if is_large else ''}: rank {rank}"
            yield from _judge_loss(result[place]["out"], loss.detach(), (vocab_size, is_large), what, n)
            yield from found(_gradient_fault(result[place], wanted[rank], what, n))
    gathered = entropy_bytes(n) * n / 2  # an all-gather of three numbers per position will do as well
    fault = over_budget(evidence, max(entropy_bytes(n), gathered), "three numbers per position", slack=0.05)
    if fault is not None and calls(evidence, 0, "all_gather") and most_sent(evidence) > 0.4 * scores_bytes(n):
        text = f"{fault.message}: all scores travel, and every rank holds [N, V] again"
        yield Fault("logits gathered", f"{text}; exchange the largest, the sum of exponentials, the target's score")
    yield from found(fault)


def _judge_loss(got: Any, want: Tensor, case: tuple[int, bool], what: str, n: int) -> Iterator[Fault]:
    if not isinstance(got, Tensor) or got.numel() != 1:
        yield Fault("returned", f"{what}: expected the mean loss, a tensor of one number, got {describe(got)}")
    if bool((got == -torch.inf).all()):
        text = f"{what}'s loss is -inf: in some position every exponential came out as 0, so that a larger number than"
        yield Fault(
            "underflow", f"{text} its own largest score was subtracted; take the largest of each position (MAX)"
        )
    if not got.isfinite().all():
        text = f"{what}'s loss is {float(got)}: exp of a large score is beyond the largest number"
        yield Fault("overflow", f"{text}; subtract the largest score of the position, over all ranks, first")
    if fault := compare(got.view(()), want, f"{what}'s loss", n):
        text = f"{what}'s loss is {float(got):.6g}, expected {float(want):.6g}:"
        known = [mistake for mistake in _wrong_losses(*case, n) if mistake[1].isfinite()]
        yield known_mistake(got.view(()), want, known, text) or fault


def _wrong_losses(vocab_size: int, is_large: bool, n: int) -> Iterator[tuple[str, Tensor, str]]:
    """Known mistakes: the loss that each gives, and what to say."""
    logits, targets = scores(vocab_size, is_large), targets_of(vocab_size)
    filled = F.pad(logits, (0, -vocab_size % n), value=FILLING)
    width = filled.shape[1] // n
    real = F.pad(logits, (0, -vocab_size % n), value=-torch.inf).chunk(n, 1)
    totals = torch.stack([(part - part.amax(1, keepdim=True)).exp().sum(1) for part in real]).nan_to_num().sum(0)
    entropy, picked = logits.exp().sum(1).log(), logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    text = f"the {filled.shape[1] - vocab_size} columns beyond the vocabulary got a share of the probability; set them"
    yield "padding counted", F.cross_entropy(filled, targets), f"{text} to -inf before anything else"
    text = "each rank subtracted its own largest score, so their exponentials are on different scales; all_reduce the"
    yield "own maximum", (totals.log() + logits.amax(1) - picked).mean(), f"{text} largest with MAX"
    text = "take the mean over positions"
    yield "summed over positions", F.cross_entropy(logits, targets, reduction="sum"), text
    text = "every rank adds a score for each target, also for those that are another rank's: mask what is not here with"
    index = [targets - rank * width for rank in range(n)]
    zeroed = [one.where((one >= 0) & (one < width), 0) for one in index]
    for places in ([one.clamp(0, width - 1) for one in index], zeroed):
        each = [part.gather(1, one.unsqueeze(1)).squeeze(1) for part, one in zip(real, places, strict=True)]
        yield "others' targets", (entropy - total(each)).mean(), f"{text} 0"
    text = "a rank that does not hold the target leaves out the target's score; sum these scores over ranks (g)"
    for rank in range(n):
        yield "target not summed", (entropy - picked * (targets // width == rank)).mean(), text


def _gradient_fault(row: dict[str, Any], want: Tensor, what: str, n: int) -> Fault | None:
    if not row["went"] or row["grad"] is None:
        return Fault("graph cut", f"{what}: the loss: {CUT}; g (reduce_from_ranks) sums and can go back")
    if is_times(row["grad"], want, n):
        text = f"{what}'s gradient is {n} times what it should be: every rank's loss is the whole loss, and a sum in"
        return Fault("gradient t times", f"{text} backward counts all {n} of them; g's backward hands it on as it is")
    fault = compare(row["grad"], want, f"{what}'s gradient", n)
    if fault is None:
        return None
    at_targets = (want < 0).to(want.dtype) / NUM_TARGETS  # a share less 1 is below zero; all others are shares
    for part, left in (("sum of exponentials", -at_targets), ("target's score", want + at_targets)):
        if bool(at_targets.any()) and same(row["grad"], left):
            return Fault("half a graph", f"{what}: no gradient comes through the {part}: in it, {CUT}; use g")
    return fault


def budget_entropy(evidence: Evidence) -> list[str]:
    """Say what was sent, and what gathering would cost."""
    n = evidence.world_size
    whole = scores_bytes(n)
    wanted = entropy_bytes(n)
    return [sent_line(evidence, wanted, "three numbers per position"), f"the scores would be {in_megabytes(whole)}"]


_MAXIMUM = "dist.all_reduce(largest, dist.ReduceOp.MAX)"

WRONG_ENTROPIES = (
    Mutant("padding", "padding counted", "beyond the vocabulary", 2, 37).edit("(beyond, -torch.inf)", "(beyond, 3.0)"),
    Mutant("own maximum", "own maximum", "different scales", 2)
    .without(_MAXIMUM)
    .edit("here = (targets", f"{_MAXIMUM}\nhere = (targets"),
    Mutant("unmasked", "others' targets", "mask what is not here", 2).without(".masked_fill(~here, 0.0)"),
    Mutant("no maximum", "overflow", "subtract the largest", 1).edit(
        "logits.detach().amax(1)", "torch.zeros_like(logits[:, 0])"
    ),
    Mutant("gathered", "logits gathered", "all scores travel", 2)
    .setup(JOIN)
    .body("return F.cross_entropy(Join.apply(logits)[:, :vocab_size], targets)"),
    Mutant("two sums", "gradient t times", "2 times what it should be", 2, 33).setup(TWO_SUMS),
    Mutant("plain call", "half a graph", "sum of exponentials", 2, 32).edit(
        ".exp().sum(1))", ".exp().sum(1).detach())"
    ),
    Mutant("own targets", "target not summed", "leaves out the target's score", 2).edit(
        "reduce_from_ranks(own)", "own"
    ),
    Mutant("cut", "graph cut", "it has no history", 1, 32).edit(
        "logits.masked_fill(beyond", "logits.detach().masked_fill(beyond"
    ),
)
