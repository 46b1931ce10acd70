"""How the exercises on messages are driven on real ranks, and how their faults are told apart: shift and ping-pong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import native_collectives
from distlab.grading.values import compare, seeded

if TYPE_CHECKING:
    from distlab.comm import RankError
    from distlab.comm.record.read import Call

SHAPES = ((3, 5), (1 << 14,))
ROUNDS = 12
TO_ITSELF = re.compile(r"same as the rank of the current process|Pair is not connected")  # torch's words, gloo's words
# The record knows no rank at the other end; gloo does not look, so the rank may crash where it does not hang.
OUTSIDE = re.compile(r"(send|recv from anyone) #|SIGSEGV|SIGABRT|SIGBUS")
WAITS = re.compile(r"rank (\d+) waits in (send to \d+|recv from \d+|\w+) #")


def on_ranks(world_size: int) -> str:
    """Return "on 1 rank", "on 2 ranks"."""
    return f"on {world_size} rank{'' if world_size == 1 else 's'}"


def waiting(error: RankError) -> str:
    """Return "rank 0 waits in send to 1, rank 1 waits in send to 0" from the text of a hang, or ""."""
    found = dict(WAITS.findall(str(error)))
    return ", ".join(f"rank {rank} waits in {call}" for rank, call in found.items())


def deadlock(error: RankError, world_size: int, advice: str) -> Fault | None:
    """Name a hang among sends and receives, with who waits for whom."""
    who = waiting(error)
    if "send to" not in who and "recv from" not in who:
        return None
    return Fault("deadlock", f"{on_ranks(world_size)} nobody can go on: {who}. {advice}")


def from_scratch(evidence: Evidence) -> Iterator[Fault]:
    """Refuse torch's own collectives where messages were asked for."""
    used = native_collectives(evidence)
    if used:
        names = ", ".join(f"dist.{name}" for name in used)
        yield Fault("native collective", f"{names} does the work; build it from send and recv (or isend and irecv)")


def never_waited(evidence: Evidence) -> Iterator[Fault]:
    """Find a receive that nobody waited for."""
    for rank in range(evidence.world_size):
        for call in evidence.records.calls(rank):
            if call.op == "recv" and not call.wait_ns:
                text = f"rank {rank} calls irecv from {call.peer} and never wait(): the tensor may still be empty"
                yield Fault("not waited", f"{text}; keep what irecv returns and call its wait() before you read")
                return


# 01.shift


def drive_shift(fn: Callable[[Tensor], Any]) -> list[tuple[Any, bool]]:
    """Shift a small and a larger tensor; return what came, and whether the argument stayed as it was."""
    seen, rank = [], dist.get_rank()
    for number, shape in enumerate(SHAPES):
        tensor = seeded(rank, *shape, purpose=f"shift {number}")
        before = tensor.clone()
        seen.append((fn(tensor), torch.equal(tensor, before)))
    return seen


def judge_shift(evidence: Evidence) -> Iterator[Fault]:
    """Look at values first, then at what was sent and when."""
    yield from never_waited(evidence)
    for number, shape in enumerate(SHAPES):
        yield from _judge_shifted(evidence, number, shape)
    yield from from_scratch(evidence)
    num_messages = len(SHAPES) if evidence.world_size > 1 else 0
    for rank in range(evidence.world_size):
        sends = [call for call in evidence.records.calls(rank) if call.op == "send"]
        if len(sends) != num_messages:
            text = (
                f"right result, but rank {rank} sends {len(sends) / len(SHAPES):g} messages a call where one is enough"
            )
            yield Fault("too many messages", f"{text}: only to the next rank")
    yield from _one_after_another(evidence)


def _judge_shifted(evidence: Evidence, number: int, shape: Sequence[int]) -> Iterator[Fault]:
    n = evidence.world_size
    own = [seeded(rank, *shape, purpose=f"shift {number}") for rank in range(n)]
    for rank in range(n):
        got, unchanged = evidence.results[rank][number]
        before, after = (rank - 1) % n, (rank + 1) % n
        if not isinstance(got, Tensor):
            yield Fault("not a tensor", f"rank {rank} returns {got!r}; return the tensor that came from rank {before}")
            continue
        if got.shape == own[rank].shape and n > 1:
            if torch.equal(got, own[rank]):
                where = "an end of the line: the circle must close there" if rank in (0, n - 1) else "the middle"
                text = f"rank {rank} returns its own tensor where rank {before}'s was expected; it is at {where}"
                yield Fault("own tensor", f"{text}, so take neighbours modulo world_size")
            if n > 2 and torch.equal(got, own[after]):
                text = f"rank {rank} returns the tensor of rank {after}, the next one, instead of rank {before}'s"
                yield Fault("wrong direction", f"{text}; send to rank + 1, receive from rank - 1")
        fault = compare(got, own[before], what=f"what rank {rank} returns (rank {before}'s tensor)", world_size=n)
        if fault is not None:
            yield fault
        if not unchanged:
            text = f"rank {rank}'s argument was changed: what arrives overwrites what the caller still needs"
            yield Fault("argument changed", f"{text}; receive into torch.empty_like(tensor)")


def _one_after_another(evidence: Evidence) -> Iterator[Fault]:
    """Find a chain: nearly every rank sends only after it has received."""
    n, late = evidence.world_size, []
    for rank in range(n):
        calls = evidence.records.calls(rank)
        sends, receives = ([call for call in calls if call.op == op] for op in ("send", "recv"))
        if sends and receives and sends[0].start_ns >= receives[0].end_ns:
            late.append(rank)
    if len(late) > (n + 1) // 2:
        text = f"right result, but the messages go one after another: ranks {late} send only after they have received"
        yield Fault("one after another", f"{text}, {n} messages' time instead of one; start both, then wait")


