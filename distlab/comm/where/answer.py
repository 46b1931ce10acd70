"""Let a rank write its stacks when another process of the same user asks: with faulthandler, into memory alone.

faulthandler's handler is C: it answers also while the rank waits in C or holds the interpreter lock. The signal is one
that programs do not use for themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterator


def signal_number() -> int:
    """Return the signal that asks for stacks (Linux; elsewhere 0: nobody can ask)."""
    return int(signal.SIGRTMIN) + 9 if hasattr(os, "memfd_create") else 0


def answer(rank: int) -> int:
    """Answer from now on; return the file in memory that takes the stacks, or -1 where this system has none."""
    number = signal_number()
    if not number or signal.getsignal(number) != signal.SIG_DFL:
        return -1
    file = os.memfd_create(f"distlab-rank{rank}.stack")
    faulthandler.register(number, file, all_threads=True)
    return file


@contextlib.contextmanager
def answering(rank: int) -> Iterator[None]:
    """Answer the questions of `distlab where` while the block runs."""
    file = answer(rank)
    try:
        yield
    finally:
        if file >= 0:
            faulthandler.unregister(signal_number())
            os.close(file)
