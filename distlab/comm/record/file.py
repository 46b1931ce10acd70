"""The record of one rank: rows in a file mapped into memory, which a launcher can read while the rank hangs.

`rank{r}.rec` holds a header, one line of totals per operation, and a ring of rows, one row per call. `rank{r}.names`
holds the texts (call sites, shapes, groups), one per line; a row names them by line number. Only the rank writes, and a
row's `state` is written last; any process may read at any time, and no lock is shared between processes.

When more calls are made than there are slots, old rows are overwritten; the totals keep their counts and bytes.
"""

from __future__ import annotations

import csv
import mmap
import os
import struct
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
OPS: tuple[str, ...] = ("", *_COLLECTIVES, "barrier", "send", "recv")
SEND, RECV = OPS.index("send"), OPS.index("recv")

# Life of a call. WAITING: the rank is blocked in it; ASIDE: a thread that need not block the rank is.
ISSUED, WAITING, DONE, FAILED, ASIDE = 1, 2, 3, 4, 5
MAX_TEXTS = 1 << 16  # a job may run for weeks, and its shapes change at each call
FINISHED = 4  # a bit of the same number as the header's `aside`
HEADER = struct.Struct("<8sQQQQqQQQQQ")  # a magic text, then what Header holds
MAGIC = b"distrec5"

_FIELDS = csv.reader(Path(__file__).with_name("row.csv").read_text("utf-8").splitlines())
ROW = np.dtype([(name, kind) for name, kind, _ in _FIELDS])  # the third says what it is; `state` is written last
ROW_BYTES = ROW.itemsize
KNOWN = struct.Struct("<QQQIIIIIiHHI")
_PACK = struct.Struct(f"<QqqqQ{KNOWN.size}sQ")
_COUNT = struct.Struct("<q")
_GROUPS = struct.Struct("<qqq")
_END_AT, _WAIT_AT, _STATE_AT = (ROW.fields[name][1] for name in ("end", "wait", "state"))  # type: ignore[index]

GROUP = "new_group"  # begins the text of a group: number of the job, and of the group in it
_COUNT_AT, _ASIDE_AT, _COUNTED_AT, _GROUPS_AT = (HEADER.size - 8 * n for n in (7, 5, 4, 3))
TOTALS_AT = 128
TOTALS = np.dtype([("calls", "u8"), ("bytes", "u8"), ("ring", "u8")])
ROWS_AT = 1024


class RecordHeader(NamedTuple):
    """Header of a rank's file, as read.

    Attributes:
        slots: rows that the ring holds.
        job: how many times the record was begun; rows of different jobs never meet.
        first: number of the job's first row.
        newest: number of the newest row; first - 1 where there is none.
        start_ns: start of the job.
        aside: 1 where a thread that need not block the rank made a call; FINISHED where it makes no more calls.
        counted: number of the first row that is not in the totals.
        groups_begun, groups_made: how many groups the job has begun to make (dist.new_group), and has made.
        left_text: members and line of the last group that it destroyed; 0: none.
    """

    slots: int
    job: int
    first: int
    newest: int
    start_ns: int
    aside: int
    counted: int
    groups_begun: int
    groups_made: int
    left_text: int = 0

    @property
    def making(self) -> int:
        """Number of the group that the rank is making, from 1; 0: none."""
        return self.groups_begun if self.groups_begun > self.groups_made else 0

    @property
    def is_finished(self) -> bool:
        """Whether the rank makes no more calls, by its own doing."""
        return bool(self.aside & FINISHED)


class Known(NamedTuple):
    """What every call from one line with one shape has in common: worked out once, written many times.

    Attributes:
        key: tells the numberings of calls apart.
        packed: the middle of a row, from `bytes` to `op`, as it stands in the file.
    """

    key: int
    packed: bytes

    @classmethod
    def of(
        cls,
        op: str,
        channel: int,
        fingerprint: int,
        num_bytes: tuple[int, int],
        texts: tuple[int, int, int, int],
        peer: int,
        parties: int,
    ) -> Known:
        """Pack what `ROW` says of the fields: the payload, and what a ring would send; site, via, what and group."""
        code = OPS.index(op)
        packed = KNOWN.pack(*num_bytes, channel, fingerprint, *texts, peer, parties, code, 0)
        return cls(channel ^ code if code == RECV else channel, packed)


def add_to_totals(totals: NDArray[Any], rows: NDArray[Any]) -> None:
    """Add the calls and bytes of rows to totals, one entry per operation."""
    for field, values in (("calls", np.uint64(1)), ("bytes", rows["bytes"]), ("ring", rows["ring"])):
        np.add.at(totals[field], rows["op"], values)


