"""Traces in files: Chrome JSON, the format that ui.perfetto.dev, chrome://tracing and torch.profiler share.

Each rank of each trace is a process, each lane a thread. The viewer's times are floating-point microseconds; the exact
nanoseconds travel in each event's `args`, so that reading back loses nothing.

A run has a folder with a file per rank: every rank saves its own spans on its own clock. Processes on one machine share
the monotonic clock; between machines the clocks differ by a constant that is measured once and saved with the traces as
`clocks.json`: a list with, for each rank, the nanoseconds to add to its times.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distlab.trace.span import Span
from distlab.trace.trace import Trace

_VERSION = 1
_KEY = "distlab"
CLOCKS_FILE = "clocks.json"
EXACT = Span._fields[4:]  # in an event's `args`: start, end, bytes, stage and micro-batch


def write_chrome(path: str | Path, /, **traces: Trace) -> Path:
    """Write traces into one file, as `write_chrome("step.json", measured=..., predicted=...)`.

    Every trace is shown from its own earliest start, so that measured and predicted lie over each other. Spans of one
    lane that overlap without nesting, which a viewer cannot stack, are shown on further threads of the same name.

    Raises:
        ValueError: no trace was given.
    """
    if not traces:
        raise ValueError(
            'write_chrome got no trace; name at least one, as in write_chrome("step.json", measured=trace)'
        )
    path = Path(path)
    path.write_bytes(chrome_json(traces))
    return path


def chrome_json(traces: dict[str, Trace]) -> bytes:
    """Return what `write_chrome` writes."""
    document = {
        "traceEvents": list(_events(traces)),
        "displayTimeUnit": "ns",
        "otherData": {_KEY: {"version": _VERSION, "traces": list(traces)}},
    }
    return json.dumps(document).encode()


def _events(traces: dict[str, Trace]) -> Iterator[dict[str, Any]]:
    pid = -1
    for order, (title, trace) in enumerate(traces.items()):
        origin_ns = int(trace.start_ns.min()) if len(trace) else 0
        pids: dict[int, int] = {}
        for rank in trace.ranks:
            pid += 1
            pids[rank] = pid
            yield _metadata("process_name", pid, 0, name=f"{title} rank {rank}", trace=title, rank=rank)
            yield _metadata("process_sort_index", pid, 0, sort_index=rank * len(traces) + order)
        threads: dict[tuple[int, str, int], int] = {}
        for span, row in zip(trace, _rows(trace), strict=True):
            key = (span.rank, span.lane, row)
            if key not in threads:
                threads[key] = len(threads) + 1
                name = span.lane if row == 0 else f"{span.lane} ({row + 1})"
                yield _metadata("thread_name", pids[span.rank], threads[key], name=name, lane=span.lane)
            us = {"ts": (span.start_ns - origin_ns) / 1000, "dur": (span.end_ns - span.start_ns) / 1000}
            shown = {"name": span.name, "cat": span.kind, "pid": pids[span.rank], "tid": threads[key]}
            yield {"ph": "X", **shown, **us, "args": {field: getattr(span, field) for field in EXACT}}


def _metadata(event: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "args": args}


def _rows(trace: Trace) -> list[int]:
    """Spread the spans of each lane over rows in which any two are apart or nested."""
    rows = [0] * len(trace)
    stacks: dict[tuple[int, int], list[list[int]]] = {}  # (rank, lane) -> a stack of open ends for each row
    order = np.lexsort((-trace.end_ns, trace.start_ns)).tolist()
    ranks, lanes = trace.rank.tolist(), trace.lane.tolist()
    starts, ends = trace.start_ns.tolist(), trace.end_ns.tolist()
    for index in order:
        lane = stacks.setdefault((ranks[index], lanes[index]), [])
        for stack in lane:  # close the spans that have ended
            while stack and stack[-1] <= starts[index]:
                stack.pop()
        fitting = (row for row, stack in enumerate(lane) if not stack or stack[-1] >= ends[index])
        rows[index] = next(fitting, len(lane))
        if rows[index] == len(lane):
            lane.append([])
        lane[rows[index]].append(ends[index])
    return rows


def read_chrome(path: str | Path) -> dict[str, Trace]:
    """Read the traces of a Chrome JSON file, plain or gzipped, by name; the exact inverse of `write_chrome`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not JSON, or no Chrome trace, or a different program wrote it.
    """
    document, events = load_events(path)
    other = document.get("otherData") if isinstance(document, dict) else None
    header = other.get(_KEY) if isinstance(other, dict) else None
    if header is None:
        told = "write_chrome's files are read, and torch.profiler's by `profile`"
        raise ValueError(f"{path}: a different program wrote it; {told}")
    if not isinstance(header, dict) or header.get("version") != _VERSION:
        raise ValueError(f"{path}: it was written as {str(header)[:80]}; this program reads version {_VERSION}")
    try:
        return _traces(header["traces"], events)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: it is damaged ({error!r}); write the trace again") from error


def load_events(path: str | Path) -> tuple[Any, list[Any]]:
    """Load a Chrome JSON file, plain or gzipped: the whole document, and the events in it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut off, no JSON, or no Chrome trace.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no trace at {path}; write one with write_chrome(path, measured=trace), or in a shell by "
            "`distlab lab NN --trace DIR`"
        )
    content = path.read_bytes()
    if content[:15] == b"SQLite format 3" or path.suffix == ".nsys-rep":
        own = "record the same steps with torch.profiler, and give what its export_chrome_trace writes"
        raise ValueError(f"{path} is a report of Nsight Systems, which is not read here: {own}")
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        document = json.loads(content)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or is cut off ({error}); expected a Chrome trace") from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise ValueError(
            f'{path} is no Chrome trace: expected a list of events, or an object with one as "traceEvents"'
        )
    return document, events


