"""How the checks look at whole all-reduces, and at a prediction of their times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from distlab.grading import Evidence, Fault

from distlab_lesson_02.cases import (  # isort: skip
    Case,
    LENGTHS,
    Result,
    cases,
    coded,
    explain_parts,
    parts_of,
    play,
    refuse_copies,
    refuse_native,
    refuse_returned,
    rounds,
    too_many_bytes,
    varied,
)
from distlab_lesson_02.judge_rings import differs, drive_on_sums, is_coded  # isort: skip


def judge_sum(evidence: Evidence) -> Iterator[Fault]:
    """Look at every rank's sum, on all ranks and in the smaller group."""
    for everybody in cases(evidence):
        n, length = len(everybody[0].ranks), everybody[0].after.numel()
        yield from refuse_native(everybody)
        yield from refuse_returned(everybody, [length] * n, "the tensor")
        make = coded if is_coded(everybody) else varied
        yield from refuse_copies(everybody, [sum(make(r, length) for r in range(n))] * n)
        for case in everybody:
            where = f"{case.name}: the sum on rank {case.ranks[case.rank]}"
            if is_coded(everybody):
                yield from explain_parts(case.after, where, n)
            else:
                yield from differs(case.after, sum(varied(r, length) for r in range(n)), where)
            if not isinstance(case.returned, str):
                yield from differs(case.returned, case.after, f"{case.name}: what rank {case.rank} returned")


# halving and doubling


def drive_halving(fn: Callable[..., Any]) -> list[Result]:
    """Call fn on coded and varied tensors of several lengths: on all ranks, which are a power of two."""
    rank, results = dist.get_rank(), []
    for length in LENGTHS:
        results.append(play(fn, coded(rank, length), name=f"{length} elements"))
        results.append(play(fn, varied(rank, length), name=f"{length} different elements"))
    members = (2, 3) if dist.get_world_size() == 4 else ()
    group = dist.new_group(list(members)) if members else None
    if rank in members:
        tensor = coded(members.index(rank), 7)
        results.append(play(fn, tensor, group, name="a group of ranks [2, 3]", ranks=members))
    return results


