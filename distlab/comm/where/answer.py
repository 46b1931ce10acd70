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

STOPPED = "it is stopped by a signal (SIGSTOP or a debugger) and does nothing until it gets SIGCONT"
SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR1)  # macOS has no SIGRTMIN


@contextlib.contextmanager
def answering(rank: int) -> Iterator[None]:
    """Answer the questions of `distlab where` while the block runs, in memory that no file names.

    Nobody can ask where the program uses the signal itself, or the system has no such memory.
    """
    if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN) or not hasattr(os, "memfd_create"):
        yield
        return
    file = os.memfd_create(f"distlab-rank{rank}.stack")
    faulthandler.register(SIGNAL, file, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(SIGNAL)
        os.close(file)


def is_whole(dump: str) -> bool:
    """Tell whether the stacks are written to their end: the main thread comes last, its outermost call too."""
    return dump.endswith((" in <module>\n", "in _bootstrap\n"))
