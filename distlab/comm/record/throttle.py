"""A slow link on one machine: collectives take the time that they would take at a given bandwidth and latency.

    with throttled(bytes_per_s=125e6, latency_s=50e-6):  # gigabit Ethernet, on every rank
        train()

Ranks on one machine exchange data at the speed of memory. Here each rank has a link of its own in thought: a collective
occupies it, after those called before, for the time that the ring algorithm needs on it, and whoever waits for the
collective sleeps until then. The data still travels at once. So a rank that computes meanwhile loses nothing: overlap
works as on a real link, and a rank that sleeps leaves its core to others, as one that waits for a network does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch.distributed as dist

from distlab.comm.nodes.wire import Pace, Wire, link_s as link_s, sleep_until
from distlab.comm.record.file import RecordWriter
from distlab.comm.record.intercept import FrontEnd, Token, put
from distlab.comm.record.operations import Operation, Terms, num_bytes_of, tensors_in
from distlab.comm.shared_memory.work import SharedWork
from distlab.comm.where.frames import Site


class ThrottledLink:
    """This rank's link: a listener to every call, which makes whoever waits for one wait long enough."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._pace = Pace(Wire(bytes_per_s, latency_s))  # a wire refuses what no link has
        self._numbers = itertools.count(1)
        self._ends: dict[int, float] = {}  # of calls whose end was not seen

    def call(self, operation: Operation, group: Any, data: Any, terms: Terms, site: Site, aside: bool) -> Token:
        """Give a call its place on the link, behind those before (called by the front end).

        Raises:
            ValueError: it is a send or a receive: when a message began to travel is the other rank's knowledge.
        """
        if operation.op in ("send", "recv"):
            raise ValueError(
                f"rank {dist.get_rank()}: {operation.op} at {site[0]}:{site[1]} inside throttled(), which slows down "
                "collectives only; use a collective, or slow the network down with the Linux tool tc"
            )
        num_bytes = sum(map(num_bytes_of, tensors_in(data)))
        wire, number = self._pace.wire, next(self._numbers)
        seconds = link_s(operation.op, num_bytes, group.size(), bytes_per_s=wire.bytes_per_s, latency_s=wire.latency_s)
        self._ends[number] = self._pace.occupy(seconds, time.monotonic())
        # The front end talks to a writer of records; of those, the link needs to hear of waits and ends only.
        return cast(RecordWriter, self), number

    def group(self, event: str, what: str = "") -> None:
        """Do nothing: the link carries calls only."""

    def wait(self, number: int, state: int) -> None:
        """Sleep until a call's bytes are through the link (called before the real wait)."""
        sleep_until(self._ends.get(number, 0.0))

    def end(self, number: int, state: int) -> None:
        """Forget a call that is over, or failed at once."""
        self._ends.pop(number, None)


@contextmanager
def throttled(bytes_per_s: float, latency_s: float = 0.0) -> Iterator[None]:
    """Give this rank's collectives the time of a link inside a with block; all ranks use the same.

    It sees what waits in Python: DataParallel, hooks, plain collectives, functional ones. torch's own DDP waits in C++
    and is not slowed down. It takes about 30 us per call itself.

    Args:
        bytes_per_s: bandwidth of each rank's link, one way.
        latency_s: time of one message apart from its bytes.

    Error: a call lasts at least `link_s`, and longer only by the lateness of a sleep (about 0.1 ms) or when the real
        exchange is slower still. Each rank counts from its own call: where ranks call at different times the first
        one returns early, and waits for the last in its next call. So a step's time is right for the slowest rank.
        benchmarks/throttled.py measures both.

    Raises:
        ValueError: a bandwidth or latency that no link has; a send or receive inside the block.
    """
    link = ThrottledLink(bytes_per_s, latency_s)
    real: dict[type, Any] = {kind: kind.is_completed for kind in (dist.Work, SharedWork)}

    def is_completed(work: dist.Work) -> bool:
        front = FrontEnd._active
        tokens: list[Token] = [] if front is None else front._live.get(work, [])
        ends = [link._ends.get(number, 0.0) for writer, number in tokens if cast(Any, writer) is link]
        is_through = time.monotonic() >= max(ends, default=0.0)
        return is_through and bool(real[SharedWork if isinstance(work, SharedWork) else dist.Work](work))

    with ExitStack() as undo:
        for kind in real:
            put(undo, kind, "is_completed", is_completed)
        FrontEnd.add(link)
        undo.callback(FrontEnd.remove, link)
        yield
