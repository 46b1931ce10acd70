"""An embedding that is cut by tokens, and the bug in it: a vocabulary that the ranks do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from distlab_lesson_08.checks.shared import CUT, DOUBLE, FILLING, HIDDEN, TWO_SUMS, reduce_bytes, there_and_back
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

TOKENS = 11


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    """Make tokens, each at least once, and a rank's rows; those beyond the vocabulary hold FILLING."""
    rows = F.pad(seeded(-1, TOKENS, HIDDEN, purpose="embedding"), (0, 0, 0, -TOKENS % n), value=FILLING)
    tokens = (torch.arange(2 * TOKENS) * 7 % TOKENS).view(2, TOKENS)
    grad = seeded(-1, 2, TOKENS, HIDDEN, purpose="gradient of embed")
    return {f"{TOKENS} tokens": (tokens, rows.chunk(n)[rank].clone(), TOKENS, grad)}


def use_embed(fn: Callable[..., Any], tokens: Tensor, weight: Tensor, vocab_size: int, grad: Tensor) -> dict[str, Any]:
    """Return the embedded tokens and the gradient of the own rows."""
    return there_and_back(lambda weight: fn(tokens, weight, vocab_size), "the output", grad, weight=weight)


drive_repair = Cases(_cases, use_embed, needs="one all-reduce of the output")


def budget_repair(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = reduce_bytes(2 * DOUBLE * TOKENS * HIDDEN, evidence.world_size)
    return [sent_line(evidence, wanted, "one all-reduce of the output")]


_OTHERS = "rows of other tokens are added: a rank that does not hold a token must add zeros; multiply by `here`"

WRONG_REPAIR = (
    Mutant(
        "rounded down",
        "vocabulary not divisible",
        "V // t tokens were taken for a rank's, but it has ceil(V/t) rows. Round up: -(-vocab_size // t)",
        2,
        37,
    ).edit("-(-vocab_size // dist.get_world_size())", "vocab_size // dist.get_world_size()"),
    Mutant("unmasked", "others' tokens", _OTHERS, 2).without(" * here.unsqueeze(-1)"),
    Mutant("clamped", "others' tokens", _OTHERS, 2)
    .without(" * here.unsqueeze(-1)")
    .edit("index.where(here, 0)", "index.clamp(0, width - 1)"),
    Mutant("wrapped", "others' tokens", _OTHERS, 2)
    .without(" * here.unsqueeze(-1)")
    .edit("index.where(here, 0)", "index % width"),
    Mutant("alone", "not summed", "tokens whose rows lie on other ranks are zeros: sum over ranks", 2).edit(
        "reduce_from_ranks(x)", "x"
    ),
    Mutant("cut", "graph cut", f"{CUT}; g (reduce_from_ranks) sums and can go back", 1, 32).edit("(x)", "(x.detach())"),
    Mutant(
        "rows mixed", "rows mixed", "all ranks' gradients are added, but each rank has rows of its own: no f", 2
    ).edit("weight) *", "copy_to_ranks(weight)) *"),
    Mutant(
        "two sums", "gradient t times", "every rank has all of the gradient: a sum in backward counts it t times", 2, 33
    ).setup(TWO_SUMS),
    Mutant("gathered", "gathered", "the ranks' outputs are gathered: all_reduce (g) sends less", 3)
    .edit(
        "return reduce_from_ranks(x)",
        """
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x.detach())
        every[dist.get_rank()] = x
        return torch.stack(every).sum(0)
        """,
    )
    .setup("import torch"),
    Mutant("tokens in place", "changed argument", "work on a copy", 2).edit(
        "tokens - dist.get_rank() * width", "tokens.sub_(dist.get_rank() * width)"
    ),
    Mutant("rows as they lie", "raised", "view", seen="one layout").edit(
        "index.where(here, 0)", "index.where(here, 0).view(-1).view(tokens.shape)"
    ),
    Mutant("one more", "one more", "a rank's tokens end before the next rank's first: < and not <=", 2)
    .edit("index < width", "index <= width")
    .edit("index.where(here, 0)", "index.clamp(0, width - 1)"),
)
