"""Trace: what happened, or should happen, on each rank and when; and SpanWriter: a rank notes what it does.

A Trace holds columns (one numpy array per field); a Span is a view of one row. The simulator returns a Trace, a
measured run returns a Trace, and every timeline is drawn from one. To note a span takes about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import Any, Protocol, SupportsInt

import numpy as np
from numpy.typing import NDArray

from distlab.trace.critical_path import CriticalPath
from distlab.trace.span import Span

NUMBERS = {"rank": np.int32, "start_ns": np.int64, "end_ns": np.int64, "num_bytes": np.int64}
NUMBERS |= {"stage": np.int32, "microbatch": np.int32}
WORDS = ("lane", "name", "kind")


@dataclass(frozen=True, eq=False)
class Trace:
    """Spans in columns, all of one length; words are codes into `words`.

    Two traces are equal when their spans are. Build one with `from_spans` or `from_columns`.
    """

    rank: NDArray[np.int32]
    lane: NDArray[np.int32]
    name: NDArray[np.int32]
    kind: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    words: tuple[str, ...]

    @classmethod
    def from_spans(cls, spans: Iterable[Span]) -> Trace:
        """Build a trace from spans, in their order."""
        rows = list(spans)
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(Span._fields)
        return cls.from_columns(**dict(zip(Span._fields, columns, strict=True)))

    @classmethod
    def from_columns(cls, **columns: object) -> Trace:
        """Build a trace from one sequence per field of Span.

        A scalar stands for a whole column; num_bytes, stage and microbatch may be left out. `lane`, `name` and `kind`
        are sequences of strings.

        Raises:
            ValueError: a column is missing, unknown, of a different length, or no column of numbers; a span ends before
                it starts.
        """
        columns = {"num_bytes": 0, "stage": -1, "microbatch": -1} | columns
        if set(columns) != set(Span._fields):
            raise ValueError(f"trace columns are {sorted(columns)}; expected {sorted(Span._fields)}")
        sized = (column for column in columns.values() if isinstance(column, Sized) and not isinstance(column, str))
        sizes = [len(column) for column in sized if getattr(column, "ndim", 1) > 0]
        length = 0 if 0 in sizes else max(sizes, default=1)
        words: dict[str, int] = {}
        arrays: dict[str, NDArray[np.generic]] = {}
        for field, column in columns.items():
            values = column
            if field in WORDS:
                texts = [column] if isinstance(column, str) else list(column)  # type: ignore[call-overload]
                values = [words.setdefault(str(text), len(words)) for text in texts]
                values = values[0] if isinstance(column, str) else values
            try:
                array = np.asarray(values, dtype=NUMBERS.get(field, np.int32))
            except (OverflowError, TypeError) as error:
                raise ValueError(
                    f"trace column {field!r} holds a value that is not a number, or too large for its type: {error}"
                ) from error
            if array.ndim > 0 and array.size != length:
                raise ValueError(f"trace column {field!r} has {array.size} rows; the others have {length}")
            arrays[field] = np.array(np.broadcast_to(array, (length,)))
        backwards = np.flatnonzero(arrays["end_ns"] < arrays["start_ns"])  # type: ignore[operator]
        if backwards.size:
            raise ValueError(f"trace row {backwards[0]} ends before it starts")
        return cls(**arrays, words=tuple(words))  # type: ignore[arg-type]

    @classmethod
    def concatenate(cls, traces: Iterable[Trace]) -> Trace:
        """Join traces that share a clock, one after the other."""
        words: dict[str, int] = {}
        arrays: dict[str, list[NDArray[np.generic]]] = {field: [] for field in Span._fields}
        for part in list(traces) or [cls.from_spans([])]:
            codes = np.array([words.setdefault(word, len(words)) for word in part.words], dtype=np.int32)
            for field in Span._fields:
                column = getattr(part, field)
                arrays[field].append(codes[column] if field in WORDS and len(column) else column)
        return cls(**{f: np.concatenate(a) for f, a in arrays.items()}, words=tuple(words))

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Span]:
        words = self.words
        columns = [getattr(self, field).tolist() for field in Span._fields]
        for row in zip(*columns, strict=True):
            span = Span(*row)
            yield span._replace(lane=words[row[1]], name=words[row[2]], kind=words[row[3]])

    def __getitem__(self, index: int) -> Span:
        row = [getattr(self, field)[index].item() for field in Span._fields]
        return Span(row[0], self.words[row[1]], self.words[row[2]], self.words[row[3]], *row[4:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and list(self) == list(other)

    def select(self, mask: NDArray[np.bool_] | Callable[[Span], bool]) -> Trace:
        """Keep the rows of a boolean mask, or the spans for which a function is true."""
        return self.take(np.fromiter(map(mask, self), bool, len(self)) if callable(mask) else np.asarray(mask))

    def take(self, rows: NDArray[np.integer | np.bool_]) -> Trace:
        """Pick rows by number, in the order given, or by a mask."""
        return Trace(**{field: getattr(self, field)[rows] for field in Span._fields}, words=self.words)

    def is_word(self, field: str, *texts: str) -> NDArray[np.bool_]:
        """Rows whose lane, name or kind is one of the texts, as a mask for `select`."""
        codes = [code for code, word in enumerate(self.words) if word in texts]
        return np.isin(getattr(self, field), codes)

    def shifted(self, offset_ns: int) -> Trace:
        """Move every span by offset_ns (a different clock, or a new origin)."""
        offset = np.int64(offset_ns)
        return replace(self, start_ns=self.start_ns + offset, end_ns=self.end_ns + offset)

    def from_zero(self) -> Trace:
        """Move the earliest start to zero."""
        return self.shifted(-int(self.start_ns.min())) if len(self) else self

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a span, ascending."""
        return tuple(np.unique(self.rank).tolist())

    @property
    def duration_s(self) -> float:
        """From the earliest start to the latest end, in seconds."""
        return float(self.end_ns.max() - self.start_ns.min()) / 1e9 if len(self) else 0.0

    def critical_path(self) -> CriticalPath:
        """Find the chain of spans and waits that decides when the last rank ends, and what shorter spans would win.

        Of `simulate_schedule`, path and gains are exact. Else what a span waits for is inferred from what is recorded.
        Then gains are estimates: what never held anything up is not recorded. Clocks have to be aligned; without calls
        or messages nothing ties ranks. It takes about 30 us a span, and each gain 3 us.
        """
        return CriticalPath.of(list(self))


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

    def trace(self) -> Trace:
        """Read what was noted so far, in the order in which spans ended; a GPU's times are waited for."""
        return Trace.from_spans(Span(*row[:4], int(row[4]), int(row[5]), *row[6:]) for row in self._rows)


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
    """A span that has started, or will; a generator of contextlib takes half a microsecond more."""

    __slots__ = ("_fields", "_start_ns", "_writer")

    def __init__(self, writer: SpanWriter, fields: tuple[str, str, str, int, int, int]) -> None:
        self._writer, self._fields = writer, fields

    def __enter__(self) -> None:
        self._start_ns = self._writer.clock.now()

    def __exit__(self, *_: object) -> None:
        writer, end_ns = self._writer, self._writer.clock.now()
        name, kind, lane, num_bytes, stage, microbatch = self._fields
        writer._rows.append((writer.rank, lane, name, kind, self._start_ns, end_ns, num_bytes, stage, microbatch))
