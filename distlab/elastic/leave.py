"""How ranks leave: at the end of a step when they are asked to, and never later than a limit.

SIGTERM is how a cluster says that it wants its machine back, some 30 seconds before SIGKILL. A rank that waits for
others in C runs no Python, so no handler of Python's either. But the interpreter writes the signal's number into a pipe
at once (`signal.set_wakeup_fd`), and a thread reads it. So the limit holds whatever the rank is doing.

A rank that is stopped (SIGSTOP, a debugger) hears nothing at all. Its peers fail when their wait times out. Torchrun
kills it 30 s later, and starts all ranks anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

STATUS = 128 + signal.SIGTERM


class Left(SystemExit):
    """The ranks were asked to end, have saved and leave with status 143: the run is not over, and can be started."""


class Notice:
    """Whether this process was asked to end (SIGTERM).

    Attributes:
        asked: set by the signal.
        doing: what the process does, for its last words.
    """

    def __init__(self, limit_s: float, rank: int) -> None:
        self.limit_s, self.rank = limit_s, rank
        self.asked = threading.Event()
        self.doing = "starting"
        self._over = threading.Event()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hear the signal while the block runs; the process ends when it is in the block a limit after the signal.

        Signals reach the main thread alone: in a different one nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        handler = signal.signal(signal.SIGTERM, lambda *_: None)  # without one the process would end at once
        old_mouth = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        thread = threading.Thread(target=self._listen, args=(ear,), name="notice", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            signal.set_wakeup_fd(old_mouth)
            signal.signal(signal.SIGTERM, handler if handler is not None else signal.SIG_DFL)
            os.write(mouth, b"\0")  # not close: a child may have the same end of the pipe
            thread.join()
            os.close(mouth)
            os.close(ear)

    def _forget(self) -> None:
        """Let SIGTERM end a child that this process has forked (a DataLoader's worker), not speak for the parent."""
        if not self._over.is_set():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _listen(self, ear: int) -> None:
        while not self._over.is_set():
            if signal.SIGTERM not in os.read(ear, 64):
                continue
            self.asked.set()
            if not self._over.wait(self.limit_s):
                text = f"rank {self.rank}: was asked to end (SIGTERM) {self.limit_s:g} s ago and is still {self.doing}"
                print(f"{text}; ends now. The newest checkpoint stays", file=sys.stderr, flush=True)
                os._exit(STATUS)
