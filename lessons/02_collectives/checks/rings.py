"""The two halves of the ring: whose parts are in which chunk, then bytes and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_02.checks import shared

from distlab.grading import Evidence, Fault, Mutant
from distlab.plan import split_evenly

JUNK = -1000.0  # times rank + 1: what stands in memory that an all-gather must fill


def chunk_lengths(length: int, n: int) -> list[int]:
    """Return the lengths of tensor.tensor_split(n)."""
    return [stop - start for start, stop in split_evenly(length, n)]


def judge_reduce_scatter(evidence: Evidence) -> Iterator[Fault]:
    """Look at each rank's chunk: length, whose parts are in it, values; then bytes and steps."""
    for all_ranks in shared.cases(evidence):
        n, length = len(all_ranks[0].ranks), all_ranks[0].after.numel()
        sizes = chunk_lengths(length, n)
        yield from shared.refuse_native(all_ranks)
        yield from shared.refuse_returned(all_ranks, sizes, "its own chunk")
        for rank, case in enumerate(all_ranks):
            if isinstance(case.returned, str):
                continue
            where = f"{case.name}: chunk {rank} on rank {case.ranks[rank]}"
            if shared.is_coded(all_ranks):
                yield from explain_chunk(case, rank, where)
            else:
                want = sum(shared.varied(r, length) for r in range(n))
                yield from shared.differs(case.returned, want.tensor_split(n)[rank], where)
    for all_ranks in shared.cases(evidence):
        yield from not_like_a_ring(all_ranks, "a ring reduce-scatter", "the one you keep")
        for rank, case in enumerate(all_ranks):
            if not torch.equal(case.after.tensor_split(len(all_ranks))[rank], case.returned):
                message = f"rank {case.ranks[rank]} returned the right chunk, but it is not in the tensor"
                advice = "add to the chunks of that tensor, and return one of them"
                yield Fault("not in place", f"{message} that was passed in: {advice}")
            if not case.is_view:
                message = f"{case.name}: rank {case.ranks[rank]} returns a copy of its chunk, in memory of its own"
                yield Fault("a copy", f"{message}; return the chunk of tensor.tensor_split(n) itself, a view into it")


def explain_chunk(case: shared.Case, rank: int, where: str) -> Iterator[Fault]:
    """Name whose parts a chunk lacks; where another chunk is finished instead, say so."""
    n = len(case.ranks)
    full = float(sum(shared.BASE**r for r in range(n)))
    if not case.returned.numel() or bool((case.returned == full).all()):
        return
    finished = [c for c, chunk in enumerate(case.after.tensor_split(n)) if chunk.numel() and (chunk == full).all()]
    if finished and rank not in finished:
        message = f"{where} is not finished, but chunk {finished[0]} is: each rank must end with its own chunk"
        yield Fault("wrong chunk finished", f"{message}, so the first chunk that rank r sends is (r - 1) % n")
    own = shared.parts_of(float(case.returned[0]), n)
    if own is not None and own[rank] == 0:
        yield Fault("own part overwritten", f"{where} lacks rank {rank}'s own part: add what arrives, do not copy it")
    yield from shared.explain_parts(case.returned, where, n)


def not_like_a_ring(all_ranks: Sequence[shared.Case], what: str, kept: str) -> Iterator[Fault]:
    """Find a rank that sends more messages than a ring has steps, to another rank than the next, or too many bytes."""
    n, length = len(all_ranks), all_ranks[0].after.numel()
    worst = max(all_ranks, key=lambda case: case.num_sends)
    if worst.num_sends > n - 1:
        yield Fault("too many messages", f"rank {worst.rank} sent {worst.num_sends} messages; {what} has {n - 1} steps")
    peers = [{call.peer for call in case.calls if call.op == "send"} for case in all_ranks]
    is_back = all(own <= {case.ranks[case.rank - 1]} for case, own in zip(all_ranks, peers, strict=True))
    for case in all_ranks:
        after = case.ranks[(case.rank + (-1 if is_back else 1)) % n]  # a ring may go either way round
        others = sorted({call.peer for call in case.calls if call.op == "send"} - {after})
        if others:
            message = f"right values, but rank {case.ranks[case.rank]} of {n} also sends to rank {others[0]}"
            advice = f"so that {n} wires are enough, and none is crossed twice in a step"
            yield Fault("not a ring", f"{message}; in a ring it sends to rank {after} only, {advice}")
    budget = 8 * (length - min(chunk_lengths(length, n)))
    yield from shared.too_many_bytes(all_ranks, budget, f"a ring (every chunk but {kept}, once)")


def drive_all_gather(fn: Callable[..., Any]) -> list[shared.Result]:
    """Call fn on tensors of which only this rank's chunk is filled."""

    def own_chunk(rank: int, n: int, length: int) -> torch.Tensor:
        tensor = torch.full((length,), JUNK * (rank + 1), dtype=torch.float64)
        tensor.tensor_split(n)[rank].copy_(numbered(length).tensor_split(n)[rank])
        return tensor

    rank, n = dist.get_rank(), dist.get_world_size()
    results = [shared.play(fn, own_chunk(rank, n, length), name=f"{length} elements") for length in shared.LENGTHS]
    members = shared.MEMBERS.get(n, ())
    return results + shared.play_in_small_group(fn, lambda place: own_chunk(place, len(members), 7))


