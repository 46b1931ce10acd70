"""Read the record of one rank, whose layout `distlab.comm.record.file` says, while the rank goes on or hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distlab.comm.record.file import HEADER, MAGIC, OPS, ROW, ROWS_AT, TOTALS, TOTALS_AT, Header


class RecordReader:
    """Read a rank's file from any process, at any time, without disturbing the rank."""

    def __init__(self, path: Path) -> None:
        self._bytes: NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        self._rows: NDArray[Any] = self._bytes[ROWS_AT:].view(ROW)
        self._names_file = open(path.with_suffix(".names"), "rb")  # noqa: SIM115 (open as long as the reader)
        self._tail = b""
        self.names: list[str] = [""]
        self.rank = int(path.stem.removeprefix("rank"))

    @staticmethod
    def is_ready(path: Path) -> bool:
        """Tell whether the rank has written its header."""
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def close(self) -> None:
        """Close the texts; the mapping goes with the reader."""
        self._names_file.close()

    def header(self) -> Header:
        """Return the header as it stands."""
        _, *numbers = HEADER.unpack(self._bytes[: HEADER.size].tobytes())
        return Header(*numbers)

    def totals(self) -> NDArray[Any]:
        """Return calls, payload bytes and ring bytes per operation of the rows before header.counted."""
        return self._bytes[TOTALS_AT : TOTALS_AT + len(OPS) * TOTALS.itemsize].view(TOTALS).copy()

    def rows(self, header: Header, after: int = 0) -> NDArray[Any]:
        """Copy the job's rows with a number above `after`, oldest first, without overwritten and half-written ones."""
        start = max(header.first, header.newest - header.slots + 1, after + 1)
        return self.pick(header, np.arange(start, header.newest + 1, dtype=np.uint64))

    def pick(self, header: Header, numbers: NDArray[np.uint64]) -> NDArray[Any]:
        """Copy the job's rows with these numbers, as far as they are there."""
        rows: NDArray[Any] = self._rows[numbers % np.uint64(header.slots)]
        now = self.header()
        intact = (rows["n"] == numbers) & (rows["state"] > 0) & (numbers + np.uint64(header.slots) > now.newest)
        return np.asarray(rows[intact & (now.job == header.job)])

    def read_names(self) -> list[str]:
        """Return the texts, those written since the last look included."""
        lines = (self._tail + self._names_file.read()).split(b"\n")
        self._tail = lines.pop()
        self.names += [line.decode("utf-8", "replace") for line in lines]
        return self.names
