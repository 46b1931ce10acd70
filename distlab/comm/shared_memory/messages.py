"""Sends and receives through shared memory: one ring of bytes for each ordered pair of ranks, first in, first out.

A message is a header (tag, length, dtype) and its bytes, which go through the ring in pieces. The receiver takes
the message at the head when a receive with its tag is there. Where only receives with other tags wait, it puts the
message aside, in memory of its own, so that any number of messages may be open. A send is over once all of its bytes
have left the ring.

Whoever waits for a message moves all messages of this rank on. While nobody waits, a thread of the group does, so that
they travel while the caller computes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from distlab.comm.shared_memory import futex
from distlab.comm.shared_memory.arena import BELL, MIN_PIECE_BYTES, PAGE, Arena
from distlab.comm.shared_memory.dense import flat_of, settle
from distlab.comm.shared_memory.meeting import Meeting
from distlab.comm.shared_memory.work import SharedWork, start_thread

WRITTEN, READ = 0, 64  # places of a ring's counts of bytes: the sender's and the receiver's
HEADER_BYTES = 256  # messages begin at multiples of it, so that no header is cut by the ring's end
TEXT_BYTES = HEADER_BYTES - 32
PIECES_PER_RING = 8  # at most: to wake the other side takes longer than to copy fewer bytes than the least piece
SETTLE_S = 0.0005  # how long a caller may take from its call to its wait, before the thread takes over
copy = ctypes.memmove


class MessageHeader(ctypes.Structure):
    """What begins a message in the ring."""

    _fields_ = (
        ("num_bytes", ctypes.c_int64),
        ("mark", ctypes.c_uint64),
        ("arrives_s", ctypes.c_double),
        ("tag", ctypes.c_int32),
        ("text", ctypes.c_char * TEXT_BYTES),
    )


class Message(SharedWork):
    """One side of a message, a send or a receive; whoever waits for it moves messages on.

    Args:
        messages: this rank's.
        tensor: what is sent, or written.
        peer: the other rank of the group; -1: any.
        tag: must be equal on both sides.
        mark: stands for dtype and number of elements, which must be equal.
        text: call, dtype and shape, for people.

    Attributes:
        arrives_s: of a send: the receive is not over before this moment.
    """

    arrives_s = 0.0

    def __init__(self, messages: Messages, tensor: torch.Tensor, *, peer: int, tag: int, mark: int, text: str) -> None:
        super().__init__([tensor])
        self._messages = messages
        self.peer, self.tag, self.mark, self.text = peer, tag, mark, text
        self.tensor, self.memory = tensor, flat_of(tensor)
        self.address, self.num_bytes = self.memory.data_ptr(), self.memory.nbytes
        self.deadline_s = time.monotonic() + messages.meeting.timeout_s

    def _stand(self, limit_s: float) -> bool:
        return self._messages.drive(self, limit_s)

    def arrive(self) -> None:
        """End a receive, which has all its bytes."""
        settle(self.tensor, self.memory)
        self.end.come()


class _Ring:
    """What sender and receiver have in common.

    Attributes:
        ring_bell: lets the other side look.
        position: this side's count of bytes, written or read.
    """

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        base = arena.base + arena.layout.ring(source, destination)
        other = destination if arena.rank == source else source
        self.ring_bell = functools.partial(futex.add, arena.header(other) + BELL)
        self.written, self.read = (ctypes.c_int64.from_address(base + place) for place in (WRITTEN, READ))
        self.data, self.num_bytes, self.position = base + PAGE, arena.layout.ring_bytes, 0
        self._piece_bytes = max(MIN_PIECE_BYTES, self.num_bytes // PIECES_PER_RING)

    def header(self) -> MessageHeader:
        """The header at this side's position."""
        return MessageHeader.from_address(self.data + self.position % self.num_bytes)

    def span(self, num_bytes: int) -> tuple[int, int]:
        """Return where the bytes begin of a message whose header stands at this side's position, and where it ends.

        Large ones begin at a page or piece: processors copy faster between places that are alike within their pages.
        """
        unit = HEADER_BYTES if num_bytes <= PAGE else PAGE if num_bytes <= self._piece_bytes else self._piece_bytes
        first = -(-(self.position + HEADER_BYTES) // unit) * unit
        return first, first - (-num_bytes // HEADER_BYTES) * HEADER_BYTES

    def piece(self, left: int, free: int) -> tuple[int, int]:
        """Return address and length of what can be moved at once: of bytes that are left, and free at this position."""
        at = self.position % self.num_bytes
        return self.data + at, min(left, free, self._piece_bytes - at % self._piece_bytes)


class Outgoing(_Ring):
    """The sender's side of a ring."""

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        super().__init__(arena, source, destination)
        self.waiting: deque[Message] = deque()  # not all written; the first one may have begun
        self.unread: deque[tuple[int, Message]] = deque()  # all written; with the count at which it is over
        self._moved = -1  # bytes of the first one that waits; -1: not begun

    def advance(self) -> bool:
        """Do what can be done now; return whether the receiver should look."""
        read, changed = self.read.value, False
        while self.unread and self.unread[0][0] <= read:
            self.unread.popleft()[1].end.come()
        while self.waiting and self._begin(self.waiting[0]):
            changed = True
            if not self._write(self.waiting[0]):
                break
            self.unread.append((self.position, self.waiting.popleft()))
        return changed

    def _begin(self, message: Message) -> bool:
        """Write a message's header; return whether it stands, and there is room for more."""
        room = self.num_bytes - (self.position - self.read.value)
        if self._moved >= 0:
            return room > 0
        if room < HEADER_BYTES:
            return False
        header = self.header()
        header.tag, header.num_bytes, header.mark = message.tag, message.num_bytes, message.mark
        header.arrives_s, header.text = message.arrives_s, message.text.encode()[:TEXT_BYTES]
        self._moved = 0
        self.position, self._end = self.span(message.num_bytes)
        self.written.value = self.position
        return True

    def _write(self, message: Message) -> bool:
        """Write as many of a message's bytes as there is room for; return whether these are all."""
        while (left := message.num_bytes - self._moved) > 0:
            free = self.num_bytes - (self.position - self.read.value)
            if free <= 0:
                return False
            place, length = self.piece(left, free)
            copy(place, message.address + self._moved, length)
            self._moved += length
            self.position = self.position + length if length < left else self._end
            self.written.value = self.position
            if length < left:
                self.ring_bell()  # so that this piece is read while the next one is written
        self._moved = -1
        return True


class Incoming(_Ring):
    """The receiver's side of a ring."""

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        super().__init__(arena, source, destination)
        self.source = source
        self.taking: Message | None = None  # the receive that takes the message at the head
        self.left = -1  # bytes of the message that is being taken, for a receive or aside; -1: none is
        self._aside: list[tuple[MessageHeader, Any]] = []

    def advance(self, receives: list[Message]) -> bool:
        """Do what can be done now; takes receives out of the list; return whether the sender should look.

        Raises:
            ValueError: a receive does not fit the message that it takes.
        """
        changed = False
        self._take_aside(receives)
        while self.left >= 0 or self._begin(receives):
            changed |= self._read()
            if self.left >= 0:
                break
            self._take_aside(receives)
        return changed

    def _match(self, header: MessageHeader, receives: list[Message]) -> Message | None:
        """Take the first receive for a message out of the list."""
        found = next((m for m in receives if m.peer in (-1, self.source) and m.tag == header.tag), None)
        if found is None:
            return None
        if found.mark != header.mark:
            raise ValueError(
                f"a send and the receive that takes it do not fit: {header.text.decode(errors='replace')}, receive "
                f"{found.text}; give both the same number of elements and the same dtype"
            )
        receives.remove(found)
        found.peer = found.source = self.source
        found.until_s = header.arrives_s
        return found

    def _begin(self, receives: list[Message]) -> bool:
        """Begin to take the message at the head; return whether there is one to take."""
        written = self.written.value
        if written == self.position:
            return False
        header = self.header()
        self.taking = self._match(header, receives)
        if self.taking is not None:
            self._address = self.taking.address
        else:
            more = written > self.span(header.num_bytes)[1] or written - self.position >= self.num_bytes
            if not more or not any(m.peer in (-1, self.source) for m in receives):
                return False
            self._memory = ctypes.create_string_buffer(header.num_bytes)
            self._address, self._header = ctypes.addressof(self._memory), MessageHeader.from_buffer_copy(header)
        self.left = header.num_bytes
        self.position, self._end = self.span(header.num_bytes)
        return True

    def _read(self) -> bool:
        """Read what is there of the message; end it where that is all. Return whether the sender should look."""
        first = self.position
        while self.left > 0 and (there := self.written.value - self.position) > 0:
            place, length = self.piece(self.left, there)
            copy(self._address, place, length)
            is_awaited = self.left > self.num_bytes  # by the sender: it has more than the ring holds
            self._address += length
            self.left -= length
            self.position += length
            self.read.value = self.position
            if is_awaited:
                self.ring_bell()
        if self.left > 0:
            return self.position > first
        self.read.value = self.position = self._end
        self.left = -1
        if self.taking is None:
            self._aside.append((self._header, self._memory))
        else:
            self.taking.arrive()
            self.taking = None
        return True

    def _take_aside(self, receives: list[Message]) -> None:
        """Give messages that were put aside to the receives that are there now."""
        for header, memory in list(self._aside):
            found = self._match(header, receives)
            if found is not None:
                copy(found.address, memory, header.num_bytes)
                self._aside.remove((header, memory))
                found.arrive()


class Messages:
    """One rank's messages: all move on together, on whichever thread has time."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.arena, self.rank = meeting, meeting.arena, meeting.rank
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        self._receives: list[Message] = []  # that no message has come for
        self._lock = threading.Lock()
        self._bell = self.arena.header(self.rank) + BELL
        self._word = futex.word_at(self._bell)
        self._drivers = 0
        self._wanted = threading.Event()
        self.threads: list[threading.Thread] = []
        self._is_closed = False

    def send(self, message: Message) -> None:
        """Send a message, as far as it goes at once."""
        with self._lock:
            if message.peer not in self._out:
                self._out[message.peer] = Outgoing(self.arena, self.rank, message.peer)
            self._out[message.peer].waiting.append(message)
            self._advance()
        self._leave_to_thread(message)

    def receive(self, message: Message) -> None:
        """Receive a message, if it is there already."""
        with self._lock:
            for source in self.meeting.others if message.peer < 0 else (message.peer,):
                if source not in self._in:
                    self._in[source] = Incoming(self.arena, source, self.rank)
            self._receives.append(message)
            self._advance()
        self._leave_to_thread(message)

    def close(self) -> None:
        """Let the thread end."""
        self._is_closed = True
        self._wanted.set()

    def drive(self, message: Message, limit_s: float) -> bool:
        """Move messages on until one is over, or for a limit above 0; return whether it is over."""
        end_s, end = time.monotonic() + limit_s if limit_s > 0 else 0.0, message.end
        with self._lock:
            self._drivers += 1
        try:
            while not end.is_over:
                seen = self._word.value
                with self._lock:
                    self._advance()
                if not end.is_over:
                    self._sleep(seen)
                if end_s and time.monotonic() > end_s:
                    break
        finally:
            with self._lock:
                self._drivers -= 1
                is_left = not self._drivers and next(self._open(), None) is not None
            if is_left:
                self._wanted.set()
        return end.is_over

    def _sleep(self, seen: int) -> None:
        """Sleep until a different rank rings; after a long silence, look whether the others still live."""
        futex.wait(self._bell, seen)
        if self._word.value == seen or self.arena.gone.value:
            self._give_up()

    def _open(self) -> Iterator[Message]:
        """All messages that are not over."""
        for out in self._out.values():
            yield from (message for _, message in out.unread)
            yield from out.waiting
        yield from self._receives
        yield from (ring.taking for ring in self._in.values() if ring.taking is not None)

    def _advance(self) -> None:
        """Move on what can be moved; the lock is held."""
        for out in self._out.values():
            if (out.unread or out.waiting) and out.advance():
                out.ring_bell()
        wanted = {message.peer for message in self._receives}
        try:
            for source, ring in self._in.items():
                if (ring.left >= 0 or source in wanted or -1 in wanted) and ring.advance(self._receives):
                    ring.ring_bell()
        except ValueError as error:
            self._fail(ValueError(f"rank {self.meeting.me}: {error}"))

    def _fail(self, error: Exception) -> None:
        """End every message with an error; the group is not used any more."""
        self.meeting.fail(error)
        for message in list(self._open()):
            message.end.come(error)
        self._out, self._in, self._receives = {}, {}, []

    def _give_up(self) -> None:
        """End all messages where one of them can never arrive."""
        with self._lock:
            gone = {rank: self.arena.why_gone(rank, self.meeting.members) for rank in self.meeting.others}
            self._advance()  # what others had written before they went
            for message in list(self._open()):
                reason = self._why_never(message, gone)
                if reason:
                    self._fail(RuntimeError(f"rank {self.meeting.me}: {message.text}: {reason}"))
                    break

    def _why_never(self, message: Message, gone: dict[int, str]) -> str:
        reasons = list(gone.values()) if message.peer < 0 else [gone[message.peer]]
        if all(reasons):
            return reasons[0]
        whom = "any rank" if message.peer < 0 else f"rank {self.meeting.members[message.peer]}"
        timed_out = f"Timed out waiting {self.meeting.timeout_s * 1000:.0f} ms for {whom}"
        return timed_out if time.monotonic() > message.deadline_s else ""

    def _leave_to_thread(self, message: Message) -> None:
        if message.end.is_over:
            return
        if not self.threads:
            self.threads.append(start_thread(self._serve, f"shared-messages-{self.meeting.members}"))
        if not self._wanted.is_set():
            self._wanted.set()

    def _serve(self) -> None:
        while not self._is_closed:
            self._wanted.wait()
            time.sleep(SETTLE_S)
            self._wanted.clear()
            while not self._is_closed:
                if self._drivers:  # who leaves to this thread what is open when they go
                    break
                seen = self._word.value
                with self._lock:
                    self._advance()
                    is_idle = next(self._open(), None) is None
                if is_idle:
                    break
                self._sleep(seen)