def _traces(titles: list[str], events: list[Any]) -> dict[str, Trace]:
    spans: dict[str, list[Span]] = {title: [] for title in titles}
    owners: dict[int, tuple[str, int]] = {}
    lanes: dict[tuple[int, int], str] = {}
    for event in events:
        args, pid, tid = event["args"], event["pid"], event["tid"]
        if event["ph"] == "X":
            title, rank = owners[pid]
            numbers = [args[field] for field in EXACT]
            if any(type(number) is not int for number in numbers):
                raise TypeError(f"times, bytes, stage and micro-batch are {numbers}; expected whole numbers")
            spans[title].append(Span(rank, lanes[pid, tid], event["name"], event["cat"], *numbers))
        elif event["name"] == "process_name":
            owners[pid] = (args["trace"], args["rank"])
        elif event["name"] == "thread_name":
            lanes[pid, tid] = args["lane"]
    return {title: Trace.from_spans(rows) for title, rows in spans.items()}


def rank_file(folder: str | Path, rank: int) -> Path:
    """Name the file in which a rank saves its trace."""
    return Path(folder) / f"rank{rank}.trace.json.gz"


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Save a trace as Chrome JSON, gzipped: damage is noticed, and a reader never sees half a file."""
    path = Path(path)
    replace_file(path, gzip.compress(chrome_json({"trace": trace}), 5))
    return path


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
    replace_file(path, f"{text}\n".encode())
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
    traces = list[Trace]()
    for rank, path in enumerate(paths):
        found = read_chrome(path)
        if len(found) != 1 or {one for trace in found.values() for one in trace.ranks} - {rank}:
            told = ", ".join(f"{name} of ranks {trace.ranks}" for name, trace in found.items()) or "nothing"
            raise ValueError(f"{path} holds {told}; expected one trace, of rank {rank} only, as save_trace saves it")
        traces += found.values()
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


def replace_file(path: Path, content: bytes) -> None:
    """Write next to the final place, then move: the file is whole, or (with an OSError) what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
