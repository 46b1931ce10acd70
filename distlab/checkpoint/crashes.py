"""Every state of a folder that a kill would leave while a function runs: to try whether a save survives it.

A process that is killed (SIGKILL) does nothing more: no `finally`, no flush of what a file object still holds. What it
handed to the system before stays. So `crash_points` runs the function once, undisturbed, and looks at the folder after
each call into the system: what lies there is what a kill at this moment leaves. A file that has grown is added once
more, half written. A power cut leaves less: `unflushed` says what was not yet on the disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

Files = dict[str, tuple[int, bytes | None]]  # by path in the folder: number of the file, and its bytes (None: a folder)
_PLAIN = (dict, list, tuple, set, str, bytes, int, float, type, MappingProxyType)  # their methods write no file
_FLUSHES, _RENAMES = ("fsync", "fdatasync"), ("rename", "replace")


class Crash(NamedTuple):
    """What a kill at one moment leaves.

    Attributes:
        after: the call after which, or in which, the process is killed.
        files: bytes by path in the folder; None for a folder.
        unflushed: paths of files, and of folders ("." is the whole), that a power cut may still take back.
    """

    after: str
    files: Mapping[str, bytes | None]
    unflushed: frozenset[str]

    def restore(self, folder: Path) -> None:
        """Put this state into an empty folder."""
        for name, data in self.files.items():
            if data is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(data)


def crash_points(
    action: Callable[[], object], folder: Path, *, alone: bool = True, pause_s: float = 0.0
) -> list[Crash]:
    """Run an action and return every state of a folder that a kill of this process would leave, in their order.

    The first is the state before, the last the one after.

    Args:
        action: writes to the folder, in this thread.
        folder: the folder, which is there.
        alone: whether no other process writes there. Else no file is added half written, and what others have flushed
            is not known.
        pause_s: sleep so long after each change and before each rename, so that other ranks run ahead.
    """
    seen = _Seen(folder, alone, pause_s)
    with ExitStack() as undo:
        for name in _FLUSHES:
            undo.callback(setattr, os, name, getattr(os, name))
            setattr(os, name, partial(seen.flush, getattr(os, name)))
        undo.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(seen.called)
        action()
    seen.look("the last call")
    return seen.crashes


class _Seen:
    """Looks at a folder after each call into C, and notes what has changed."""

    def __init__(self, folder: Path, alone: bool, pause_s: float) -> None:
        self._folder, self._alone, self._pause_s = folder, alone, pause_s
        self._number, self._files = os.stat(folder).st_ino, _files(folder)
        self._unflushed: set[int] = set()  # numbers of files
        self.crashes = [Crash("nothing", {name: data for name, (_, data) in self._files.items()}, frozenset())]

    def called(self, frame: FrameType, event: str, function: Any) -> None:
        """Look at the folder each time a call into C has ended. Python calls this (`sys.setprofile`)."""
        name = getattr(function, "__name__", "a call")
        may_write = not isinstance(getattr(function, "__self__", None), _PLAIN)
        if event in ("c_return", "c_exception") and may_write and getattr(function, "__module__", "") != "builtins":
            self.look(name)
        elif event == "c_call" and name in _RENAMES:
            time.sleep(self._pause_s)

    def flush(self, real: Callable[[Any], None], file: Any) -> None:
        """Call os.fsync or the like, and note what is on the disk from now on."""
        self.look("a call before fsync")
        real(file)
        self._unflushed.discard(os.stat(file if isinstance(file, int) else file.fileno()).st_ino)
        self._add("fsync", self._files)

    def look(self, after: str) -> None:
        """Note the state of the folder, where it has changed."""
        old, new = self._files, _files(self._folder)
        if new == old:
            return
        self._unflushed |= {number for number, _ in self._names(old) ^ self._names(new)}
        known = dict(old.values())
        for name, (number, data) in new.items():
            had = known.get(number, old[name][1] if name in old else b"")  # a file may take the name of a different one
            if data is None or data == had:
                continue
            self._unflushed.add(number)
            if self._alone and had is not None and len(data) > len(had) + 1:
                self._add(f"half of {after}", {**new, name: (number, data[: (len(had) + len(data)) // 2])})
        self._files = new
        self._add(after, new)
        time.sleep(self._pause_s)

    def _names(self, files: Files) -> set[tuple[int, str]]:
        """Return the names in each folder, by its number: those in a folder that gets a new name stay."""
        pairs = (os.path.split(name) for name in files)
        return {(files[folder][0] if folder else self._number, name) for folder, name in pairs}

    def _add(self, after: str, files: Files) -> None:
        numbers = {".": self._number} | {name: number for name, (number, _) in files.items()}
        unflushed = frozenset(name for name, number in numbers.items() if number in self._unflushed)
        self.crashes.append(Crash(after, {name: data for name, (_, data) in files.items()}, unflushed))


def _files(folder: Path) -> Files:
    """Return all that is in a folder, folders before what is in them."""
    while True:
        with suppress(FileNotFoundError):  # a different rank has just moved it
            return dict(_below(folder, ""))


def _below(folder: Path, prefix: str) -> list[tuple[str, tuple[int, bytes | None]]]:
    found: list[tuple[str, tuple[int, bytes | None]]] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name = prefix + entry.name
        if entry.is_dir():
            found += [(name, (entry.inode(), None)), *_below(Path(entry.path), f"{name}/")]
        else:
            found.append((name, (entry.inode(), Path(entry.path).read_bytes())))
    return found
