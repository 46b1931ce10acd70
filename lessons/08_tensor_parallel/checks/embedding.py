"""An embedding that is cut by tokens, and the bug in it: a vocabulary that the ranks do not divide."""

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
    HIDDEN,
    TWO_SUMS,
    backward,
    is_times,
    part,
    plain,
    reduce_bytes,
)
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import calls, over_budget, sent_line
from distlab.grading.diagnosis.values import compare, same, seeded

TOKENS = 11


def embedding() -> Tensor:
    """Return all rows of an embedding."""
    return seeded(-1, TOKENS, HIDDEN, purpose="embedding")


def token_batch() -> Tensor:
    """Return tokens, each at least once."""
    return (torch.arange(2 * TOKENS) * 7 % TOKENS).view(2, TOKENS)


def embed_gradient() -> Tensor:
    """Return the gradient of what comes out."""
    return seeded(-1, 2, TOKENS, HIDDEN, purpose="gradient of embed")


def drive_embed(fn: Callable[[Tensor, Tensor, int], Any]) -> dict[str, Any]:
    """Look tokens up and go back; rows beyond the vocabulary hold FILLING."""
    n = dist.get_world_size()
    width = -(-TOKENS // n)
    rows = F.pad(embedding(), (0, 0, 0, width * n - TOKENS), value=FILLING)
    own = part(rows)
    out = fn(token_batch(), own, TOKENS)
    value = plain(out)
    went = backward(out, embed_gradient())
    return {"out": value, "went": went, "grad": plain(own.grad)}


def judge_embed(evidence: Evidence) -> Iterator[Fault]:
    """Every token's row, also in an odd vocabulary; gradients of the own rows."""
    n = evidence.world_size
    full = embedding().requires_grad_()
    want = F.embedding(token_batch(), full)
    (grad,) = torch.autograd.grad(want, full, embed_gradient())
    width = -(-TOKENS // n)
    wanted = F.pad(grad, (0, 0, 0, width * n - TOKENS)).split(width)
    for rank, result in enumerate(evidence.results):
        yield from found(_judge_embedded(result["out"], want.detach(), rank, n))
        if not result["went"] or result["grad"] is None:
            yield Fault("graph cut", f"rank {rank}: the output: {CUT}; g (reduce_from_ranks) sums and can go back")
        if is_times(result["grad"], wanted[rank], n):
            text = f"rank {rank}: the embedding's gradient is {n} times what it should be: behind the sum every rank"
            yield Fault("gradient t times", f"{text} has all of it; a sum in backward counts it {n} times")
        if n > 1 and same(result["grad"], torch.stack(wanted).sum(0)):
            text = f"rank {rank}: the gradients of all ranks' rows are added up, but each rank has rows of its own"
            yield Fault("rows mixed", f"{text}: f is for what every rank holds")
        yield from found(compare(result["grad"], wanted[rank], f"rank {rank}'s gradient", n))
    fault = over_budget(evidence, reduce_bytes(DOUBLE * want.numel(), n), "one all-reduce of the output")
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: rows or copies of the output are gathered; each rank looks up its own, and the sum"
        yield Fault("gathered", f"{text} of all is right")
    yield from found(fault)


def _judge_embedded(got: Any, want: Tensor, rank: int, n: int) -> Fault | None:
    fault = compare(got, want, f"rank {rank}'s output", n)
    if fault is None or not isinstance(got, Tensor) or got.shape != want.shape:
        return fault
    tokens, width = token_batch(), -(-TOKENS // n)
    right = (got - want).abs().amax(-1) < 1e-9
    if not right.any() or n == 1:
        return _unmasked(got, want, n) or fault
    wrong = sorted(set(tokens[~right].tolist()))
    lost = sorted(set(tokens[(got == 0).all(-1)].tolist()))
    floor = TOKENS // n
    if floor != width and wrong and min(wrong) >= floor and all(token < floor for token in tokens[right].tolist()):
        text = f"tokens {wrong} come out wrong, from {floor} on: {TOKENS} tokens over {n} ranks were taken for"
        text += f" {floor} a rank, but a rank has {width} rows. Round up: -(-{TOKENS} // {n})"
        return Fault("vocabulary not divisible", text)
    if lost and all(token // width == lost[0] // width for token in lost):
        return Fault("not summed", f"rank {rank} has zeros for tokens {lost}, whose rows lie on another rank")
    here = sorted({token for token in tokens.flatten().tolist() if token // width == rank})
    if lost and set(lost).isdisjoint(here):
        text = f"rank {rank} has zeros for tokens {lost}, whose rows lie on other ranks: sum over ranks"
        return Fault("not summed", text)
    return _unmasked(got, want, n) or fault


def _unmasked(got: Tensor, want: Tensor, n: int) -> Fault | None:
    tokens, width = token_batch(), -(-TOKENS // n)
    rows = F.pad(embedding(), (0, 0, 0, width * n - TOKENS), value=FILLING).split(width)
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
    wanted = reduce_bytes(DOUBLE * embed_gradient().numel(), evidence.world_size)
    return [sent_line(evidence, wanted, "one all-reduce of the output")]


WRONG_EMBEDDINGS = (
    Mutant("rounded down", "vocabulary not divisible", "Round up", 2, 37).edit(
        "-(-vocab_size // dist.get_world_size())", "vocab_size // dist.get_world_size()"
    ),
    Mutant("unmasked", "others' tokens", "must add zeros", 3).without(" * here.unsqueeze(-1)"),
    Mutant("alone", "not summed", "lie on", 2).edit("reduce_from_ranks(x)", "x"),
    Mutant("cut", "graph cut", "it has no history", 2, 32).edit("(x)", "(x.detach())"),
    Mutant("rows mixed", "rows mixed", "rows of its own", 2).edit("weight) *", "copy_to_ranks(weight)) *"),
    Mutant("two sums", "gradient t times", "counts it 2 times", 2, 33).setup(TWO_SUMS),
)
