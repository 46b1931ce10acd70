"""SpanWriter: a rank notes what it does and when, for about a microsecond per span."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any, Protocol, SupportsInt

from distlab.trace.span import Span, Trace


class Clock(Protocol):
    """Where a writer reads the time, in nanoseconds; a GPU's clock gives moments that are known later."""

    def now(self) -> SupportsInt:
        """Return the time now, or the moment at which the device reaches this place."""

    def end_of(self, work: Any) -> SupportsInt | None:
        """Return when a call of torch.distributed is over, or None where only a wait can tell."""


class HostClock:
    """The clock of `time.monotonic_ns`."""

    def now(self) -> int:
        """Return the time now."""
        return monotonic_ns()

    def end_of(self, work: Any) -> None:
        """Return None: the host learns of an end when it waits or asks."""


class SpanWriter:
    """Collect the spans of one rank, from any thread.

        writer = SpanWriter(rank)
        with writer.span("forward", kind="F", microbatch=0):
            loss = model(batch)
        trace = writer.trace()

    Times are those of `time.monotonic_ns`, which all processes of one machine share. What was started on a GPU is over
    when the GPU is done, not when the block ends: there the times come from a GPU's clock
    (`distlab.comm.device.span_writer` makes such a writer), and the host does not wait for them before `trace()`.

    Args:
        rank: whose spans these are.
        clock: where times come from; None is the host's clock.
    """

    def __init__(self, rank: int, clock: Clock | None = None) -> None:
        if rank < 0:
            raise ValueError(f"SpanWriter: rank is {rank}; ranks are numbered from 0")
        self.rank = rank
        self.clock: Clock = HostClock() if clock is None else clock
        self._rows: list[tuple[int, str, str, str, SupportsInt, SupportsInt, int, int, int]] = []

    def span(
        self,
        name: str,
        kind: str = "",
        *,
        lane: str = "compute",
        num_bytes: int = 0,
        stage: int = -1,
        microbatch: int = -1,
    ) -> _OpenSpan:
        """Note a span that lasts as long as the `with` block, also where the block raises."""
        return _OpenSpan(self, (name, kind, lane, num_bytes, stage, microbatch))

    def add(
        self,
        name: str,
        kind: str,
        start_ns: SupportsInt,
        end_ns: SupportsInt,
        *,
        lane: str = "compute",
        num_bytes: int = 0,
    ) -> None:
        """Note a span whose times are known already, or are moments of this writer's clock.

        Raises:
            ValueError: the span ends before it starts.
        """
        if isinstance(start_ns, int) and isinstance(end_ns, int) and end_ns < start_ns:
            raise ValueError(f"rank {self.rank}: span {name!r} ends at {end_ns} ns, before its start at {start_ns} ns")
        self._rows.append((self.rank, lane, name, kind, start_ns, end_ns, num_bytes, -1, -1))

    def call(self) -> OpenCall:
        """Note that a call of torch.distributed starts now; `OpenCall.draw` makes it a span."""
        return OpenCall(self)

    def clear(self) -> None:
        """Forget all spans, such as those of the steps that warm up."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def trace(self) -> Trace:
        """Read what was noted so far, in the order in which spans ended; a GPU's times are waited for."""
        rows = [(*row[:4], int(row[4]), int(row[5]), *row[6:]) for row in self._rows]
        if not rows:
            return Trace.from_spans([])
        return Trace.from_columns(**dict(zip(Span._fields, zip(*rows, strict=True), strict=True)))


class OpenCall:
    """A call of torch.distributed that goes on while a rank computes.

    Attributes:
        end_ns: when it was over, as far as this is known; else it is drawn up to the wait for it.
    """

    __slots__ = ("_start_ns", "_writer", "end_ns")

    def __init__(self, writer: SpanWriter) -> None:
        self._writer = writer
        self._start_ns: SupportsInt = writer.clock.now()
        self.end_ns: SupportsInt | None = None

    def follow(self, work: Any) -> None:
        """Learn the end from nccl's call itself, whenever it is waited for; None (no call of nccl) changes nothing."""
        if work is not None:
            self.end_ns = self._writer.clock.end_of(work)

    def note_end(self) -> None:
        """Note that the call was seen to be over now."""
        if self.end_ns is None:
            self.end_ns = self._writer.clock.now()

    def draw(self, name: str, kind: str, *, lane: str, num_bytes: int) -> None:
        """Note the span: from the start to the end, or to now where no end is known."""
        self.note_end()
        assert self.end_ns is not None, "it was noted just now"
        self._writer.add(name, kind, self._start_ns, self.end_ns, lane=lane, num_bytes=num_bytes)


class _OpenSpan:
    """A span that has started, or will: the object behind `with writer.span(...)`."""

    __slots__ = ("_fields", "_start_ns", "_writer")

    def __init__(self, writer: SpanWriter, fields: tuple[str, str, str, int, int, int]) -> None:
        self._writer = writer
        self._fields = fields

    def __enter__(self) -> None:
        self._start_ns = self._writer.clock.now()

    def __exit__(self, *_: object) -> None:
        end_ns = self._writer.clock.now()
        name, kind, lane, num_bytes, stage, microbatch = self._fields
        row = (self._writer.rank, lane, name, kind, self._start_ns, end_ns, num_bytes, stage, microbatch)
        self._writer._rows.append(row)
