"""Messages: shift a tensor around the circle, and gather tensors at a root."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from distlab_lesson_01.checks.shared import (
    TO_ITSELF,
    WAITS,
    deadlock,
    from_scratch,
    never_waited,
    on_ranks,
    to_itself,
    waiting,
)
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import calls, sent_bytes
from distlab.grading.diagnosis.values import compare, same, seeded

if TYPE_CHECKING:
    from distlab.comm import RankError

SHAPES = ((3, 5), (1 << 14,))
SHIFTED_BYTES = 8 * sum(map(math.prod, SHAPES))
# The recorder refuses a rank that the group does not have; gloo would crash or wait.
OUTSIDE = re.compile(r"there is no such rank")


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
    for rank in range(evidence.world_size):
        per_call, is_alone = len(calls(evidence, rank, "send")) / len(SHAPES), evidence.world_size == 1
        if not per_call and not is_alone:
            text = f"right result, but rank {rank} calls neither dist.send nor dist.isend"
            yield Fault("unseen", f"{text}: send the tensor with one of them, not with what is below them")
        if sent_bytes(evidence, rank) > (0 if is_alone else SHIFTED_BYTES):
            text = f"right result, but rank {rank} sends {per_call:g} messages per call where one is enough"
            yield Fault("too many messages", f"{text}: each number once, only to the next rank")
    yield from _one_after_another(evidence)


def _judge_shifted(evidence: Evidence, number: int, shape: Sequence[int]) -> Iterator[Fault]:
    n = evidence.world_size
    own = [seeded(rank, *shape, purpose=f"shift {number}") for rank in range(n)]
    for rank in range(n):
        got, unchanged = evidence.results[rank][number]
        if n > 1 and all(same(evidence.results[each][number][0], own[each]) for each in range(n)):
            text = "every rank returns its own tensor, not the one that came: return the tensor that was received into"
            yield Fault("own tensor", text)
        before, after = (rank - 1) % n, (rank + 1) % n
        if not isinstance(got, Tensor):
            yield Fault("not a tensor", f"rank {rank} returns {got!r}; return the tensor that came from rank {before}")
        if got.shape == own[rank].shape and n > 1:
            if torch.equal(got, own[rank]):
                where = "an end of the line: the circle must close there" if rank in (0, n - 1) else "the middle"
                text = f"rank {rank} returns its own tensor where rank {before}'s was expected; it is at {where}"
                yield Fault("own tensor", f"{text}, so take neighbours modulo world_size")
            if n > 2 and torch.equal(got, own[after]):
                text = f"rank {rank} returns the tensor of rank {after}, the next one, instead of rank {before}'s"
                yield Fault("wrong direction", f"{text}; send to rank + 1, receive from rank - 1")
        yield from found(compare(got, own[before], f"what rank {rank} returns (rank {before}'s tensor)", n))
        if not unchanged:
            text = f"rank {rank}'s argument was changed: what arrives overwrites what the caller still needs"
            yield Fault("argument changed", f"{text}; receive into torch.empty_like(tensor)")


def _one_after_another(evidence: Evidence) -> Iterator[Fault]:
    """Find a chain: nearly every rank sends only after it has received."""
    n, late = evidence.world_size, []
    for rank in range(n):
        sends, receives = calls(evidence, rank, "send"), calls(evidence, rank, "recv")
        if sends and receives and sends[0].start_ns >= receives[0].end_ns:
            late.append(rank)
    if len(late) > (n + 1) // 2:
        text = f"right result, but the messages go one after another: ranks {late} send only after they have received"
        yield Fault("one after another", f"{text}, {n} messages' time instead of one; start both, then wait")


def shift_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a message to oneself, a neighbour that does not exist, and a deadlock."""
    if TO_ITSELF.search(str(error)):
        return to_itself(world_size, "a rank", "when world_size is 1 return a copy of the tensor")
    if OUTSIDE.search(str(error)):
        words = f"{on_ranks(world_size)} a rank sends to or receives from a rank outside 0 to {world_size - 1}"
        return Fault("no such rank", f"{words}: at the ends the circle must close, so take (rank + 1) % world_size")
    if (fault := _from_the_wrong_side(error, world_size)) is not None:
        return fault
    advice = "A send ends when the other side receives, so one of them must receive first"
    if "send to" not in waiting(error):
        advice = "All of them receive first, so nothing has been sent that could arrive"
    return deadlock(error, world_size, f"{advice}: start both with isend and irecv, then wait for both")


