"""The tree's broadcast, and the times of three all-reduces that are predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_02.checks import shared

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import apart


def drive_broadcast(fn: Callable[..., Any]) -> list[shared.Result]:
    """Call fn with every root, then in a group without rank 0 with its last rank as root."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results = [shared.play(fn, shared.varied(rank, 5), root, name=f"root {root}") for root in range(n)]
    members = shared.MEMBERS.get(n, ())
    return results + shared.play_in_small_group(fn, lambda place: shared.varied(place, 5), len(members) - 1)


def judge_broadcast(evidence: Evidence) -> Iterator[Fault]:
    """Look at the copies, then at the root's sends and the number of steps."""
    for all_ranks in shared.cases(evidence):
        n = len(all_ranks[0].ranks)
        root = int(all_ranks[0].name.split()[-1]) if all_ranks[0].name.startswith("root") else n - 1
        want, levels = shared.varied(root, 5), math.ceil(math.log2(n))
        yield from shared.refuse_native(all_ranks)
        yield from shared.refuse_returned(all_ranks, [5] * n, "the tensor")
        yield from shared.refuse_copies(all_ranks, [want] * n)
        for other in range(n):
            if other != root and all(torch.equal(case.after, shared.varied(other, 5)) for case in all_ranks):
                text = f"{all_ranks[0].name}: all ranks have rank {other}'s tensor"
                yield Fault("wrong root", f"{text}, not rank {root}'s")
        for rank, case in enumerate(all_ranks):
            if not torch.equal(case.after, want):
                kept = torch.equal(case.after, shared.varied(rank, 5))
                what = "still has its own tensor" if kept else f"has {case.after.tolist()}"
                message = f"{case.name}: rank {case.ranks[rank]} of {n} {what}, expected that of rank {root}"
                yield Fault("not reached" if kept else "wrong tensor", message)
        if all_ranks[root].num_sends > levels:
            message = f"right copies, but root {root} sent {all_ranks[root].num_sends} messages, one after the other on"
            advice = f"in a tree of {n} ranks it sends {levels}, and those who have the tensor help"
            yield Fault("root sends to all", f"{message} its link; {advice}")
        if (steps := shared.rounds(all_ranks)) > levels:
            message = f"right copies, but {steps} steps follow one another; doubling reaches {n} ranks in {levels}"
            yield Fault("too many steps", message)


def broadcast_budget(evidence: Evidence) -> tuple[str, ...]:
    """Say how many steps the tree took."""
    all_ranks = next(shared.cases(evidence))
    return (
        f"{len(all_ranks)} ranks: {shared.rounds(all_ranks)} steps, the root sent {all_ranks[0].num_sends} tensors",
    )


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
    wanted, found = apart(want, got)
    head = f"{where}: expected {wanted} s, got {found} s"
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
        advice = "the bandwidth is in bytes per second already, so there is nothing to multiply by 8"
        yield Fault("bits for bytes", f"{head}: {advice}")
    else:
        carried = (got - waiting_s) / (num_bytes / bytes_per_s)
        yield Fault("bytes", f"{head}: the busiest link carries {carried:.4g} times the tensor instead of {sizes:.4g}")


WRONG_BROADCASTS = (
    Mutant("the root alone", "root sends to all", "sent 3", 4)
    .edit("place < have and place + have < n", "place == 0")
    .edit("have <= place < 2 * have", "place == have")
    .edit("have *= 2", "have += 1"),
    Mutant("a chain", "too many steps", "3 steps", 4).body("""
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        if rank != root:
            exchange(Receive(tensor, (rank - 1) % n), group=group)
        if (rank + 1) % n != root:
            exchange(Send(tensor, (rank + 1) % n), group=group)
        return tensor
    """),
    Mutant("always from rank 0", "wrong root", "root 1", 2, 7).edit("rank, n =", "root = 0\nrank, n ="),
    Mutant("powers of two only", "not reached", "rank 2 of 3", 3).edit("while have < n", "while 2 * have <= n"),
    Mutant("group ranks as global", "group ignored", "group", 3, 7)
    .edit("exchange(Send(tensor, (place + have + root) % n)", "dist.send(tensor, (place + have + root) % n")
    .edit("exchange(Receive(tensor, (place - have + root) % n)", "dist.recv(tensor, (place - have + root) % n"),
)
WRONG_TIMES = (
    Mutant("one way only", "half of it", "come back", 1).edit(": 2 *", ":", times=3).edit("= 2 *", "="),
    Mutant("floor of log2", "levels not rounded up", "take a third", 1).edit(
        "math.ceil(math.log2(n))", "int(math.log2(n))"
    ),
    Mutant("bytes times bandwidth", "bytes times bandwidth", "so divide", 1).edit(
        "/ bytes_per_s", "* bytes_per_s", times=3
    ),
    Mutant("bits for bytes", "bits for bytes", "multiply by 8", 1).edit("/ bytes_per_s", "* 8 / bytes_per_s", times=3),
    Mutant("whole tensors in the ring", "bytes", "instead of 1.875", 1, 1).edit(
        "2 * (n - 1) * latency_s + least_bytes / bytes_per_s", "2 * (n - 1) * (latency_s + num_bytes / bytes_per_s)"
    ),
    Mutant("a ring's latencies for the tree", "latencies", "30 latencies", 1).edit(
        "2 * levels * (latency_s + num_bytes", "2 * (n - 1) * latency_s + 2 * levels * (num_bytes"
    ),
)
