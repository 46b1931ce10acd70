"""Name what is wrong with a loss over a vocabulary that nobody holds whole, and with an embedding cut by tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from distlab_lesson_08 import cases
from distlab_lesson_08.judges import CUT, DOUBLE, is_times, reduce_bytes, same
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes, over_budget, sent_line
from distlab.grading.values import compare, describe


def entropy_bytes(n: int) -> float:
    """Return what the largest, the sum and the target's score of each position cost, in all cases together."""
    return len(cases.ENTROPY_CASES) * reduce_bytes(3 * DOUBLE * cases.NUM_TARGETS, n)


def judge_entropy(evidence: Evidence) -> Iterator[Fault]:
    """The loss and the own columns' gradient of the whole vocabulary, from three numbers a position."""
    n = evidence.world_size
    for place, (vocab_size, is_large) in enumerate(cases.ENTROPY_CASES):
        logits = cases.scores(vocab_size, is_large).requires_grad_()
        targets = cases.targets_of(vocab_size)
        loss = F.cross_entropy(logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None, "it took part"
        width = -(-vocab_size // n)
        wanted = F.pad(logits.grad, (0, width * n - vocab_size)).split(width, 1)
        for rank, result in enumerate(evidence.results):
            what = f"{vocab_size} tokens{', large scores' if is_large else ''}: rank {rank}"
            fault = _judge_loss(result[place]["out"], loss.detach(), (vocab_size, is_large), what, n)
            fault = fault or _judge_gradient(result[place], wanted[rank], what, n)
            if fault is not None:
                yield fault
                return
    fault = over_budget(evidence, entropy_bytes(n), "three numbers a position", slack=0.05)
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: all scores travel, and every rank holds [N, V] again"
        fault = Fault("logits gathered", f"{text}; exchange the largest, the sum of exponentials, the target's score")
    if fault is not None:
        yield fault


def _judge_loss(got: Any, want: Tensor, case: tuple[int, bool], what: str, n: int) -> Fault | None:
    if not isinstance(got, Tensor) or got.numel() != 1:
        return Fault("returned", f"{what}: expected the mean loss, a tensor of one number, got {describe(got)}")
    if not got.isfinite().all():
        text = f"{what}'s loss is {float(got)}: exp of a large score is beyond the largest number"
        return Fault("overflow", f"{text}; subtract the largest score of the position, over all ranks, first")
    if same(got.view(()), want):
        return None
    logits, targets = cases.scores(*case), cases.targets_of(case[0])
    width = -(-case[0] // n)
    filled = F.pad(logits, (0, width * n - case[0]), value=cases.FILLING)
    for code, (value, words) in _wrong_losses(logits, filled, targets, n).items():
        if bool(value.isfinite()) and same(got.view(()), value):
            return Fault(code.strip(), f"{what}'s loss is {float(got):.6g}, expected {float(want):.6g}: {words}")
    return compare(got.view(()), want, f"{what}'s loss", n)


def _wrong_losses(logits: Tensor, filled: Tensor, targets: Tensor, n: int) -> dict[str, tuple[Tensor, str]]:
    parts, width = filled.chunk(n, 1), filled.shape[1] // n
    real = [part.masked_fill(torch.arange(r * width, (r + 1) * width) >= logits.shape[1], -torch.inf)
            for r, part in enumerate(parts)]  # fmt: skip
    totals = torch.stack([(part - part.amax(1, keepdim=True)).exp().sum(1) for part in real]).nan_to_num().sum(0)
    largest = logits.amax(1)
    picked = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    index = [(targets - r * width).clamp(0, width - 1).unsqueeze(1) for r in range(n)]
    zero = [(targets - r * width).where((targets >= r * width) & (targets < (r + 1) * width), 0).unsqueeze(1)
            for r in range(n)]  # fmt: skip
    each = [sum(part.gather(1, one).squeeze(1) for part, one in zip(real, where, strict=True))
            for where in (index, zero)]  # fmt: skip
    entropy = logits.exp().sum(1).log()
    words = "every rank adds a score for each target, also for those that are another rank's"
    others = "others' targets"
    found = {
        "padding counted": (
            F.cross_entropy(filled, targets),
            f"the {filled.shape[1] - logits.shape[1]} columns beyond the vocabulary got a share of the probability; set"
            " them to -inf before anything else",
        ),
        "own maximum": (
            (totals.log() + largest - picked).mean(),
            "each rank subtracted its own largest score, so their exponentials are on different scales; all_reduce"
            " the largest with MAX",
        ),
        "summed over positions": (F.cross_entropy(logits, targets, reduction="sum"), "take the mean over positions"),
    }
    for number, value in enumerate(each):
        found[f"{others}{number * ' '}"] = ((entropy - value).mean(), f"{words}: mask what is not here with 0")
    for r in range(n):
        own = picked * (targets // width == r)
        found[f"target not summed{r * ' '}"] = (
            (entropy - own).mean(),
            "where a rank does not hold the target, it leaves out its score; sum the targets' scores over ranks (g)",
        )
    return found


def _judge_gradient(row: dict[str, Any], want: Tensor, what: str, n: int) -> Fault | None:
    if not row["went"] or row["grad"] is None:
        return Fault("graph cut", f"{what}: the loss: {CUT}; g (reduce_from_ranks) sums and can go back")
    if is_times(row["grad"], want, n):
        text = f"{what}'s gradient is {n} times what it should be: every rank's loss is the whole loss, and a sum in"
        return Fault("gradient t times", f"{text} backward counts all {n} of them; g's backward hands it on as it is")
    fault = compare(row["grad"], want, f"{what}'s gradient", n)
    if fault is None:
        return None
    at_targets = (want < 0).to(want.dtype) / cases.NUM_TARGETS  # a share less 1 is below zero; all others are shares
    for part, left in (("sum of exponentials", -at_targets), ("target's score", want + at_targets)):
        if bool(at_targets.any()) and same(row["grad"], left):
            return Fault("half a graph", f"{what}: no gradient comes through the {part}: in it, {CUT}; use g")
    return fault


def budget_entropy(evidence: Evidence) -> list[str]:
    """Say what was sent beside what gathering costs."""
    n = evidence.world_size
    whole = (n - 1) / n * DOUBLE * cases.NUM_TARGETS * 2 * sum(cases.VOCABULARIES)
    wanted = entropy_bytes(n)
    return [sent_line(evidence, wanted, "three numbers a position"), f"the scores would be {in_megabytes(whole)}"]


def judge_embed(evidence: Evidence) -> Iterator[Fault]:
    """Every token's row, also in an odd vocabulary; gradients of the own rows."""
    n = evidence.world_size
    full = cases.embedding().requires_grad_()
    want = F.embedding(cases.token_batch(), full)
    want.backward(cases.embed_gradient())  # type: ignore[no-untyped-call]
    assert full.grad is not None, "it took part"
    width = -(-cases.TOKENS // n)
    wanted = F.pad(full.grad, (0, 0, 0, width * n - cases.TOKENS)).split(width)
    for rank, result in enumerate(evidence.results):
        fault = _judge_embedded(result["out"], want.detach(), rank, n)
        if fault is None and (not result["went"] or result["grad"] is None):
            fault = Fault("graph cut", f"rank {rank}: the output: {CUT}; g (reduce_from_ranks) sums and can go back")
        if fault is None and is_times(result["grad"], wanted[rank], n):
            text = f"rank {rank}: the embedding's gradient is {n} times what it should be: behind the sum every rank"
            fault = Fault("gradient t times", f"{text} has all of it; a sum in backward counts it {n} times")
        if fault is None and n > 1 and same(result["grad"], torch.stack(wanted).sum(0)):
            text = f"rank {rank}: the gradients of all ranks' rows are added up, but each rank has rows of its own"
            fault = Fault("rows mixed", f"{text}: f is for what every rank holds")
        fault = fault or compare(result["grad"], wanted[rank], f"rank {rank}'s gradient", n)
        if fault is not None:
            yield fault
            return
    wanted_bytes = reduce_bytes(DOUBLE * want.numel(), n)
    fault = over_budget(evidence, wanted_bytes, "one all-reduce of the output")
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: rows or copies of the output are gathered; each rank looks up its own, and the sum"
        fault = Fault("gathered", f"{text} of all is right")
    if fault is not None:
        yield fault


def _judge_embedded(got: Any, want: Tensor, rank: int, n: int) -> Fault | None:
    fault = compare(got, want, f"rank {rank}'s output", n)
    if fault is None or not isinstance(got, Tensor) or got.shape != want.shape:
        return fault
    tokens, width = cases.token_batch(), -(-cases.TOKENS // n)
    right = (got - want).abs().amax(-1) < 1e-9
    if not right.any() or n == 1:
        return _unmasked(got, want, n) or fault
    wrong = sorted(set(tokens[~right].tolist()))
    lost = sorted(set(tokens[(got == 0).all(-1)].tolist()))
    floor = cases.TOKENS // n
    if floor != width and wrong and min(wrong) >= floor and all(token < floor for token in tokens[right].tolist()):
        text = f"tokens {wrong} come out wrong, from {floor} on: {cases.TOKENS} tokens over {n} ranks were taken for"
        text += f" {floor} a rank, but a rank has {width} rows. Round up: -(-{cases.TOKENS} // {n})"
        return Fault("vocabulary not divisible", text)
    if lost and all(token // width == lost[0] // width for token in lost):
        return Fault("not summed", f"rank {rank} has zeros for tokens {lost}, whose rows lie on another rank")
    here = sorted({token for token in tokens.flatten().tolist() if token // width == rank})
    if lost and set(lost).isdisjoint(here):
        text = f"rank {rank} has zeros for tokens {lost}, whose rows lie on other ranks: sum over ranks"
        return Fault("not summed", text)
    return _unmasked(got, want, n) or fault


def _unmasked(got: Tensor, want: Tensor, n: int) -> Fault | None:
    tokens, width = cases.token_batch(), -(-cases.TOKENS // n)
    rows = F.pad(cases.embedding(), (0, 0, 0, width * n - cases.TOKENS), value=cases.FILLING).split(width)
    zeroed, clamped, wrapped = want.clone(), torch.zeros_like(want), torch.zeros_like(want)
    for rank, own in enumerate(rows):
        index = tokens - rank * width
        outside = (index < 0) | (index >= width)
        zeroed += own[0] * outside.unsqueeze(-1)
        clamped += F.embedding(index.clamp(0, width - 1), own)
        wrapped += F.embedding(index % width, own)
    if any(same(got, wrong) for wrong in (zeroed, clamped, wrapped)):
        text = f"to each token's row {n - 1} rows of other tokens were added: a rank that does not hold a token"
        return Fault("others' tokens", f"{text} must add zeros; multiply by `here`")
    return None


def budget_embed(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = reduce_bytes(DOUBLE * cases.embed_gradient().numel(), evidence.world_size)
    return [sent_line(evidence, wanted, "one all-reduce of the output")]