def _from_the_wrong_side(error: RankError, world_size: int) -> Fault | None:
    """Say so where a rank waits for one that is not the rank before it."""
    for rank, call in WAITS.findall(str(error)):
        source, before = call.removeprefix("recv from "), (int(rank) - 1) % world_size
        if source.isdecimal() and int(source) != before:
            text = f"{on_ranks(world_size)} no rank can go on: {waiting(error)}. Rank {rank} is to receive from rank"
            return Fault("wrong neighbour", f"{text} {before}, the one before it: (rank - 1) % world_size")
    return None


def shift_budget(evidence: Evidence) -> list[str]:
    """Say what a right solution sent."""
    if evidence.world_size == 1:
        return ["nothing sent on one rank"]
    text = "1 message per rank and call, all at the same time"
    return [f"{text}: {evidence.records.sent_bytes(0):,} bytes in {len(SHAPES)} calls"]


def drive_gather(fn: Callable[[Tensor, int], Any]) -> list[Any]:
    """Gather at the first rank and at the last; later ranks begin earlier, so that they also arrive earlier."""
    rank, world_size, results = dist.get_rank(), dist.get_world_size(), []
    for root in (0, world_size - 1):
        dist.barrier()
        time.sleep(0.03 * (world_size - 1 - rank))
        results.append(fn(gathered(rank), root))
    return results


def gathered(rank: int) -> Tensor:
    """Return what a rank gives."""
    return seeded(rank, 6, 4, purpose="gather")


def judge_gather(evidence: Evidence) -> Iterator[Fault]:
    """Look at who returns what, then at the order, then at the messages."""
    n = evidence.world_size
    yield from never_waited(evidence)
    for number, root in enumerate((0, n - 1)):
        returned = [evidence.results[rank][number] for rank in range(n)]
        yield from _judge_who(returned, root)
        yield from _judge_list(returned[root], root, n)
    yield from from_scratch(evidence)
    for rank in range(n):
        want, sends = (rank != 0) + (rank != n - 1), len(calls(evidence, rank, "send"))
        if sends < want or sent_bytes(evidence, rank) > want * gathered(rank).nbytes:
            text = f"right lists, but rank {rank} sends {sends} messages in two gathers (to root 0 and root {n - 1})"
            yield Fault("too many messages", f"{text}; expected {want}: its tensor once to each root that it is not")


def _judge_who(returned: Sequence[Any], root: int) -> Iterator[Fault]:
    having = [rank for rank, value in enumerate(returned) if value is not None]
    if having == [root]:
        return
    if root not in having and len(having) == 1:
        text = f"with root={root} the list is on rank {having[0]}: the argument root is not used everywhere"
        yield Fault("root ignored", f"{text}; replace the fixed number by root")
    if root not in having:
        text = f"with root={root} rank {root} returns None"
        yield Fault("nothing at the root", f"{text}; it must return the list of all tensors")
    others = [rank for rank in having if rank != root]
    yield Fault("not only the root", f"with root={root} ranks {others} return something too; they must return None")


def _judge_list(got: Any, root: int, n: int) -> Iterator[Fault]:
    if got is None:
        return
    if not isinstance(got, list | tuple) or not all(isinstance(tensor, Tensor) for tensor in got):
        yield Fault("not a list", f"rank {root} returns a {type(got).__name__}; return a list of {n} tensors")
    want = [gathered(rank) for rank in range(n)]
    if len(got) != n:
        own = not any(torch.equal(tensor, want[root]) for tensor in got)
        why = f"; the root's own tensor is missing: put it at place {root}" if own and len(got) == n - 1 else ""
        yield Fault("wrong length", f"rank {root} returns {len(got)} tensors where {n} were expected{why}")
    whose = [next((rank for rank in range(n) if torch.equal(tensor, want[rank])), None) for tensor in got]
    if whose == list(range(n)):
        return
    senders = [rank for place, rank in enumerate(whose) if place != root]
    if len(senders) > 1 and None not in senders and len(set(senders)) == 1:
        text = f"rank {root} received {len(senders)} tensors and all are rank {senders[0]}'s, the last that came"
        yield Fault("one buffer", f"{text}: each message needs a tensor of its own; call torch.empty_like for each")
    if sorted(rank for rank in whose if rank is not None) == list(range(n)):
        text = f"rank {root} has the tensors in the order of ranks {whose}; expected {list(range(n))}"
        yield Fault("wrong order", f"{text}. Messages come in any order: say from whom each receive is")
    for rank, (one, other) in enumerate(zip(got, want, strict=True)):
        yield from found(compare(one, other, f"place {rank} of the list on rank {root}", n))


