"""Read dumps of torch's flight recorder, whoever wrote them, as records of calls; no code of a dump runs.

A dump is a pickle of plain values, or JSON. torch writes one per rank when a call of nccl times out, or when its pipe
is written to. The flight recorder tells neither roots nor reductions, and on gloo neither messages nor the members of
groups: then those count that have called.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distlab.comm.plain import restricted_load
from distlab.comm.record.file import DONE, ISSUED, OPS, ROW, TOTALS, Header
from distlab.comm.record.matching import channel_of, fingerprint_of
from distlab.comm.record.read import RankRecord, Records
from distlab.comm.where.frames import is_machinery, owner_of

MAX_BYTES = 1 << 28
_ALIASES = {
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_reduce_barrier": "barrier",
}
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
    if not isinstance(read, dict) or not {"pg_config", "entries"} <= read.keys():
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
        raise ValueError(f"there are no files {prefix}0, {prefix}1, ...; pass the value of TORCH_FR_DUMP_TEMP_FILE")
    return records_of({rank: read_dump(_bytes(path), str(path)) for rank, path in sorted(paths.items())})


def _is_of(path: Path, start: Path) -> bool:
    return path.name[len(start.name) :].isdigit() and path.is_file()


def _bytes(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; a dump has {MAX_BYTES} at most")
    return path.read_bytes()


def records_of(dumps: Mapping[int, Mapping[str, Any]]) -> Records:
    """Turn dumps into records, as our own recorder writes them.

    Raises:
        ValueError: a part of a dump is not what torch writes.
    """
    found, rank = {}, min(dumps)
    try:
        members = _members(dumps)
        for rank, dump in sorted(dumps.items()):  # noqa: B007 (named in the error)
            found[rank] = _record(rank, dump, members)
    except _DAMAGE as error:
        raise ValueError(f"the dump of rank {rank} is damaged ({type(error).__name__}: {error})") from error
    return Records(found)


def _members(dumps: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the ranks of each group, by its name."""
    called: dict[str, list[int]] = {}
    told: dict[str, list[int]] = {}
    for rank, dump in sorted(dumps.items()):
        for group in {str(entry["process_group"][0]) for entry in dump["entries"]}:
            called.setdefault(group, []).append(rank)
        for group, config in dump["pg_config"].items():
            told[str(group)] = json.loads(config["ranks"])
    called["0"] = sorted(dumps)  # torch's name for the group of all
    return called | {group: members for group, members in told.items() if members}


def _record(rank: int, dump: Mapping[str, Any], members: Mapping[str, list[int]]) -> RankRecord:
    entries, names = dump["entries"], [""]
    calls = [fields for entry in entries if (fields := _fields(rank, entry, members, names))]
    table = np.zeros(len(calls), ROW)
    for row, fields in zip(table, calls, strict=True):
        for field, value in fields.items():
            row[field] = value
    table["n"] = np.arange(1, len(calls) + 1)
    first = entries[0]["record_id"] if entries else 0  # what the ring of the flight recorder has overwritten
    header = Header(len(calls) or 1, 1, 1 - first, len(calls), 0, 0, 1, 0, 0)
    return RankRecord(header, table, np.zeros(len(OPS), TOTALS), names)


def _is_passed_on(file: str) -> bool:
    return owner_of(file) == "torch" or is_machinery(file)


def _fields(rank: int, entry: Any, groups: Mapping[str, list[int]], names: list[str]) -> dict[str, int]:
    """Return a call's row by field; an empty one for an operation that we do not know."""
    name = str(entry["profiling_name"]).partition(":")[2]
    pair = _PAIR.match(name)
    plain = re.sub(r"_(base|coalesced|single|into_tensor|tensor)$", "", name.strip("_").lower())
    op = pair[1] if pair else _ALIASES.get(plain, plain)
    if op not in OPS[1:]:
        return {}
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
