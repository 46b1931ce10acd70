"""A row of parameters that is cut into shards, and the step of ZeRO-1 on such a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import calls, in_megabytes, most_sent
from distlab.grading.diagnosis.values import compare, describe, same, seeded

SHARD_CASES = (
    ((6, 6), 2),
    ((5, 3), 2),
    ((7,), 3),
    ((2, 9, 1), 4),
    ((3, 4, 0, 5), 3),
    ((1, 2), 4),
    ((10, 7), 1),
)
ROW = 24  # elements of the row of ZeRO-1: 1, 2, 3 and 4 ranks divide it
UPDATES = 2
Piece = tuple[int, int, int]


def drive_pieces(fn: Callable[[list[int], int, int], Any]) -> list[list[Any]]:
    """Call fn for each shard of each case."""
    return [[fn(list(sizes), count, shard) for shard in range(count)] for sizes, count in SHARD_CASES]


def judge_pieces(evidence: Evidence) -> Iterator[Fault]:
    """Every element in one shard, all shards of one length, places counted in the tensor."""
    for (sizes, count), shards in zip(SHARD_CASES, evidence.results[0], strict=True):
        asked = f"tensors of {list(sizes)} elements in {count} shard{'s' if count > 1 else ''}"
        for shard, pieces in enumerate(shards):
            if not _is_list_of_pieces(pieces):
                text = f"{asked}, shard {shard}: expected a list of (tensor, start, stop), got {describe(pieces)}"
                yield Fault("returned", text)
        held = [[tuple(piece) for piece in pieces] for pieces in shards]
        length = -(-sum(sizes) // count)
        want = [right_pieces(sizes, length, shard) for shard in range(count)]
        if held != want:
            yield from _judge_counting(sizes, held, want, asked)
            yield from _judge_cover(sizes, length, held, asked)
            if held == [_each_tensor(sizes, count, shard) for shard in range(count)]:
                text = f"{asked}: every tensor is cut by itself, as FSDP2 does"
                yield Fault("each tensor cut", f"{text}; here the tensors lie end to end first, and their row is cut")
            shard = next(s for s in range(count) if held[s] != want[s])
            yield Fault("values", f"{asked}: shard {shard} holds {held[shard]}, expected {want[shard]}")


def _is_list_of_pieces(pieces: Any) -> bool:
    return isinstance(pieces, list | tuple) and all(
        isinstance(piece, list | tuple) and len(piece) == 3 and all(type(number) is int for number in piece)
        for piece in pieces
    )


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


def _judge_counting(
    sizes: tuple[int, ...], held: list[list[Piece]], want: list[list[Piece]], asked: str
) -> Iterator[Fault]:
    """Places that are counted from elsewhere, or to elsewhere."""
    length = -(-sum(sizes) // len(want))
    offsets = [sum(sizes[:tensor]) for tensor in range(len(sizes))]
    in_row = [[(t, a + offsets[t], b + offsets[t]) for t, a, b in pieces] for pieces in want]
    if held == in_row:
        text = f"{asked}: start and stop count elements of the whole row; tensor {want[-1][-1][0] if want[-1] else 1}"
        yield Fault("counted in the row", f"{text} begins at its own 0: subtract where the tensor begins")
    if held == [[(t, a - s * length, b - s * length) for t, a, b in pieces] for s, pieces in enumerate(in_row)]:
        text = f"{asked}: start and stop count elements of the shard; they are to count those of the tensor"
        yield Fault("counted in the shard", f"{text}: subtract where the tensor begins, not where the shard does")
    if held == [[(t, a, b - a) for t, a, b in pieces] for pieces in want]:
        yield Fault("stop is a length", f"{asked}: stop is how many elements there are; let it be start + that many")
    if held == [[(t, a, b - 1) for t, a, b in pieces] for pieces in want]:
        yield Fault("stop is the last", f"{asked}: stop is the last element; let it be one past it, as in a slice")
    for shard, pieces in enumerate(held):
        for tensor, start, stop in pieces:
            where = f"{asked}: shard {shard} has ({tensor}, {start}, {stop})"
            size = sizes[tensor] if 0 <= tensor < len(sizes) else 0
            if start >= stop:
                yield Fault("empty piece", f"{where}, a piece without elements: leave it out (start < stop)")
            if start < 0 or stop > size:
                text = f"{where}, but tensor {tensor} has {size} elements: what the row is filled up with belongs to no"
                yield Fault("past the end", f"{text} tensor")


def _judge_cover(sizes: tuple[int, ...], length: int, held: list[list[Piece]], asked: str) -> Iterator[Fault]:
    """Elements in no shard or in two, and shards that are not equally long."""
    elements = [(tensor, place) for pieces in held for tensor, a, b in pieces for place in range(a, b)]
    for tensor, size in enumerate(sizes):
        for place in range(size):
            if (tensor, place) not in elements:
                text = f"{asked}: element {place} of tensor {tensor} is in no shard, so no rank would update it"
                yield Fault("elements lost", f"{text}; the length of a shard is rounded up: -(-total // num_shards)")
            if elements.count((tensor, place)) > 1:
                yield Fault("held twice", f"{asked}: element {place} of tensor {tensor} is in two shards")
    for shard, pieces in enumerate(held):
        number = sum(stop - start for _, start, stop in pieces)
        should = sum(stop - start for _, start, stop in right_pieces(sizes, length, shard))
        text = f"{asked}: shard {shard} holds {number} elements, where equal shards have {length}"
        if number > length and all((start, stop) == (0, sizes[t]) for row in held for t, start, stop in row):
            yield Fault("unequal shards", f"{text}: the fullest rank decides what fits; cut through tensors")
        if number != should:
            text = f"{text} and this one gets {should} of the tensors'" if should < length else text
            yield Fault("unequal shards", f"{text}; -(-total // num_shards) for all, filled up at the row's end alone")


def _each_tensor(sizes: tuple[int, ...], count: int, shard: int) -> list[tuple[int, int, int]]:
    """Return the pieces of a shard if every tensor were cut by itself."""
    lengths = [-(-size // count) for size in sizes]
    cuts = [(min(shard * n, size), min((shard + 1) * n, size)) for n, size in zip(lengths, sizes, strict=True)]
    return [(tensor, start, stop) for tensor, (start, stop) in enumerate(cuts) if start < stop]


def budget_pieces(evidence: Evidence) -> list[str]:
    """Say how much is filled up."""
    filled = max(-(-sum(sizes) // count) * count - sum(sizes) for sizes, count in SHARD_CASES)
    return [f"{len(SHARD_CASES)} cases; at most {filled} elements filled up, always fewer than there are shards"]


class Momentum:
    """An optimizer with state for what it is given: SGD with momentum; writes down what that was."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, shard: Tensor, gradient: Tensor) -> None:
        """Update a shard in place."""
        self.seen.append((shard.clone(), gradient.clone()))
        if self.buffer is None:
            self.buffer = torch.zeros_like(shard)
        self.buffer.mul_(0.9).add_(gradient)
        shard.sub_(self.buffer, alpha=0.1)


