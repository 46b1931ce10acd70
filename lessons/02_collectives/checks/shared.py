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
from torch import Tensor

from distlab.comm import RankError
from distlab.comm.record.read import Call
from distlab.grading import Evidence, Fault
from distlab.grading.diagnosis.blame import messages_that_do_not_fit

BASE = 64
LENGTHS = (12, 7, 2)  # divisible by 1, 2, 3 and 4; uneven; fewer elements than ranks
MEMBERS = {3: (1, 2), 4: (1, 2, 3)}  # a smaller group without rank 0, by world size
Result = tuple[str, int, int, Tensor | str, Tensor, tuple[int, ...], bool]


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
        is_view: whether what came back lies in the memory of what was passed in.
        calls: what this rank did with torch.distributed in the call.
    """

    name: str
    start_ns: int
    end_ns: int
    returned: Tensor | str
    after: Tensor
    ranks: tuple[int, ...]
    rank: int
    is_view: bool
    calls: list[Call]

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's sends in the call."""
        return sum(call.num_bytes for call in self.calls if call.op == "send")

    @property
    def num_sends(self) -> int:
        """Number of this rank's sends in the call."""
        return sum(call.op == "send" for call in self.calls)


def coded(rank: int, length: int) -> Tensor:
    """Return a tensor whose sums tell whose parts are in them."""
    return torch.full((length,), float(BASE**rank), dtype=torch.float64)


def varied(rank: int, length: int) -> Tensor:
    """Return whole numbers that differ by rank and by place, so that a chunk in the wrong place shows."""
    return (torch.arange(length, dtype=torch.float64) + 1) * (10 * rank + 3) + 100 * rank


def play(fn: Callable[..., Any], tensor: Tensor, *args: Any, name: str, ranks: tuple[int, ...] = ()) -> Result:
    """Call fn on this rank, one of these (of all); keep what came back, what became of the tensor, and when."""
    ranks = ranks or tuple(range(dist.get_world_size()))
    start = time.monotonic_ns()
    try:
        returned = fn(tensor, *args)
    except Exception as error:
        if len(ranks) < dist.get_world_size():
            error.add_note(f"(in a group of ranks {list(ranks)})")
        raise
    end = time.monotonic_ns()
    kind = "None" if returned is None else f"a {type(returned).__name__}"
    kept, is_view = kind, False
    if isinstance(returned, Tensor):
        kept = returned.detach().clone()
        is_view = returned.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return name, start, end, kept, tensor.detach().clone(), ranks, is_view


def play_in_small_group(fn: Callable[..., Any], make: Callable[[int], Tensor], *args: Any) -> list[Result]:
    """Call fn in a group without rank 0, on make(rank in the group); other ranks wait outside."""
    members = MEMBERS.get(dist.get_world_size(), ())
    group = dist.new_group(list(members)) if members else None  # every rank must call this
    if dist.get_rank() not in members:
        return []
    tensor = make(members.index(dist.get_rank()))
    return [play(fn, tensor, *args, group, name=f"a group of ranks {list(members)}", ranks=members)]


def cases(evidence: Evidence) -> Iterator[list[Case]]:
    """Yield each case as what all its ranks did, with the calls that they made in it."""
    by_name: dict[str, list[Case]] = {}
    for world_rank, results in enumerate(evidence.results):
        calls = evidence.records.calls(world_rank) if world_rank in evidence.records.ranks else []
        for name, start, end, returned, after, ranks, is_view in results:
            own = [call for call in calls if start <= call.start_ns <= end]
            case = Case(name, start, end, returned, after, ranks, ranks.index(world_rank), is_view, own)
            by_name.setdefault(name, []).append(case)
    yield from by_name.values()


def refuse_native(all_ranks: Sequence[Case]) -> Iterator[Fault]:
    """Find calls of torch's own collectives, which these exercises build."""
    for case in all_ranks:
        native = [call.op for call in case.calls if call.op not in ("send", "recv")]
        if native:
            message = f"rank {case.ranks[case.rank]} calls torch's own {native[0]}; build it from Send and Receive"
            yield Fault("torch's own collective", message)


def refuse_returned(all_ranks: Sequence[Case], lengths: Sequence[int], what: str) -> Iterator[Fault]:
    """Find results that are not a tensor of the expected length."""
    for case, length in zip(all_ranks, lengths, strict=True):
        if isinstance(case.returned, str):
            message = f"rank {case.rank} returned {case.returned}; expected a tensor: return {what}"
            yield Fault("nothing returned" if case.returned == "None" else "no tensor returned", message)
        if case.returned.shape != (length,):
            text = f"{case.after.numel()} elements on {len(case.ranks)} ranks: rank {case.rank} returned"
            text += f" {case.returned.numel()} elements, expected {what} of {length}; chunks are tensor.tensor_split(n)"
            yield Fault("wrong length", f"{text}, the first L % n of them one element longer")


def refuse_copies(all_ranks: Sequence[Case], wanted: Sequence[Tensor]) -> Iterator[Fault]:
    """Find right results that stand in a new tensor, while the one passed in is as wrong as before."""
    for case, want in zip(all_ranks, wanted, strict=True):
        right = isinstance(case.returned, Tensor) and torch.equal(case.returned, want)
        if right and not torch.equal(case.after, want):
            message = f"rank {case.ranks[case.rank]} returned the right values in a new tensor"
            yield Fault("not in place", f"{message}; change the tensor that was passed in, and return it")


