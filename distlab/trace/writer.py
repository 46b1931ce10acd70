"""SpanWriter: a rank notes what it does and when, for about a microsecond per span."""

from __future__ import annotations

from time import monotonic_ns
from types import TracebackType

from distlab.trace.span import Span, Trace


class SpanWriter:
    """Collect the spans of one rank, from any thread.

        writer = SpanWriter(rank)
        with writer.span("forward", kind="F", microbatch=0):
            loss = model(batch)
        trace = writer.trace()

    Times are those of `time.monotonic_ns`, which all processes of one machine share. What was started on a GPU is over
    when the GPU is done, not when the block ends: synchronise inside the block, or take times from torch.profiler.
    """

    def __init__(self, rank: int) -> None:
        if rank < 0:
            raise ValueError(f"SpanWriter: rank is {rank}; ranks are numbered from 0")
        self.rank = rank
        self._rows: list[tuple[int, str, str, str, int, int, int, int, int]] = []

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
        start_ns: int,
        end_ns: int,
        *,
        lane: str = "compute",
        num_bytes: int = 0,
        microbatch: int = -1,
    ) -> None:
        """Note a span whose times are known already.

        Raises:
            ValueError: the span ends before it starts.
        """
        if end_ns < start_ns:
            raise ValueError(f"rank {self.rank}: span {name!r} ends at {end_ns} ns, before its start at {start_ns} ns")
        self._rows.append((self.rank, lane, name, kind, start_ns, end_ns, num_bytes, -1, microbatch))

    def clear(self) -> None:
        """Forget all spans, such as those of the steps that warm up."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def trace(self) -> Trace:
        """Read what was noted so far, in the order in which spans ended."""
        rows = self._rows[:]
        if not rows:
            return Trace.from_spans([])
        return Trace.from_columns(**dict(zip(Span._fields, zip(*rows, strict=True), strict=True)))


class _OpenSpan:
    """A span that has started, or will: the object behind `with writer.span(...)`."""

    __slots__ = ("_fields", "_start_ns", "_writer")

    def __init__(self, writer: SpanWriter, fields: tuple[str, str, str, int, int, int]) -> None:
        self._writer = writer
        self._fields = fields

    def __enter__(self) -> None:
        self._start_ns = monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_ns = monotonic_ns()
        name, kind_of_span, lane, num_bytes, stage, microbatch = self._fields
        writer = self._writer
        writer._rows.append(
            (writer.rank, lane, name, kind_of_span, self._start_ns, end_ns, num_bytes, stage, microbatch)
        )