def judge_halving(evidence: Evidence) -> Iterator[Fault]:
    """Look at the sums, then at bytes and steps."""
    for everybody in cases(evidence):
        if everybody[0].name == "12 elements":
            yield from not_gathered(everybody)
    yield from judge_sum(evidence)
    for everybody in cases(evidence):
        n, length = len(everybody[0].ranks), everybody[0].after.numel()
        levels = int(math.log2(n))
        if length % n == 0:
            yield from too_many_bytes(everybody, 2 * (n - 1) * length * 8 // n, "halving and doubling")
        if (steps := rounds(everybody)) > 2 * levels:
            message = f"right sums, but {steps} steps follow one another; {n} ranks need {levels} down and {levels} up"
            yield Fault("too many steps", message)


def not_gathered(everybody: Sequence[Case]) -> Iterator[Fault]:
    """Find ranks whose own chunk is finished while others are not: the way down is right, the way out is not."""
    n = len(everybody[0].ranks)
    for rank, case in enumerate(everybody):
        finished = [all(parts_of(float(v), n) == [1] * n for v in c) for c in case.after.tensor_split(n)]
        if not finished[rank] or all(finished):
            continue
        head = f"{case.name}: on rank {rank} chunk {rank} is the full sum, but chunk {finished.index(False)} is not"
        if sum(finished) == 1:
            yield Fault("never doubled", f"{head}: now exchange the finished blocks, ever larger ones")
        else:
            yield Fault("doubled in another order", f"{head}: swap back in reverse order, the smallest block first")


# two levels


def machines_of(world_size: int) -> list[tuple[int, int]]:
    """Return the (machines, ranks a machine) to try with so many ranks."""
    return [(m, world_size // m) for m in range(1, world_size + 1) if world_size % m == 0]


def drive_hierarchical(fn: Callable[..., Any]) -> list[Result]:
    """Call fn on each way to put the ranks into machines."""
    rank, results = dist.get_rank(), []
    for m, g in machines_of(dist.get_world_size()):
        machines = [[machine * g + place for place in range(g)] for machine in range(m)]
        local, _ = dist.new_subgroups_by_enumeration(machines)
        cross, _ = dist.new_subgroups_by_enumeration([list(places) for places in zip(*machines, strict=True)])
        for length in (12, 7):
            name = f"{m} machines of {g} ranks, {length} elements"
            results.append(play(fn, coded(rank, length), local, cross, name=name))
            results.append(play(fn, varied(rank, length), local, cross, name=f"{name} (different)"))
    return results


def judge_hierarchical(evidence: Evidence) -> Iterator[Fault]:
    """Look for machines that are missing or counted twice, then at the bytes between machines."""
    n = evidence.world_size
    for everybody in cases(evidence):
        num_machines, g = int(everybody[0].name.split()[0]), int(everybody[0].name.split()[3])
        for rank, case in enumerate(everybody):
            parts = parts_of(float(case.after[0]), n)
            inside = [1 if r // g == rank // g else 0 for r in range(n)]
            across = [1 if r % g == rank % g else 0 for r in range(n)]
            if is_coded(everybody) and "(" not in case.name and num_machines > 1 and g > 1:
                if parts == inside:
                    yield Fault("machines apart", f"{case.name}: rank {rank} has the sum of its own machine only")
                if parts == across:
                    message = f"{case.name}: rank {rank} has the sum over its cross group {cross_of(rank, g, n)} only"
                    yield Fault("ranks apart", f"{message}: the ranks of a machine never met")
                if any(parts_of(float(v), n) != [1] * n for v in case.after):
                    yield from unfinished(case, rank, g)
    yield from judge_sum(evidence)
    for everybody in cases(evidence):
        num_machines, g = int(everybody[0].name.split()[0]), int(everybody[0].name.split()[3])
        if "12 elements" in everybody[0].name:
            yield from too_much_across(everybody, num_machines, g)


def cross_of(rank: int, g: int, n: int) -> list[int]:
    """Return the ranks with the same place on all machines."""
    return list(range(rank % g, n, g))


def unfinished(case: Case, rank: int, g: int) -> Iterator[Fault]:
    """Find the case that only this rank's chunk of the machine is finished: nobody gathered."""
    chunks = case.after.tensor_split(g)
    done = [all(parts_of(float(v), len(case.ranks)) == [1] * len(case.ranks) for v in c) for c in chunks]
    if done == [c == rank % g for c in range(g)]:
        message = f"{case.name}: on rank {rank} only chunk {rank % g} is the full sum: gather the chunks in the machine"
        yield Fault("never gathered", message)


def too_much_across(everybody: Sequence[Case], num_machines: int, g: int) -> Iterator[Fault]:
    """Compare what crosses between machines, and what stays inside, with the budget."""
    total = everybody[0].after.numel() * 8
    across = 2 * (num_machines - 1) * total // (num_machines * g)
    inside = 2 * (g - 1) * total // g
    for case in everybody:
        sends = [call for call in case.calls if call.op == "send"]
        away = sum(call.num_bytes for call in sends if call.peer // g != case.rank // g)
        if away > across and case.sent_bytes - away < inside:
            message = f"{case.sent_bytes - away} bytes inside its machine and {away} to others; the chunk should cross"
            yield Fault("groups swapped", f"right sums, but rank {case.rank} sent {message}: are the groups swapped?")
        if away > across:
            message = (
                f"right sums, but with {num_machines} machines of {g} ranks, rank {case.rank} sent {away} bytes to "
                f"other machines for a tensor of {total}; its chunk alone needs {across}: 1/{g} of the tensor may cross"
            )
            yield Fault("too many bytes between machines", message)
        if case.sent_bytes - away > inside:
            message = f"rank {case.rank} sent {case.sent_bytes - away} bytes inside its machine; {inside} are enough"
            yield Fault("too many bytes inside", f"right sums, but {message}")


def hierarchical_budget(evidence: Evidence) -> tuple[str, ...]:
    """Say what crossed between machines in the squarest arrangement."""
    arrangements = machines_of(evidence.world_size)
    m, g = arrangements[len(arrangements) // 2]
    everybody = next(c for c in cases(evidence) if c[0].name == f"{m} machines of {g} ranks, 12 elements")
    case, total = everybody[0], everybody[0].after.numel() * 8
    away = sum(call.num_bytes for call in case.calls if call.op == "send" and call.peer // g != case.rank // g)
    return (f"{m} machines of {g} ranks: {away} bytes a rank between machines for a tensor of {total}",)


# the relay, to be repaired


def judge_relay(evidence: Evidence) -> Iterator[Fault]:
    """Look at the sums, then at bytes and steps of the relay."""
    yield from judge_sum(evidence)
    for everybody in cases(evidence):
        n, length = len(everybody[0].ranks), everybody[0].after.numel()
        yield from too_many_bytes(everybody, (n - 1) * length * 8, "the relay ((n-1) S)")
        if (steps := rounds(everybody)) > n - 1:
            yield Fault("too many steps", f"right sums, but {steps} steps follow one another; the relay takes {n - 1}")


drive_relay = drive_on_sums

# predicted times

CONDITIONS = (  # bytes, ranks, latency, bandwidth; the first tells the latencies alone
    (0.0, 16, 1e-5, 1e9),
    (1e9, 16, 5e-6, 25e9),
    (1e6, 8, 5e-6, 25e9),
    (4e3, 64, 5e-6, 25e9),
    (1e8, 2, 3e-6, 231.5e9),
    (1e5, 1024, 2e-5, 1.25e9),
    (1e6, 6, 5e-6, 25e9),
)
ALGORITHMS = ("ring", "tree", "halving_doubling")


def drive_times(fn: Callable[..., Any]) -> list[Any]:
    """Call fn on several sizes, ranks and links."""
    return [fn(*condition) for condition in CONDITIONS]


def latencies_and_sizes(name: str, n: int) -> tuple[float, float]:
    """Return how many latencies, and how often the tensor's bytes, an algorithm takes."""
    levels = math.ceil(math.log2(n))
    return {
        "ring": (2.0 * (n - 1), 2 * (n - 1) / n),
        "tree": (2 * levels, 2 * levels),
        "halving_doubling": (2 * levels, 2 * (n - 1) / n),
    }[name]


def judge_times(evidence: Evidence) -> Iterator[Fault]:
    """Compare each prediction with alpha, beta and the number of steps, and name the term that is off."""
    results = evidence.results[0]
    for got in results:
        if not isinstance(got, dict) or set(got) != set(ALGORITHMS):
            what = sorted(got) if isinstance(got, dict) else type(got).__name__
            message = f"expected a dict with the keys ring, tree and halving_doubling; got {what}"
            yield Fault("not the three times", message)
            return
    for name in ALGORITHMS:
        yield from explain_times(name, [float(got[name]) for got in results])


def explain_times(name: str, times: Sequence[float]) -> Iterator[Fault]:
    """Say which term of an algorithm's time is wrong: all of it, the latencies, bits for bytes, or the bytes."""
    wanted = []
    for num_bytes, n, latency_s, bytes_per_s in CONDITIONS:
        steps, sizes = latencies_and_sizes(name, n)
        wanted.append((steps * latency_s, sizes * num_bytes / bytes_per_s))
    pairs = [(got, sum(want)) for got, want in zip(times, wanted, strict=True)]
    asked = [name != "halving_doubling" or n & (n - 1) == 0 for _, n, _, _ in CONDITIONS]
    pairs = [pair if counts else (0.0, 0.0) for pair, counts in zip(pairs, asked, strict=True)]
    wrong = [index for index, (got, want) in enumerate(pairs) if not math.isclose(got, want, rel_tol=1e-9)]
    if not wrong:
        return
    num_bytes, n, latency_s, bytes_per_s = CONDITIONS[wrong[0]]
    (got, want), (waiting_s, wire_s) = pairs[wrong[0]], wanted[wrong[0]]
    steps, sizes = latencies_and_sizes(name, n)
    where = f"{name}, {num_bytes:g} bytes on {n} ranks, latency {latency_s:g} s, {bytes_per_s:g} bytes/s"
    head = f"{where}: expected {want:g} s, got {got:g} s"
    if all(math.isclose(2 * got, want, rel_tol=1e-9) for got, want in pairs):
        yield Fault("half of it", f"{head}: half; the sums go in and then have to come back, which takes as long again")
    elif all(CONDITIONS[index][1] == 6 for index in wrong):
        message = f"{head}, though right for powers of two: 4 ranks are reached in 2 steps, the other 2 take a third"
        yield Fault("levels not rounded up", message)
    elif math.isclose(got, waiting_s + sizes * num_bytes * bytes_per_s, rel_tol=1e-6) and num_bytes:
        yield Fault("bytes times bandwidth", f"{head}: bytes over bytes per second are seconds, so divide")
    elif wrong[0] == 0:
        yield Fault("latencies", f"{head}: {got / latency_s:.4g} latencies instead of {steps:g}, one for each step")
    elif math.isclose(got, waiting_s + 8 * wire_s, rel_tol=1e-6):
        yield Fault(
            "bits for bytes", f"{head}: the bandwidth is in bytes a second already, so nothing to multiply by 8"
        )
    else:
        carried = (got - waiting_s) / (num_bytes / bytes_per_s)
        yield Fault("bytes", f"{head}: the busiest link carries {carried:.4g} times the tensor instead of {sizes:.4g}")
