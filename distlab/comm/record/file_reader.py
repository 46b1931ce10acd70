"""Read the record of one rank, whose layout `distlab.comm.record.file` says, while the rank goes on or hangs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distlab.comm.record.file import HEADER, MAGIC, OPS, ROW, ROWS_AT, TOTALS, TOTALS_AT, Header


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
            return file.read(len(MAGIC)) == MAGIC

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._names_file.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # a file that could not be opened
            self.close()

    def _read(self, at: int, size: int) -> bytes:
        """Return bytes of the file.

        Raises:
            RuntimeError: the file has become too short.
        """
        data = os.pread(self._file.fileno(), size, at)
        if len(data) < size:
            raise RuntimeError(
                f"the record of rank {self.rank}'s calls, {self._file.name}, was truncated while the ranks ran; find "
                "what writes into the launcher's folder, and stop it"
            )
        return data

    def header(self) -> Header:
        """Return the header as it stands."""
        _, *numbers = HEADER.unpack(self._read(0, HEADER.size))
        return Header(*numbers)

    def totals(self) -> NDArray[Any]:
        """Return calls, payload bytes and ring bytes per operation of the rows before header.counted."""
        return np.frombuffer(self._read(TOTALS_AT, len(OPS) * TOTALS.itemsize), TOTALS).copy()

    def rows(self, header: Header, after: int = 0) -> NDArray[Any]:
        """Copy the job's rows with a number above `after`, oldest first, without overwritten and half-written ones."""
        start = max(header.first, header.newest - header.slots + 1, after + 1)
        return self.pick(header, np.arange(start, header.newest + 1, dtype=np.uint64))

    def pick(self, header: Header, numbers: NDArray[np.uint64]) -> NDArray[Any]:
        """Copy the job's rows with these numbers, as far as they are there."""
        slots = (numbers % np.uint64(header.slots)).astype(np.int64)
        first, end = (int(slots.min()), int(slots.max()) + 1) if len(slots) else (0, 0)
        data = self._read(ROWS_AT + first * ROW.itemsize, (end - first) * ROW.itemsize)
        rows: NDArray[Any] = np.frombuffer(data, ROW)[slots - first]
        now = self.header()
        intact = (rows["n"] == numbers) & (rows["state"] > 0) & (numbers + np.uint64(header.slots) > now.newest)
        return np.asarray(rows[intact & (now.job == header.job)])

    def read_names(self) -> list[str]:
        """Return the texts, those written since the last look included."""
        lines = (self._tail + self._names_file.read()).split(b"\n")
        self._tail = lines.pop()
        self.names += [line.decode("utf-8", "replace") for line in lines]
        return self.names
