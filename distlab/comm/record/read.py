"""Read what ranks recorded: in any process, at any time, also while the ranks hang.

Records holds numpy rows for each rank; `Call` is a view of one row in words. Counts of calls and bytes come from totals
that the rank keeps. So they are right even when more calls were made than the ring of rows holds; `dropped` says how
many rows were overwritten.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.comm.record import file as layout
from distlab.trace import Span, Trace

_STATES = {layout.ISSUED: "issued", layout.WAITING: "waiting", layout.ASIDE: "waiting"}
_STATES |= {layout.DONE: "done", layout.FAILED: "failed"}


class Call(NamedTuple):
    """One call in words.

    Attributes:
        rank: who made it.
        op: "all_reduce", "send", ...
        number: its number on the group (for send and recv: on the pair and tag), from 1.
        what: dtype and shape, such as "float32[256]".
        group: global ranks of the group.
        peer: global rank of the root or the other end, or -1.
        num_bytes: payload.
        site: the learner's file:line.
        via: the line of distlab that made the call for it, or "".
        start_ns: when it was made (time.monotonic_ns).
        wait_ns: when the rank began to wait for it, which may be after its end; or 0.
        end_ns: when it was first known to be over, or 0.
        state: "issued", "waiting", "done" or "failed".
        channel: a number that calls share which can meet: those of one group, or of one pair of ranks and tag.
    """

    rank: int
    op: str
    number: int
    what: str
    group: tuple[int, ...]
    peer: int
    num_bytes: int
    site: str
    via: str
    start_ns: int
    wait_ns: int
    end_ns: int
    state: str
    channel: int = 0

    def __str__(self) -> str:
        to = "" if self.peer < 0 or self.op not in ("send", "recv") else f" {'to' if self.op == 'send' else 'from'} "
        to += str(self.peer) if to else ""
        to = " from anyone" if self.op == "recv" and self.peer < 0 else to
        root = f", root {self.peer}" if self.peer >= 0 and self.op not in ("send", "recv") else ""
        what = f"{self.what}, " if self.what else ""
        return f"{self.op}{to} #{self.number} ({what}group {list(self.group)}{root}) at {short(self.site)}"


def short(site: str) -> str:
    """Return a call site, relative to the working directory where the file lies below it."""
    return site.removeprefix(os.getcwd() + os.sep)


def group_ranks(text: str) -> tuple[int, ...]:
    """Return the global ranks in a group's text, "name [0, 1]"."""
    inside = text.rpartition("[")[2].rstrip("]")
    return tuple(int(rank) for rank in inside.split(",") if rank.strip())


def call_of(rank: int, row: Any, names: list[str]) -> Call:
    """Put one row in words."""
    what, site, via = (names[row[field]] if row[field] < len(names) else "?" for field in ("what", "site", "via"))
    number, peer, num_bytes, channel = (int(row[field]) for field in ("seq", "peer", "bytes", "channel"))
    start, wait, end = (int(row[field]) for field in ("start", "wait", "end"))
    op, group, state = layout.OPS[row["op"]], group_ranks(names[row["group"]]), _STATES.get(int(row["state"]), "issued")
    return Call(rank, op, number, what, group, peer, num_bytes, site, via, start, wait, end, state, channel)


class RankRecord(NamedTuple):
    """What one rank recorded: header, rows (oldest first), totals per operation, and the texts that rows name.

    The totals count every call of the job, those whose rows were overwritten too.
    """

    header: layout.RecordHeader
    rows: NDArray[Any]
    totals: NDArray[Any]
    names: list[str]


@dataclass(frozen=True)
class Records:
    """Calls of some ranks."""

    by_rank: Mapping[int, RankRecord]

    def __len__(self) -> int:
        return sum(len(record.rows) for record in self.by_rank.values())

    def __iter__(self) -> Iterator[Call]:
        for rank, record in self.by_rank.items():
            for row in record.rows:
                yield call_of(rank, row, record.names)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that recorded, ascending."""
        return tuple(self.by_rank)

    def rank(self, rank: int) -> Records:
        """Keep one rank."""
        return Records({rank: self._of(rank)})

    def calls(self, rank: int) -> list[Call]:
        """Return a rank's calls in order."""
        return list(self.rank(rank))

    def dropped(self, rank: int) -> int:
        """Return how many of the rank's first rows were overwritten; counts of calls and bytes still hold them."""
        record = self._of(rank)
        return record.header.newest - record.header.first + 1 - len(record.rows)

    def ops(self, rank: int) -> tuple[str, ...]:
        """Return the names of the rank's calls in order."""
        return tuple(layout.OPS[op] for op in self._of(rank).rows["op"].tolist())

    def num_calls(self, op: str | None = None) -> int:
        """Return the number of calls of all ranks, of one operation or of all."""
        return sum(self._total(rank, "calls", op) for rank in self.by_rank)

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that the rank's own send and isend calls carried."""
        return self._total(rank, "bytes", "send")

    def payload_bytes(self, rank: int, op: str | None = None) -> int:
        """Return the bytes that the rank gave to native collectives (or to one operation).

        For all_gather its own part, for scatter the part that it got, for all others the whole tensor.
        """
        if op is not None:
            return self._total(rank, "bytes", op)
        return self._total(rank, "bytes") - self._total(rank, "bytes", "send") - self._total(rank, "bytes", "recv")

    def ring_equivalent_bytes(self, rank: int) -> int:
        """Return the bytes that the rank would have sent if its native collectives ran as rings.

        The formulas are those of distlab.comm.record.operations.ring_bytes: 2(n-1)/n S for an all_reduce of S over n
        ranks.
        """
        return self._total(rank, "ring")

    def to_trace(self, lane_of: Callable[[Call], str] = lambda call: "communication") -> Trace:
        """Return the calls as spans on the lanes that `lane_of` says, and the time blocked in wait() on "wait".

        A call whose end was not seen ends where the rank began to wait for it, or at once.
        """
        spans = []
        for call in self:
            name = f"{call.op} #{call.number}"
            end = call.end_ns or max(call.start_ns, call.wait_ns)
            spans.append(Span(call.rank, lane_of(call), name, call.op, call.start_ns, end, call.num_bytes))
            if 0 < call.wait_ns < call.end_ns:
                spans.append(Span(call.rank, "wait", name, "wait", call.wait_ns, call.end_ns))
        return Trace.from_spans(spans)

    def _of(self, rank: int) -> RankRecord:
        if rank not in self.by_rank:
            raise ValueError(f"no record of rank {rank}; there are records of ranks {list(self.by_rank)}")
        return self.by_rank[rank]

    def _total(self, rank: int, field: str, op: str | None = None) -> int:
        if op is not None and op not in layout.OPS[1:]:
            raise ValueError(f"no operation is called {op!r}; choose one of {', '.join(layout.OPS[1:])}")
        totals = self._of(rank).totals[field]
        return int(totals.sum() if op is None else totals[layout.OPS.index(op)])


