"""Span and Trace: what happened, or should happen, on each rank and when.

A Trace holds columns (one numpy array per field); a Span is a view of one row. The simulator returns a Trace, a
measured run returns a Trace, and every timeline is drawn from one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray


class Span(NamedTuple):
    """One thing that a rank did, from start_ns to end_ns.

    Attributes:
        rank: who did it.
        lane: what it occupied: "compute", "communication", or a group's own lane.
        name: what a reader sees, such as "forward", "2F0", "all_reduce bucket 1".
        kind: what it is, for colour and for sums: "F", "B", "I", "W", "optimizer", "all_reduce", "send", "recv",
            "wait".
        start_ns: start, in nanoseconds on the trace's clock.
        end_ns: end, on the same clock.
        num_bytes: payload moved; 0 for compute.
        stage: pipeline stage, or -1.
        microbatch: micro-batch, or -1.
    """

    rank: int
    lane: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    stage: int = -1
    microbatch: int = -1

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


NUMBERS = {"rank": np.int32, "start_ns": np.int64, "end_ns": np.int64, "num_bytes": np.int64}
NUMBERS |= {"stage": np.int32, "microbatch": np.int32}
WORDS = ("lane", "name", "kind")


def _is_column(value: object) -> TypeGuard[Sized]:
    return isinstance(value, Sized) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


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
        sizes = [len(column) for column in columns.values() if _is_column(column)]
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
        parts = list(traces)
        words: dict[str, int] = {}
        arrays: dict[str, list[NDArray[np.generic]]] = {field: [] for field in Span._fields}
        for part in parts:
            codes = np.array([words.setdefault(word, len(words)) for word in part.words], dtype=np.int32)
            for field in Span._fields:
                column = getattr(part, field)
                arrays[field].append(codes[column] if field in WORDS and len(column) else column)
        if not parts:
            return cls.from_spans([])
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
