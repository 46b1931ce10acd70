"""The tree's broadcast, halving and doubling, and the times of three all-reduces that are predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from distlab_lesson_02.checks import shared

from distlab.course.grading.cases import Cases, Given
from distlab.grading import Evidence, Fault, Mutant


def _levels(n: int) -> int:
    return math.ceil(math.log2(n))


def _broadcast(rank: int, n: int) -> Given:
    given: Given = {f"root {root} (elements: 100 to 400 times 10^rank)": (root, ()) for root in range(n)}
    members = shared.MEMBERS.get(n, ())
    last = f"in a group of ranks {list(members)}, root {len(members) - 1}"
    return {**given, last: (len(members) - 1, members)} if members else given


def _use_broadcast(fn: Callable[..., Any], root: int, members: tuple[int, ...]) -> Any:
    return shared.use_sum(lambda tensor, *group: fn(tensor, root, *group), 5, members)


def _halving(rank: int, n: int) -> Given:
    return shared.cases(n, "100 to 400 times 10^rank", (2, 3) if n == 4 else ())


def use_times(fn: Callable[..., Any], num_bytes: float, n: int, latency_s: float, bytes_per_s: float) -> Any:
    """Leave out halving_doubling where n is no power of two: the text says nothing of it."""
    times = fn(num_bytes, n, latency_s, bytes_per_s)
    if n & (n - 1) and isinstance(times, dict):
        return {name: seconds for name, seconds in times.items() if name != "halving_doubling"}
    return times


CONDITIONS = (  # bytes, ranks, latency, bandwidth; the first tells the latencies alone
    (0.0, 16, 1e-5, 1e9),
    (1e9, 16, 5e-6, 25e9),
    (1e6, 8, 5e-6, 25e9),
    (4e3, 64, 5e-6, 25e9),
    (1e8, 2, 3e-6, 231.5e9),
    (1e5, 1024, 2e-5, 1.25e9),
    (1e6, 6, 5e-6, 25e9),
)
_ASKED = "{:g} bytes on {} ranks, latency {:g} s, {:g} bytes/s"
drive_tree_broadcast = Cases(_broadcast, _use_broadcast, most_bytes=0)
drive_halving_doubling = Cases(_halving, shared.use_sum, 1.1, "halving and doubling")
drive_times = Cases({_ASKED.format(*condition): condition for condition in CONDITIONS}, use_times)
failure_tree_broadcast = failure_halving_doubling = shared.failure
judge_halving_doubling = partial(shared.in_steps, what="halving and doubling", needs=lambda n: 2 * _levels(n))
budget_halving_doubling = partial(shared.budget, formula="2 (n-1)/n S")


def judge_tree_broadcast(evidence: Evidence) -> Iterator[Fault]:
    """Look at the root's sends and the number of steps."""
    yield from shared.refuse_native(evidence)
    for number, (case, ranks, made) in enumerate(shared.played(evidence)):
        root, levels = number if len(ranks) == evidence.world_size else len(ranks) - 1, _levels(len(ranks))
        if (count := len(shared.sent(made[root]))) > levels:
            text = f"right result, but {case}: the root sends {count} messages, one after the other on its link; in a"
            advice = f"tree of {len(ranks)} ranks it sends {levels}, and ranks that have the tensor help"
            yield Fault("root sends to all", f"{text} {advice}")
    yield from shared.in_steps(evidence, "a tree", _levels)


def budget_tree_broadcast(evidence: Evidence) -> tuple[str, ...]:
    """Say how many steps the tree took."""
    _, ranks, made = next(shared.played(evidence))
    return (f"{len(ranks)} ranks: {shared.rounds(made)} steps, the root sent {len(shared.sent(made[0]))} tensors",)


