"""Bytes to ranks of other nodes: gloo's messages over sockets, in the time that a wire takes.

Both sides know the length of a block before they send or receive it: gloo does not compare lengths.

A message over a wire is led by the moment at which it arrives, on the clock that all ranks of this host share. Its
receiver sleeps until then, and its sender until the bytes have left. The bytes themselves travel at once, so a rank
that computes meanwhile loses nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distlab.nodes.wire import Pace, sleep_until

STAMP_BYTES = 8
COLLECTIVE_TAG = 1 << 30  # above the tags of messages
Block = tuple[int, int]  # address and length


def memory_at(block: Block) -> torch.Tensor:
    """Return memory of this process as a tensor of bytes; whoever owns it must keep it."""
    address, num_bytes = block
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


class Passage:
    """A send or a receive that is under way."""

    def __init__(self, work: Any, stamped: torch.Tensor | None, block: Block | None, until_s: float) -> None:
        self._work, self._stamped, self._block, self._until_s = work, stamped, block, until_s

    def wait(self, limit_s: float = 0.0) -> None:
        """Wait until it is over; what was received is in its place then."""
        if limit_s > 0:
            self._work.wait(timedelta(seconds=limit_s))
        else:
            self._work.wait()
        until_s = self._until_s
        if self._block is not None and self._stamped is not None:  # a receive over a wire
            until_s = float(self._stamped[:STAMP_BYTES].view(torch.float64))
            ctypes.memmove(self._block[0], self._stamped.data_ptr() + STAMP_BYTES, self._block[1])
        sleep_until(until_s)


class Sockets:
    """One rank's sockets to the ranks of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, pace: Pace | None) -> None:
        self.pace = pace
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("sockets", store),  # type: ignore[attr-defined]
            rank,
            size,
            timedelta(seconds=timeout_s),
        )

    def close(self) -> None:
        """Leave the sockets; gloo's threads end."""
        self._gloo = None

    def send(self, block: Block, peer: int, tag: int) -> Passage:
        """Send bytes as a message of its own; they may be written over at once where a wire is slow."""
        if self.pace is None:
            return Passage(self._gloo.send([memory_at(block)], peer, tag), None, None, 0.0)
        sent_s, arrives_s = self.pace.message(block[1])
        stamped = torch.empty(STAMP_BYTES + block[1], dtype=torch.uint8)
        stamped[:STAMP_BYTES].view(torch.float64).fill_(arrives_s)
        ctypes.memmove(stamped.data_ptr() + STAMP_BYTES, block[0], block[1])
        return Passage(self._gloo.send([stamped], peer, tag), stamped, None, sent_s)

    def receive(self, block: Block, peer: int, tag: int) -> Passage:
        """Receive such a message."""
        if self.pace is None:
            return Passage(self._gloo.recv([memory_at(block)], peer, tag), None, block, 0.0)
        stamped = torch.empty(STAMP_BYTES + block[1], dtype=torch.uint8)
        return Passage(self._gloo.recv([stamped], peer, tag), stamped, block, 0.0)

    def exchange(self, outgoing: Mapping[int, Block], incoming: Mapping[int, Block]) -> None:
        """Send a block to each of some ranks and receive one from each of some; a collective pays for all together."""
        works = [
            self._gloo.recv([memory_at(block)], peer, COLLECTIVE_TAG) for peer, block in incoming.items() if block[1]
        ]
        works += [
            self._gloo.send([memory_at(block)], peer, COLLECTIVE_TAG) for peer, block in outgoing.items() if block[1]
        ]
        for work in works:
            work.wait()