def parts_of(value: float, n: int) -> list[int] | None:
    """Return how often each rank's part is in one coded element, or None where it is not such a sum."""
    if not (0 <= value < float(BASE**n) and value == int(value)):
        return None
    return [int(value) // BASE**rank % BASE for rank in range(n)]


def explain_parts(got: Tensor, where: str, n: int) -> Iterator[Fault]:
    """Say whose parts of a coded sum are missing, or in it more than once."""
    for index, value in enumerate(got.tolist()):
        parts = parts_of(value, n)
        if parts == [1] * n:
            continue
        at = f"{where}, element {index},"
        if parts is None:
            yield Fault("garbage", f"{at} is not a sum of the ranks' values ({value:g}): memory that was never filled?")
        assert parts is not None
        missing, twice = [rank for rank in range(n) if not parts[rank]], [rank for rank in range(n) if parts[rank] > 1]
        if missing:
            more = f", and has {_parts(twice)} {max(parts)} times" if twice else ""
            yield Fault("part missing", f"{at} lacks {_parts(missing)}{more}")
        text = f"{at} has {_parts(twice)} {parts[twice[0]]} times"
        yield Fault("counted twice", f"{text}; each rank's part belongs in once")


def rounds(all_ranks: Sequence[Case]) -> int:
    """Return the longest chain of messages, each sent only after the one before had come, or had left its sender."""
    depth_in: dict[tuple[int, int, int], int] = {}  # (sender, receiver, number): how deep the message is
    sends = [(call, case) for case in all_ranks for call in case.calls if call.op == "send"]
    for call, case in sorted(sends, key=lambda pair: pair[0].start_ns):
        earlier = [old for old in case.calls if 0 < old.end_ns <= call.start_ns]
        before = [
            depth_in.get((old.rank, old.peer, old.number) if old.op == "send" else (old.peer, old.rank, old.number), 0)
            for old in earlier
        ]
        depth_in[call.rank, call.peer, call.number] = 1 + max(before, default=0)
    return max(depth_in.values(), default=0)


def too_many_bytes(all_ranks: Sequence[Case], budget: float, what: str) -> Iterator[Fault]:
    """Find the rank that sends most, where that is more than the budget."""
    worst = max(all_ranks, key=lambda case: case.sent_bytes)
    if worst.sent_bytes > budget:
        message = f"right values, but rank {worst.rank} sent {worst.sent_bytes} bytes for a tensor of"
        yield Fault("too many bytes", f"{message} {worst.after.numel() * 8}, where {what} needs {budget:.0f}")


def explain_failure(error: RankError, world_size: int) -> Fault | None:
    """Name the fault of ranks that hung, or whose messages do not fit."""
    text = str(error)
    tell = _short(text)
    members = MEMBERS.get(world_size)
    if members and ("(in a group of ranks" in text or "finished: ranks [0" in text):
        message = f"right on all ranks, but not in a group of ranks {list(members)}: take rank and size from"
        message += " dist.get_rank(group) and dist.get_world_size(group), and pass group=group to every exchange, whose"
        return Fault("group ignored", f"{message} ranks are then counted inside the group\n{tell.splitlines()[0]}")
    if (misfit := messages_that_do_not_fit(text)) is not None:
        return Fault("messages do not fit", misfit)
    if "deadlock" in text:
        message = "the ranks wait for each other forever. Does every Send meet a Receive from its sender in the same"
        return Fault(
            "deadlock", f"{message} step? And where a rank does both in a step, give them to one exchange. {tell}"
        )
    return None


def _parts(ranks: Sequence[int]) -> str:
    """Name the ranks' parts in words."""
    names = " and ".join(f"rank {rank}'s" for rank in ranks)
    return f"{names} part{'s' if len(ranks) > 1 else ''}"


def _short(text: str, num_lines: int = 6) -> str:
    """Keep the lines that say what happened, without the stacks."""
    lines = [line.strip() for line in text.partition("\n---")[0].splitlines() if line.strip()]
    return "\n".join(lines[:num_lines])


def drive_on_sums(fn: Callable[..., Any]) -> list[Result]:
    """Call fn on coded and varied tensors of several lengths, and in a group without rank 0."""
    rank, results = dist.get_rank(), []
    for length in LENGTHS:
        results.append(play(fn, coded(rank, length), name=f"{length} elements"))
        results.append(play(fn, varied(rank, length), name=f"{length} different elements"))
    return results + play_in_small_group(fn, lambda place: coded(place, 7))


def is_coded(all_ranks: Sequence[Case]) -> bool:
    """Whether the case's values tell whose parts are in them."""
    return "different" not in all_ranks[0].name


def differs(got: Tensor, want: Tensor, where: str) -> Iterator[Fault]:
    """Name the first element that is not as expected."""
    wrong = (got != want).nonzero().flatten().tolist()
    if wrong:
        index = wrong[0]
        message = f"{where}, element {index}: expected {want[index]:g}, got {got[index]:g}: values of another place?"
        yield Fault("wrong place", message)


def most_sent(evidence: Evidence, formula: str) -> tuple[str, ...]:
    """Say what the first case took: bytes of the rank that sent most, and steps that followed one another."""
    all_ranks = next(cases(evidence))
    sent, total = max(case.sent_bytes for case in all_ranks), all_ranks[0].after.numel() * 8
    steps = rounds(all_ranks)
    return (f"{len(all_ranks)} ranks: {sent} bytes sent per rank for {total} ({formula}), {steps} steps",)
