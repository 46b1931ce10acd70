"""How the checks look at the ring's two halves and at the tree: whose parts are where, then bytes and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab.grading import Evidence, Fault
from distlab.plan import split_evenly

from distlab_lesson_02.cases import (  # isort: skip
    BASE,
    Case,
    LENGTHS,
    MEMBERS,
    Result,
    cases,
    coded,
    explain_parts,
    parts_of,
    play,
    play_in_small_group,
    refuse_copies,
    refuse_native,
    refuse_returned,
    rounds,
    too_many_bytes,
    varied,
)

JUNK = -1000.0  # times rank + 1: what stands in memory that an all-gather must fill


def chunk_lengths(length: int, n: int) -> list[int]:
    """Return the lengths of tensor.tensor_split(n)."""
    return [stop - start for start, stop in split_evenly(length, n)]


def drive_on_sums(fn: Callable[..., Any]) -> list[Result]:
    """Call fn on coded and varied tensors of several lengths, and in a group without rank 0."""
    rank, results = dist.get_rank(), []
    for length in LENGTHS:
        results.append(play(fn, coded(rank, length), name=f"{length} elements"))
        results.append(play(fn, varied(rank, length), name=f"{length} different elements"))
    return results + play_in_small_group(fn, lambda place: coded(place, 7))


def is_coded(everybody: Sequence[Case]) -> bool:
    """Whether the case's values tell whose parts are in them."""
    return "different" not in everybody[0].name


