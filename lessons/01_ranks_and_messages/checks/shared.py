"""What the checks of lesson 1 share: how a hang is told, and what a right exchange of messages is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distlab.grading import Evidence, Fault
from distlab.grading.diagnosis.traffic import native_collectives

if TYPE_CHECKING:
    from distlab.comm import RankError

TO_ITSELF = re.compile(r"same as the rank of the current process|this rank itself")  # torch's words, the recorder's
WAITS = re.compile(r"rank (\d+) waits in (send to \d+|recv from \d+|\w+) #")


def on_ranks(world_size: int) -> str:
    """Return "on 1 rank", "on 2 ranks"."""
    return f"on {world_size} rank{'' if world_size == 1 else 's'}"


def to_itself(world_size: int, who: str, advice: str) -> Fault:
    """Name a message of a rank to itself."""
    text = f"{on_ranks(world_size)} {who} sends to or receives from itself, which torch cannot do"
    return Fault("itself", f"{text}; {advice}")


def waiting(error: RankError) -> str:
    """Return "rank 0 waits in send to 1, rank 1 waits in send to 0" from the text of a hang, or ""."""
    found = dict(WAITS.findall(str(error)))
    return ", ".join(f"rank {rank} waits in {call}" for rank, call in found.items())


def deadlock(error: RankError, world_size: int, advice: str) -> Fault | None:
    """Name a hang among sends and receives, with who waits for whom."""
    who = waiting(error)
    if "send to" not in who and "recv from" not in who:
        return None
    return Fault("deadlock", f"{on_ranks(world_size)} no rank can go on: {who}. {advice}")


def from_scratch(evidence: Evidence) -> Iterator[Fault]:
    """Refuse torch's own collectives where messages were asked for."""
    used = native_collectives(evidence)
    if used:
        names = ", ".join(f"dist.{name}" for name in used)
        yield Fault("native collective", f"{names} does the work; build it from send and recv (or isend and irecv)")


def never_waited(evidence: Evidence) -> Iterator[Fault]:
    """Find a receive that its rank never waited for."""
    for rank in range(evidence.world_size):
        for call in evidence.records.calls(rank):
            if call.op == "recv" and not call.wait_ns:
                text = f"rank {rank} calls irecv from {call.peer} and never wait(): the tensor may still be empty"
                yield Fault("not waited", f"{text}; keep what irecv returns and call its wait() before you read")
