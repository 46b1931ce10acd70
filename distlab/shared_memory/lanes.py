"""A lane: messages from one rank to one other, first in, first out, through shared memory.

Each message is announced by a letter (tag, length, dtype) and travels as pieces. The receiver takes the message at the
head when a receive with its tag is there. Where only receives with other tags wait, it puts the message aside. A send
is over once a receive has taken it. Where all letters are in use, it is over once its message has been put aside, so
that any number of messages can be under way.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distlab.shared_memory import futex
from distlab.shared_memory.arena import LANE_HEAD_BYTES, LETTER_BYTES, LETTERS, NUM_LETTERS, NUM_PIECES, Arena
from distlab.shared_memory.work import SharedWork

POSTED, WRITTEN, READ = 0, 64, 128  # places of a lane's counters
_TEXT = 32  # where a letter's text begins
_WRAP = 1 << 30
copy = ctypes.memmove


class Letter(ctypes.Structure):
    """What announces a message."""

    _fields_ = (
        ("taken", ctypes.c_int32),  # the message's number + 1 once a receive has taken it whole; minus that: put aside
        ("tag", ctypes.c_int32),
        ("num_bytes", ctypes.c_int64),
        ("mark", ctypes.c_uint64),
        ("length", ctypes.c_int64),
        ("text", ctypes.c_char * (LETTER_BYTES - _TEXT)),
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
    number: int = -1
    moved: int = 0
    address: int = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.memory.data_ptr()
        self.num_bytes = self.memory.numel() * self.memory.element_size()


class _Lane:
    """What both ends know of a lane."""

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        base = arena.base + arena.layout.lane(source, destination)
        self.piece_bytes = arena.layout.piece_bytes
        self.posted = futex.word_at(base + POSTED)
        self.written = futex.word_at(base + WRITTEN)
        self.read = futex.word_at(base + READ)
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
        self._number = 0

    @property
    def messages(self) -> list[Message]:
        """All that are not over."""
        return [*self.open, *self.waiting]

    def advance(self) -> bool:
        """Do what can be done now; return whether the receiver should look."""
        changed = False
        for message in list(self.open):
            if self.letters[message.number % NUM_LETTERS].taken == message.number + 1:
                self.open.remove(message)
                message.work.finish()
        while self.waiting and self._has_letter():
            self._announce(self.waiting.popleft())
            changed = True
        while self.moving:
            message = self.moving[0]
            changed |= self._write(message)
            if message.moved < message.num_bytes:
                break
            self.moving.popleft()
        return changed

    def _has_letter(self) -> bool:
        """Return whether the next letter is free; a message that was put aside gives its letter back."""
        while self.open and (self._number - self.open[0].number) % _WRAP >= NUM_LETTERS:
            oldest = self.open[0]
            if self.letters[oldest.number % NUM_LETTERS].taken != -(oldest.number + 1):
                return False
            self.open.popleft()
            oldest.work.finish()
        return True

    def _announce(self, message: Message) -> None:
        message.number = self._number
        self._number = (self._number + 1) % _WRAP
        letter, text = self.letters[message.number % NUM_LETTERS], message.text.encode()[: LETTER_BYTES - _TEXT]
        letter.taken, letter.tag, letter.num_bytes, letter.mark = 0, message.tag, message.num_bytes, message.mark
        letter.length, letter.text = len(text), text
        futex.fence()
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
            futex.fence()
            self.written.value = written
        return written != first


class InLane(_Lane):
    """The receiver's end."""

    def __init__(self, arena: Arena, source: int, destination: int) -> None:
        super().__init__(arena, source, destination)
        self.source = source
        self._number = 0  # of the message at the head
        self._current: Message | None = None  # takes the message at the head
        self._moved = 0
        self._aside: list[tuple[Letter, int, torch.Tensor]] = []
        self._is_aside = False

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
        futex.fence()
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
            futex.fence()
            length = min(self.piece_bytes, message.num_bytes - self._moved)
            copy(message.address + self._moved, self.piece(read), length)
            self._moved += length
            read = (read + 1) % _WRAP
            futex.fence()
            self.read.value = read

    def _end(self, message: Message) -> None:
        letter, number = self.letters[self._number % NUM_LETTERS], self._number
        self._current, self._number = None, (number + 1) % _WRAP
        if self._is_aside:
            self._is_aside = False
            kept = Letter.from_buffer_copy(letter)
            self._aside.append((kept, number, message.memory))
            futex.fence()
            letter.taken = -(number + 1)
            return
        self._tell(message)
        letter.taken = number + 1

    @staticmethod
    def _tell(message: Message) -> None:
        """A receive has taken the message."""
        if message.landed is not None:
            message.landed()
        futex.fence()
        message.work.finish()

    def _take_aside(self, receives: list[Message]) -> bool:
        kept = []
        for letter, number, memory in self._aside:
            found = self._wanted(receives, letter)
            if found is None:
                kept.append((letter, number, memory))
                continue
            copy(found.address, memory.data_ptr(), found.num_bytes)
            self._tell(found)
            place = self.letters[number % NUM_LETTERS]
            if place.taken == -(number + 1):  # otherwise it already announces another message
                place.taken = number + 1
        changed = len(kept) != len(self._aside)
        self._aside = kept
        return changed
