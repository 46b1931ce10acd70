"""What the checks of this lesson share: tensors whose sums tell whose parts are in them, and the messages of each case.

A rank's elements are 100 to 400 times 10^rank. So each digit of a sum is a rank's part: where 432100 is right, 402100
lacks rank 2's part and 462100 has it twice. A barrier comes after each call of all ranks: it parts the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankError
from distlab.comm.record.read import Call
from distlab.course.grading.cases import Given
from distlab.course.grading.diagnosis.blame import messages_that_do_not_fit
from distlab.course.grading.diagnosis.traffic import MESSAGES, calls
from distlab.grading import Evidence, Fault, Mutant

LENGTHS = (12, 7, 2)  # divisible by 1, 2, 3 and 4; uneven; fewer elements than ranks
MEMBERS = {3: (1, 2), 4: (1, 2, 3)}  # a smaller group without rank 0, by world size
OUTSIDE = "outside the group"


def coded(rank: int, length: int) -> Tensor:
    """Return a rank's tensor."""
    return ((torch.arange(length) + rank) % 4 + 1).double() * 10 ** (rank + 2)


def cases(n: int, what: str, members: tuple[int, ...]) -> Given:
    """Return the length of each case and its ranks: () is all of them; the last one is a group of some."""
    rows: Given = {f"{length} elements ({what})": (length, ()) for length in LENGTHS}
    return {**rows, f"7 elements, in a group of ranks {list(members)}": (7, members)} if members else rows


def sums(rank: int, n: int) -> Given:
    """Return cases on all ranks, and in a group without rank 0."""
    return cases(n, "100 to 400 times 10^rank", MEMBERS.get(n, ()))


def place_in(members: Sequence[int]) -> tuple[int, int]:
    """Return this rank's number among some ranks, or all of them, and how many they are."""
    rank = dist.get_rank()
    return (members.index(rank) if rank in members else 0, len(members)) if members else (rank, dist.get_world_size())


def called(fn: Callable[..., Any], members: Sequence[int], *arguments: Any) -> Any:
    """Call fn, with a group of these ranks if there are some; other ranks stay outside."""
    if not members:
        returned = fn(*arguments)
        dist.barrier()
        return returned
    group = dist.new_group(list(members))  # every rank must call this
    try:
        return fn(*arguments, group) if dist.get_rank() in members else OUTSIDE
    except Exception as error:
        error.add_note(f"(in a group of ranks {list(members)})")
        raise


def use_sum(fn: Callable[..., Any], length: int, members: tuple[int, ...]) -> Any:
    """Sum in place."""
    tensor = coded(place_in(members)[0], length)
    returned = called(fn, members, tensor)
    return returned if isinstance(returned, str) else {"what is returned": returned, "the tensor afterwards": tensor}


def parted(evidence: Evidence, rank: int) -> list[list[Call]]:
    """Return the messages of a rank, call by call of the checked function."""
    parts: list[list[Call]] = [[]]
    for call in calls(evidence, rank):
        if call.op == "barrier":
            parts.append([])
        else:
            parts[-1].append(call)
    return parts


def played(evidence: Evidence) -> Iterator[tuple[str, list[int], list[list[Call]]]]:
    """Yield each case's name, the ranks that took part, and their messages."""
    parts = [parted(evidence, rank) for rank in range(evidence.world_size)]
    for number, case in enumerate(evidence.results[0]):
        ranks = [rank for rank, made in enumerate(evidence.results) if made[case]["result"] != OUTSIDE]
        yield case, ranks, [parts[rank][number] for rank in ranks]


def refuse_native(evidence: Evidence, num_calls: int | None = None) -> Iterator[Fault]:
    """Find calls of torch's own collectives, which these exercises build."""
    if num_calls is None:
        num_calls = sum(len(ranks) == evidence.world_size for _, ranks, _ in played(evidence))
    for rank in range(evidence.world_size):
        made = [call.op for call in calls(evidence, rank)]
        native = [op for op in made if op not in (*MESSAGES, "barrier")]
        native += ["barrier"] * (made.count("barrier") - num_calls)
        if native:
            text = f"right result, but rank {rank} calls torch's own {native[0]}"
            text = f"{text}; build it from Send and Receive, or from what you have built of them"
            yield Fault("torch's own collective", text)


def in_steps(evidence: Evidence, what: str, needs: Callable[[int], int]) -> Iterator[Fault]:
    """Refuse torch's collectives, and more steps than so many ranks need."""
    yield from refuse_native(evidence)
    for case, ranks, made in played(evidence):
        if (steps := rounds(made)) > (most := needs(len(ranks))):
            text = f"right result, but {case}: {steps} steps follow one another"
            yield Fault("too many steps", f"{text}; {what} of {len(ranks)} ranks takes {most}")


def rounds(made: Sequence[Sequence[Call]]) -> int:
    """Return the longest chain of messages, each sent only after the one before had come, or had left its sender."""
    depth_in: dict[tuple[int, int, int], int] = {}  # (sender, receiver, number): how deep the message is
    sends = [(call, own) for own in made for call in own if call.op == "send"]
    for call, own in sorted(sends, key=lambda pair: pair[0].start_ns):
        before = [
            depth_in.get((old.rank, old.peer, old.number) if old.op == "send" else (old.peer, old.rank, old.number), 0)
            for old in own
            if 0 < old.end_ns <= call.start_ns
        ]
        depth_in[call.rank, call.peer, call.number] = 1 + max(before, default=0)
    return max(depth_in.values(), default=0)


def sent(made: Sequence[Call]) -> list[Call]:
    """Return the sends among some messages."""
    return [call for call in made if call.op == "send"]


def averaged(returned: str) -> Mutant:
    """Divide a sum by the number of ranks."""
    says = "it is the mean over ranks, not the sum: do not divide"
    return Mutant("averages", "mean not sum", says, 2).edit(f"return {returned}", f"return {returned}.div_(n)")


def budget(evidence: Evidence, formula: str) -> tuple[str, ...]:
    """Say what the first case took: bytes of the rank that sent most, and steps that followed one another."""
    _, ranks, made = next(played(evidence))
    most, total = max(sum(call.num_bytes for call in sent(own)) for own in made), 8 * LENGTHS[0]
    return (f"{len(ranks)} ranks: {most} bytes sent per rank for {total} ({formula}), {rounds(made)} steps",)


def failure(error: RankError, world_size: int) -> Fault | None:
    """Name a group that is ignored, and what to do where ranks wait for each other."""
    text = str(error)
    lines = [line.strip() for line in text.partition("\n---")[0].splitlines() if line.strip()]
    if "(in a group of ranks" in text or "finished: ranks [0" in text:
        words = "right on all ranks, but not in a group of some of them. Does it take rank and size from"
        words += " dist.get_rank(group) and dist.get_world_size(group), and pass group=group to every exchange, whose"
        return Fault("group ignored", f"{words} ranks are counted inside the group?\n{lines[0]}")
    if (pair := messages_that_do_not_fit(text)) is not None:
        first, _, rest = pair.partition("\n")
        words = "in each step a rank receives the chunk that its sender sends in this step, in a place as long as it"
        return Fault("mismatch", f"{first}: {words}\n{rest}")
    if "deadlock" in text:
        words = (
            "the ranks wait for each other forever. Does every Send meet a Receive from its sender in the same step?"
        )
        tail = "\n".join(lines[:6])
        return Fault("deadlock", f"{words} And where a rank does both in a step, give them to one exchange. {tail}")
    return None
