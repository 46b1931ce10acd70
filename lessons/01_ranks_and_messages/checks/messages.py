"""Messages: shift a tensor around the circle, and gather tensors at a root."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.course.grading.cases import Cases, Given
from distlab.course.grading.diagnosis.traffic import calls, native_collectives
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Fault, Mutant

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


def _shifted(rank: int, n: int) -> Given:
    return {
        "3 x 5 elements": (seeded(rank, 3, 5, purpose="shift 0"),),
        "16,384 elements": (seeded(rank, 1 << 14, purpose="shift 1"),),
    }


def _gathered(rank: int) -> Tensor:
    return seeded(rank, 6, 4, purpose="gather")


def _use_gather(fn: Callable[..., Any], tensor: Tensor, root: int) -> dict[str, Any]:
    """Tell tensors by whose they are; later ranks begin earlier, so that they also arrive earlier."""
    dist.barrier()
    time.sleep(0.03 * (dist.get_world_size() - 1 - dist.get_rank()))
    got = fn(tensor, root)
    if dist.get_rank() != root and got is not None:
        got = "something"
    elif isinstance(got, list | tuple):
        every = [_gathered(rank) for rank in range(dist.get_world_size())]
        got = [
            next(
                (rank for rank, own in enumerate(every) if isinstance(one, Tensor) and torch.equal(one, own)), "nobody"
            )
            for one in got
        ]
    return {"whose tensors it returns": got}


drive_shift = Cases(_shifted, needs="one message per call")
drive_gather = Cases(
    lambda rank, n: {f"root {root}": (_gathered(rank), root) for root in (0, n - 1)},
    _use_gather,
    needs="one message to each root that a rank is not",
)
judge_gather = from_scratch


def judge_shift(evidence: Evidence) -> Iterator[Fault]:
    """Look at what was sent, and whether nearly every rank sends only after it has received."""
    yield from from_scratch(evidence)
    n, late = evidence.world_size, []
    for rank in range(n):
        sends, receives = calls(evidence, rank, "send"), calls(evidence, rank, "recv")
        if n > 1 and not sends:
            text = f"right result, but rank {rank} calls neither dist.send nor dist.isend"
            yield Fault("unseen", f"{text}: send the tensor with one of them, not with what is below them")
        if sends and receives and sends[0].start_ns >= receives[0].end_ns:
            late.append(rank)
    if len(late) > (n + 1) // 2:
        text = f"right result, but the messages go one after another: ranks {late} send only after they have received"
        yield Fault("one after another", f"{text}, {n} messages' time instead of one; start both, then wait")


def failure_shift(error: RankError, world_size: int) -> Fault | None:
    """Name a message to oneself, a neighbour that does not exist, and a deadlock."""
    if TO_ITSELF.search(str(error)):
        return to_itself(world_size, "a rank", "when world_size is 1 return a copy of the tensor")
    if "there is no such rank" in str(error):  # the recorder refuses it; gloo would crash or wait
        words = f"{on_ranks(world_size)} a rank sends to or receives from a rank outside 0 to {world_size - 1}"
        return Fault("no such rank", f"{words}: at the ends the circle must close, so take (rank + 1) % world_size")
    for rank, call in WAITS.findall(str(error)):
        source, before = call.removeprefix("recv from "), (int(rank) - 1) % world_size
        if source.isdecimal() and int(source) != before:
            text = f"{on_ranks(world_size)} no rank can go on: {waiting(error)}. Rank {rank} is to receive from rank"
            return Fault("wrong neighbour", f"{text} {before}, the one before it: (rank - 1) % world_size")
    advice = "A send ends when the other side receives, so one of them must receive first"
    if "send to" not in waiting(error):
        advice = "All of them receive first, so nothing has been sent that could arrive"
    return deadlock(error, world_size, f"{advice}: start both with isend and irecv, then wait for both")


def failure_gather(error: RankError, world_size: int) -> Fault | None:
    """Name a hang, and a root that sends to itself."""
    if TO_ITSELF.search(str(error)):
        return to_itself(world_size, "the root", "put a copy of its own tensor in the list")
    return deadlock(error, world_size, "Every rank but root sends once, and root receives once from each of them")


def budget_shift(evidence: Evidence) -> list[str]:
    """Say what a right solution sent."""
    if evidence.world_size == 1:
        return ["nothing sent on one rank"]
    text = "1 message per rank and call, all at the same time"
    return [f"{text}: {evidence.records.sent_bytes(0):,} bytes in 2 calls"]


def budget_gather(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    return [f"{evidence.world_size - 1} messages of {_gathered(0).nbytes} bytes per gather; the root sends none"]


_BOTH = (
    "arriving = dist.irecv(received, (rank - 1) % world_size)\nleaving = dist.isend(tensor, (rank + 1) % world_size)"
)
_WAITS = "arriving.wait()\nleaving.wait()"
WRONG_SHIFT = (
    Mutant("every rank sends first", "deadlock", "waits in send to", 2, 3)
    .edit(_BOTH, "dist.send(tensor, (rank + 1) % world_size)")
    .edit(_WAITS, "dist.recv(received, (rank - 1) % world_size)"),
    Mutant("every rank receives first", "deadlock", "All of them receive first", 2, 3)
    .edit(_BOTH, "dist.recv(received, (rank - 1) % world_size)")
    .edit(_WAITS, "dist.send(tensor, (rank + 1) % world_size)"),
    Mutant("one rank forgotten", "itself", "receives from itself", 1, "torch refuses it", ends=True).without(
        "if world_size == 1:\n    return tensor.clone()"
    ),
    Mutant("returns its own", "own tensor", "it returns this rank's own tensor; return the one that came", 2).edit(
        "return received", "return tensor.clone()"
    ),
    Mutant(
        "a line, not a circle",
        "no circle",
        "rank 0 receives from nobody; the circle must close at its ends, so take neighbours modulo world_size",
        2,
        "wrong ends",
    )
    .edit("torch.empty_like(tensor)", "tensor.clone()")
    .edit(
        _BOTH,
        """
        requests = [dist.irecv(received, rank - 1)] if rank > 0 else []
        requests += [dist.isend(tensor, rank + 1)] if rank < world_size - 1 else []
        """,
    )
    .edit(_WAITS, "for request in requests:\n    request.wait()"),
    Mutant("past the end", "no such rank", "outside 0 to 1", 2, "wrong ends", ends=True).edit(
        _BOTH, "leaving = dist.isend(tensor, rank + 1)\narriving = dist.irecv(received, rank - 1)"
    ),
    Mutant(
        "wrong direction",
        "wrong direction",
        "the tensor of the next rank has come; send to rank + 1, receive from rank - 1",
        3,
        "right on 2 ranks",
    )
    .edit("(rank - 1)", "(rank + 1)")
    .edit("tensor, (rank + 1)", "tensor, (rank - 1)"),
    Mutant("never waits", "not waited", "keep what irecv returns", 2, "pytorch tutorial on isend").without(
        "arriving.wait()"
    ),
    Mutant("a chain", "one after another", "one after another", 4, 25).edit(
        f"{_BOTH}\n{_WAITS}",
        """
        if rank == 0:
            dist.send(tensor, 1)
        dist.recv(received, (rank - 1) % world_size)
        if rank > 0:
            dist.send(tensor, (rank + 1) % world_size)
        """,
    ),
    Mutant("overwrites", "changed argument", "it belongs to the caller", 2, 40).edit(
        "return received", "return tensor.copy_(received)"
    ),
    Mutant("all_gather", "native collective", "dist.all_gather", 2, 1).body("""
        everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, tensor)
        return everything[dist.get_rank() - 1]
    """),
    Mutant("below torch.distributed", "unseen", "neither dist.send nor dist.isend", 2, "unseen calls").body("""
        everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.allgather([everything], [tensor]).wait()
        return everything[dist.get_rank() - 1]
    """),
    Mutant("float64 written down", "mismatch", "the receive that takes it do not fit", 2, "one dtype", races=True).edit(
        "torch.empty_like(tensor)", "torch.empty(tensor.shape, dtype=torch.float64)"
    ),
)
_WAIT_FOR_ALL = "for message in arriving:\n    message.wait()"
WRONG_GATHER = (
    Mutant("from anyone", "wrong order", "tensors stand in the order of arrival; say from whom each receive is", 3, 27)
    .edit("irecv(tensors[sender], sender)", "recv(tensors[sender])")
    .without(_WAIT_FOR_ALL),
    Mutant("root is 0", "root ignored", "rank 0 has the list, whatever root is; use the argument", 2, 7).edit(
        "rank, world_size", "root = 0\nrank, world_size"
    ),
    Mutant("one buffer", "one buffer", "each receive overwrites the one before; each needs a tensor of its own", 3, 40)
    .edit("tensors = [", "buffer = torch.empty_like(tensor)\ntensors = [")
    .edit("else torch.empty_like(tensor)", "else buffer")
    .edit("irecv(", "recv(")
    .without(_WAIT_FOR_ALL),
    Mutant("own missing", "own missing", "the root's own tensor is missing; put it at place `root`", 1).edit(
        "return tensors", "return tensors[:root] + tensors[root + 1 :]"
    ),
    Mutant("root first", "wrong order", "the root's own tensor stands first; the tensor of rank 0 does", 2).edit(
        "return tensors", "return [tensors.pop(root), *tensors]"
    ),
    Mutant("reversed", "wrong order", "the tensor of the last rank stands first; that of rank 0 does", 3).edit(
        "return tensors", "return tensors[::-1]"
    ),
    Mutant("root last", "wrong order", "the root's own tensor stands last; put it at place `root`", 2).edit(
        "return tensors", "return [*tensors[:root], *tensors[root + 1 :], tensors[root]]"
    ),
    Mutant(
        "own empty", "own missing", "nothing was put in at the root's own place; put a copy of its tensor there", 1
    ).edit("tensor.clone() if sender == root else torch.empty_like", "torch.zeros_like"),
    Mutant("to all ranks", "to all ranks", "each rank sends its tensor to all; the root alone needs it", 2, 1)
    .edit(
        "if rank != root:\n    dist.send(tensor, root)\n    return None",
        "leaving = [dist.isend(tensor, other) for other in range(world_size) if other != rank]",
    )
    .edit("sender == root", "sender == rank")
    .edit("sender != root", "sender != rank")
    .edit("in arriving", "in arriving + leaving")
    .edit("return tensors", "return tensors if rank == root else None"),
    Mutant("everyone returns", "not only the root", "other ranks than root return something; they return None", 2).edit(
        "return None", "return [tensor]"
    ),
    Mutant("own is the first", "itself", "put a copy of its own tensor", 3, ends=True)
    .edit("if sender == root else", "if sender == 0 else")
    .edit("if sender != root]", "if sender != 0]"),
    Mutant("not waited", "not waited", "keep what irecv returns", 3).without(_WAIT_FOR_ALL),
    Mutant("stacked", "not a list", "the tensors are stacked into one; return a list of them", 1).edit(
        "return tensors", "return torch.stack(tensors)"
    ),
)
