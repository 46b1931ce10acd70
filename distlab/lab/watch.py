"""End a lab that hangs, with words: who waits for whom, and where each rank stands.

A thread in each rank looks four times a second. While learner code is tried out (`Lab.watched`) every call is recorded,
and rank 0 sees a deadlock from the records within seconds; in timed code nothing is recorded, and the time limit ends
it. A rank that holds the interpreter lock for ever is ended by faulthandler, a little later and with its stack alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from distlab.comm import RankTimeout
from distlab.comm.launch.torchrun import record_failure
from distlab.comm.record.call_site import main_frame

if TYPE_CHECKING:
    from distlab.comm.record.watchdog import Watchdog

LOOK_S = 0.25
LOCK_GRACE_S = 10.0
TELL_S = 1.0  # for the other ranks to say where they stand
_ENDING = "ending"
_OWN = ("distlab/lab/", "distlab/comm/record/intercept.py", "<frozen runpy>")


class Guard:
    """Watches over one rank of a lab from its start to its end."""

    def __init__(self, what: str, limit_s: float) -> None:
        self.what, self.limit_s = what, limit_s
        self.deadline = time.monotonic() + limit_s
        self.folder: Path | None = None
        self.world_size = 1
        self.watchdog: Watchdog | None = None
        self._main = threading.get_ident()
        self._done = threading.Event()

    def __enter__(self) -> Guard:
        faulthandler.dump_traceback_later(self.limit_s + LOCK_GRACE_S, exit=True)
        threading.Thread(target=self._look, name="guard", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def watching(self, watchdog: Watchdog | None) -> Iterator[None]:
        """Ask the watchdog, on the rank that has one, while the block runs."""
        self.watchdog = watchdog
        try:
            yield
        finally:
            self.watchdog = None

    def finished(self) -> list[int]:
        """Return the ranks that have left the block that is watched."""
        if self.folder is None:
            return []
        return [rank for rank in range(self.world_size) if (self.folder / f"finished{rank}").exists()]

    def _look(self) -> None:
        while not self._done.wait(LOOK_S):
            if self.folder is not None and (self.folder / _ENDING).exists():
                self._end("", wait=False)
            if time.monotonic() > self.deadline:
                self._end("\n".join([f"{self.what} did not finish in {self.limit_s:g} s (--limit-s)", *self._waits()]))
            watchdog = self.watchdog
            words = None if watchdog is None else watchdog.check(self.finished())
            if words is not None and not self._done.is_set() and self.watchdog is watchdog:
                self._end(f"{self.what} cannot go on: {words}")

    def _end(self, words: str, *, wait: bool = True) -> None:
        """Write down why and where this rank stands, let the others do the same, and leave at once."""
        stack = self._stack()
        if self.folder is not None and wait:
            with contextlib.suppress(OSError):
                (self.folder / _ENDING).touch()
        if not record_failure(RankTimeout(words), stack):
            print(f"{words}\n\nIt stands here (innermost call last):\n{stack}", file=sys.stderr, flush=True)
        time.sleep(TELL_S)
        os._exit(1)

    def _waits(self) -> list[str]:
        """Say in a line a rank whom it waits for, where calls are recorded and this rank sees them."""
        if self.folder is None or self.watchdog is None:
            return []
        from distlab.comm import read_records
        from distlab.comm.record.watchdog import describe

        return describe(read_records(self.folder), self.world_size)

    def _stack(self) -> str:
        """Return where the main thread is, without the frames that lead every lab to its own code."""
        frames = traceback.extract_stack(main_frame(self._main))
        return "".join(traceback.format_list([frame for frame in frames if not _is_ours(frame.filename)] or frames))


def own_traceback(error: BaseException) -> str:
    """Write an exception's traceback without the frames that lead every lab to its own code."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _is_ours(file: str) -> bool:
    return any(part in file for part in _OWN)
