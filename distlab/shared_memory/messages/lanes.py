"""A lane: messages from one rank to one other, first in, first out, through shared memory.

Each message is announced by a letter (tag, length, dtype) and travels as pieces. The receiver takes the message at the
head when a receive with its tag is there. Where only receives with other tags wait, it puts the message aside, in
memory of its own. Either way the letter's place is free again, so that any number of messages may be open, and the send
is over.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distlab.shared_memory import futex
from distlab.shared_memory.arena import BELL, LANE_HEAD_BYTES, NUM_PIECES, Arena
from distlab.shared_memory.work import SharedWork

POSTED, WRITTEN = 0, 64  # places of a lane's counters: the sender's (letters, pieces)
READ, NOTED = 128, 132  # and the receiver's (pieces, letters)
NUM_LETTERS, LETTER_BYTES = 64, 256
LETTERS = 256  # where a lane's letters begin
TEXT_BYTES = LETTER_BYTES - 24
_WRAP = 1 << 30
WORTH_A_RING = 64 << 10  # bytes of a piece from which on both ends copy at once; to copy fewer is faster than to wake
copy = ctypes.memmove


class Letter(ctypes.Structure):
    """What announces a message."""

    _fields_ = (
        ("num_bytes", ctypes.c_int64),
        ("mark", ctypes.c_uint64),
        ("tag", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("text", ctypes.c_char * (TEXT_BYTES)),
    )


@dataclass(slots=True, eq=False)
class Message:
    """One side of a message: a send, or a receive.

    Attributes:
        peer: the other rank of the group; -1: any.
        tag: must be equal on both sides.
        memory: the bytes; kept alive until the message is over.
        mark: stands for dtype and number of elements, which must be equal.
        text: dtype and shape, for people.
        work: what the caller waits for.
        deadline_s: when to give up, on the monotonic clock.
        landed: what to do with a receive's bytes once they are there.
    """

    peer: int
    tag: int
    memory: torch.Tensor
    mark: int
    text: str
    work: SharedWork
    deadline_s: float
    landed: Callable[[], None] | None = None
    moved: int = 0
    address: int = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.memory.data_ptr()
        self.num_bytes = self.memory.numel() * self.memory.element_size()


class _Lane:
    """The part of a lane that sender and receiver have in common.

    Attributes:
        ring: lets the other end look.
        copies_at_once: whether the receiver copies one piece while the sender writes the next.
    """

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        base = arena.base + arena.layout.lane(source, destination)
        other = destination if arena.rank == source else source
        self.ring = functools.partial(futex.add, arena.header(other) + BELL)
        self.piece_bytes = arena.layout.piece_bytes
        self.copies_at_once = self.piece_bytes >= WORTH_A_RING
        self.posted = futex.word_at(base + POSTED)
        self.written = futex.word_at(base + WRITTEN)
        self.read = futex.word_at(base + READ)
        self.noted = futex.word_at(base + NOTED)
        self.letters = (Letter * NUM_LETTERS).from_address(base + LETTERS)
        self.data = base + LANE_HEAD_BYTES

    def piece(self, number: int) -> int:
        """Address of a piece."""
        return self.data + number % NUM_PIECES * self.piece_bytes


class OutLane(_Lane):
    """The sender's end."""

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        super().__init__(arena, source, destination)
        self.waiting: deque[Message] = deque()  # without a letter yet
        self.moving: deque[Message] = deque()  # with a letter, not all written
        self.open: deque[Message] = deque()  # with a letter, not taken
        self._number = self._num_over = 0

    @property
    def messages(self) -> list[Message]:
        """All that are not over."""
        return [*self.open, *self.waiting]

    def forget(self, message: Message) -> None:
        """Let go of a message that will never be over."""
        for line in (self.waiting, self.moving):
            if message in line:
                line.remove(message)

    def advance(self) -> bool:
        """Do what can be done now; return whether the receiver should look."""
        changed = False
        self._end_taken()
        while self.waiting and (self._number - self._num_over) % _WRAP < NUM_LETTERS:
            self._announce(self.waiting.popleft())
            changed = True
        while self.moving:
            message = self.moving[0]
            changed |= self._write(message)
            if message.moved < message.num_bytes:
                break
            self.moving.popleft()
        return changed

    def _end_taken(self) -> None:
        """End the sends whose messages the receiver has."""
        noted = self.noted.value
        while self._num_over != noted:
            self._num_over = (self._num_over + 1) % _WRAP
            self.open.popleft().work.finish()

    def _announce(self, message: Message) -> None:
        letter, text = self.letters[self._number % NUM_LETTERS], message.text.encode()[:TEXT_BYTES]
        self._number = (self._number + 1) % _WRAP
        letter.tag, letter.num_bytes, letter.mark = message.tag, message.num_bytes, message.mark
        letter.length, letter.text = len(text), text
        self.posted.value = self._number
        self.moving.append(message)
        self.open.append(message)

    def _write(self, message: Message) -> bool:
        written = first = self.written.value
        while message.moved < message.num_bytes and (written - self.read.value) % _WRAP < NUM_PIECES:
            length = min(self.piece_bytes, message.num_bytes - message.moved)
            copy(self.piece(written), message.address + message.moved, length)
            message.moved += length
            written = (written + 1) % _WRAP
            self.written.value = written
            if self.copies_at_once and message.moved < message.num_bytes:
                self.ring()
        return written != first


