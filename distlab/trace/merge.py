"""Traces on disk, one file per rank, and the ranks' clocks brought together.

Every rank saves its own spans on its own clock. Processes on one machine share the monotonic clock; between machines
the clocks differ by a constant that is measured once and saved with the traces as `clocks.json`: a list with, for
each rank, the nanoseconds to add to its times.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from distlab.trace.chrome import chrome_json, read_chrome
from distlab.trace.span import Trace

CLOCKS_FILE = "clocks.json"


def rank_file(folder: str | Path, rank: int) -> Path:
    """Name the file in which a rank saves its trace."""
    return Path(folder) / f"rank{rank}.trace.json.gz"


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Save a trace as Chrome JSON, gzipped: damage is noticed, and a reader never sees half a file."""
    path = Path(path)
    _replace(path, gzip.compress(chrome_json({"trace": trace}), 5))
    return path


def load_trace(path: str | Path) -> Trace:
    """Load what `save_trace` saved.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or holds something else.
    """
    traces = read_chrome(path)
    if len(traces) != 1:
        raise ValueError(
            f"{path} holds the traces {', '.join(traces) or 'of nobody'}; expected one, as save_trace saves it"
        )
    return next(iter(traces.values()))


def merge(traces: Iterable[Trace], clock_offsets_ns: Sequence[int] | None = None) -> Trace:
    """Join traces into one on a common clock, sorted by start.

    clock_offsets_ns[i] is added to the times of the i-th trace; without offsets the traces share a clock already.

    Raises:
        ValueError: the number of offsets is not the number of traces.
    """
    parts = list(traces)
    offsets = [0] * len(parts) if clock_offsets_ns is None else list(clock_offsets_ns)
    if len(offsets) != len(parts):
        raise ValueError(
            f"got {len(offsets)} clock offsets for {len(parts)} traces; pass one per trace, in their order"
        )
    joined = Trace.concatenate(part.shifted(int(offset)) for part, offset in zip(parts, offsets, strict=True))
    return joined.take(np.lexsort((joined.rank, joined.start_ns)))


def save_clocks(clock_offsets_ns: Sequence[int], folder: str | Path) -> Path:
    """Save the nanoseconds to add to each rank's clock, rank 0 first, where `load_folder` looks for them."""
    path = Path(folder) / CLOCKS_FILE
    text = json.dumps([int(offset) for offset in clock_offsets_ns])
    _replace(path, f"{text}\n".encode())
    return path


def load_folder(folder: str | Path) -> Trace:
    """Merge the traces that the ranks of a run saved in a folder, their clocks aligned; it has as many ranks as clocks.

    Raises:
        FileNotFoundError: the clocks, or the trace of a rank is missing.
        ValueError: a file is damaged, or holds spans of a different rank.
    """
    folder = Path(folder)
    offsets = _load_clocks(folder / CLOCKS_FILE)
    paths = [rank_file(folder, rank) for rank in range(len(offsets))]
    if missing := [rank for rank, path in enumerate(paths) if not path.is_file()]:
        raise FileNotFoundError(
            f"{folder} has no trace of rank {', '.join(map(str, missing))}, of {len(offsets)} ranks in {CLOCKS_FILE}; "
            "did these ranks end before they saved?"
        )
    traces = [load_trace(path) for path in paths]
    for rank, trace in enumerate(traces):
        if set(trace.ranks) - {rank}:
            raise ValueError(f"{paths[rank]} holds spans of ranks {trace.ranks}; expected rank {rank} only")
    return merge(traces, offsets)


def _load_clocks(path: Path) -> list[int]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; save the ranks' clock offsets with save_clocks(offsets, folder)")
    try:
        offsets = json.loads(path.read_bytes())
    except ValueError:
        offsets = None
    if not isinstance(offsets, list) or any(type(one) is not int for one in offsets):
        raise ValueError(f"{path} holds no list of whole nanoseconds, one per rank; save the clock offsets again")
    return offsets


def _replace(path: Path, content: bytes) -> None:
    """Write next to the final place, then move: the file is whole, or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
