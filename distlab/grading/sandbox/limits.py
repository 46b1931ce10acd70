"""Limits of one process that runs an answer: memory, sizes and number of files, processes, signals to others."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import Any

from distlab.grading.exercise import Refused

MAX_FILE_BYTES = 256 << 20
MAX_OPEN_FILES = 1024
_STARTS_A_PROCESS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.spawn", "subprocess.Popen"}


def limit_process(memory_limit_bytes: int) -> None:
    """Limit memory beyond what this process has now, the size and the number of its files, and core dumps."""
    with contextlib.suppress(OSError, ValueError):  # systems other than Linux have no /proc, or refuse a limit
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[5])  # written to or kept for it; not what is only mapped or reserved
        _lower(resource.RLIMIT_DATA, pages * resource.getpagesize() + memory_limit_bytes)
    with contextlib.suppress(OSError, ValueError):
        _lower(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
        _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
        _lower(resource.RLIMIT_CORE, 0)


def limit_number_of_processes(more: int) -> None:
    """Let this process and those that it starts add at most so many to what this user runs now (root has no limit)."""
    with contextlib.suppress(OSError, ValueError):
        _lower(resource.RLIMIT_NPROC, _number_of_threads() + more)


def _number_of_threads() -> int:
    """Count the threads of all of this user's processes: to the system each is a process."""
    own = os.getuid()
    count = 0
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            count += len(os.listdir(tasks)) if tasks.stat().st_uid == own else 0
    return count


def _lower(which: int, limit: int) -> None:
    soft, hard = resource.getrlimit(which)
    known = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(which, (min(known), hard))


def forbid_processes() -> None:
    """Refuse, from now on, to start a process or to signal another one."""
    own = os.getpid()

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS_A_PROCESS:
            raise Refused("forked", f"it starts a process ({event}); a check gives each rank one process: use that one")
        if event in ("os.kill", "os.killpg") and args[0] not in (own, 0) and os.getpid() == own:
            raise Refused("forked", f"it sends a signal to process {args[0]}, which is not its own")

    sys.addaudithook(refuse)
