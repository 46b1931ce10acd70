"""What the checks of this lesson share: calls with known inputs, whose parts they find in a result and its messages.

A coded tensor holds 64**rank in every element. Each base-64 digit of a sum then says how often that rank's part is in
it, element by element, exactly: 64**0 + 2 * 64**3 is rank 0's part once and rank 3's twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.comm import RankError
from distlab.comm.record.read import Call
from distlab.grading import Evidence, Fault

BASE = 64
LENGTHS = (12, 7, 2)  # divisible by 1, 2, 3 and 4; uneven; fewer elements than ranks
MEMBERS = {3: (1, 2), 4: (1, 2, 3)}  # a smaller group without rank 0, by world size
Result = tuple[str, int, int, "torch.Tensor | str", torch.Tensor, tuple[int, ...]]


class Case(NamedTuple):
    """One call of the checked function on one rank.

    Attributes:
        name: what was asked, for the message.
        start_ns: when the call began.
        end_ns: when it had returned.
        returned: the tensor that came back, or the kind of thing that came back instead.
        after: the tensor that was passed in, after the call.
        ranks: global ranks that took part.
        rank: this rank's number among them.
        calls: what this rank did with torch.distributed in the call.
    """

    name: str
    start_ns: int
    end_ns: int
    returned: torch.Tensor | str
    after: torch.Tensor
    ranks: tuple[int, ...]
    rank: int
    calls: list[Call]

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's sends in the call."""
        return sum(call.num_bytes for call in self.calls if call.op == "send")

    @property
    def num_sends(self) -> int:
        """Number of this rank's sends in the call."""
        return sum(call.op == "send" for call in self.calls)


def coded(rank: int, length: int) -> torch.Tensor:
    """Return a tensor whose sums tell whose parts are in them."""
    return torch.full((length,), float(BASE**rank), dtype=torch.float64)


def varied(rank: int, length: int) -> torch.Tensor:
    """Return whole numbers that differ by rank and by place, so that a chunk in the wrong place shows."""
    return (torch.arange(length, dtype=torch.float64) + 1) * (10 * rank + 3) + 100 * rank


def play(
    fn: Callable[..., Any],
    tensor: torch.Tensor,
    *args: Any,
    name: str,
    ranks: Sequence[int] | None = None,
) -> Result:
    """Call fn on this rank, and keep what came back, what became of the tensor, and when."""
    ranks = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    start = time.monotonic_ns()
    try:
        returned = fn(tensor, *args)
    except Exception as error:
        if len(ranks) < dist.get_world_size():
            error.add_note(f"(in a group of ranks {list(ranks)})")
        raise
    end = time.monotonic_ns()
    kept = returned.detach().clone() if isinstance(returned, torch.Tensor) else _kind(returned)
    return name, start, end, kept, tensor.detach().clone(), ranks


def small_group() -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """Make a group without rank 0 where there are ranks enough; every rank calls this."""
    members = MEMBERS.get(dist.get_world_size(), ())
    return members, dist.new_group(list(members)) if members else None


def play_in_small_group(fn: Callable[..., Any], make: Callable[[int], torch.Tensor], *args: Any) -> list[Result]:
    """Call fn in a group without rank 0, on make(rank in the group); other ranks wait outside."""
    members, group = small_group()
    if dist.get_rank() not in members:
        return []
    tensor = make(members.index(dist.get_rank()))
    return [play(fn, tensor, *args, group, name=f"a group of ranks {list(members)}", ranks=members)]


def cases(evidence: Evidence) -> Iterator[list[Case]]:
    """Yield each case as what all its ranks did, with the calls that they made in it."""
    by_name: dict[str, list[Case]] = {}
    for world_rank, results in enumerate(evidence.results):
        calls = evidence.records.calls(world_rank) if world_rank in evidence.records.ranks else []
        for name, start, end, returned, after, ranks in results:
            own = [call for call in calls if start <= call.start_ns <= end]
            case = Case(name, start, end, returned, after, ranks, ranks.index(world_rank), own)
            by_name.setdefault(name, []).append(case)
    yield from by_name.values()


def refuse_native(everybody: Sequence[Case]) -> Iterator[Fault]:
    """Find calls of torch's own collectives, which these exercises build."""
    for case in everybody:
        native = [call.op for call in case.calls if call.op not in ("send", "recv")]
        if native:
            message = f"rank {case.ranks[case.rank]} calls torch's own {native[0]}; build it from Send and Receive"
            yield Fault("torch's own collective", message)
            return


def refuse_returned(everybody: Sequence[Case], lengths: Sequence[int], what: str) -> Iterator[Fault]:
    """Find results that are no tensor of the expected length."""
    for case, length in zip(everybody, lengths, strict=True):
        if isinstance(case.returned, str):
            message = f"rank {case.rank} returned {case.returned}; expected a tensor: return {what}"
            yield Fault("nothing returned" if case.returned == "None" else "no tensor returned", message)
            return
        if case.returned.shape != (length,):
            total, n = case.after.numel(), len(case.ranks)
            message = (
                f"{total} elements on {n} ranks: rank {case.rank} returned {case.returned.numel()} elements, expected "
                f"{what} of {length}; chunks are tensor.tensor_split(n), the first L % n of them one element longer"
            )
            yield Fault("wrong length", message)
            return