def judge_reduce_scatter(evidence: Evidence) -> Iterator[Fault]:
    """Look at each rank's chunk: length, whose parts are in it, values; then bytes and steps."""
    for everybody in cases(evidence):
        n, length = len(everybody[0].ranks), everybody[0].after.numel()
        sizes = chunk_lengths(length, n)
        yield from refuse_native(everybody)
        yield from refuse_returned(everybody, sizes, "its own chunk")
        for rank, case in enumerate(everybody):
            if isinstance(case.returned, str):
                continue
            where = f"{case.name}: chunk {rank} on rank {case.ranks[rank]}"
            if is_coded(everybody):
                yield from explain_chunk(case, rank, where)
            else:
                want = sum(varied(r, length) for r in range(n))
                yield from differs(case.returned, want.tensor_split(n)[rank], where)
    for everybody in cases(evidence):
        n, total = len(everybody[0].ranks), everybody[0].after.numel() * 8
        budget = total - min(chunk_lengths(total // 8, n)) * 8
        yield from too_many_sends(everybody, n - 1, "a ring reduce-scatter")
        yield from leaves_the_ring(everybody)
        yield from too_many_bytes(everybody, budget, "a ring (every chunk but the one you keep, once)")
        for rank, case in enumerate(everybody):
            if not torch.equal(case.after.tensor_split(n)[rank], case.returned):
                message = (
                    f"rank {case.ranks[rank]} returned the right chunk, but it is not in the tensor that was passed in"
                )
                yield Fault("not in place", f"{message}: add to the chunks of that tensor, and return one of them")


def explain_chunk(case: Case, rank: int, where: str) -> Iterator[Fault]:
    """Name whose parts a chunk lacks; where another chunk is finished instead, say so."""
    n = len(case.ranks)
    full = float(sum(BASE**r for r in range(n)))
    if not case.returned.numel() or bool((case.returned == full).all()):
        return
    finished = [c for c, chunk in enumerate(case.after.tensor_split(n)) if chunk.numel() and (chunk == full).all()]
    if finished and rank not in finished:
        yield Fault(
            "wrong chunk finished",
            f"{where} is not finished, but chunk {finished[0]} is: each rank must end with its own chunk, so the first "
            f"chunk that rank r sends is (r - 1) % n",
        )
    own = parts_of(float(case.returned[0]), n)
    if own is not None and own[rank] == 0:
        yield Fault("own part overwritten", f"{where} lacks rank {rank}'s own part: add what arrives, do not copy it")
    yield from explain_parts(case.returned, where, n)


def differs(got: torch.Tensor, want: torch.Tensor, where: str) -> Iterator[Fault]:
    """Name the first element that is not as expected."""
    wrong = (got != want).nonzero().flatten().tolist()
    if wrong:
        index = wrong[0]
        message = f"{where}, element {index}: expected {want[index]:g}, got {got[index]:g}: values of another place?"
        yield Fault("wrong place", message)


def too_many_sends(everybody: Sequence[Case], limit: int, what: str) -> Iterator[Fault]:
    """Find a rank that needs more messages than there are steps."""
    worst = max(everybody, key=lambda case: case.num_sends)
    if worst.num_sends > limit:
        yield Fault("too many messages", f"rank {worst.rank} sent {worst.num_sends} messages; {what} has {limit} steps")


def leaves_the_ring(everybody: Sequence[Case]) -> Iterator[Fault]:
    """Find a rank that sends to another one than the next."""
    for case in everybody:
        n, after = len(case.ranks), case.ranks[(case.rank + 1) % len(case.ranks)]
        others = sorted({call.peer for call in case.calls if call.op == "send"} - {after})
        if others:
            message = (
                f"right values, but rank {case.ranks[case.rank]} of {n} also sends to rank {others[0]}; in a ring it "
                f"sends to rank {after} only, so that {n} wires are enough, and none is crossed twice in a step"
            )
            yield Fault("not a ring", message)
            return


def most_sent(evidence: Evidence, formula: str) -> tuple[str, ...]:
    """Say what the first case took: bytes of the rank that sent most, and steps that followed one another."""
    everybody = next(cases(evidence))
    sent, total = max(case.sent_bytes for case in everybody), everybody[0].after.numel() * 8
    steps = rounds(everybody)
    return (f"{len(everybody)} ranks: {sent} bytes sent a rank for {total} ({formula}), {steps} steps",)


# all-gather


def drive_all_gather(fn: Callable[..., Any]) -> list[Result]:
    """Call fn on tensors of which only this rank's chunk is filled."""

    def own_chunk(rank: int, n: int, length: int) -> torch.Tensor:
        tensor = torch.full((length,), JUNK * (rank + 1), dtype=torch.float64)
        tensor.tensor_split(n)[rank].copy_(numbered(length).tensor_split(n)[rank])
        return tensor

    rank, n = dist.get_rank(), dist.get_world_size()
    results = [play(fn, own_chunk(rank, n, length), name=f"{length} elements") for length in LENGTHS]
    members = MEMBERS.get(n, ())
    return results + play_in_small_group(fn, lambda place: own_chunk(place, len(members), 7))


def numbered(length: int) -> torch.Tensor:
    """Return 1, 2, 3, ..."""
    return torch.arange(1, length + 1, dtype=torch.float64)


def judge_all_gather(evidence: Evidence) -> Iterator[Fault]:
    """Look for chunks that never came, came to the wrong place or were added; then bytes and steps."""
    for everybody in cases(evidence):
        n, length = len(everybody[0].ranks), everybody[0].after.numel()
        want = numbered(length)
        yield from refuse_native(everybody)
        yield from refuse_returned(everybody, [length] * n, "the whole tensor")
        yield from refuse_copies(everybody, [want] * n)
        for rank, case in enumerate(everybody):
            chunks = zip(case.after.tensor_split(n), want.tensor_split(n), strict=True)
            wrong = [(c, got, right) for c, (got, right) in enumerate(chunks) if not torch.equal(got, right)]
            if wrong:
                yield explain_gathered(rank, *wrong[0], where=f"{case.name}: rank {case.ranks[rank]}")
                return
            yield from differs(case.returned, want, f"{case.name}: what rank {case.ranks[rank]} returned")
    for everybody in cases(evidence):
        n, total = len(everybody[0].ranks), everybody[0].after.numel() * 8
        budget = total - min(chunk_lengths(total // 8, n)) * 8
        yield from too_many_sends(everybody, n - 1, "a ring all-gather")
        yield from leaves_the_ring(everybody)
        yield from too_many_bytes(everybody, budget, "a ring (every chunk but the next rank's own, once)")


def explain_gathered(rank: int, chunk: int, got: torch.Tensor, want: torch.Tensor, *, where: str) -> Fault:
    """Say what stands where chunk `chunk` should."""
    value = float(got[(got != want).nonzero()[0, 0]])
    if chunk == rank:
        return Fault("own chunk lost", f"{where} had chunk {chunk} filled, and it was overwritten with {value:g}")
    if value == JUNK * (rank + 1):
        return Fault("chunk never received", f"{where} never received chunk {chunk}: its memory is as it was before")
    if value % JUNK == 0:
        sender = int(value / JUNK) - 1
        message = f"{where} holds memory of rank {sender} as chunk {chunk}, which rank {sender} had not filled yet"
        return Fault("sent before it was there", f"{message}: in step 0 a rank has only its own chunk to send")
    if value < 0:
        return Fault("added", f"{where} added chunk {chunk} to what stood there; the chunks are finished: copy them")
    return Fault("wrong place", f"{where} holds {value:g} in chunk {chunk} where {want[0]:g} belongs")


# broadcast


def drive_broadcast(fn: Callable[..., Any]) -> list[Result]:
    """Call fn with every root, then in a group without rank 0 with its last rank as root."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results = [play(fn, varied(rank, 5), root, name=f"root {root}") for root in range(n)]
    members = MEMBERS.get(n, ())
    return results + play_in_small_group(fn, lambda place: varied(place, 5), len(members) - 1)


def judge_broadcast(evidence: Evidence) -> Iterator[Fault]:
    """Look at the copies, then at the root's sends and the number of steps."""
    for everybody in cases(evidence):
        n = len(everybody[0].ranks)
        root = int(everybody[0].name.split()[-1]) if everybody[0].name.startswith("root") else n - 1
        want, levels = varied(root, 5), math.ceil(math.log2(n))
        yield from refuse_native(everybody)
        yield from refuse_returned(everybody, [5] * n, "the tensor")
        yield from refuse_copies(everybody, [want] * n)
        for other in range(n):
            if other != root and all(torch.equal(case.after, varied(other, 5)) for case in everybody):
                yield Fault(
                    "wrong root", f"{everybody[0].name}: everybody has rank {other}'s tensor, not rank {root}'s"
                )
        for rank, case in enumerate(everybody):
            if not torch.equal(case.after, want):
                kept = torch.equal(case.after, varied(rank, 5))
                what = "still has its own tensor" if kept else f"has {case.after.tolist()}"
                message = f"{case.name}: rank {case.ranks[rank]} of {n} {what}, expected that of rank {root}"
                yield Fault("not reached" if kept else "wrong tensor", message)
        if everybody[root].num_sends > levels:
            yield Fault(
                "root sends to everybody",
                f"right copies, but root {root} sent {everybody[root].num_sends} messages, one after the other on its "
                f"link; in a tree of {n} ranks it sends {levels}, and those who have the tensor help",
            )
        if (steps := rounds(everybody)) > levels:
            message = f"right copies, but {steps} steps follow one another; doubling reaches {n} ranks in {levels}"
            yield Fault("too many steps", message)


def broadcast_budget(evidence: Evidence) -> tuple[str, ...]:
    """Say how many steps the tree took."""
    everybody = next(cases(evidence))
    return (f"{len(everybody)} ranks: {rounds(everybody)} steps, the root sent {everybody[0].num_sends} tensors",)
