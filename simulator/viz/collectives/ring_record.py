"""Read a ring collective from what was recorded: in each step who sends which chunk to whom.

The record knows senders, receivers, bytes and order. In each step a ring forwards what it received in the step before,
so a chunk can be followed from rank to rank; it is named after the rank that sends it first.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from distlab.trace import Trace
from simulator.units import format_bytes

_PEER = re.compile(r"\b(?:to|from)\s+(?:rank\s+)?(\d+)")


class RecordedCall(Protocol):
    """One recorded call: what a picture of a ring needs to know about it."""

    @property
    def rank(self) -> int:
        """Who made the call."""

    @property
    def op(self) -> str:
        """The operation, such as "send" or "all_reduce"; a ring's picture reads "send" and "recv" only."""

    @property
    def peer(self) -> int:
        """The rank at the other end, or the root, or -1."""

    @property
    def num_bytes(self) -> int:
        """Payload."""

    @property
    def start_ns(self) -> int:
        """When the call was made."""

    @property
    def end_ns(self) -> int:
        """When it was known to be over, or 0."""


class Delivery(NamedTuple):
    """One send and the receive that took it; times in nanoseconds on one clock."""

    sender: int
    receiver: int
    num_bytes: int
    start_ns: int
    end_ns: int


Record = Trace | Iterable[RecordedCall]


class RingSteps(NamedTuple):
    """A ring's record, step by step.

    Attributes:
        ranks: in ring order: each sends to the next, the last to the first.
        operation: "all_reduce" or "reduce_scatter".
        chunk: [steps, ranks] the chunk that each rank sends, an index into ranks (who sends it first).
        num_bytes: [steps, ranks] bytes that each rank sends.
        span_s: [steps] from the first send to the last receive of the step.
        fault: what is not as a ring does it, in words, or "".
    """

    ranks: tuple[int, ...]
    operation: str
    chunk: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    span_s: NDArray[np.float64]
    fault: str

    @property
    def held(self) -> NDArray[np.int64]:
        """How many ranks' parts each chunk holds, as `provenance`: [steps + 1, ranks, chunks]; all are the full sum."""
        return np.asarray(provenance(self).sum(axis=3), np.int64)


class _End(NamedTuple):
    """One end of a message, as a trace has it: a RecordedCall."""

    rank: int
    op: str
    peer: int
    num_bytes: int
    start_ns: int
    end_ns: int


def messages_of(record: Record) -> list[Delivery]:
    """Pair sends with their receives, first in first out for each pair of ranks, in order of their starts.

    In a trace the peer is read from the span's name, "send to 1 #3"; recorded calls have it as a field.

    Raises:
        ValueError: there are no sends, a peer is unknown, or a send and its receive differ in bytes.
    """
    calls: Iterable[RecordedCall] = _ends_of_trace(record) if isinstance(record, Trace) else record
    ends = sorted((call for call in calls if call.op in ("send", "recv")), key=lambda end: end.start_ns)
    arrivals: dict[tuple[int, int], deque[RecordedCall]] = {}
    for end in ends:
        if end.op == "recv":
            arrivals.setdefault((end.peer, end.rank), deque()).append(end)
    messages = []
    for send in (end for end in ends if end.op == "send"):
        waiting = arrivals.get((send.rank, send.peer))
        taken = waiting.popleft() if waiting else send
        if taken.num_bytes != send.num_bytes:
            words = (
                f"rank {send.rank} sends {send.num_bytes} bytes to rank {send.peer}, which receives {taken.num_bytes}"
            )
            raise ValueError(f"{words}; pass the sends and receives of one call only")
        messages.append(Delivery(send.rank, send.peer, send.num_bytes, send.start_ns, max(taken.end_ns, send.start_ns)))
    if not messages:
        raise ValueError("the record has no send; record an algorithm built on send and recv, with at least 2 ranks")
    return messages


def _ends_of_trace(trace: Trace) -> list[_End]:
    ends = []
    for span in trace.select(trace.is_word("kind", "send", "recv")):
        peer = _PEER.search(span.name)
        if peer is None:
            raise ValueError(
                f"rank {span.rank}: span {span.name!r} does not name the other rank; pass the Records, not a Trace"
            )
        ends.append(_End(span.rank, span.kind, int(peer.group(1)), span.num_bytes, span.start_ns, span.end_ns))
    return ends