_ON = "some ranks still have their own tensor; go on until all n have the root's, also where n is no power of two"
WRONG_TREE_BROADCAST = (
    Mutant("the root alone", "root sends to all", "the root sends 3 messages", 4)
    .edit("place < have and place + have < n", "place == 0")
    .edit("have <= place < 2 * have", "place == have")
    .edit("have *= 2", "have += 1"),
    Mutant("adds one", "root sends to all", "in a tree of 4 ranks it sends 2", 4).edit("have *= 2", "have += 1"),
    Mutant("a chain", "too many steps", "3 steps", 4).body("""
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        if rank != root:
            exchange(Receive(tensor, (rank - 1) % n), group=group)
        if (rank + 1) % n != root:
            exchange(Send(tensor, (rank + 1) % n), group=group)
        return tensor
    """),
    Mutant("always from rank 0", "wrong root", "all ranks get rank 0's tensor; count places from the root", 2, 7).edit(
        "rank, n =", "root = 0\nrank, n ="
    ),
    Mutant("powers of two only", "not reached", _ON, 3).edit("while have < n", "while 2 * have <= n"),
    Mutant("two rounds", "not reached", _ON, 5, "one size").edit("while have < n:", "while have < min(n, 4):"),
    Mutant("twice the distance", "raised", "send to itself", 4).edit(
        "(place + have + root)", "(place + 2 * have + root)"
    ),
    Mutant("group ranks as global", "group ignored", "group", 3, 7, ends=True)
    .edit("exchange(Send(tensor, (place + have + root) % n)", "dist.send(tensor, (place + have + root) % n")
    .edit("exchange(Receive(tensor, (place - have + root) % n)", "dist.recv(tensor, (place - have + root) % n"),
)
_DOUBLING = (
    "for peer, mine, theirs in reversed(swaps):\n    exchange(Receive(theirs, peer), Send(mine, peer), group=group)"
)
_KEEPS = "(first, second) if rank < peer else (second, first)"
WRONG_HALVING_DOUBLING = (
    Mutant(
        "whole tensors",
        "whole tensors",
        "whole tensors travel; send the half that the partner keeps, and go on with the other",
        4,
        1,
    )
    .edit(_KEEPS, "(tensor, tensor.clone())")
    .without(_DOUBLING),
    Mutant(
        "never doubles",
        "never doubled",
        "a rank's own block alone is finished; exchange finished blocks, ever larger ones",
        2,
    ).without(_DOUBLING),
    Mutant(
        "both keep one half",
        "both keep one half",
        "both partners keep the first half; the lower rank keeps the first, the other one the second",
        2,
        2,
    ).edit(_KEEPS, "(first[: second.numel()], second)"),
    Mutant(
        "halves rounded down",
        "odd element left out",
        "of an odd number of elements one is left out; the halves are block.tensor_split(2)",
        2,
        8,
    ).edit("= block.tensor_split(2)", "= block[: block.numel() // 2 * 2].tensor_split(2)"),
    Mutant(
        "doubles in halving's order",
        "doubled in another order",
        "blocks are swapped back in the order of halving; go in reverse order, the smallest block first",
        4,
        8,
    ).edit("reversed(swaps)", "swaps"),
    Mutant(
        "copies instead of adding",
        "own part overwritten",
        "what arrives is copied over this rank's own part; add it to what is there",
        2,
        2,
    ).edit("mine += received", "mine.copy_(received)"),
    Mutant("next rank as partner", "deadlock", "wait for each other", 4).edit(
        "rank ^ distance", "(rank + distance) % n"
    ),
    shared.averaged("tensor"),
    Mutant("works on a copy", "not in place", "the sum stands in a copy; add to the tensor that was passed in", 2).edit(
        "block, swaps, distance = tensor,", "block, swaps, distance = tensor.clone(),"
    ),
)
_PAYS, _STEP = "2 * (n - 1) * latency_s", "(latency_s + num_bytes / bytes_per_s)"
_LEAST = "latency_s + least_bytes / bytes_per_s"
_BACK, _HALVES = f"2 * levels * {_LEAST}", "levels * (2 * latency_s + num_bytes / bytes_per_s)"
_ROUNDS, _ROUND = f"{_PAYS} + least_bytes", f"{_PAYS[4:]} + 0.5 * least_bytes"
_WHOLE, _TREE = "2 * levels * (latency_s + num_bytes / bytes_per_s)", f"levels * {_STEP}"
_ONCE = f"(levels * {_STEP[1:]}"
WRONG_TIMES = (
    Mutant(
        "one way only",
        "half of it",
        "that is one way; the sums go in and then have to come back, which takes as long again",
        1,
    )
    .edit(": 2 *", ":", times=3)
    .edit("= 2 *", "="),
    Mutant(
        "floor of log2",
        "levels not rounded up",
        "4 ranks are reached in 2 steps, and 2 more take a third; round log2 n up",
        1,
    ).edit("math.ceil(math.log2(n))", "int(math.log2(n))"),
    Mutant(
        "bytes times bandwidth", "bytes times bandwidth", "bytes over bytes per second are seconds, so divide", 1
    ).edit("/ bytes_per_s", "* bytes_per_s", times=3),
    Mutant("bits for bytes", "bits for bytes", "the bandwidth is in bytes per second: do not multiply by 8", 1).edit(
        "/ bytes_per_s", "* 8 / bytes_per_s", times=3
    ),
    Mutant(
        "whole tensors in the ring",
        "whole tensors in the ring",
        "a step of the ring carries a chunk, 1/n of the tensor; here each carries all of it",
        1,
        1,
    ).edit(
        "2 * (n - 1) * latency_s + least_bytes / bytes_per_s", "2 * (n - 1) * (latency_s + num_bytes / bytes_per_s)"
    ),
    Mutant(
        "a ring's latencies for the tree",
        "a ring's latencies",
        "the tree has the ring's 2 (n - 1) latencies; it takes ceil(log2 n) steps each way",
        1,
    ).edit("2 * levels * (latency_s + num_bytes", "2 * (n - 1) * latency_s + 2 * levels * (num_bytes"),
    Mutant("a step too many", "a step too many", "the ring takes n - 1 steps each way, not n", 1).edit(
        "2 * (n - 1) * latency_s", "2 * n * latency_s"
    ),
    *(
        Mutant(name, name, says, 1).edit(old, new)
        for name, says, old, new in (
            ("one latency", "the ring pays its latency once; each of its 2 (n - 1) steps pays it", _PAYS, "latency_s"),
            ("latencies of halves", "halving_doubling pays log2 n latencies; it takes 2 log2 n", _BACK, _BACK[4:]),
            ("latencies one way", "the ring pays n - 1 latencies; round twice, it pays 2 (n - 1)", _PAYS, _PAYS[4:]),
            ("one way round", "the ring goes round once; sums need one round, and copies a second", _ROUNDS, _ROUND),
            ("tree up alone", "the tree only goes up; the sum comes down as long again", '"tree": 2 *', '"tree":'),
            ("chunks in the tree", "the tree sends chunks; whole tensors travel in its steps", _STEP, _LEAST),
            ("halves alone", "each step carries S / 2; it is S / 2, then S / 4 and so on", _BACK, _HALVES),
            ("whole tensors", "whole tensors travel in halving_doubling; first it is S / 2, then S / 4", _BACK, _WHOLE),
            ("tensor once", "the tree's bytes count once each way; they travel in each of its steps", _TREE, _ONCE),
            ("two tensors", "2 S travel; a rank never sends one of n chunks: 2 (n - 1) / n S", "(n - 1) / n * ", ""),
        )
    ),
    Mutant("rounded log2", "values", "tree", 1, "one size").edit("math.ceil(math.log2(n))", "round(math.log2(n))"),
)