def row_gradient(rank: int, step: int) -> Tensor:
    """Return a rank's own gradient in a step."""
    return seeded(rank, ROW, purpose=f"zero 1 {step}")


def drive_step(fn: Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], None]], Any]) -> dict[str, Any]:
    """Make two updates of one row; every rank begins with the same."""
    row, update = seeded(-1, ROW, purpose="row"), Momentum()
    after = []
    for step in range(UPDATES):
        fn(row, row_gradient(dist.get_rank(), step), update)
        after.append(row.clone())
    state = 0 if update.buffer is None else update.buffer.numel()
    return {"after": after, "seen": update.seen, "state": state}


def step_bytes(n: int) -> float:
    """Return what reduce-scatter and all-gather of a row of float64 send."""
    return 2 * (n - 1) / n * 8 * ROW


def judge_step(evidence: Evidence) -> Iterator[Fault]:
    """Own shard alone is updated, with the mean gradient, and all ranks have the whole row afterwards."""
    n = evidence.world_size
    row, update = seeded(-1, ROW, purpose="row"), Momentum()
    for step in range(UPDATES):
        mean = torch.stack([row_gradient(rank, step) for rank in range(n)]).mean(0)
        before = row.clone()
        update(row, mean)
        for rank, result in enumerate(evidence.results):
            yield from _judge_update(result["seen"], (step, rank, n), before, mean)
        for rank, result in enumerate(evidence.results):
            yield from _judge_row(result["after"][step], before, row, (step, rank, n))
    wanted = UPDATES * step_bytes(n)
    if most_sent(evidence) > 1.01 * wanted:
        text = (
            f"right result, but {in_megabytes(most_sent(evidence))} sent per rank where reduce-scatter and all-gather"
        )
        text = f"{text} need {in_megabytes(wanted)}"
        if calls(evidence, 0, "all_reduce"):
            text = f"{text}: the all-reduce brings every rank the mean of all gradients, and each uses one shard of it"
            yield Fault("all-reduce", f"{text}; scatter_sum is the half that you need")
        yield Fault("too many bytes", text)