def ring_steps(record: Record) -> RingSteps:
    """Follow the chunks of one ring collective through its steps.

    The number of steps says which: 2(n-1) are an all_reduce, n-1 a reduce_scatter. An all_gather alone, which has as
    many steps as a reduce_scatter, is not supported.

    Raises:
        ValueError: the messages are not of a ring: a rank sends to several, counts differ, or the steps do not fit.
    """
    ranks, sent = _ring_order(messages_of(record))
    size, count = len(ranks), len(sent[0])
    operation = "all_reduce" if count % (2 * (size - 1)) == 0 else "reduce_scatter"
    num_steps = (size - 1) * (2 if operation == "all_reduce" else 1)
    if count % num_steps:
        raise ValueError(
            f"each rank sends {count} messages; a ring {operation} of {size} ranks has {num_steps} steps: "
            "pass the spans of one call only"
        )
    pieces = count // num_steps  # a step may cut its chunk into several messages
    table = [[own[step * pieces : (step + 1) * pieces] for own in sent] for step in range(num_steps)]
    num_bytes = np.array([[sum(m.num_bytes for m in part) for part in row] for row in table], dtype=np.int64)
    starts = [min(m.start_ns for part in row for m in part) for row in table]
    ends = [max(m.end_ns for part in row for m in part) for row in table]
    chunk, fault = _follow(ranks, num_bytes)
    return RingSteps(
        ranks=ranks,
        operation=operation,
        chunk=chunk,
        num_bytes=num_bytes,
        span_s=(np.array(ends) - np.array(starts)) / 1e9,
        fault=fault,
    )


def _ring_order(messages: Sequence[Delivery]) -> tuple[tuple[int, ...], list[list[Delivery]]]:
    """Return the ranks in ring order, from the lowest on, and each one's messages."""
    by_rank: dict[int, list[Delivery]] = {}
    for message in messages:
        by_rank.setdefault(message.sender, []).append(message)
    after = {}
    for rank, own in by_rank.items():
        receivers = sorted({message.receiver for message in own})
        if len(receivers) != 1:
            raise ValueError(f"rank {rank} sends to ranks {receivers}; in a ring each rank sends to one neighbour")
        after[rank] = receivers[0]
    ranks = [min(by_rank)]
    while after.get(ranks[-1], ranks[0]) not in ranks:
        ranks.append(after[ranks[-1]])
    if len(ranks) != len(by_rank) or after.get(ranks[-1]) != ranks[0] or len(ranks) < 2:
        raise ValueError(f"the messages go {after} (sender: receiver); that is not one ring through all ranks")
    counts = {rank: len(own) for rank, own in by_rank.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the ranks send different numbers of messages: {counts}; pass the spans of one call only")
    return tuple(ranks), [by_rank[rank] for rank in ranks]


def _follow(ranks: Sequence[int], num_bytes: NDArray[np.int64]) -> tuple[NDArray[np.int64], str]:
    """Name each step's chunks: what a rank sends is what its left neighbour sent one step earlier."""
    steps, size = num_bytes.shape
    chunk = (np.arange(size)[None, :] - np.arange(steps)[:, None]) % size
    expected = np.roll(num_bytes, 1, axis=1)[:-1]
    wrong = np.argwhere(num_bytes[1:] != expected)
    if not len(wrong):
        return chunk, ""
    step, place = (int(at) for at in wrong[0])
    got, sent = format_bytes(float(expected[step, place])), format_bytes(float(num_bytes[step + 1, place]))
    return chunk, f"rank {ranks[place]} receives {got} in step {step + 1} and sends {sent} in step {step + 2}"


def provenance(steps: RingSteps) -> NDArray[np.bool_]:
    """Return whose parts are in each chunk: [steps + 1, ranks, chunks, parts], before each step and after the last."""
    size = len(steps.ranks)
    state = np.zeros((size, size, size), dtype=bool)
    places = np.arange(size)
    state[places, :, places] = True
    states = [state]
    for row in steps.chunk:
        after = state.copy()
        for place, sent in enumerate(row.tolist()):
            after[(place + 1) % size, sent] |= state[place, sent]
        state = after
        states.append(state)
    return np.array(states)


def chunk_name(index: int) -> str:
    """Return a chunk's letters: A to Z, then AA, AB, ..."""
    return chr(65 + index) if index < 26 else chunk_name(index // 26 - 1) + chunk_name(index % 26)


def step_verb(steps: RingSteps, number: int) -> str:
    """Say what receivers do in a step: 'add' while sums are partial, 'copy' once they are full."""
    sent = steps.held[number][np.arange(len(steps.ranks)), steps.chunk[number]]
    return "copy" if (sent >= len(steps.ranks)).all() else "add"
