"""Keep what was passed, and when, in one JSON file in the folder of the learner's working copies.

Two notebooks may check at once: each change reads, alters and replaces the file under a lock. A file that cannot be
read is moved aside, never written over.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.grading.report import Report

MARKER = ".distlab-work"
FILE = "progress.json"
SCHEMA = 1
OUTSIDE = "Not kept: this is not a folder that `distlab lesson start` made."


@dataclass(frozen=True)
class Entry:
    """What is known about one exercise.

    Attributes:
        attempts: checks of an answer, right or wrong; one that is not written yet does not count.
        first_passed: time of the first right answer (ISO 8601, UTC), or "".
        last_passed: time of the last one, or "".
        budget: what the last right answer used.
        seconds: how long its check took.
    """

    attempts: int = 0
    first_passed: str = ""
    last_passed: str = ""
    budget: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it was ever right."""
        return bool(self.first_passed)


def work_folder(start: Path | None = None) -> Path | None:
    """Return the folder of working copies that holds `start` (by default the working directory), or None."""
    here = (start or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / MARKER).exists()), None)


def keep(report: Report, start: Path | None = None) -> str:
    """Write a report down; return one line where it was not kept, or where something else must be told."""
    folder = work_folder(start)
    if folder is None:
        return OUTSIDE
    if report.verdict not in ("passed", "wrong"):
        return ""
    try:
        with _locked(folder):
            entries, told = _read(folder)
            entries[report.exercise.name] = _updated(entries.get(report.exercise.name, Entry()), report)
            _write(folder, entries)
    except OSError as error:
        return f"Not kept: {folder / FILE} cannot be written ({error.strerror or error})."
    return told


def load_progress(start: Path | None = None) -> dict[str, Entry]:
    """Return what is known about each exercise, by name; empty outside a work folder or where the file is damaged."""
    folder = work_folder(start)
    if folder is None:
        return {}
    try:
        return _parse((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}


def _updated(entry: Entry, report: Report) -> Entry:
    entry = replace(entry, attempts=entry.attempts + 1)
    if not report.passed:
        return entry
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    first = entry.first_passed or now
    return replace(entry, first_passed=first, last_passed=now, budget=report.budget, seconds=round(report.seconds, 3))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when a process ends."""
    import fcntl

    with open(folder / MARKER, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(folder: Path) -> tuple[dict[str, Entry], str]:
    """Return the entries; a damaged file is moved aside first, and the second value says so."""
    path = folder / FILE
    try:
        return _parse(path.read_bytes()), ""
    except FileNotFoundError:
        return {}, ""
    except (ValueError, OSError) as error:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        aside = folder / f"progress.damaged-{stamp}-{os.getpid()}.json"
        path.rename(aside)
        reason = " ".join(str(error).split())
        return {}, f"{FILE} could not be read ({reason}); it is now {aside.name}, and a new one was begun."


def _parse(data: bytes) -> dict[str, Entry]:
    """Read the file's text.

    Raises:
        ValueError: it is not what `_write` wrote.
    """
    found: Any = json.loads(data)
    if not isinstance(found, dict) or not isinstance(found.get("exercises"), dict):
        raise ValueError("it has no exercises")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {found.get('schema')!r}, not {SCHEMA}")
    return {str(name): _entry(name, fields) for name, fields in found["exercises"].items()}


def _entry(name: str, fields: Any) -> Entry:
    kinds = {"attempts": int, "first_passed": str, "last_passed": str, "budget": list, "seconds": int | float}
    if not isinstance(fields, dict) or any(not isinstance(fields.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(f"its entry {name!r} is damaged")
    budget = tuple(str(line) for line in fields["budget"])
    return Entry(fields["attempts"], fields["first_passed"], fields["last_passed"], budget, float(fields["seconds"]))


def _write(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Replace the file in one step, so that a reader or a crash sees the old one or the new one."""
    data = {"schema": SCHEMA, "exercises": {name: asdict(entries[name]) for name in sorted(entries)}}
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".progress-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / FILE)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