class RecordReader:
    """Read a rank's file from any process, at any time, without disturbing the rank.

    It copies bytes and maps nothing: a read of a mapped file that was truncated would end the reader with SIGBUS.

    Args:
        path: the rank's file, rank{r}.rec.
        names: the file of its texts, where it is not beside it.
        rank: whose it is, where the name does not tell.
    """

    def __init__(self, path: Path, names: Path | None = None, rank: int | None = None) -> None:
        self.rank = int(path.stem.removeprefix("rank")) if rank is None else rank
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as the reader)
        self._names_file = open(names or path.with_suffix(".names"), "rb")  # noqa: SIM115 (open as long as the reader)
        self._tail = b""
        self.names: list[str] = [""]

    @staticmethod
    def is_ready(path: Path) -> bool:
        """Tell whether the rank has written its header."""
        with open(path, "rb") as file:
            return file.read(len(layout.MAGIC)) == layout.MAGIC

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a file that could not be opened
            self._file.close()
            self._names_file.close()

    def _read(self, at: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, at)

    def header(self) -> layout.RecordHeader:
        """Return the header as it stands."""
        _, *numbers = layout.HEADER.unpack(self._read(0, layout.HEADER.size))
        return layout.RecordHeader(*numbers)

    def totals(self) -> NDArray[Any]:
        """Return calls, payload bytes and ring bytes per operation of the rows before header.counted."""
        data = self._read(layout.TOTALS_AT, len(layout.OPS) * layout.TOTALS.itemsize)
        return np.frombuffer(data, layout.TOTALS).copy()

    def rows(self, header: layout.RecordHeader, after: int = 0) -> NDArray[Any]:
        """Copy the job's rows with a number above `after`, oldest first, without overwritten and half-written ones."""
        start = max(header.first, header.newest - header.slots + 1, after + 1)
        return self.pick(header, np.arange(start, header.newest + 1, dtype=np.uint64))

    def pick(self, header: layout.RecordHeader, numbers: NDArray[np.uint64]) -> NDArray[Any]:
        """Copy the job's rows with these numbers, as far as they are there."""
        slots = (numbers % np.uint64(header.slots)).astype(np.int64)
        first, end = (int(slots.min()), int(slots.max()) + 1) if len(slots) else (0, 0)
        data = self._read(layout.ROWS_AT + first * layout.ROW.itemsize, (end - first) * layout.ROW.itemsize)
        rows: NDArray[Any] = np.frombuffer(data, layout.ROW)[slots - first]
        now = self.header()
        intact = (rows["n"] == numbers) & (rows["state"] > 0) & (numbers + np.uint64(header.slots) > now.newest)
        return np.asarray(rows[intact & (now.job == header.job)])

    def read_names(self) -> list[str]:
        """Return the texts, those written since the last look included."""
        lines = (self._tail + self._names_file.read()).split(b"\n")
        self._tail = lines.pop()
        self.names += [line.decode("utf-8", "replace") for line in lines]
        return self.names


def read_record(reader: RecordReader) -> RankRecord:
    """Read a rank's file once, again if the rank began a new job or made room meanwhile."""
    while True:
        header = reader.header()
        rows, totals = reader.rows(header), reader.totals()
        layout.add_to_totals(totals, rows[rows["n"] >= header.counted])
        now = reader.header()
        if (now.job, now.counted) == (header.job, header.counted):
            return RankRecord(header, rows, totals, list(reader.read_names()))


def read_records(folder: str | Path, rank: int | None = None) -> Records:
    """Read the records in a folder, of all ranks or of one."""
    records = {}
    for path in Path(folder).glob(f"rank{'*' if rank is None else rank}.rec"):
        if RecordReader.is_ready(path):
            reader = RecordReader(path)
            records[reader.rank] = read_record(reader)
    return Records({rank: records[rank] for rank in sorted(records)})


def is_pair(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows are sends or receives."""
    return np.asarray((rows["op"] == layout.SEND) | (rows["op"] == layout.RECV), dtype=bool)