def refuse_copies(everybody: Sequence[Case], wanted: Sequence[torch.Tensor]) -> Iterator[Fault]:
    """Find right results that stand in a new tensor, while the one passed in is as wrong as before."""
    for case, want in zip(everybody, wanted, strict=True):
        right = isinstance(case.returned, torch.Tensor) and torch.equal(case.returned, want)
        if right and not torch.equal(case.after, want):
            message = f"rank {case.ranks[case.rank]} returned the right values in a new tensor"
            yield Fault("not in place", f"{message}; change the tensor that was passed in, and return it")
            return


def parts_of(value: float, n: int) -> list[int] | None:
    """Return how often each rank's part is in one coded element, or None where it is no such sum."""
    if not (0 <= value < float(BASE**n) and value == int(value)):
        return None
    return [int(value) // BASE**rank % BASE for rank in range(n)]


def explain_parts(got: torch.Tensor, where: str, n: int, expected: Sequence[int] | None = None) -> Iterator[Fault]:
    """Say whose parts of a coded sum are missing, or in it more often than expected (once each)."""
    wanted = [1] * n if expected is None else list(expected)
    for index, value in enumerate(got.tolist()):
        parts = parts_of(value, n)
        if parts == wanted:
            continue
        at = f"{where}, element {index},"
        if parts is None:
            yield Fault("garbage", f"{at} is no sum of the ranks' values ({value:g}): memory that nobody filled?")
        elif missing := [rank for rank in range(n) if parts[rank] < wanted[rank]]:
            twice = [rank for rank in range(n) if parts[rank] > wanted[rank]]
            more = f", and has {_parts(twice)} {max(parts)} times" if twice else ""
            yield Fault("part missing", f"{at} lacks {_parts(missing)}{more}")
        else:
            twice = [rank for rank in range(n) if parts[rank] > wanted[rank]]
            times = parts[twice[0]]
            yield Fault("counted twice", f"{at} has {_parts(twice)} {times} times; each rank's part belongs in once")
        return


def rounds(everybody: Sequence[Case]) -> int:
    """Return the longest chain of messages, each sent only after the one before had come, or had left its sender."""
    depth_in: dict[tuple[int, int, int], int] = {}  # (sender, receiver, number): how deep the message is
    sends = sorted(
        ((call, case) for case in everybody for call in case.calls if call.op == "send"),
        key=lambda pair: pair[0].start_ns,
    )
    for call, case in sends:
        earlier = [old for old in case.calls if 0 < old.end_ns <= call.start_ns]
        before = [
            depth_in.get((old.rank, old.peer, old.number) if old.op == "send" else (old.peer, old.rank, old.number), 0)
            for old in earlier
        ]
        depth_in[call.rank, call.peer, call.number] = 1 + max(before, default=0)
    return max(depth_in.values(), default=0)


def too_many_bytes(everybody: Sequence[Case], budget: float, what: str) -> Iterator[Fault]:
    """Find the rank that sends most, where that is more than the budget."""
    worst = max(everybody, key=lambda case: case.sent_bytes)
    if worst.sent_bytes > budget:
        message = (
            f"right values, but rank {worst.rank} sent {worst.sent_bytes} bytes for a tensor of "
            f"{worst.after.numel() * 8}, where {what} needs {budget:.0f}"
        )
        yield Fault("too many bytes", message)


def explain_failure(error: RankError, world_size: int) -> Fault | None:
    """Name the fault of ranks that hung, or whose messages do not fit."""
    text = str(error)
    tell = _short(text)
    members = MEMBERS.get(world_size)
    if members and ("(in a group of ranks" in text or "finished: ranks [0" in text):
        return Fault(
            "group ignored",
            f"right on all ranks, but not in a group of ranks {list(members)}: take rank and size from "
            "dist.get_rank(group) and dist.get_world_size(group), and pass group=group to every exchange, whose ranks "
            f"are then counted inside the group\n{tell.splitlines()[0]}",
        )
    if "do not fit" in text:
        return Fault("messages do not fit", f"a send and its receive differ in size. {tell}")
    if "deadlock" in text:
        return Fault(
            "deadlock",
            "the ranks wait for each other for ever. Does every Send meet a Receive from its sender in the same step? "
            f"And where a rank does both in a step, give them to one exchange. {tell}",
        )
    return None


def _parts(ranks: Sequence[int]) -> str:
    """Name the ranks' parts in words."""
    names = " and ".join(f"rank {rank}'s" for rank in ranks)
    return f"{names} part{'s' if len(ranks) > 1 else ''}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _short(text: str, num_lines: int = 6) -> str:
    """Keep the lines that say what happened, without the stacks."""
    lines = [line.strip() for line in text.partition("\n---")[0].splitlines() if line.strip()]
    return "\n".join(lines[:num_lines])
