"""Messages of a group whose ranks sit in several nodes: lanes of shared memory inside, sockets to other nodes."""

from __future__ import annotations

import functools
import threading

from distlab.nodes.place import Place
from distlab.nodes.sockets import Sockets
from distlab.shared_memory.letters import Message
from distlab.shared_memory.meeting import Meeting
from distlab.shared_memory.messages import Messages
from distlab.shared_memory.work import SharedWork


class CrossingMessages(Messages):
    """One rank's messages."""

    def __init__(self, meeting: Meeting, name: str, place: Place, sockets: Sockets) -> None:
        super().__init__(meeting, name)
        self._mates, self._sockets = set(place.mates), sockets

    def send(self, message: Message) -> None:
        """Send a message."""
        if message.peer in self._mates:
            super().send(message)
        else:
            passage = self._sockets.send((message.address, message.num_bytes), message.peer, message.tag)
            message.work.under_way = passage, message

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
            passage = self._sockets.receive((message.address, message.num_bytes), message.peer, message.tag)
            message.work.under_way = passage, message

    def drive(self, work: SharedWork, limit_s: float) -> bool:
        """Move messages on until one is over, or for a limit above 0; return whether it is over."""
        with self._lock:  # of those who wait, one drives
            under_way, work.under_way = work.under_way, None
        if under_way is None:
            return super().drive(work, limit_s)
        passage, message = under_way
        try:
            passage.wait(limit_s)
            if message.landed is not None:
                message.landed()
            work.finish()
        except Exception as error:
            work.finish(RuntimeError(f"rank {self.meeting.me}: {message.text}: {error}"))
        return True

    def drive_alone(self, work: SharedWork) -> None:
        """Have a message moved on though nobody waits for it, on a thread of its own: its future was asked for."""
        if work.under_way is not None:
            threading.Thread(target=functools.partial(self.drive, work, 0.0), name=self.name, daemon=True).start()

    def close(self) -> None:
        """Let the threads end."""
        super().close()
        self._sockets.close()
