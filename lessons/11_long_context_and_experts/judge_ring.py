"""Name what is wrong with attention round a ring of ranks: masks, merges, whose keys those are, and what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from distlab_lesson_11 import cases
from distlab_lesson_11.judge_attention import same
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes
from distlab.grading.values import compare

DOUBLE = 8


class Slip(NamedTuple):
    """A wrong attention: whose keys and values each step reads, whose positions mask them, and how."""

    code: str
    words: str
    keys_of: Callable[[int, int, int], int] = lambda rank, step, n: (rank - step) % n
    values_of: Callable[[int, int, int], int] | None = None  # those that belong to the keys
    mask_of: Callable[[int, int, int], int] = lambda rank, step, n: (rank - step) % n
    mask: str = "causal"
    merge: str = "exact"
    power: float = 0.5  # of D, by which scores are divided


RIGHT = Slip("", "")
SLIPS = (
    Slip(
        "local positions",
        "masks keys by where they stand in a rank's part; compare positions of the whole sequence: "
        "positions[rank][:, None] >= positions[owner]",
        mask="local",
    ),
    Slip(
        "own position hidden",
        "hides each query's own position; a query sees keys of its own position and before: >= and not >",
        mask="strict",
    ),
    Slip(
        "mask turned round",
        "sees the keys after a query and hides those before; visible is positions[rank][:, None] >= positions[owner]",
        mask="after",
    ),
    Slip("no mask", "lets queries see keys that come after them; mask them with -inf before the exponential", mask=""),
    Slip(
        "own keys alone",
        "has seen the keys of this rank alone; hand keys and values on n - 1 times",
        keys_of=lambda rank, step, n: rank,
        merge="first",
    ),
    Slip(
        "same keys again",
        "reads the first neighbour's keys in every step: hand on what has just arrived, not what was there first",
        keys_of=lambda rank, step, n: (rank - min(step, 1)) % n,
    ),
    Slip(
        "wrong owner",
        "masks keys as if they came from the other side: after k hops from rank - 1, they are those of rank - k",
        mask_of=lambda rank, step, n: (rank + step) % n,
    ),
    Slip("plain mean", "counts every block alike; each counts with exp(its log_sum - the total)", merge="mean"),
    Slip("plain sum", "adds the blocks' means; weights must add up to 1 over all keys", merge="sum"),
    Slip("not scaled", "leaves out the division of the scores by sqrt(D)", power=0.0),
    Slip("divided by D", "divides the scores by D; divide by the root of D, for a sum of D products", power=1.0),
    Slip(
        "values stay behind",
        "weighs this rank's own values with the keys of others; a key and its value belong together: hand on both",
        values_of=lambda rank, step, n: rank,
    ),
    Slip(
        "keys stay behind",
        "weighs the values of others with this rank's own keys; a key and its value belong together: hand on both",
        keys_of=lambda rank, step, n: rank,
        values_of=lambda rank, step, n: (rank - step) % n,
    ),
    Slip(
        "mask transposed",
        "has a mask with keys down the rows and queries along them; scores have queries down the rows: "
        "positions[rank][:, None] >= positions[owner]",
        mask="transposed",
    ),
    Slip(
        "log_sum not kept",
        "merges every block as if the first alone had come before; keep the total of each merge as the log_sum",
        merge="stale",
    ),
    Slip(
        "mean not rescaled",
        "adds each block's share to a mean that keeps its weight; shrink what was there by exp(its log_sum - the "
        "total)",
        merge="unscaled",
    ),
)


def attention_of(rank: int, n: int, steep: float, slip: Slip = RIGHT) -> Tensor:
    """Return what a rank should get, or would get with a slip."""
    query, key, value = cases.whole_sequence(n, steep)
    placed = cases.positions_of(n)
    query = query[:, placed[rank]] * cases.SIZE ** (0.5 - slip.power)
    parts = []
    for step in range(n):
        owner, masker = placed[slip.keys_of(rank, step, n)], placed[slip.mask_of(rank, step, n)]
        valued = placed[(slip.values_of or slip.keys_of)(rank, step, n)]
        visible = torch.ones(len(owner), len(owner), dtype=torch.bool)
        if slip.mask == "causal":
            visible = placed[rank][:, None] >= masker
        elif slip.mask == "strict":
            visible = placed[rank][:, None] > masker
        elif slip.mask == "after":
            visible = placed[rank][:, None] <= masker
        elif slip.mask == "transposed":
            visible = masker[:, None] >= placed[rank]
        elif slip.mask == "local":
            visible = visible.tril()
        parts.append(cases.attend(query, key[:, owner], value[:, valued], visible))
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
    for name, steep in cases.RING_CASES:
        for rank, result in enumerate(evidence.results):
            got, want = result[name]["got"], attention_of(rank, n, steep)
            what = f"{name}: rank {rank}'s result"
            if not result[name]["kept"]:
                text = f"{name}: rank {rank}'s query, key or value was changed; receive into a tensor of its own"
                yield Fault("changed argument", text)
                return
            if (fault := _not_finite(got, name, rank, n)) is not None:
                yield fault
                return
            if (fault := compare(got, want, what, 1)) is not None:
                yield _named(evidence, name, steep) or fault
                return
        yield from _judge_traffic(evidence, name)


def _not_finite(got: Any, name: str, rank: int, n: int) -> Fault | None:
    if not isinstance(got, Tensor) or bool(got.isfinite().all()):
        return None
    count = int((~got.isfinite()).sum())
    if name == "large scores":
        text = f"{name}: rank {rank}'s result has {count} numbers that are not finite: exp of a score of hundreds is"
        return Fault("overflow", f"{text} infinite; subtract the log_sum (or the largest score) before the exponential")
    if n == 1:
        text = f"{name}: on one rank the result has {count} NaN, and each query sees a key there: its own position's"
        return Fault("own position hidden", f"{text}. Hide keys of later positions alone: visible is >=, not >")
    text = f"{name}: rank {rank}'s result has {count} NaN: some queries see none of a block's keys, all scores are -inf"
    return Fault("nothing visible", f"{text} and -inf - (-inf) is NaN; such a block has weights of zero")


def _named(evidence: Evidence, name: str, steep: float) -> Fault | None:
    """Say which slip gives what all ranks got; with few ranks several may look alike, and the first is told."""
    n = evidence.world_size
    for slip in SLIPS:
        if all(same(result[name]["got"], attention_of(r, n, steep, slip)) for r, result in enumerate(evidence.results)):
            return Fault(slip.code, f"{name}: each rank's result {slip.words}")
    return None


def _judge_traffic(evidence: Evidence, name: str) -> Iterator[Fault]:
    n = evidence.world_size
    block = 2 * DOUBLE * cases.HEADS * cases.PER_RANK * cases.SIZE
    for rank, result in enumerate(evidence.results):
        begin, end = result[name]["run_ns"]
        made = [call for call in calls(evidence, rank) if begin <= call.start_ns <= end and call.op != "barrier"]
        others = sorted({call.op for call in made if call.op not in ("send", "recv")})
        if others:
            text = (
                f"right result, but rank {rank} called {', '.join(others)}: it holds keys and values of all {n} ranks"
            )
            yield Fault("whole sequence gathered", f"{text} at once, which is what did not fit; hand them round a ring")
            return
        sent = [call for call in made if call.op == "send"]
        peers = sorted({call.peer for call in sent})
        if len(peers) > 1:  # either neighbour will do: a ring has no better direction
            text = f"right result, but rank {rank} sends to ranks {', '.join(map(str, peers))}; in a ring it sends to"
            yield Fault("not a ring", f"{text} one neighbour alone, and hands on what has arrived")
            return
        num_bytes = sum(call.num_bytes for call in sent)
        if num_bytes > (n - 1) * block:
            hops = num_bytes / block
            text = f"right result, but rank {rank} sent {in_megabytes(num_bytes)}, {hops:g} blocks of keys and values"
            more = "the last hop brings home what everybody has" if hops == n else "keys and values, nothing else"
            yield Fault("too many bytes", f"{text}, where {n - 1} hops are enough: {more}")
            return


def ring_failure(error: RankError, world_size: int) -> Fault | None:
    """Name sends that wait for each other."""
    text = str(error)
    if "deadlock" in text and "waits in send" in text:
        words = f"all {world_size} ranks wait in send, each for the next to receive: nobody comes to its recv"
        return Fault("blocking sends", f"{words}. Start the send (dist.isend), receive, then wait for the send")
    return None


def budget_ring(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    n = evidence.world_size
    block = 2 * DOUBLE * cases.HEADS * cases.PER_RANK * cases.SIZE
    return [f"sent {in_megabytes((n - 1) * block)} a rank: {n - 1} hops of keys and values, {block} bytes each"]