def gather_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a hang, and a root that sends to itself."""
    if TO_ITSELF.search(str(error)):
        return to_itself(world_size, "the root", "put a copy of its own tensor in the list")
    return deadlock(error, world_size, "Every rank but root sends once, and root receives once from each of them")


def gather_budget(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    return [f"{evidence.world_size - 1} messages of {gathered(0).nbytes} bytes per gather; the root sends none"]


_BOTH = (
    "arriving = dist.irecv(received, (rank - 1) % world_size)\nleaving = dist.isend(tensor, (rank + 1) % world_size)"
)
_WAITS = "arriving.wait()\nleaving.wait()"
WRONG_SHIFTS = (
    Mutant("every rank sends first", "deadlock", "waits in send to", 2, 3)
    .edit(_BOTH, "dist.send(tensor, (rank + 1) % world_size)")
    .edit(_WAITS, "dist.recv(received, (rank - 1) % world_size)"),
    Mutant("every rank receives first", "deadlock", "All of them receive first", 2, 3)
    .edit(_BOTH, "dist.recv(received, (rank - 1) % world_size)")
    .edit(_WAITS, "dist.send(tensor, (rank + 1) % world_size)"),
    Mutant("one rank forgotten", "itself", "receives from itself", 1, "torch refuses it").without(
        "if world_size == 1:\n    return tensor.clone()"
    ),
    Mutant("a line, not a circle", "own tensor", "circle must close", 2, "wrong ends")
    .edit("torch.empty_like(tensor)", "tensor.clone()")
    .edit(
        _BOTH,
        """
        requests = [dist.irecv(received, rank - 1)] if rank > 0 else []
        requests += [dist.isend(tensor, rank + 1)] if rank < world_size - 1 else []
        """,
    )
    .edit(_WAITS, "for request in requests:\n    request.wait()"),
    Mutant("past the end", "no such rank", "outside 0 to 1", 2, "wrong ends").edit(
        _BOTH, "leaving = dist.isend(tensor, rank + 1)\narriving = dist.irecv(received, rank - 1)"
    ),
    Mutant("wrong direction", "wrong direction", "the next one", 3, "right on 2 ranks")
    .edit("(rank - 1)", "(rank + 1)")
    .edit("tensor, (rank + 1)", "tensor, (rank - 1)"),
    Mutant("never waits", "not waited", "never wait()", 2, "pytorch tutorial on isend").without("arriving.wait()"),
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
    Mutant("overwrites", "argument changed", "was changed", 2, 40).edit(
        "return received", "return tensor.copy_(received)"
    ),
    Mutant("all_gather", "native collective", "dist.all_gather", 2, 1).body("""
        everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, tensor)
        return everything[dist.get_rank() - 1]
    """),
)
_WAIT_FOR_ALL = "for message in arriving:\n    message.wait()"
WRONG_GATHERS = (
    Mutant("from anyone", "wrong order", "say from whom", 3, 27)
    .edit("irecv(tensors[sender], sender)", "recv(tensors[sender])")
    .without(_WAIT_FOR_ALL),
    Mutant("root is 0", "root ignored", "replace the fixed number", 2, 7).edit(
        "rank, world_size", "root = 0\nrank, world_size"
    ),
    Mutant("one buffer", "one buffer", "a tensor of its own", 3, 40)
    .edit("tensors = [", "buffer = torch.empty_like(tensor)\ntensors = [")
    .edit("else torch.empty_like(tensor)", "else buffer")
    .edit("irecv(", "recv(")
    .without(_WAIT_FOR_ALL),
    Mutant("own missing", "wrong length", "own tensor is missing", 2, "common").edit(
        "return tensors", "return tensors[:root] + tensors[root + 1 :]"
    ),
    Mutant("to all ranks", "too many messages", "each root that it is not", 3, 1)
    .edit(
        "if rank != root:\n    dist.send(tensor, root)\n    return None",
        "leaving = [dist.isend(tensor, other) for other in range(world_size) if other != rank]",
    )
    .edit("sender == root", "sender == rank")
    .edit("sender != root", "sender != rank")
    .edit("in arriving", "in arriving + leaving")
    .edit("return tensors", "return tensors if rank == root else None"),
)
