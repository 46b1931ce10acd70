"""Let a rank write its stacks when it is asked by a signal, for its launcher or for `distlab where`.

faulthandler's handler is C: it answers also while the rank waits in C or holds the interpreter lock. The signal is one
that programs do not use for themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR1)  # macOS has no SIGRTMIN
SILENT = "it does not answer: it is starting, it is stopped by a signal, or it gets no time to run"


@contextlib.contextmanager
def answering(rank: int) -> Iterator[None]:
    """Answer the questions of `distlab where` while the block runs, in memory that no file names.

    Nobody can ask where the program uses the signal itself, or the system has no such memory.
    """
    if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN) or not hasattr(os, "memfd_create"):
        yield
        return
    signal.signal(SIGNAL, signal.SIG_IGN)  # who sees the file may send the signal, which must not end the rank
    file = os.memfd_create(f"distlab-rank{rank}.stack")
    faulthandler.register(SIGNAL, file, all_threads=True)
    try:
        yield
    finally:
        os.close(file)
        faulthandler.unregister(SIGNAL)


def ask(files: Mapping[int, Path], send: Callable[[list[int]], object], limit_s: float) -> dict[int, str]:
    """Let ranks write their stacks; return by rank what each has written, "" where it does not answer.

    Args:
        files: where each writes.
        send: sends the signal to some ranks.
        limit_s: how long to wait until all have written to the end.
    """
    with contextlib.ExitStack() as stack:
        opened, said = {}, dict.fromkeys(files, b"")
        for rank, path in files.items():
            with contextlib.suppress(OSError):  # it is starting, or has just ended
                opened[rank] = stack.enter_context(path.open("rb"))
                opened[rank].seek(0, os.SEEK_END)
        send(list(opened))
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not all(is_whole(said[rank]) for rank in opened):
            time.sleep(0.01)
            for rank, file in opened.items():
                said[rank] += file.read()
    return {rank: text.decode(errors="replace") for rank, text in said.items()}


def is_whole(dump: bytes) -> bool:
    """Tell whether the stacks are written to their end: the main thread comes last, its outermost call too."""
    return dump.endswith((b" in <module>\n", b"in _bootstrap\n"))
