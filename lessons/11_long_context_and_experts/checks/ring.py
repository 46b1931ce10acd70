"""Attention round a ring of ranks: masks, merges, whose keys those are, and what was sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_11.checks.attention import HEADS, SIZE, STEEP, attend
from distlab_lesson_11.checks.ring_slips import RIGHT, SLIPS, Slip
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.traffic import calls, in_megabytes
from distlab.grading.diagnosis.values import compare, same, seeded

PER_RANK = 4  # positions of a rank: two chunks of two
BLOCK_BYTES = 2 * 8 * HEADS * PER_RANK * SIZE  # keys and values in float64
RING_CASES = (("ordinary scores", 1.0), ("large scores", STEEP))


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


def drive_ring(fn: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Attend with this rank's queries in each case."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, steep in RING_CASES:
        mine = [part[:, positions_of(n)[rank]].contiguous() for part in whole_sequence(n, steep)]
        kept = [part.clone() for part in mine]
        begin_ns = time.monotonic_ns()
        got = fn(*mine, positions_of(n))
        results[name] = {
            "got": got,
            "kept": all(map(torch.equal, kept, mine)),
            "run_ns": (begin_ns, time.monotonic_ns()),
        }
        dist.barrier()
    return results


def attention_of(rank: int, n: int, steep: float, slip: Slip = RIGHT) -> Tensor:
    """Return what a rank should get, or would get with a slip."""
    query, key, value = whole_sequence(n, steep)
    placed = positions_of(n)
    query = query[:, placed[rank]] * SIZE ** (0.5 - slip.power)
    parts = []
    for step in range(n):
        keyed = placed[slip.keys_of(rank, step, n)]
        valued = placed[(slip.values_of or slip.keys_of)(rank, step, n)]
        visible = slip.visible(placed[rank], placed[slip.mask_of(rank, step, n)])
        parts.append(attend(query, key[:, keyed], value[:, valued], visible))
    return _merged(parts, slip.merge)


def _merged(parts: list[tuple[Tensor, Tensor]], how: str) -> Tensor:
    """Merge the blocks' means, right ("exact") or as a slip does."""
    mean, log_sum = parts[0]
    means, log_sums = (torch.stack(some) for some in zip(*parts, strict=True))
    if how == "mean":
        return means.mean(0)
    if how == "sum":
        return means.sum(0)
    if how == "exact":
        return (log_sums.softmax(0)[..., None] * means).sum(0)
    for new, new_log_sum in parts[1:] if how != "first" else ():
        total = torch.logaddexp(log_sum, new_log_sum)
        kept = mean if how == "unscaled" else (log_sum - total).exp()[..., None] * mean
        mean = kept + (new_log_sum - total).exp()[..., None] * new
        log_sum = log_sum if how == "stale" else total
    return mean


def judge_ring(evidence: Evidence) -> Iterator[Fault]:
    """Equal to one process with the whole sequence; keys and values go round, and no more than that."""
    n = evidence.world_size
    for name, steep in RING_CASES:
        for rank, result in enumerate(evidence.results):
            got, what = result[name]["got"], f"{name}: rank {rank}'s result"
            if not result[name]["kept"]:
                text = f"{name}: rank {rank}'s query, key or value was changed; receive into a tensor of its own"
                yield Fault("changed argument", text)
            if isinstance(got, Tensor) and not bool(got.isfinite().all()):
                yield _hides_itself(evidence, name, steep) or _not_finite(got, attention_of(rank, n, steep), name, rank)
            if fault := compare(got, attention_of(rank, n, steep), what, 1):
                yield _named(evidence, name, steep) or fault
        yield from _judge_traffic(evidence, name)


def _not_finite(got: Tensor, want: Tensor, name: str, rank: int) -> Fault:
    count, finite = int((~got.isfinite()).sum()), got.isfinite()
    if got.shape != want.shape or not torch.allclose(got[finite], want.to(got.dtype)[finite], rtol=0.0, atol=1e-4):
        return Fault(
            "nan", f"{name}: rank {rank}'s result has {count} numbers that are not finite, and others are wrong"
        )
    if name == "large scores":
        text = f"{name}: rank {rank}'s result has {count} numbers that are not finite: exp of a score of hundreds is"
        return Fault("overflow", f"{text} infinite; subtract the log_sum (or the largest score) before the exponential")
    text = f"{name}: rank {rank}'s result has {count} NaN: some queries see none of a block's keys, all scores are -inf"
    return Fault("nothing visible", f"{text} and -inf - (-inf) is NaN; such a block has weights of zero")


def _hides_itself(evidence: Evidence, name: str, steep: float) -> Fault | None:
    """Say so where the numbers that are finite are those of a mask that hides each query's own position."""
    n, slip = evidence.world_size, next(slip for slip in SLIPS if slip.code == "own position hidden")
    pairs = [(result[name]["got"], attention_of(r, n, steep, slip)) for r, result in enumerate(evidence.results)]
    if not all(isinstance(got, Tensor) and got.shape == want.shape for got, want in pairs):
        return None
    finite = [(got[(there := got.isfinite() & want.isfinite())], want[there]) for got, want in pairs]
    if not any(one.numel() for one, _ in finite) or not all(same(*pair) for pair in finite):
        return None
    return Fault(slip.code, f"{name}: each rank's result {slip.words}; the first position sees no key at all then")