def numbered(length: int) -> torch.Tensor:
    """Return 1, 2, 3, ..."""
    return torch.arange(1, length + 1, dtype=torch.float64)


def judge_all_gather(evidence: Evidence) -> Iterator[Fault]:
    """Look for chunks that never came, came to the wrong place or were added; then bytes and steps."""
    for all_ranks in shared.cases(evidence):
        n, length = len(all_ranks[0].ranks), all_ranks[0].after.numel()
        want = numbered(length)
        yield from shared.refuse_native(all_ranks)
        yield from shared.refuse_returned(all_ranks, [length] * n, "the whole tensor")
        yield from shared.refuse_copies(all_ranks, [want] * n)
        for rank, case in enumerate(all_ranks):
            chunks = zip(case.after.tensor_split(n), want.tensor_split(n), strict=True)
            wrong = [(c, got, right) for c, (got, right) in enumerate(chunks) if not torch.equal(got, right)]
            if wrong:
                yield explain_gathered(rank, *wrong[0], where=f"{case.name}: rank {case.ranks[rank]}")
            yield from shared.differs(case.returned, want, f"{case.name}: what rank {case.ranks[rank]} returned")
    for all_ranks in shared.cases(evidence):
        yield from not_like_a_ring(all_ranks, "a ring all-gather", "the next rank's own")


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


_EXCHANGE = "exchange(Receive(received, (rank - 1) % n), Send(outgoing, (rank + 1) % n), group=group)"
_MY_CHUNK = ".tensor_split(dist.get_world_size(group))[dist.get_rank(group)]"
WRONG_SCATTERS = (
    Mutant("whole tensors travel", "too many bytes", "288 bytes", 4, 1).body(
        f"return relay_all_reduce(tensor, group){_MY_CHUNK}"
    ),
    Mutant("starts one chunk late", "wrong chunk finished", "chunk 1 is", 3)
    .edit("(rank - step - 1)", "(rank - step)")
    .edit("(rank - step - 2)", "(rank - step - 1)"),
    Mutant("copies instead of adding", "own part overwritten", "rank 0's own", 2, 2)
    .edit("scratch[: grows.numel()]", "grows")
    .without("grows += received"),
    Mutant("one step too many", "too many messages", "2 steps", 3).edit("range(n - 1)", "range(n)"),
    Mutant("L // n elements per chunk", "wrong length", "7 elements", 2, 8).edit(
        "tensor.tensor_split(n)", "tensor[: tensor.numel() // n * n].tensor_split(n)"
    ),
    Mutant("passes on what came", "part missing", "lacks rank", 3, 2)
    .without("outgoing = chunks[(rank - step - 1) % n]")
    .edit("scratch = torch.empty_like(chunks[0])", "outgoing = chunks[(rank - 1) % n]")
    .edit("scratch[: grows.numel()]", "torch.empty_like(grows)")
    .edit("grows += received", "grows += received\noutgoing = received"),
    Mutant("send, then receive", "deadlock", "one exchange", 2, 3).edit(
        _EXCHANGE,
        """
        exchange(Send(outgoing, (rank + 1) % n), group=group)
        exchange(Receive(received, (rank - 1) % n), group=group)
        """,
    ),
    Mutant("no neighbours", "not a ring", "also sends to rank 2", 3)
    .edit("(rank - step - 1)", "(rank + step + 1)")
    .edit("(rank - step - 2) % n", "rank")
    .edit(_EXCHANGE, _EXCHANGE.replace("rank - 1", "rank - step - 1").replace("rank + 1", "rank + step + 1")),
    Mutant("works on a copy", "not in place", "not in the tensor", 2).edit(
        "tensor.tensor_split", "tensor.clone().tensor_split"
    ),
    Mutant("a copy of the chunk", "a copy", "a view into it", 2).edit(
        "return chunks[rank]", "return chunks[rank].clone()"
    ),
    Mutant("calls all_reduce", "torch's own collective", "all_reduce", 2, "common shortcut").body(
        f"dist.all_reduce(tensor, group=group)\nreturn tensor{_MY_CHUNK}"
    ),
)
WRONG_GATHERS = (
    Mutant("another rank's chunk first", "own chunk lost", "overwritten", 3)
    .edit("(rank - step)", "(rank - step + 1)")
    .edit("(rank - step - 1)", "(rank - step)"),
    Mutant("adds instead of copying", "added", "copy them", 2)
    .edit("exchange(Receive(unknown", "received = torch.empty_like(unknown)\nexchange(Receive(received")
    .edit("group=group)", "group=group)\nunknown += received"),
    Mutant("n-2 steps", "chunk never received", "never received", 3).edit("n - 1):", "n - 2):"),
    Mutant("whole tensors travel", "too many bytes", "288 bytes", 4, 1)
    .edit("exchange(Receive(unknown", "received = torch.empty_like(tensor)\nexchange(Receive(received")
    .edit("Send(known", "Send(tensor.clone()")
    .edit("group=group)", "group=group)\nunknown.copy_(received.tensor_split(n)[(rank - step - 1) % n])"),
    Mutant("no neighbours", "not a ring", "also sends to rank 2", 3)
    .edit("(rank - step) % n", "rank")
    .edit("(rank - 1)", "(rank - step - 1)")
    .edit("(rank + 1)", "(rank + step + 1)"),
    Mutant("returns its chunk", "wrong length", "the whole tensor", 2).edit("return tensor", "return chunks[rank]"),
)
