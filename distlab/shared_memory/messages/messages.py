"""Sends and receives of one rank in one group: all move on together, on whichever thread has time.

Whoever waits for a message moves all of them on. While nobody waits, a thread of the group does, so that messages
travel while the caller computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from torch.futures import Future

from distlab.shared_memory import futex
from distlab.shared_memory.arena import BELL, look_s
from distlab.shared_memory.meeting import Meeting, why_gone
from distlab.shared_memory.messages.lanes import InLane, Message, OutLane
from distlab.shared_memory.work import GroupThread, SharedWork, Tensors

SETTLE_S = 0.0005  # how long a caller may take from its call to its wait, before the thread takes over


class MessageWork(SharedWork):
    """A send or a receive; whoever waits for it moves messages on."""

    def __init__(self, results: Tensors, messages: Messages) -> None:
        super().__init__(results)
        self._messages = messages

    def _stand(self, limit_s: float) -> bool:
        return self._messages.drive(self, limit_s)

    def get_future(self) -> Future[Tensors]:
        """A future of the tensor; it becomes done even if the caller never calls wait()."""
        self._messages.drive_alone(self)
        return super().get_future()


class Messages:
    """One rank's messages."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self.meeting, self.name = meeting, name
        self.arena, self.rank = meeting.arena, meeting.rank
        self._out: dict[int, OutLane] = {}
        self._in: dict[int, InLane] = {}
        self._sending: set[int] = set()  # ranks to which a message is not over
        self._taking: set[int] = set()  # ranks whose messages are half taken
        self._receives: list[Message] = []  # that no message has come for
        self._lock = threading.Lock()
        self._bell = self.arena.header(self.rank) + BELL
        self._word = futex.word_at(self._bell)
        self._look = futex.timeout_at(look_s(self.arena.size))
        self._drivers = 0
        self._wanted = threading.Event()
        self.threads: list[threading.Thread] = []
        self._is_closed = False

    def send(self, message: Message) -> None:
        """Send a message, as far as it goes at once."""
        with self._lock:
            if message.peer not in self._out:
                self._out[message.peer] = OutLane(self.arena, self.rank, message.peer)
            self._out[message.peer].waiting.append(message)
            self._sending.add(message.peer)
            self._advance()
        self._leave_to_thread(message)

    def receive(self, message: Message) -> None:
        """Receive a message, if it is there already."""
        with self._lock:
            for source in range(self.arena.size) if message.peer < 0 else (message.peer,):
                if source not in self._in:
                    self._in[source] = InLane(self.arena, source, self.rank)
            self._receives.append(message)
            self._advance()
        self._leave_to_thread(message)

    def close(self) -> None:
        """Let the thread end."""
        self._is_closed = True
        self._wanted.set()

    def drive(self, work: SharedWork, limit_s: float) -> bool:
        """Move messages on until one is over, or for a limit above 0; return whether it is over."""
        end_s = time.monotonic() + limit_s if limit_s > 0 else 0.0
        with self._lock:
            self._drivers += 1
        try:
            while not work.is_over:
                seen = self._word.value
                with self._lock:
                    self._advance()
                if not work.is_over:
                    self._sleep(seen)
                if end_s and time.monotonic() > end_s:
                    break
        finally:
            with self._lock:
                self._drivers -= 1
                is_left = not self._drivers and not self._is_idle()
            if is_left:
                self._wanted.set()
        return work.is_over

    def drive_alone(self, work: SharedWork) -> None:
        """Do nothing: the group's thread moves on the messages that no rank waits for."""

    def _sleep(self, seen: int) -> None:
        """Sleep until another rank rings; after a long silence, look whether the others still live."""
        futex.wait(self._bell, seen, self._look)
        if self._word.value == seen or self.arena.is_anyone_gone:
            self._give_up()

    def _is_idle(self) -> bool:
        return next(self._open(), None) is None

    def _open(self) -> Iterator[Message]:
        """All messages that are not over."""
        for peer in self._sending:
            yield from self._out[peer].messages
        yield from self._receives
        for source in self._taking:
            if (current := self._in[source].current) is not None:
                yield current

    def _advance(self) -> None:
        """Move on what can be moved; the lock is held."""
        ring = []
        for peer in list(self._sending):
            out = self._out[peer]
            if out.advance():
                ring.append(peer)
            if not out.open and not out.waiting:
                self._sending.discard(peer)
        wanted = {message.peer for message in self._receives}
        try:
            for source in list(self._in) if -1 in wanted else wanted | self._taking:
                lane = self._in[source]
                if lane.advance(self._receives):
                    ring.append(source)
                (self._taking.add if lane.is_busy else self._taking.discard)(source)
        except ValueError as error:
            self._fail(ValueError(f"rank {self.meeting.me}: {error}"))
        for peer in ring:
            futex.add(self.arena.header(peer) + BELL)

    def _fail(self, error: Exception) -> None:
        """End every message with an error; the group is not used any more."""
        self.meeting.fail(error)
        for message in list(self._open()):
            self._end(message, error)

    def _end(self, message: Message, error: Exception) -> None:
        for out in self._out.values():
            out.forget(message)
        if message in self._receives:
            self._receives.remove(message)
        if not message.work.is_over:
            message.work.finish(error)

    def _give_up(self) -> None:
        """End messages that can never arrive."""
        others, members, now = self.meeting.others, self.meeting.members, time.monotonic()
        with self._lock:
            asked = {message.peer for message in self._open()} | self._taking
            gone = {rank: why_gone(self.arena, rank, members) for rank in (others if -1 in asked else asked)}
            self._advance()  # what they had written before they went
            for message in list(self._open()):
                peers = others if message.peer < 0 else [message.peer]
                reason = gone.get(peers[0], "") if all(gone.get(peer) for peer in peers) else ""
                if not reason and now > message.deadline_s:
                    whom = "any rank" if message.peer < 0 else f"rank {members[message.peer]}"
                    reason = f"timed out waiting {self.meeting.timeout_s * 1000:.0f} ms for {whom}"
                if reason:
                    error = RuntimeError(f"rank {self.meeting.me}: {message.text}: {reason}")
                    self._end(message, error)
                    self.meeting.fail(error)

    def _leave_to_thread(self, message: Message) -> None:
        if message.work.is_over:
            return
        if not self.threads:
            self.threads.append(GroupThread(self._serve, self.name))
            self.threads[0].start()
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
                    is_idle = self._is_idle()
                if is_idle:
                    break
                self._sleep(seen)