class InLane(_Lane):
    """The receiver's end."""

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        super().__init__(arena, source, destination)
        self.source = source
        self._number = 0  # of the message at the head
        self._current: Message | None = None  # takes the message at the head
        self._moved = 0
        self._aside: list[tuple[Letter, torch.Tensor]] = []
        self._is_aside = False

    @property
    def is_busy(self) -> bool:
        """Whether a message is half taken."""
        return self._current is not None

    @property
    def current(self) -> Message | None:
        """The receive that is taking a message now."""
        return None if self._is_aside else self._current

    def advance(self, receives: list[Message]) -> bool:
        """Do what can be done now; takes receives out of the list; return whether the sender should look.

        Raises:
            ValueError: a receive does not fit the message that it takes.
        """
        changed = self._take_aside(receives) if self._aside else False
        while True:
            if self._current is None and not self._begin(receives):
                return changed
            moved = self._moved
            self._read()
            message = self._current
            assert message is not None, "a message has begun"
            changed |= self._moved != moved
            if self._moved < message.num_bytes:
                return changed
            self._end(message)
            changed = True

    def _wanted(self, receives: list[Message], letter: Letter) -> Message | None:
        found = next((m for m in receives if m.peer in (-1, self.source) and m.tag == letter.tag), None)
        if found is None:
            return None
        if found.mark != letter.mark:
            text = letter.text.decode(errors="replace")
            raise ValueError(
                f"a send and the receive that takes it do not fit: send {text}, receive {found.text}; give both the "
                "same number of elements and the same dtype"
            )
        receives.remove(found)
        found.work.source = self.source
        return found

    def _begin(self, receives: list[Message]) -> bool:
        """Begin to take the message at the head; return whether there is one to take."""
        left = (self.posted.value - self._number) % _WRAP
        if not left:
            return False
        letter = self.letters[self._number % NUM_LETTERS]
        found = self._wanted(receives, letter)
        if found is None:
            if left < 2 or not any(m.peer in (-1, self.source) for m in receives):
                return False
            memory = torch.empty(letter.num_bytes, dtype=torch.uint8)
            found = Message(self.source, letter.tag, memory, letter.mark, "", SharedWork([]), 0.0)
            self._is_aside = True
        self._current, self._moved = found, 0
        return True

    def _read(self) -> None:
        message, read = self._current, self.read.value
        assert message is not None, "a message has begun"
        while self._moved < message.num_bytes and self.written.value != read:
            length = min(self.piece_bytes, message.num_bytes - self._moved)
            copy(message.address + self._moved, self.piece(read), length)
            read = (read + 1) % _WRAP
            self.read.value = read
            if self.copies_at_once and self._moved + NUM_PIECES * self.piece_bytes < message.num_bytes:
                self.ring()  # the sender has waited for this place
            self._moved += length

    def _end(self, message: Message) -> None:
        number, is_aside = self._number, self._is_aside
        self._current, self._is_aside = None, False
        if is_aside:
            kept = Letter.from_buffer_copy(self.letters[number % NUM_LETTERS])
            self._aside.append((kept, message.memory))
        self._number = (number + 1) % _WRAP
        self.noted.value = self._number
        if not is_aside:
            _take(message)

    def _take_aside(self, receives: list[Message]) -> bool:
        kept = []
        for letter, memory in self._aside:
            found = self._wanted(receives, letter)
            if found is None:
                kept.append((letter, memory))
            else:
                copy(found.address, memory.data_ptr(), found.num_bytes)
                _take(found)
        changed = len(kept) != len(self._aside)
        self._aside = kept
        return changed


def _take(message: Message) -> None:
    """End a receive, which has all its bytes."""
    if message.landed is not None:
        message.landed()
    message.work.finish()
