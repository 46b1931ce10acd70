"""An all-reduce on two levels: sums, and what crosses between machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from distlab_lesson_02.checks import shared

from distlab.comm import RankError
from distlab.course.grading.cases import Cases, Given
from distlab.grading import Evidence, Fault, Mutant

TOTAL = 8 * shared.LENGTHS[0]  # bytes of the tensor whose messages are looked at


def _machines(n: int) -> list[tuple[int, int]]:
    """Return the (machines, ranks per machine) to try with so many ranks."""
    return [(m, n // m) for m in range(1, n + 1) if n % m == 0]


def _cases(rank: int, n: int) -> Given:
    return {f"{m} machine{'s' * (m > 1)} of {g} (elements: 100 to 400 times 10^rank)": (m, g) for m, g in _machines(n)}


def _use(fn: Callable[..., Any], m: int, g: int) -> dict[str, Any]:
    machines = [[machine * g + place for place in range(g)] for machine in range(m)]
    local, _ = dist.new_subgroups_by_enumeration(machines)
    cross, _ = dist.new_subgroups_by_enumeration([list(places) for places in zip(*machines, strict=True)])
    return {f"{length} elements": shared.use_sum(lambda x: fn(x, local, cross), length, ()) for length in (12, 7)}


drive_hierarchical = Cases(_cases, _use, most_bytes=0)


def _bytes_away(evidence: Evidence, rank: int, number: int, g: int) -> tuple[int, int]:
    """Return the bytes that a rank sent to other machines, and inside its own, in an arrangement."""
    sends = shared.sent(shared.parted(evidence, rank)[2 * number])  # of 12 elements
    away = sum(call.num_bytes for call in sends if call.peer // g != rank // g)
    return away, sum(call.num_bytes for call in sends) - away


def judge_hierarchical(evidence: Evidence) -> Iterator[Fault]:
    """Compare what crosses between machines, and what stays inside, with what is needed."""
    arrangements = _machines(evidence.world_size)
    yield from shared.refuse_native(evidence, 2 * len(arrangements))
    for number, (m, g) in enumerate(arrangements):
        across, inside = 2 * (m - 1) * TOTAL // (m * g), 2 * (g - 1) * TOTAL // g
        for rank in range(evidence.world_size):
            away, here = _bytes_away(evidence, rank, number, g)
            text = f"right sums, but with {m} machines of {g} ranks, rank {rank} sent {away} bytes to other machines"
            if away > across and here < inside:
                text += f" and {here} inside its own; the chunk should cross"
                yield Fault("groups swapped", f"{text}: are the groups swapped?")
            if away > across:
                text += f" for a tensor of {TOTAL}; its chunk alone needs {across}"
                yield Fault("too many bytes between machines", f"{text}: 1/{g} of the tensor may cross")
            if here > inside:
                text = f"right sums, but rank {rank} sent {here} bytes inside its machine; {inside} are enough"
                yield Fault("too many bytes inside", text)


def failure_hierarchical(error: RankError, world_size: int) -> Fault | None:
    """Name a step over the wrong group by tensors of several lengths in one call; else as in the other exercises."""
    if "a send and the receive that takes it do not fit" in str(error):
        words = "ranks give tensors of several lengths to one call: a step runs over the wrong group, or takes a piece"
        words += " where the whole tensor (in local) or this rank's whole chunk (in cross) is due"
        return Fault("wrong group", f"{words}. cross holds the ranks with the same chunk")
    return shared.failure(error, world_size)


def budget_hierarchical(evidence: Evidence) -> tuple[str, ...]:
    """Say what crossed between machines in the squarest arrangement."""
    arrangements = _machines(evidence.world_size)
    number = len(arrangements) // 2
    m, g = arrangements[number]
    away, _ = _bytes_away(evidence, 0, number, g)
    return (f"{m} machines of {g} ranks: {away} bytes per rank between machines for a tensor of {TOTAL}",)


_ACROSS, _GATHER = "too many bytes between machines", "collectives.ring_all_gather(tensor, local)"
_CROSS = "collectives.ring_all_reduce(chunk, cross)"
WRONG_HIERARCHICAL = (
    Mutant("two whole all-reduces", _ACROSS, "1/2", 4, "guide code").body("""
        collectives.ring_all_reduce(tensor, local)
        return collectives.ring_all_reduce(tensor, cross)
    """),
    Mutant("levels swapped", "groups swapped", "48 inside", 4, 7)
    .edit("tensor, local)", "tensor, cross)", times=2)
    .edit("chunk, cross", "chunk, local"),
    Mutant("gathers too early", _ACROSS, "1/2", 4, "guide code").edit(
        f"{_CROSS}\nreturn {_GATHER}", f"{_GATHER}\nreturn collectives.ring_all_reduce(tensor, cross)"
    ),
    Mutant(
        "never crosses", "machines apart", "it is the sum of this machine alone; all-reduce the chunk over cross", 2, 5
    ).without(_CROSS),
    Mutant("cross alone", "ranks apart", "it is the sum over cross alone: the ranks of a machine never met", 2).body(
        "return collectives.ring_all_reduce(tensor, cross)"
    ),
    Mutant(
        "half across", "half across", "a part of the chunk alone is summed over cross; all-reduce the chunk there", 2
    ).edit(_CROSS, "collectives.ring_reduce_scatter(chunk, cross)"),
    Mutant("never gathers", "never gathered", "this rank's chunk alone is the sum; gather chunks over local", 2).edit(
        _GATHER, "tensor"
    ),
    Mutant(
        "gathers across", "gathered across", "chunks are gathered over cross; those of a machine lie in local", 4
    ).edit(_GATHER, "collectives.ring_all_gather(tensor, cross)"),
    Mutant("returns its chunk", "wrong length", "this rank's chunk is returned; return the whole tensor", 2).edit(
        f"return {_GATHER}", f"{_GATHER}\nreturn chunk"
    ),
    Mutant("over the wrong group", "wrong group", "a step runs over the wrong group", 4, races=True, ends=True).edit(
        "chunk, cross", "chunk, local"
    ),
)