def _judge_update(seen: list[Any], where: tuple[int, int, int], before: Tensor, mean: Tensor) -> Iterator[Fault]:
    step, rank, n = where
    if len(seen) != UPDATES:
        text = f"rank {rank} called update {len(seen)} times in {UPDATES} steps"
        yield Fault("update calls", f"{text}; expected once per step: update(own shard, its mean gradient)")
    shard, gradient = seen[step]
    if n > 1 and shard.numel() == ROW:
        text = f"rank {rank} updates all {ROW} elements, so its optimizer keeps state for all: every rank holds"
        yield Fault("whole row updated", f"{text} the same again; give update its own {ROW // n} alone")
    for other in range(n):
        if other != rank and same(shard, before.chunk(n)[other]):
            yield Fault("wrong shard", f"rank {rank} updates the shard of rank {other}; parameters.chunk(n)[rank]")
    yield from found(compare(shard, before.chunk(n)[rank], f"step {step}: what rank {rank} gave to update first", n))
    alone = row_gradient(rank, step).chunk(n)[rank]
    if n > 1 and (same(gradient, alone) or same(gradient, alone / n)):
        text = f"rank {rank} updates its shard with its own gradient: nothing of the others reached it"
        yield Fault("own gradient", f"{text}; scatter_sum adds up the ranks' gradients")
    what = f"step {step}: the gradient that rank {rank} gave to update"
    yield from found(compare(gradient, mean.chunk(n)[rank], what, n))


def _judge_row(got: Tensor, before: Tensor, want: Tensor, where: tuple[int, int, int]) -> Iterator[Fault]:
    step, rank, n = where
    if same(got, before):
        text = f"step {step}: rank {rank}'s parameters are as before the step: update the row itself (a view of it),"
        yield Fault("nothing written", f"{text} not a copy")
    for other in range(n):
        part, old, new = (row.chunk(n)[other] for row in (got, before, want))
        if other != rank and same(part, old) and not same(old, new):
            text = f"step {step}: rank {rank} still has the old values of rank {other}'s shard: replicas drift apart"
            yield Fault("not gathered", f"{text}; all-gather the new parameters after the update")
    yield from found(compare(got, want, f"step {step}: rank {rank}'s parameters", n))


def budget_step(evidence: Evidence) -> list[str]:
    """Say what was sent and what state a rank holds."""
    state = max(result["state"] for result in evidence.results)
    sent = in_megabytes(step_bytes(evidence.world_size))
    return [f"sent {sent} per rank and step, as an all-reduce does", f"optimizer state: {state} of {ROW} elements"]


_LENGTH, _PIECE = "-(-sum(sizes) // num_shards)", "(tensor, start - begin, stop - begin)"
_SUM = "scatter_sum(gradient, mean)\nmean /= dist.get_world_size()"

WRONG_PIECES = (
    Mutant("rounded down", "elements lost", "no rank would update it", 1).edit(_LENGTH, "sum(sizes) // num_shards"),
    Mutant("places in the row", "counted in the row", "begins at its own 0", 1).edit(_PIECE, "(tensor, start, stop)"),
    Mutant("whole tensors", "unequal shards", "cut through tensors", 1).body("""
        held, found = [0] * num_shards, []
        for tensor, size in enumerate(sizes):
            least = held.index(min(held))
            held[least] += size
            if least == shard and size:
                found.append((tensor, 0, size))
        return found
    """),
    Mutant("empty pieces", "empty piece", "leave it out", 1)
    .edit("if start < stop:", "if True:")
    .edit(_PIECE, "(tensor, start - begin, max(start, stop) - begin)"),
    Mutant("padding is the last's", "past the end", "belongs to no tensor", 1).edit(
        "low, high =", "sizes = [*sizes[:-1], sizes[-1] + length * num_shards - sum(sizes)]\nlow, high ="
    ),
    Mutant("counted from the shard", "counted in the shard", "not where the shard does", 1).edit(
        _PIECE, "(tensor, start - low, stop - low)"
    ),
    Mutant("last element", "stop is the last", "as in a slice", 1).edit(
        _PIECE, "(tensor, start - begin, stop - begin - 1)"
    ),
)
WRONG_STEPS = (
    Mutant("all-reduce", "all-reduce", "the half that you need", 4)
    .edit("scatter_sum(gradient, mean)", "dist.all_reduce(gradient)")
    .edit("mean /=", "mean = gradient.chunk(dist.get_world_size())[dist.get_rank()] /"),
    Mutant("updates everything", "whole row updated", "every rank holds the same", 2)
    .edit("update(own, mean)", "gather_into(gradient, mean)\nupdate(parameters, gradient)")
    .without("gather_into(parameters, own)"),
    Mutant("no gather", "not gathered", "replicas drift apart", 2, 66).without("gather_into(parameters, own)"),
    Mutant("sum", "sum not mean", "divide by world_size (3)", 3, 9).without("mean /= dist.get_world_size()"),
    Mutant("own gradient", "own gradient", "nothing of the others", 2, 66).edit(
        _SUM, "mean = gradient.chunk(dist.get_world_size())[dist.get_rank()]"
    ),
    Mutant("a copy", "nothing written", "not a copy", 1)
    .edit("[dist.get_rank()]", "[dist.get_rank()].clone()")
    .edit("gather_into(parameters, own)", "gather_into(torch.empty_like(parameters), own)"),
    Mutant("another's shard", "wrong shard", "the shard of rank", 2)
    .edit("[dist.get_rank()]", "[-1 - dist.get_rank()]")
    .edit("gather_into(parameters, own)", "gather_into(parameters, own.clone())"),
)
