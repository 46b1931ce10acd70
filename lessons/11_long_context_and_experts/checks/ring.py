"""Attention round a ring of ranks: masks, merges, whose keys those are, and what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_11.checks.attention import HEADS, SIZE, STEEP
from torch import Tensor

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls, in_megabytes
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Fault, Mutant

PER_RANK = 4  # positions of a rank: two chunks of two
BLOCK_BYTES = 2 * 8 * HEADS * PER_RANK * SIZE  # keys and values in float64


def positions_of(num_ranks: int) -> list[Tensor]:
    """Return the positions of each rank in the ring's cases, in the zig-zag order."""
    if num_ranks == 1:
        return [torch.arange(PER_RANK)]
    chunks = torch.arange(PER_RANK * num_ranks).view(2 * num_ranks, -1)
    return [torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]]) for rank in range(num_ranks)]


def whole_sequence(num_ranks: int, steep: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of the whole sequence [A, S, D]."""
    length = PER_RANK * num_ranks
    query, key, value = (
        seeded(num_ranks, HEADS, length, SIZE, purpose=what) for what in ("query", "ring key", "value")
    )
    return steep * query, key, value


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    scores = (("ordinary scores", 1.0), ("large scores", STEEP))
    placed = positions_of(n)
    return {
        name: (*(part[:, placed[rank]].contiguous() for part in whole_sequence(n, steep)), placed)
        for name, steep in scores
    }


def _use(fn: Callable[..., Any], *arguments: Any) -> Any:
    got = fn(*arguments)
    dist.barrier()
    return got


drive_ring = Cases(_cases, _use, needs="n - 1 hops of keys and values")


def judge_ring(evidence: Evidence) -> Iterator[Fault]:
    """Keys and values go round a ring, to one neighbour."""
    for rank in range(evidence.world_size):
        made = [call for call in calls(evidence, rank) if call.op != "barrier"]
        if others := sorted({call.op for call in made if call.op not in ("send", "recv")}):
            text = f"right result, but rank {rank} called {', '.join(others)}: it holds keys and values of all ranks"
            yield Fault("whole sequence gathered", f"{text} at once, which is what did not fit; hand them round a ring")
        peers = sorted({call.peer for call in made if call.op == "send"})
        if len(peers) > 1:  # either neighbour will do: no direction of the ring is better
            text = f"right result, but rank {rank} sends to ranks {', '.join(map(str, peers))}; in a ring it sends to"
            yield Fault("not a ring", f"{text} one neighbour alone, and hands on what has arrived")


def failure_ring(error: RankError, world_size: int) -> Fault | None:
    """Name sends that wait for each other."""
    text = str(error)
    if "deadlock" in text and "waits in send" in text:
        words = f"all {world_size} ranks wait in send, each for the next to receive: no rank comes to its recv"
        return Fault("blocking sends", f"{words}. Start the send (dist.isend), receive, then wait for the send")
    return None


def budget_ring(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    n = evidence.world_size
    sent = in_megabytes((n - 1) * BLOCK_BYTES)
    return [f"sent {sent} per rank: {n - 1} hops of keys and values, {BLOCK_BYTES} bytes each"]


_MASK, _BLOCK = "mine[:, None] < theirs", "(scores - new_log_sum.clamp(min=lowest)[..., None]).exp() @ held[1]"
_PASS_ON = "leaving = dist.isend(held, (rank + 1) % n)\ndist.recv(arrived, (rank - 1) % n)\nleaving.wait()"
_UNDER_ITS_MAXIMUM = """
    top = scores.amax(-1) if step == 0 else torch.maximum(top, scores.amax(-1))
    share = (new_log_sum - top).exp()
    if step == 0:
"""
_MERGED = "mean = (log_sum - total).exp()[..., None] * mean + (new_log_sum - total).exp()[..., None] * new"

WRONG_RING = (
    Mutant("gathered", "whole sequence gathered", "which is what did not fit", 2)
    .edit(
        "for step in range(n):",
        "every = [torch.empty_like(held) for _ in range(n)]\ndist.all_gather(every, held)\nfor step in range(n):",
    )
    .edit(f"{_PASS_ON}\nheld = arrived", "held = every[(rank - step) % n]"),
    Mutant(
        "local positions", "local positions", "it masks by places within parts: take positions[rank] and [owner]", 2
    ).edit(_MASK, "torch.arange(len(mine))[:, None] < torch.arange(len(mine))"),
    Mutant(
        "strict mask", "own position hidden", "each query's own position is hidden: it sees that and those before", 1
    )
    .edit(_MASK, "mine[:, None] <= theirs")
    .without(".clamp(min=lowest)"),
    Mutant(
        "no mask", "no mask", "queries see keys that come after them; mask them with -inf before the exponential", 1
    ).edit(f"scores = scores.masked_fill({_MASK}, -torch.inf)", ""),
    Mutant(
        "plain mean", "plain mean", "it counts every block alike; each counts with exp(its log_sum - the total)", 2
    ).edit(_MERGED, "mean = (step * mean + new) / (step + 1)"),
    Mutant(
        "stale log_sum", "log_sum not kept", "the log_sum stays the first block's: keep the total of each merge", 3
    ).without("log_sum = total"),
    Mutant(
        "not rescaled", "mean not rescaled", "the mean so far keeps its weight: times exp(log_sum - the total)", 2
    ).edit("(log_sum - total).exp()[..., None] * mean", "mean"),
    Mutant(
        "old maximum",
        "mean not rescaled",
        "sums of earlier keys belong to a smaller maximum: times exp(the old maximum - the new) when it grows",
        2,
    )
    .edit("if step == 0:", _UNDER_ITS_MAXIMUM)
    .edit("mean, log_sum = new, new_log_sum", "mean, log_sum = new, share")
    .edit(_MERGED, "mean = (log_sum[..., None] * mean + share[..., None] * new) / (log_sum + share)[..., None]")
    .edit("log_sum = total", "log_sum = log_sum + share"),
    Mutant(
        "values stay", "values stay behind", "own values meet keys of others: a key and its value travel together", 2
    ).edit("@ held[1]", "@ value"),
    Mutant(
        "keys stay", "keys stay behind", "own keys meet values of others: a key and its value travel together", 2
    ).edit("@ held[0].mT", "@ key.mT"),
    Mutant(
        "mask transposed", "mask transposed", "the mask is transposed: queries go down the rows, keys along them", 2
    ).edit(_MASK, "theirs[:, None] < mine"),
    Mutant(
        "divided by D", "divided by D", "scores are divided by D; divide by the root of D, for a sum of D products", 1
    ).edit("query.shape[-1] ** 0.5", "query.shape[-1]"),
    Mutant(
        "without max", "overflow", "exp of hundreds is infinite: subtract the log_sum before the exponential", 1
    ).edit(_BLOCK, "scores.exp() @ held[1] / scores.exp().sum(-1, keepdim=True)"),
    Mutant(
        "softmax", "nothing visible", "a query may see no key of a block: -inf - (-inf) is NaN; its weights are 0", 2
    ).edit(_BLOCK, "scores.softmax(-1) @ held[1]"),
    Mutant("blocking", "blocking sends", "no rank comes to its recv", 2, 3, ends=True)
    .edit("leaving = dist.isend(", "dist.send(")
    .without("leaving.wait()"),
    Mutant(
        "one hop more",
        "too many bytes",
        "n hops where n - 1 are enough: the last hop brings home what every rank has",
        2,
    ).edit(
        "return mean",
        "if n > 1:\n    arrived = torch.empty_like(held)\n    " + _PASS_ON.replace("\n", "\n    ") + "\nreturn mean",
    ),
    Mutant(
        "same again", "same keys again", "the first neighbour's keys come again and again: hand on what arrived", 3
    ).edit("isend(held,", "isend(torch.stack([key, value]),"),
    Mutant(
        "other way", "wrong owner", "the mask takes the wrong owner: after k hops from rank - 1, it is rank - k", 3
    ).edit("(rank - step)", "(rank + step)"),
    Mutant(
        "alone", "own keys alone", "it has seen the keys of this rank alone; hand keys and values on n - 1 times", 2
    ).edit("range(n)", "range(1)"),
    Mutant("turned round", "mask turned round", "it hides the keys before a query, not those after it", 1).edit(
        _MASK, "mine[:, None] > theirs"
    ),
    Mutant("plain sum", "plain sum", "it adds the blocks' means; weights must add up to 1 over all keys", 2).edit(
        _MERGED, "mean = mean + new"
    ),
    Mutant("not scaled", "not scaled", "it leaves out the division of the scores by sqrt(D)", 1).without(
        " / query.shape[-1] ** 0.5"
    ),
    Mutant(
        "zeros for hidden keys", "masked with 0", "it masks with 0, a score like any other; -inf has no weight", 1
    ).edit("theirs, -torch.inf)", "theirs, 0.0)"),
    Mutant("keys for queries", "keys with keys", "it scores keys with keys, not queries with keys", 1).edit(
        "scores = query @", "scores = key @"
    ),
    Mutant("maximum", "maximum", "the smaller log_sum counts too in the total: logaddexp, not the maximum", 2).edit(
        "logaddexp(log", "maximum(log"
    ),
)
