"""Whole all-reduces: the relay to be repaired, halving and doubling, and two levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_02.checks import shared

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant


def judge_sum(evidence: Evidence) -> Iterator[Fault]:
    """Look at every rank's sum, on all ranks and in the smaller group."""
    for all_ranks in shared.cases(evidence):
        n, length = len(all_ranks[0].ranks), all_ranks[0].after.numel()
        yield from shared.refuse_native(all_ranks)
        yield from shared.refuse_returned(all_ranks, [length] * n, "the tensor")
        make = shared.coded if shared.is_coded(all_ranks) else shared.varied
        yield from shared.refuse_copies(all_ranks, [sum(make(r, length) for r in range(n))] * n)
        for case in all_ranks:
            where = f"{case.name}: the sum on rank {case.ranks[case.rank]}"
            if n > 1 and torch.equal(case.after, make(case.rank, length)):
                text = f"{case.name}: rank {case.ranks[case.rank]}'s tensor is as before"
                if not case.calls:
                    yield Fault("nothing sent", f"{text}, and it sent nothing: a ring of {n} takes {n - 1} steps")
                text = f"{text}: the sum must stand in the"
                yield Fault("as before", f"{text} tensor that was passed in, not in a copy")
            if shared.is_coded(all_ranks):
                yield from shared.explain_parts(case.after, where, n)
            else:
                yield from shared.differs(case.after, sum(shared.varied(r, length) for r in range(n)), where)
            if not isinstance(case.returned, str):
                yield from shared.differs(case.returned, case.after, f"{case.name}: what rank {case.rank} returned")


def drive_halving(fn: Callable[..., Any]) -> list[shared.Result]:
    """Call fn on coded and varied tensors of several lengths: on all ranks, which are a power of two."""
    rank, results = dist.get_rank(), []
    for length in shared.LENGTHS:
        results.append(shared.play(fn, shared.coded(rank, length), name=f"{length} elements"))
        results.append(shared.play(fn, shared.varied(rank, length), name=f"{length} different elements"))
    members = (2, 3) if dist.get_world_size() == 4 else ()
    group = dist.new_group(list(members)) if members else None
    if rank in members:
        tensor = shared.coded(members.index(rank), 7)
        results.append(shared.play(fn, tensor, group, name="a group of ranks [2, 3]", ranks=members))
    return results


