"""Weights of uneven batches: ranks have different numbers of micro-batches and tokens, and one rank has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from distlab_lesson_03.checks.accumulation import listed
from distlab_lesson_03.checks.shared import told
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.traffic import calls
from distlab.grading.diagnosis.values import describe

TOKENS = ([5, 2, 9], [3], [], [7, 4])  # of each rank's micro-batches; rank 2 has run out of data


def drive_tokens(fn: Callable[[list[int]], Any]) -> dict[str, Any]:
    """Give every rank its own numbers of tokens."""
    given = list(TOKENS[dist.get_rank()])
    return {"weights": fn(given), "left": given}


def judge_tokens(evidence: Evidence) -> Iterator[Fault]:
    """Weights must make every token of all ranks count the same, for one small all-reduce."""
    world_size = evidence.world_size
    counts = TOKENS[:world_size]
    total, parts = sum(map(sum, counts)), sum(map(len, counts))
    for rank, (result, own) in enumerate(zip(evidence.results, counts, strict=True)):
        got = result["weights"]
        if result["left"] != own:
            yield Fault("changed argument", f"rank {rank} changed the list that it was given to {result['left']}")
        numbers = isinstance(got, list | tuple) and all(isinstance(w, int | float | Tensor) for w in got)
        if not numbers or len(got) != len(own):
            text = f"rank {rank} got {describe(got)} for the tokens {own}"
            yield Fault("returned", f"{text}; expected a list of {len(own)} numbers")
        want = [count * world_size / total for count in own]
        if not _close(got, want):
            who = f"rank {rank}: tokens {own}"
            yield _wrong_weights([float(w) for w in got], own, (world_size, total, parts), who)
    for rank in evidence.records.ranks:
        made = calls(evidence, rank)
        if len(made) > 1:
            text = f"right weights, but rank {rank} made {len(made)} calls"
            yield Fault("too many calls", f"{text} where one all_reduce of one number is enough")


def _close(got: Sequence[Any], want: Sequence[float]) -> bool:
    return all(abs(float(g) - w) <= 1e-6 * abs(w) for g, w in zip(got, want, strict=True))


def _wrong_weights(got: list[float], own: list[int], world: tuple[int, int, int], who: str) -> Fault:
    world_size, total, parts = world
    want = [count * world_size / total for count in own]
    text = f"{who} got the weights {_rounded(got)}, expected {_rounded(want)}"
    if world_size > 1 and _close(got, [count / total for count in own]):
        return Fault("divided twice", f"{text}: {world_size}x too small; the mean over ranks divides by it once more")
    for each in (1 / len(own), world_size / parts, 1.0):
        if _close(got, [each] * len(own)):
            why = "every micro-batch counts the same, so a token in a short one counts for more"
            return Fault("mean of means", f"{text}: {why}; weight by tokens")
    if world_size > 1 and _close(got, [count / sum(own) for count in own]):
        why = f"divided by this rank's own {sum(own)} tokens"
        return Fault("own tokens only", f"{text}: {why}, where all ranks together have {total}; all_reduce the sum")
    if world_size > 1 and _close(got, [count * world_size / sum(own) for count in own]):
        why = f"{world_size} ranks, but only this rank's own {sum(own)} tokens"
        return Fault("own tokens only", f"{text}: {why}, where all ranks together have {total}; all_reduce the sum")
    return Fault("weights", f"{text} = tokens x {world_size} ranks / {total} tokens of all ranks")


def _rounded(weights: Sequence[float]) -> str:
    return "[" + ", ".join(f"{weight:.3g}" for weight in weights) + "]"


def tokens_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a hang or a mismatch that comes from ranks with different numbers of micro-batches."""
    text = str(error)
    if "do not make the same call" in text and "float32[" in text and "int64[" in text:
        cause = "torch.tensor([]) is float32, and the other ranks' whole numbers are int64: all must send one dtype"
        return Fault("dtypes differ", f"{cause}; torch.tensor(sum(num_tokens)) is int64 everywhere.\n{told(text)}")
    if "do not make the same call" in text and re.search(r"\b(int|float)\d+\[[2-9]", text):
        cause = "each rank sends a list as long as its own, and all must send the same shape"
        return Fault("a list each", f"{cause}: add up first, then all_reduce one number.\n{told(text)}")
    if not ("do not make the same call" in text or "has returned without it" in text or "deadlock" in text):
        return None
    counts = [len(own) for own in TOKENS[:world_size]]
    if 0 in counts:
        cause = f"rank {counts.index(0)} has no micro-batch left and makes no call, and the others wait for it"
        return Fault("rank without data", f"{cause}: a rank without data must all_reduce its 0.\n{told(text)}")
    cause = f"ranks have {listed(counts)} micro-batches; a call for each is a different number of calls on each rank"
    return Fault("a call each", f"{cause}: add up first, then call once.\n{told(text)}")


_RETURN = "[count * dist.get_world_size() / int(total) for count in num_tokens]"
WRONG_WEIGHTS = (
    Mutant("mean of means", "mean of means", "a token in a short one counts for more", 1, 22).edit(
        _RETURN, "[1 / len(num_tokens) for _ in num_tokens]"
    ),
    Mutant("own tokens", "own tokens only", "where all ranks together have 19", 2, 23).body(
        "return [count / sum(num_tokens) for count in num_tokens]"
    ),
    Mutant("no world_size", "divided twice", "the mean over ranks divides by it", 3, 63).without(
        " * dist.get_world_size()"
    ),
    Mutant("a call each", "a call each", "add up first, then call once", 2, 5).edit(
        """
        total = torch.tensor(sum(num_tokens))
        dist.all_reduce(total)
        """,
        """
        total = 0
        for count in num_tokens:
            everywhere = torch.tensor(count)
            dist.all_reduce(everywhere)
            total += int(everywhere)
        """,
    ),
    Mutant("empty stays away", "rank without data", "must all_reduce its 0", 3, 5).edit(
        "total = torch", "if not num_tokens:\n    return []\ntotal = torch"
    ),
    Mutant("micro-batches counted", "mean of means", "weight by tokens", 4, 23)
    .edit("sum(num_tokens)", "len(num_tokens)")
    .edit("count * dist", "dist")
    .edit("for count in", "for _ in"),
)