def shift_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a message to oneself, a neighbour that does not exist, and a deadlock."""
    if TO_ITSELF.search(str(error)):
        words = f"{on_ranks(world_size)} a rank sends to or receives from itself, which torch cannot do"
        return Fault("itself", f"{words}; when world_size is 1 return a copy of the tensor")
    if OUTSIDE.search(str(error)):
        words = f"{on_ranks(world_size)} a rank sends to or receives from a rank outside 0 to {world_size - 1}"
        return Fault("no such rank", f"{words}: at the ends the circle must close, so take (rank + 1) % world_size")
    advice = (
        "A send ends when the other side receives, so somebody must receive first: start both with isend and irecv, "
        "then wait for both"
    )
    return deadlock(error, world_size, advice)


def shift_budget(evidence: Evidence) -> list[str]:
    """Say what a right solution sent."""
    if evidence.world_size == 1:
        return ["nothing sent on one rank"]
    sent = evidence.records.sent_bytes(0)
    return [f"1 message a rank and call, all at the same time: {sent:,} bytes in {len(SHAPES)} calls"]


# 01.ping_pong


def partner_of(rank: int, world_size: int) -> int | None:
    """Return the partner: first with last, second with the one before; the middle one of three sits out."""
    partner = world_size - 1 - rank
    return None if partner == rank else partner


def drive_ping_pong(fn: Callable[[Tensor, int, int], Any]) -> Any:
    """Play with the partner; return what fn returned and the seconds that the whole call took."""
    partner = partner_of(dist.get_rank(), dist.get_world_size())
    if partner is None:
        return None
    tensor, start = torch.ones(1 << 17), time.perf_counter()
    seconds = fn(tensor, partner, ROUNDS)
    return seconds, time.perf_counter() - start


def judge_ping_pong(evidence: Evidence) -> Iterator[Fault]:
    """Look at the messages of each pair and then at the number."""
    n = evidence.world_size
    for rank in range(n):
        partner = partner_of(rank, n)
        if partner is None:
            continue
        calls = [call for call in evidence.records.calls(rank) if call.op in ("send", "recv")]
        yield from _judge_messages(rank, partner, calls)
        yield from _judge_seconds(rank, *evidence.results[rank], calls)
    yield from from_scratch(evidence)


def _judge_messages(rank: int, partner: int, calls: Sequence[Call]) -> Iterator[Fault]:
    sends, receives = ([call for call in calls if call.op == op] for op in ("send", "recv"))
    if len(sends) != ROUNDS or len(receives) != ROUNDS:
        text = f"rank {rank} sends {len(sends)} messages and receives {len(receives)} in {ROUNDS} rounds"
        yield Fault("wrong number of messages", f"{text}; expected {ROUNDS} of each")
        return
    if any(not call.end_ns for call in receives):
        yield Fault("not waited", f"rank {rank} does not wait for what it receives; call wait() in every round")
        return
    if rank < partner:
        early = [k for k in range(1, ROUNDS) if sends[k].start_ns < receives[k - 1].end_ns]
        if early:
            text = f"rank {rank} sends message {early[0] + 1} before the answer to message {early[0]} is there"
            yield Fault("answer not waited for", f"{text}: several messages travel at once, and the time is of no one")
    elif any(sends[k].start_ns < receives[k].end_ns for k in range(ROUNDS)):
        text = f"rank {rank} sends before it has received: both partners send at the same time"
        yield Fault("both at once", f"{text}; the higher rank answers, it does not begin")


def _judge_seconds(rank: int, seconds: Any, whole_s: float, calls: Sequence[Call]) -> Iterator[Fault]:
    """Compare the returned number with the time of the whole call (too long) and of the messages (too short).

    A right number lies between the two however busy the machine is: the clock is read inside the call, around the
    messages. So a loaded machine cannot make it wrong.
    """
    if not isinstance(seconds, int | float) or not seconds > 0:
        yield Fault(
            "not a time", f"rank {rank} returns {seconds!r}; return the seconds of one message, a positive number"
        )
        return
    if not calls:
        return
    window_s = (max(call.end_ns for call in calls) - min(call.start_ns for call in calls)) / 1e9
    ratio = seconds / (whole_s / (2 * ROUNDS))
    got = f"rank {rank} returns {seconds * 1e6:.0f} us; its {2 * ROUNDS} messages took {window_s * 1e6:.0f} us together"
    if ratio > 1.25 * ROUNDS:
        yield Fault("not divided", f"{got}; divide by their number, 2 * rounds")
    elif ratio > 0.75 * ROUNDS:
        yield Fault("all rounds", f"{got}: that is the time of all rounds one way; divide by 2 * rounds, not by 2")
    elif ratio > 1.1:
        yield Fault("round trip", f"{got}: that is a whole round trip, there and back; divide by 2 * rounds")
    elif seconds < 0.6 * window_s / (2 * ROUNDS):
        yield Fault("too short", f"{got}; read the clock before the first message and after the last answer")


def ping_pong_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a deadlock of partners."""
    text = (
        "Of two partners exactly one sends first: let the lower rank do it (rank < partner), whichever ranks they are"
    )
    return deadlock(error, world_size, text)


def ping_pong_budget(evidence: Evidence) -> list[str]:
    """Say what was played and measured."""
    megabytes = evidence.records.sent_bytes(0) / ROUNDS / 1e6
    return [
        f"{ROUNDS} rounds, {ROUNDS} messages each way; {evidence.results[0][0] * 1e3:.2f} ms for {megabytes:.2f} MB"
    ]