def judge_halving(evidence: Evidence) -> Iterator[Fault]:
    """Look at the sums, then at bytes and steps."""
    for all_ranks in shared.cases(evidence):
        if all_ranks[0].name == "12 elements":
            yield from not_gathered(all_ranks)
    yield from judge_sum(evidence)
    for all_ranks in shared.cases(evidence):
        n, length = len(all_ranks[0].ranks), all_ranks[0].after.numel()
        levels = int(math.log2(n))
        if length % n == 0:
            yield from shared.too_many_bytes(all_ranks, 2 * (n - 1) * length * 8 // n, "halving and doubling")
        if (steps := shared.rounds(all_ranks)) > 2 * levels:
            message = f"right sums, but {steps} steps follow one another; {n} ranks need {levels} down and {levels} up"
            yield Fault("too many steps", message)


def not_gathered(all_ranks: Sequence[shared.Case]) -> Iterator[Fault]:
    """Find ranks whose own chunk is finished while others are not: the way down is right, the way out is not."""
    n = len(all_ranks[0].ranks)
    for rank, case in enumerate(all_ranks):
        finished = [all(shared.parts_of(float(v), n) == [1] * n for v in c) for c in case.after.tensor_split(n)]
        if not finished[rank] or all(finished):
            continue
        head = f"{case.name}: on rank {rank} chunk {rank} is the full sum, but chunk {finished.index(False)} is not"
        if sum(finished) == 1:
            yield Fault("never doubled", f"{head}: now exchange the finished blocks, ever larger ones")
        else:
            yield Fault("doubled in another order", f"{head}: swap back in reverse order, the smallest block first")


def machines_of(world_size: int) -> list[tuple[int, int]]:
    """Return the (machines, ranks per machine) to try with so many ranks."""
    return [(m, world_size // m) for m in range(1, world_size + 1) if world_size % m == 0]


def drive_hierarchical(fn: Callable[..., Any]) -> list[shared.Result]:
    """Call fn on each way to put the ranks into machines."""
    rank, results = dist.get_rank(), []
    for m, g in machines_of(dist.get_world_size()):
        machines = [[machine * g + place for place in range(g)] for machine in range(m)]
        local, _ = dist.new_subgroups_by_enumeration(machines)
        cross, _ = dist.new_subgroups_by_enumeration([list(places) for places in zip(*machines, strict=True)])
        for length in (12, 7):
            name = f"{m} machines of {g} ranks, {length} elements"
            results.append(shared.play(fn, shared.coded(rank, length), local, cross, name=name))
            results.append(shared.play(fn, shared.varied(rank, length), local, cross, name=f"{name} (different)"))
    return results


def judge_hierarchical(evidence: Evidence) -> Iterator[Fault]:
    """Look for machines that are missing or counted twice, then at the bytes between machines."""
    n = evidence.world_size
    for all_ranks in shared.cases(evidence):
        num_machines, g = int(all_ranks[0].name.split()[0]), int(all_ranks[0].name.split()[3])
        for rank, case in enumerate(all_ranks):
            parts = shared.parts_of(float(case.after[0]), n)
            inside = [1 if r // g == rank // g else 0 for r in range(n)]
            across = [1 if r % g == rank % g else 0 for r in range(n)]
            if shared.is_coded(all_ranks) and "(" not in case.name and num_machines > 1 and g > 1:
                if parts == inside:
                    yield Fault("machines apart", f"{case.name}: rank {rank} has the sum of its own machine only")
                if parts == across:
                    message = f"{case.name}: rank {rank} has the sum over its cross group {cross_of(rank, g, n)} only"
                    yield Fault("ranks apart", f"{message}: the ranks of a machine never met")
                if any(shared.parts_of(float(v), n) != [1] * n for v in case.after):
                    yield from unfinished(case, rank, g)
    for fault in judge_sum(evidence):
        yield from other_wires(evidence)
        yield fault
    for all_ranks in shared.cases(evidence):
        num_machines, g = int(all_ranks[0].name.split()[0]), int(all_ranks[0].name.split()[3])
        if "12 elements" in all_ranks[0].name:
            yield from too_much_across(all_ranks, num_machines, g)


def other_wires(evidence: Evidence) -> Iterator[Fault]:
    """Find a step that runs over the wrong group, by whom each rank sent to, in order."""
    for all_ranks in shared.cases(evidence):
        m, g = int(all_ranks[0].name.split()[0]), int(all_ranks[0].name.split()[3])
        if m == 1 or g == 1:
            continue  # a group of one rank sends nothing
        want = ["inside"] * (g - 1) + ["across"] * (2 * (m - 1)) + ["inside"] * (g - 1)
        for case in all_ranks:
            sent = [call.peer for call in case.calls if call.op == "send"]
            went = ["inside" if peer // g == case.rank // g else "across" for peer in sent]
            if went != want and len(went) == len(want):
                text = f"{case.name}: rank {case.rank}'s messages go {', '.join(went)}, one after another, where"
                text += f" {', '.join(want)} are asked: a step runs over the wrong group. Reduce-scatter over local,"
                yield Fault("wrong group", f"{text} all-reduce the chunk over cross, all-gather over local")


def hierarchical_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a step over the wrong group by tensors of several lengths in one call; else as in the other exercises."""
    fault = shared.explain_failure(error, world_size)
    if fault is None or fault.code != "messages do not fit":
        return fault
    first, *lines = fault.message.splitlines()
    text = (
        f"{first}. So ranks give tensors of several lengths to one call: a step runs over the wrong group. The chunks"
    )
    text += " of one machine differ; cross holds the ranks with the same chunk"
    return Fault("wrong group", "\n".join([text, *lines]))


def cross_of(rank: int, g: int, n: int) -> list[int]:
    """Return the ranks with the same place on all machines."""
    return list(range(rank % g, n, g))


def unfinished(case: shared.Case, rank: int, g: int) -> Iterator[Fault]:
    """Find the case that only this rank's chunk of the machine is finished: the chunks were never gathered."""
    chunks = case.after.tensor_split(g)
    done = [all(shared.parts_of(float(v), len(case.ranks)) == [1] * len(case.ranks) for v in c) for c in chunks]
    if done == [c == rank % g for c in range(g)]:
        message = f"{case.name}: on rank {rank} only chunk {rank % g} is the full sum: gather the chunks in the machine"
        yield Fault("never gathered", message)


def too_much_across(all_ranks: Sequence[shared.Case], num_machines: int, g: int) -> Iterator[Fault]:
    """Compare what crosses between machines, and what stays inside, with the budget."""
    total = all_ranks[0].after.numel() * 8
    across = 2 * (num_machines - 1) * total // (num_machines * g)
    inside = 2 * (g - 1) * total // g
    for case in all_ranks:
        sends = [call for call in case.calls if call.op == "send"]
        away = sum(call.num_bytes for call in sends if call.peer // g != case.rank // g)
        if away > across and case.sent_bytes - away < inside:
            message = f"{case.sent_bytes - away} bytes inside its machine and {away} to others; the chunk should cross"
            yield Fault("groups swapped", f"right sums, but rank {case.rank} sent {message}: are the groups swapped?")
        if away > across:
            message = f"right sums, but with {num_machines} machines of {g} ranks, rank {case.rank} sent {away} bytes"
            message += f" to other machines for a tensor of {total}; its chunk alone needs {across}"
            yield Fault("too many bytes between machines", f"{message}: 1/{g} of the tensor may cross")
        if case.sent_bytes - away > inside:
            message = f"rank {case.rank} sent {case.sent_bytes - away} bytes inside its machine; {inside} are enough"
            yield Fault("too many bytes inside", f"right sums, but {message}")


def hierarchical_budget(evidence: Evidence) -> tuple[str, ...]:
    """Say what crossed between machines in the squarest arrangement."""
    arrangements = machines_of(evidence.world_size)
    m, g = arrangements[len(arrangements) // 2]
    all_ranks = next(c for c in shared.cases(evidence) if c[0].name == f"{m} machines of {g} ranks, 12 elements")
    case, total = all_ranks[0], all_ranks[0].after.numel() * 8
    away = sum(call.num_bytes for call in case.calls if call.op == "send" and call.peer // g != case.rank // g)
    return (f"{m} machines of {g} ranks: {away} bytes per rank between machines for a tensor of {total}",)


def judge_relay(evidence: Evidence) -> Iterator[Fault]:
    """Look at the sums, then at bytes and steps of the relay."""
    yield from judge_sum(evidence)
    for all_ranks in shared.cases(evidence):
        n, length = len(all_ranks[0].ranks), all_ranks[0].after.numel()
        yield from shared.too_many_bytes(all_ranks, (n - 1) * length * 8, "the relay ((n-1) S)")
        if (steps := shared.rounds(all_ranks)) > n - 1:
            yield Fault("too many steps", f"right sums, but {steps} steps follow one another; the relay takes {n - 1}")


WRONG_RELAYS = (
    Mutant("never passes on", "part missing", "has rank 2's part 2 times", 3, 2).without(
        "outgoing, incoming = incoming, outgoing  # pass on what came, receive into the other buffer"
    ),
    Mutant("adds the wrong buffer", "part missing", "rank 0's part 2 times", 2, 2).edit(
        "tensor += incoming\noutgoing, incoming = incoming, outgoing",
        "outgoing, incoming = incoming, outgoing\ntensor += incoming",
    ),
    Mutant("passes on sums", "counted twice", "times", 3).edit("Send(outgoing", "Send(tensor"),
    Mutant("ignores the group", "group ignored", "group=group", 3, 7).without(", group=group"),
    Mutant("one step too many", "counted twice", "belongs in once", 3).edit("range(n - 1)", "range(n)"),
    Mutant("n-2 steps", "part missing", "lacks rank 1's part", 3).edit("range(n - 1)", "range(n - 2)"),
    Mutant("no copy", "part missing", "has rank 1's part 2 times", 3, 40).edit(
        "outgoing, incoming = tensor.clone(),", "outgoing, incoming = tensor,"
    ),
)
_DOUBLING = (
    "for peer, mine, theirs in reversed(swaps):\n    exchange(Receive(theirs, peer), Send(mine, peer), group=group)"
)
_KEEPS = "(first, second) if rank < peer else (second, first)"
WRONG_HALVINGS = (
    Mutant("whole tensors", "too many bytes", "192 bytes", 4, 1)
    .edit(_KEEPS, "(tensor, tensor.clone())")
    .without(_DOUBLING),
    Mutant("never doubles", "never doubled", "ever larger", 2).without(_DOUBLING),
    Mutant("both keep one half", "wrong place", "another place", 2, 2).edit(
        _KEEPS, "(first[: second.numel()], second)"
    ),
    Mutant("halves rounded down", "part missing", "element 6", 2, 8).edit(
        "= block.tensor_split(2)", "= block[: block.numel() // 2 * 2].tensor_split(2)"
    ),
    Mutant("doubles in halving's order", "doubled in another order", "reverse order", 4, 8).edit(
        "reversed(swaps)", "swaps"
    ),
    Mutant("copies instead of adding", "part missing", "lacks rank 0's part", 2, 2).edit(
        "mine += received", "mine.copy_(received)"
    ),
    Mutant("next rank as partner", "deadlock", "wait for each other", 4).edit(
        "rank ^ distance", "(rank + distance) % n"
    ),
    Mutant("works on a copy", "as before", "not in a copy", 2).edit(
        "block, swaps, distance = tensor,", "block, swaps, distance = tensor.clone(),"
    ),
)
_ACROSS = "too many bytes between machines"
WRONG_LEVELS = (
    Mutant("two whole all-reduces", _ACROSS, "1/2", 4, "guide code").body("""
        collectives.ring_all_reduce(tensor, local)
        return collectives.ring_all_reduce(tensor, cross)
    """),
    Mutant("levels swapped", "groups swapped", "48 bytes inside", 4, 7)
    .edit("tensor, local)", "tensor, cross)", times=2)
    .edit("chunk, cross", "chunk, local"),
    Mutant("never crosses", "machines apart", "its own machine", 4, 5).without(
        "collectives.ring_all_reduce(chunk, cross)"
    ),
    Mutant("never gathers", "never gathered", "gather the chunks", 4).edit(
        "collectives.ring_all_gather(tensor, local)", "tensor"
    ),
    Mutant("gathers too early", _ACROSS, "1/2", 4, "guide code").edit(
        "collectives.ring_all_reduce(chunk, cross)\nreturn collectives.ring_all_gather(tensor, local)",
        "collectives.ring_all_gather(tensor, local)\nreturn collectives.ring_all_reduce(tensor, cross)",
    ),
    Mutant("returns its chunk", "wrong length", "returned 3 elements", 4).edit(
        "return collectives.ring_all_gather(tensor, local)", "collectives.ring_all_gather(tensor, local)\nreturn chunk"
    ),
    Mutant("half across", "machines apart", "its own machine", 4).edit(
        "collectives.ring_all_reduce(chunk, cross)", "collectives.ring_reduce_scatter(chunk, cross)"
    ),
    Mutant("gathers across", "never gathered", "gather the chunks", 4).edit(
        "collectives.ring_all_gather(tensor, local)", "collectives.ring_all_gather(tensor, cross)"
    ),
)