class RecordWriter:
    """Write a rank's rows; called only by that rank, on any of its threads.

    Raises:
        OSError: the disk has no room for the file.
    """

    def __init__(self, folder: str | Path, rank: int, slots: int = 16384) -> None:
        path = Path(folder) / f"rank{rank}.rec"
        size = ROWS_AT + slots * ROW.itemsize
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 (open until the rank ends)
        self._file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # to write later where a full disk has no room would end the process
            os.posix_fallocate(self._file.fileno(), 0, size)
        self._map = mmap.mmap(self._file.fileno(), size)
        self._names = open(path.with_suffix(".names"), "wb")  # noqa: SIM115 (open until the rank ends)
        self._ids: dict[str, int] = {}
        self._lock = threading.RLock()  # a signal handler of the same thread may make a call too
        self.rank, self.slots, self._newest, self._job = rank, slots, 0, 0
        self._groups = [0, 0, 0]  # begun, made; text of the last one destroyed
        self.reset()

    def reset(self) -> None:
        """Begin a new job: no rows, no totals, numbers from 1."""
        with self._lock:
            self._first = self._counted = self._newest + 1
            self._job += 1
            self._numbers: defaultdict[int, int] = defaultdict(int)
            self._map[TOTALS_AT:ROWS_AT] = bytes(ROWS_AT - TOTALS_AT)
            now = time.monotonic_ns()
            numbers = (self.slots, self._job, self._first, self._newest, now, 0, self._counted, 0, 0, 0)
            self._groups = [0, 0, 0]
            HEADER.pack_into(self._map, 0, MAGIC, *numbers)

    def text(self, text: str) -> int:
        """Return the number of a text; the text reaches the file before any row that names it.

        Raises:
            OSError: the disk is full.
        """
        with self._lock:
            number = self._ids.get(text)
            if self._names.closed:
                return 0
            if number is None:
                number = len(self._ids) + 1
                if number > MAX_TEXTS:
                    return 0
                self._names.write(" ".join(text.splitlines()).encode("utf-8", "replace") + b"\n")
                self._names.flush()
                self._ids[text] = number
        return number

    def begin(self, known: Known, aside: bool) -> int:
        """Write the row of a call that starts now and return its number."""
        key, packed = known
        with self._lock:
            self._newest = n = self._newest + 1
            if n < self._first:  # closed while the call was on its way
                return n
            at = ROWS_AT + n % self.slots * ROW_BYTES
            self._numbers[key] = sequence = self._numbers[key] + 1
            if n - self._counted >= self.slots:
                self._drop()
            _PACK.pack_into(self._map, at, n, time.monotonic_ns(), 0, 0, sequence, packed, ISSUED)
            _COUNT.pack_into(self._map, _COUNT_AT, n)
            if aside:
                self._map[_ASIDE_AT] |= 1
        return n

    def _drop(self) -> None:
        """Add the oldest quarter of the ring to the totals, before it is overwritten."""
        stop = self._counted + max(1, self.slots // 4)
        numbers = np.arange(self._counted, stop, dtype=np.int64) % self.slots
        rows = np.frombuffer(self._map, ROW, self.slots, ROWS_AT)[numbers]
        totals = np.frombuffer(self._map, TOTALS, len(OPS), TOTALS_AT)
        add_to_totals(totals, rows)
        self._counted = stop
        _COUNT.pack_into(self._map, _COUNTED_AT, stop)

    def group(self, event: str, what: str = "") -> None:
        """Note that a group is "begun", "made" or "left" (destroyed); `what`: its members and the line."""
        self._groups[0] += event == "begun"
        self._groups[1] += event == "made"
        number = self.text(what if event == "left" else f"{GROUP} {self._job}.{self._groups[0]}: {what}") if what else 0
        self._groups[2] = number if event == "left" else self._groups[2]
        _GROUPS.pack_into(self._map, _GROUPS_AT, *self._groups)

    def wait(self, n: int, state: int) -> None:
        """Note that the rank waits for call n from now on (WAITING, ASIDE); for what was over before (DONE); no more.

        No more: it is ISSUED, as only a stream of its GPU waits.
        """
        if self._first <= n and self._newest - n < self.slots:
            at = ROWS_AT + n % self.slots * ROW_BYTES
            _COUNT.pack_into(self._map, at + _WAIT_AT, 0 if state == ISSUED else time.monotonic_ns())
            self._map[at + _STATE_AT] = state

    def end(self, n: int, state: int) -> None:
        """Note that call n is over now."""
        if self._first <= n and self._newest - n < self.slots:
            at = ROWS_AT + n % self.slots * ROW_BYTES
            _COUNT.pack_into(self._map, at + _END_AT, time.monotonic_ns())
            self._map[at + _STATE_AT] = state

    def finish(self) -> None:
        """Note that the rank makes no more calls in this job."""
        self._map[_ASIDE_AT] |= FINISHED

    def close(self) -> None:
        """Close the files; what they hold stays readable. Calls that are still under way end unrecorded."""
        with self._lock:
            self._first = 1 << 62
            self._file.close()
            self._names.close()  # the mapping goes with its last user: a call may be on its way in a different thread
