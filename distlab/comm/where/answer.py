"""Let a rank write its stacks when it is asked by a signal, to its launcher or to `distlab where`.

faulthandler's handler is C: it answers also while the rank waits in C or holds the interpreter lock. The signal is one
that programs do not use for themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR1)  # macOS has no SIGRTMIN


def answer(rank: int, path: Path | None = None) -> int:
    """Answer from now on, in a file, or in memory alone; return the file's number.

    -1: nobody can ask, as the program uses the signal itself, or this system has no such memory.

    Raises:
        OSError: the file cannot be written.
    """
    if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return -1
    if path is not None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    elif hasattr(os, "memfd_create"):
        file = os.memfd_create(f"distlab-rank{rank}.stack")
    else:
        return -1
    faulthandler.register(SIGNAL, file, all_threads=True)
    return file


@contextlib.contextmanager
def answering(rank: int) -> Iterator[None]:
    """Answer the questions of `distlab where` while the block runs."""
    file = answer(rank)
    try:
        yield
    finally:
        if file >= 0:
            faulthandler.unregister(SIGNAL)
            os.close(file)


def is_whole(dump: str) -> bool:
    """Tell whether the stacks are written to their end: the main thread comes last, its outermost call too."""
    return dump.endswith((" in <module>\n", "in _bootstrap\n"))