def _named(evidence: Evidence, name: str, steep: float) -> Fault | None:
    """Say which slip gives what all ranks got; with few ranks several may look alike, and the first is told."""
    n = evidence.world_size
    for slip in SLIPS:
        likely = [attention_of(rank, n, steep, slip).nan_to_num() for rank in range(n)]  # NaN: a query without a key
        if all(same(result[name]["got"], want) for result, want in zip(evidence.results, likely, strict=True)):
            return Fault(slip.code, f"{name}: each rank's result {slip.words}")
    return None


def _judge_traffic(evidence: Evidence, name: str) -> Iterator[Fault]:
    n = evidence.world_size
    for rank, result in enumerate(evidence.results):
        begin, end = result[name]["run_ns"]
        made = [call for call in calls(evidence, rank) if begin <= call.start_ns <= end and call.op != "barrier"]
        others = sorted({call.op for call in made if call.op not in ("send", "recv")})
        if others:
            text = f"right result, but rank {rank} called {', '.join(others)}: it holds keys and values of all {n}"
            text = f"{text} ranks at once, which is what did not fit; hand them round a ring"
            yield Fault("whole sequence gathered", text)
        sent = [call for call in made if call.op == "send"]
        peers = sorted({call.peer for call in sent})
        if len(peers) > 1:  # either neighbour will do: no direction of the ring is better
            text = f"right result, but rank {rank} sends to ranks {', '.join(map(str, peers))}; in a ring it sends to"
            yield Fault("not a ring", f"{text} one neighbour alone, and hands on what has arrived")
        num_bytes = sum(call.num_bytes for call in sent)
        if num_bytes > (n - 1) * BLOCK_BYTES:
            hops = num_bytes / BLOCK_BYTES
            text = f"right result, but rank {rank} sent {in_megabytes(num_bytes)}, {hops:g} blocks of keys and values"
            more = "the last hop brings home what every rank has" if hops == n else "keys and values, nothing else"
            yield Fault("too many bytes", f"{text}, where {n - 1} hops are enough: {more}")


def ring_failure(error: RankError, world_size: int) -> Fault | None:
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

WRONG_RINGS = (
    Mutant("gathered", "whole sequence gathered", "which is what did not fit", 2)
    .edit(
        "for step in range(n):",
        "every = [torch.empty_like(held) for _ in range(n)]\ndist.all_gather(every, held)\nfor step in range(n):",
    )
    .edit(f"{_PASS_ON}\nheld = arrived", "held = every[(rank - step) % n]"),
    Mutant("local positions", "local positions", "of the whole sequence", 2).edit(
        _MASK, "torch.arange(len(mine))[:, None] < torch.arange(len(mine))"
    ),
    Mutant("strict mask", "own position hidden", "sees no key at all", 1)
    .edit(_MASK, "mine[:, None] <= theirs")
    .without(".clamp(min=lowest)"),
    Mutant("no mask", "no mask", "keys that come after them", 1).edit(
        f"scores = scores.masked_fill({_MASK}, -torch.inf)", ""
    ),
    Mutant("plain mean", "plain mean", "counts every block alike", 2).edit(
        "mean = (log_sum - total).exp()[..., None] * mean + (new_log_sum - total).exp()[..., None] * new",
        "mean = (step * mean + new) / (step + 1)",
    ),
    Mutant("stale log_sum", "log_sum not kept", "keep the total", 3).without("log_sum = total"),
    Mutant("not rescaled", "mean not rescaled", "shrink what was there", 2).edit(
        "(log_sum - total).exp()[..., None] * mean", "mean"
    ),
    Mutant("values stay", "values stay behind", "a key and its value", 2).edit("@ held[1]", "@ value"),
    Mutant("keys stay", "keys stay behind", "a key and its value", 2).edit("@ held[0].mT", "@ key.mT"),
    Mutant("mask transposed", "mask transposed", "queries down the rows", 2).edit(_MASK, "theirs[:, None] < mine"),
    Mutant("divided by D", "divided by D", "the root of D", 1).edit("query.shape[-1] ** 0.5", "query.shape[-1]"),
    Mutant("without max", "overflow", "exp of a score of hundreds", 1).edit(
        _BLOCK, "scores.exp() @ held[1] / scores.exp().sum(-1, keepdim=True)"
    ),
    Mutant("softmax", "nothing visible", "all scores are -inf", 2).edit(_BLOCK, "scores.softmax(-1) @ held[1]"),
    Mutant("blocking", "blocking sends", "no rank comes to its recv", 2, 3)
    .edit("leaving = dist.isend(", "dist.send(")
    .without("leaving.wait()"),
    Mutant("one hop more", "too many bytes", "brings home what every rank has", 2).edit(
        "return mean",
        "if n > 1:\n    arrived = torch.empty_like(held)\n    " + _PASS_ON.replace("\n", "\n    ") + "\nreturn mean",
    ),
    Mutant("same again", "same keys again", "what has just arrived", 3).edit(
        "isend(held,", "isend(torch.stack([key, value]),"
    ),
    Mutant("other way", "wrong owner", "they are those of rank - k", 3).edit("(rank - step)", "(rank + step)"),
    Mutant("alone", "own keys alone", "hand keys and values on", 2).edit("range(n)", "range(1)"),
)
