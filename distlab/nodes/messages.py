"""Messages of a group whose ranks sit in several nodes: lanes of shared memory inside, sockets to other nodes.

A message to another node is announced by an empty one in the lane between the two ranks. Only a receive that fits asks
the sockets for the bytes: they would not notice that a message has another length or dtype.
"""

from __future__ import annotations

import functools

import torch

from distlab.nodes.place import NodePlacement
from distlab.nodes.sockets import Passage, Sockets
from distlab.shared_memory.meeting import Meeting
from distlab.shared_memory.messages.lanes import Message
from distlab.shared_memory.messages.messages import Messages
from distlab.shared_memory.work import GroupThread, SharedWork


class Crossing:
    """One side of a message to another node.

    Attributes:
        message: what crosses.
        notice: the empty message that announces it, or waits for its announcement.
    """

    def __init__(self, message: Message, sockets: Sockets) -> None:
        self.message, self._sockets = message, sockets
        empty, work = torch.empty(0, dtype=torch.uint8), SharedWork([])
        self.notice = Message(message.peer, message.tag, empty, message.mark, message.text, work, message.deadline_s)
        self._block = message.address, message.num_bytes
        self._passage: Passage | None = None
        self._error: Exception | None = None

    def send(self) -> None:
        """Send the bytes, which leave as soon as they are asked for."""
        self._passage = self._sockets.send(self._block, self.message.peer, self.message.tag)

    def receive(self) -> None:
        """Ask for the bytes; an error counts where they are waited for."""
        try:
            self._passage = self._sockets.receive(self._block, self.message.peer, self.message.tag)
        except RuntimeError as error:
            self._error = error

    def wait(self, limit_s: float) -> None:
        """Wait for the bytes, once the notice is over."""
        error = self.notice.work.exception() or self._error
        if error is not None:
            raise error
        assert self._passage is not None, "the notice is over, so the bytes are under way"
        self._passage.wait(limit_s)
        if self.message.landed is not None:
            self.message.landed()


class CrossingMessages(Messages):
    """One rank's messages."""

    def __init__(self, meeting: Meeting, name: str, place: NodePlacement, sockets: Sockets) -> None:
        super().__init__(meeting, name)
        self._mates, self._sockets = set(place.mates), sockets

    def send(self, message: Message) -> None:
        """Send a message."""
        if message.peer in self._mates:
            super().send(message)
        else:
            message.work.under_way = crossing = Crossing(message, self._sockets)
            crossing.send()
            super().send(crossing.notice)

    def receive(self, message: Message) -> None:
        """Receive a message.

        Raises:
            ValueError: from anyone: memory and sockets cannot be watched together.
        """
        if message.peer < 0:
            raise ValueError(
                f"rank {self.meeting.me}: a receive from any rank in a group that crosses nodes; name the source, "
                "such as dist.recv(tensor, src=1)"
            )
        if message.peer in self._mates:
            super().receive(message)
        else:
            message.work.source = message.peer
            message.work.under_way = crossing = Crossing(message, self._sockets)
            crossing.notice.landed = crossing.receive
            super().receive(crossing.notice)

    def drive(self, work: SharedWork, limit_s: float) -> bool:
        """Move messages on until one is over, or for a limit above 0; return whether it is over."""
        with self._lock:  # of those who wait, one drives
            under_way, work.under_way = work.under_way, None
        if under_way is None:
            return super().drive(work, limit_s)
        notice = under_way.notice.work
        if not (notice.is_over or super().drive(notice, limit_s)):
            work.under_way = under_way
            return False
        try:
            under_way.wait(limit_s)
            work.finish()
        except Exception as error:
            who = f"rank {self.meeting.me}: "
            known = str(error).startswith(who)
            work.finish(error if known else RuntimeError(f"{who}{under_way.message.text}: {error}"))
        return True

    def drive_alone(self, work: SharedWork) -> None:
        """Move a message on by a thread of its own: the caller asked for its future and may never call wait()."""
        if work.under_way is not None:
            GroupThread(functools.partial(self.drive, work, 0.0), self.name).start()

    def close(self) -> None:
        """Let the threads end."""
        super().close()
        self._sockets.close()
