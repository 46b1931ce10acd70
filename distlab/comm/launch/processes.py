"""Processes as the system sees them: whose children they are, which set of ranks they come from, how to end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

JOB_VARIABLE = "DISTLAB_JOB"  # in each rank's environment: the name of its set's folder
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere do nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_group(pid: int) -> None:
    """Send SIGKILL to a process and to everything in its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def children(pid: int | None = None) -> list[int]:
    """Process numbers of a process's children, this one's by default, adopted ones included (Linux; elsewhere none)."""
    found: list[int] = []
    tasks = Path(f"/proc/{pid or 'self'}/task")
    for path in tasks.glob("*/children") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def job_of(pid: int) -> str | None:
    """Return the set of ranks that a process comes from, read from its environment; None where it is not named."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name.decode(errors="replace") == JOB_VARIABLE:
                return value.decode(errors="replace")
    return None
