"""Read dumps of torch's flight recorder, whoever wrote them, as records of calls; no code of a dump runs.

A dump is a pickle of plain values, or JSON. torch writes one per rank when a call of nccl times out, or when it is
asked (`ask`). The flight recorder tells neither roots nor reductions, and on gloo neither messages nor the members of
groups: then those count that have called.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distlab.comm.record.file import DONE, ISSUED, OPS, ROW, TOTALS, Header
from distlab.comm.record.matching import channel_of, fingerprint_of
from distlab.comm.record.read import RankRecord, Records
from distlab.comm.unpickle import restricted_load
from distlab.comm.where.find import RankProcess
from distlab.comm.where.frames import is_machinery, owner_of

MAX_BYTES = 1 << 28
ASK_S = 3.0
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_ALIASES = {
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_reduce_barrier": "barrier",
}
_PLACES = {"pg_config": dict, "entries": list}
_DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
_PAIR = re.compile(r"(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")


def read_dump(data: bytes, what: str) -> dict[str, Any]:
    """Read a dump.

    Raises:
        ValueError: it is not a dump of the flight recorder; the text names `what` and says why.
    """
    name = f"{what} is not a dump of torch's flight recorder: it"
    try:
        is_json = data.lstrip()[:1] == b"{"
        read = json.loads(data) if is_json else restricted_load(io.BytesIO(data), {}, name)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(read, dict) or not all(isinstance(read.get(k), of) for k, of in _PLACES.items()):
        raise ValueError(f"{name} lacks pg_config or entries")
    return read


def read_dumps(prefix: str | Path) -> Records:
    """Read the dumps PREFIX0, PREFIX1, ... that torch left, one per rank.

    Raises:
        ValueError: there are none, or one cannot be read.
    """
    start = Path(prefix)
    paths = {
        int(path.name[len(start.name) :]): path for path in start.parent.glob(f"{start.name}*") if _is_of(path, start)
    }
    if not paths:
        raise ValueError(f"there are no files {prefix}0, {prefix}1, ...; pass the value of {_PREFIXES[0]}")
    return records_of({rank: read_dump(_bytes(path), str(path)) for rank, path in sorted(paths.items())})


def _is_of(path: Path, start: Path) -> bool:
    return path.name[len(start.name) :].isdigit() and path.is_file()


def _bytes(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; a dump has {MAX_BYTES} at most")
    return path.read_bytes()


def ask(processes: Sequence[RankProcess]) -> Records:
    """Return the records of these ranks' flight recorders; a rank whose recorder is off or silent is left out.

    A rank is asked over the pipe that its environment names; else a dump that it wrote since its start is read.
    """
    dumps = {}
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            data = _from_file(process)
            if data:
                dumps[process.rank] = read_dump(data, f"the dump of rank {process.rank}")
    return records_of(dumps)


def _from_file(process: RankProcess) -> bytes:
    prefix = next((process.environment[name] for name in _PREFIXES if name in process.environment), None)
    if prefix is None:
        return b""
    path, asked = Path(f"{prefix}{process.rank}"), time.time()
    if _PIPE in process.environment:
        pipe = os.open(f"{process.environment[_PIPE]}{process.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"1\n")
        size, until = -1, time.monotonic() + ASK_S
        while time.monotonic() < until and not (_size_since(path, asked) == size >= 0):  # whole: it grows no more
            size = _size_since(path, asked)
            time.sleep(0.1)
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.started / os.sysconf("SC_CLK_TCK")
    return _bytes(path) if path.stat().st_mtime >= began - 1 else b""


def _size_since(path: Path, asked: float) -> int:
    """Return the bytes of a file that was written after a moment, or -1."""
    with contextlib.suppress(OSError):
        now = path.stat()
        return now.st_size if now.st_mtime >= asked - 0.1 else -1
    return -1


def records_of(dumps: Mapping[int, Mapping[str, Any]]) -> Records:
    """Turn dumps into records, as our own recorder writes them."""
    members = _members(dumps)
    return Records({rank: _record(rank, dump, members) for rank, dump in sorted(dumps.items())})


def _members(dumps: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the ranks of each group, by its name."""
    called: dict[str, list[int]] = {}
    told: dict[str, list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        groups = {str(e["process_group"][0]) for e in dump.get("entries", []) if _is_entry(e)}
        for group in groups:
            called.setdefault(group, []).append(rank)
        for group, config in dump["pg_config"].items():
            with contextlib.suppress(*_DAMAGE):
                told[str(group)] = [int(member) for member in json.loads(config["ranks"])] or called.get(str(group), [])
    called["0"] = sorted(dumps)  # torch's name for the group of all
    return called | {group: members for group, members in told.items() if members}


def _is_entry(entry: Any) -> bool:
    group = entry.get("process_group") if isinstance(entry, dict) else None
    return isinstance(group, list | tuple) and len(group) > 0


def _record(rank: int, dump: Mapping[str, Any], members: Mapping[str, list[int]]) -> RankRecord:
    names: list[str] = [""]
    rows = [row for entry in dump.get("entries", []) if (row := _row(rank, entry, members, names)) is not None]
    table = np.concatenate([np.zeros(0, ROW), *rows])
    table["n"] = np.arange(1, len(rows) + 1)
    ids = [entry["record_id"] for entry in dump["entries"][:1] if isinstance(entry, dict) and "record_id" in entry]
    first = ids[0] if ids and type(ids[0]) is int and 0 <= ids[0] < 1 << 62 else 0
    # Numbers before the first row: what the ring of the flight recorder has overwritten.
    header = Header(len(rows) or 1, 1, 1 - first, len(rows), 0, 0, 1, 0, 0)
    return RankRecord(header, table, np.zeros(len(OPS), TOTALS), names)


def _row(rank: int, entry: Any, groups: Mapping[str, list[int]], names: list[str]) -> Any:
    """Return a call's row; None where the entry is damaged, or none that we know."""
    row, known = np.zeros(1, ROW), len(names)
    try:
        for field, value in _fields(rank, entry, groups, names).items():
            row[field] = value
    except _DAMAGE:
        del names[known:]
        return None
    return row


def _is_passed_on(file: str) -> bool:
    return owner_of(file) == "torch" or is_machinery(file)


def _fields(rank: int, entry: Any, groups: Mapping[str, list[int]], names: list[str]) -> dict[str, int]:
    name = str(entry["profiling_name"]).partition(":")[2]
    pair = _PAIR.match(name)
    plain = re.sub(r"_(base|coalesced|single|into_tensor|tensor)$", "", name.strip("_").lower())
    op = pair[1] if pair else _ALIASES.get(plain, plain)
    if op not in OPS[1:]:
        raise ValueError(op)
    group = str(entry["process_group"][0])
    members = groups[group]
    shapes = [
        (shape, str(dtype).lower()) for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    ]
    place = next((f for f in entry.get("frames", ()) if not _is_passed_on(str(f["filename"]))), None)
    is_over = bool(entry.get("retired")) or entry.get("state") == "completed"
    created = int(entry["time_created_ns"]) - (time.time_ns() - time.monotonic_ns())
    peer = members[int(pair[3])] if pair else -1
    text = f"{group} {members}"
    told = [] if op in ("gather", "scatter", "barrier") else shapes  # what only the root passes does not meet
    first = f"{shapes[0][1]}{list(shapes[0][0])}" if shapes else ""
    what = first + (f" and {len(shapes) - 1} more" if len(shapes) > 1 else "")
    texts = (f"{place['filename']}:{place['line']}" if place else "?", what, text)
    numbers = []
    for one in texts:
        names.append(one)
        numbers.append(len(names) - 1)
    return {
        "start": created,
        "end": created if is_over else 0,
        "seq": int(entry["p2p_seq_id" if pair else "collective_seq_id"]),
        "channel": channel_of(text, op, rank, peer, 0),
        "fp": fingerprint_of(op, -1, told),
        "site": numbers[0],
        "what": numbers[1],
        "group": numbers[2],
        "peer": peer,
        "parties": 0 if pair else len(members),  # the two ends of a pair count their messages apart
        "op": OPS.index(op),
        "state": DONE if is_over else ISSUED,
    }
