"""Name what is wrong in lesson 7's cuts and in its ZeRO-1 step.

Judges of units that are gathered are in judge_units.py, of norms and state dicts in judge_state.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_07 import cases
from torch import Tensor

from distlab.comm.record.operations import ring_bytes
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes
from distlab.grading.values import compare, describe, equal

DOUBLE = 8  # bytes of an element in all cases


def sent_between(evidence: Evidence, rank: int, start_ns: int, end_ns: int) -> int:
    """Return the bytes that a rank sent between two moments; native collectives count as rings."""
    sent = 0
    for call in calls(evidence, rank):
        if start_ns <= call.start_ns <= end_ns:
            is_root, before_root = call.peer == rank, call.peer == (rank + 1) % len(call.group)
            ring = ring_bytes(call.op, call.num_bytes, len(call.group), is_root=is_root, before_root=before_root)
            sent += call.num_bytes if call.op == "send" else ring
    return sent


def judge_pieces(evidence: Evidence) -> Iterator[Fault]:
    """Every element in one shard, all shards of one length, places counted in the tensor."""
    for (sizes, count), shards in zip(cases.SHARD_CASES, evidence.results[0], strict=True):
        asked = f"tensors of {list(sizes)} elements in {count} shard{'s' if count > 1 else ''}"
        for shard, pieces in enumerate(shards):
            fault = _form(pieces, f"{asked}, shard {shard}")
            if fault is not None:
                yield fault
                return
        found = [[tuple(piece) for piece in pieces] for pieces in shards]
        fault = _pieces_fault(sizes, count, found, asked)
        if fault is not None:
            yield fault
            return


def _form(pieces: Any, what: str) -> Fault | None:
    triples = isinstance(pieces, list | tuple) and all(
        isinstance(piece, list | tuple) and len(piece) == 3 and all(type(number) is int for number in piece)
        for piece in pieces
    )
    if triples:
        return None
    return Fault("returned", f"{what}: expected a list of (tensor, start, stop), got {describe(pieces)}")


def right_pieces(sizes: tuple[int, ...], length: int, shard: int) -> list[tuple[int, int, int]]:
    """Return the pieces of a shard of some length."""
    row = [(tensor, place) for tensor, size in enumerate(sizes) for place in range(size)]
    pieces: list[tuple[int, int, int]] = []
    for tensor, place in row[shard * length : (shard + 1) * length]:
        if pieces and pieces[-1][0] == tensor:
            pieces[-1] = (tensor, pieces[-1][1], place + 1)
        else:
            pieces.append((tensor, place, place + 1))
    return pieces


def _pieces_fault(
    sizes: tuple[int, ...], count: int, found: list[list[tuple[int, int, int]]], asked: str
) -> Fault | None:
    total = sum(sizes)
    length = -(-total // count)
    want = [right_pieces(sizes, length, shard) for shard in range(count)]
    if found == want:
        return None
    offsets = [sum(sizes[:tensor]) for tensor in range(len(sizes))]
    in_row = [[(t, a + offsets[t], b + offsets[t]) for t, a, b in pieces] for pieces in want]
    if found == in_row:
        text = f"{asked}: start and stop count elements of the whole row; tensor {want[-1][-1][0] if want[-1] else 1}"
        return Fault("counted in the row", f"{text} begins at its own 0: subtract where the tensor begins")
    in_shard = [[(t, a - s * length, b - s * length) for t, a, b in pieces] for s, pieces in enumerate(in_row)]
    if found == in_shard:
        text = f"{asked}: start and stop count elements of the shard; they are to count those of the tensor"
        return Fault("counted in the shard", f"{text}: subtract where the tensor begins, not where the shard does")
    if found == [[(t, a, b - a) for t, a, b in pieces] for pieces in want]:
        return Fault("stop is a length", f"{asked}: stop is how many elements there are; let it be start + that many")
    if found == [[(t, a, b - 1) for t, a, b in pieces] for pieces in want]:
        return Fault("stop is the last", f"{asked}: stop is the last element; let it be one past it, as in a slice")
    for shard, pieces in enumerate(found):
        for tensor, start, stop in pieces:
            where = f"{asked}: shard {shard} has ({tensor}, {start}, {stop})"
            if start >= stop:
                return Fault("empty piece", f"{where}, a piece without elements: leave it out (start < stop)")
            if not 0 <= tensor < len(sizes) or start < 0 or stop > sizes[tensor]:
                size = sizes[tensor] if 0 <= tensor < len(sizes) else 0
                text = f"{where}, but tensor {tensor} has {size} elements: what the row is filled up with belongs to no"
                return Fault("past the end", f"{text} tensor")
    return _cover_fault(sizes, count, found, asked)


def _cover_fault(
    sizes: tuple[int, ...], count: int, found: list[list[tuple[int, int, int]]], asked: str
) -> Fault | None:
    length = -(-sum(sizes) // count)
    held = [sum(stop - start for _, start, stop in pieces) for pieces in found]
    for tensor, size in enumerate(sizes):
        times = [0] * size
        for pieces in found:
            for index, start, stop in pieces:
                if index == tensor:
                    times[start:stop] = [seen + 1 for seen in times[start:stop]]
        if 0 in times:
            text = f"{asked}: element {times.index(0)} of tensor {tensor} is in no shard, so nobody would update it"
            return Fault("elements lost", f"{text}; the length of a shard is rounded up: -(-total // num_shards)")
        if any(seen > 1 for seen in times):
            place = next(i for i, seen in enumerate(times) if seen > 1)
            return Fault("held twice", f"{asked}: element {place} of tensor {tensor} is in two shards")
    for shard, number in enumerate(held):
        should = sum(stop - start for _, start, stop in right_pieces(sizes, length, shard))
        text = f"{asked}: shard {shard} holds {number} elements, where equal shards have {length}"
        if number > length and all((start, stop) == (0, sizes[t]) for row in found for t, start, stop in row):
            return Fault("unequal shards", f"{text}: the fullest rank decides what fits; cut through tensors")
        if number != should:
            text = f"{text} and this one gets {should} of the tensors'" if should < length else text
            return Fault("unequal shards", f"{text}; -(-total // num_shards) for all, filled up at the row's end alone")
    if found == [_each_tensor(sizes, count, shard) for shard in range(count)]:
        text = f"{asked}: every tensor is cut by itself, as FSDP2 does"
        return Fault("each tensor cut", f"{text}; here the tensors lie end to end first, and their row is cut")
    shard = next(s for s in range(count) if found[s] != right_pieces(sizes, length, s))
    want = right_pieces(sizes, length, shard)
    return Fault("values", f"{asked}: shard {shard} holds {found[shard]}, expected {want}")


def _each_tensor(sizes: tuple[int, ...], count: int, shard: int) -> list[tuple[int, int, int]]:
    """Return the pieces of a shard if every tensor were cut by itself."""
    lengths = [-(-size // count) for size in sizes]
    cuts = [(min(shard * n, size), min((shard + 1) * n, size)) for n, size in zip(lengths, sizes, strict=True)]
    return [(tensor, start, stop) for tensor, (start, stop) in enumerate(cuts) if start < stop]


def budget_pieces(evidence: Evidence) -> list[str]:
    """Say how much is filled up."""
    filled = max(-(-sum(sizes) // count) * count - sum(sizes) for sizes, count in cases.SHARD_CASES)
    return [f"{len(cases.SHARD_CASES)} cases; at most {filled} elements filled up, always fewer than there are shards"]


def step_bytes(n: int) -> float:
    """Return what reduce-scatter and all-gather of a row send."""
    return 2 * (n - 1) / n * DOUBLE * cases.ROW


def judge_step(evidence: Evidence) -> Iterator[Fault]:
    """Own shard alone is updated, with the mean gradient, and all ranks have the whole row afterwards."""
    n = evidence.world_size
    row, update = torch.as_tensor(cases.seeded(-1, cases.ROW, purpose="row")), cases.Momentum()
    for step in range(cases.UPDATES):
        mean = torch.stack([cases.row_gradient(rank, step) for rank in range(n)]).mean(0)
        before = row.clone()
        update(row, mean)
        wheres = [(step, rank, n) for rank in range(n)]
        for result, where in zip(evidence.results, wheres, strict=True):
            if (fault := _judge_update(result, where, before, mean)) is not None:
                yield fault
                return
        for result, where in zip(evidence.results, wheres, strict=True):
            if (fault := _judge_row(result["after"][step], before, row, where)) is not None:
                yield fault
                return
    yield from _judge_step_bytes(evidence)


def _judge_update(result: dict[str, Any], where: tuple[int, int, int], before: Tensor, mean: Tensor) -> Fault | None:
    step, rank, n = where
    if len(result["seen"]) != cases.UPDATES:
        text = f"rank {rank} called update {len(result['seen'])} times in {cases.UPDATES} steps"
        return Fault("update calls", f"{text}; expected once a step: update(own shard, its mean gradient)")
    shard, gradient = result["seen"][step]
    if n > 1 and shard.numel() == cases.ROW:
        text = f"rank {rank} updates all {cases.ROW} elements, so its optimizer keeps state for all: every rank holds"
        return Fault("whole row updated", f"{text} the same again; give update its own {cases.ROW // n} alone")
    own = before.chunk(n)[rank]
    for other in range(n):
        if other != rank and shard.shape == own.shape and equal(shard, before.chunk(n)[other]):
            return Fault("wrong shard", f"rank {rank} updates the shard of rank {other}; parameters.chunk(n)[rank]")
    fault = compare(shard, own, f"step {step}: what rank {rank} gave to update first", n)
    if fault is not None:
        return fault
    alone = cases.row_gradient(rank, step).chunk(n)[rank]
    if n > 1 and gradient.shape == own.shape and (equal(gradient, alone) or equal(gradient, alone / n)):
        text = f"rank {rank} updates its shard with its own gradient: nothing of the others reached it"
        return Fault("own gradient", f"{text}; scatter_sum adds up the ranks' gradients")
    return compare(gradient, mean.chunk(n)[rank], f"step {step}: the gradient that rank {rank} gave to update", n)


def _judge_row(got: Tensor, before: Tensor, want: Tensor, where: tuple[int, int, int]) -> Fault | None:
    step, rank, n = where
    if equal(got, want):
        return None
    if equal(got, before):
        text = f"step {step}: rank {rank}'s parameters are as before the step: update the row itself (a view of it),"
        return Fault("nothing written", f"{text} not a copy")
    for other in range(n):
        part, old, new = (row.chunk(n)[other] for row in (got, before, want))
        if other != rank and equal(part, old) and not equal(old, new):
            text = f"step {step}: rank {rank} still has the old values of rank {other}'s shard: replicas drift apart"
            return Fault("not gathered", f"{text}; all-gather the new parameters after the update")
    return compare(got, want, f"step {step}: rank {rank}'s parameters", n)


def _judge_step_bytes(evidence: Evidence) -> Iterator[Fault]:
    n = evidence.world_size
    wanted = cases.UPDATES * step_bytes(n)
    sent = max(evidence.records.sent_bytes(r) + evidence.records.ring_equivalent_bytes(r) for r in range(n))
    if sent <= 1.01 * wanted:
        return
    text = f"right result, but {in_megabytes(sent)} sent a rank where reduce-scatter and all-gather need"
    if any(call.op == "all_reduce" for call in calls(evidence, 0)):
        text = f"{text} {in_megabytes(wanted)}: the all-reduce brings every rank the mean of all gradients, and each"
        yield Fault("all-reduce", f"{text} uses one shard of it; scatter_sum is the half that you need")
    else:
        yield Fault("too many bytes", f"{text} {in_megabytes(wanted)}")


def budget_step(evidence: Evidence) -> list[str]:
    """Say what was sent and what state a rank holds."""
    n = evidence.world_size
    state = max(result["state"] for result in evidence.results)
    sent = in_megabytes(step_bytes(n))
    return [f"sent {sent} a rank and step, as an all-reduce does", f"optimizer state: {state} of {cases.ROW} elements"]
