"""End a lab that hangs, with words: who waits for whom, and where each rank stands.

A thread in each rank looks four times a second. While learner code is tried out (`Lab.watched`) every call is recorded,
and the ranks see a deadlock from the records within seconds; in timed code nothing is recorded, and the time limit ends
it. A rank that holds the interpreter lock forever is ended by faulthandler, a little later and with its stack alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType

from distlab.comm import RankTimeout
from distlab.comm.watch.watch import LOOK_S, Watch, end, stack_of
from distlab.comm.where.frames import is_machinery

LOCK_GRACE_S = 10.0


class Guard:
    """Watches over one rank of a lab from its start to its end.

    Attributes:
        watch: what it sees of the other ranks, once calls have been recorded where all of them are on one machine.
    """

    def __init__(self, what: str, limit_s: float) -> None:
        self.what, self.limit_s = what, limit_s
        self.deadline = time.monotonic() + limit_s
        self.watch: Watch | None = None
        self._is_looking = False
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
    def watching(self) -> Iterator[None]:
        """Look for calls that cannot end well, where the ranks of this machine see each other, in the block."""
        self._is_looking = True
        try:
            yield
        finally:
            self._is_looking = False

    def _look(self) -> None:
        while not self._done.wait(LOOK_S if self.watch is None else self.watch.look_s):
            watch, words = self.watch, ""
            if time.monotonic() > self.deadline:
                words = "\n".join([f"{self.what} did not finish in {self.limit_s:g} s (--limit-s)", *self._waits()])
                words = words if watch is None else watch.said() or watch.tell(words)
            elif watch is not None:
                words = watch.look() if self._is_looking else watch.said()
            if words and not self._done.is_set():
                end(RankTimeout(words), stack_of(self._main), aloud=False)

    def _waits(self) -> list[str]:
        """Return one line per rank: whom it waits for, where calls are recorded and this rank sees them."""
        if self.watch is None or not self._is_looking:
            return []
        from distlab.comm import read_records
        from distlab.comm.watch.waits import describe

        return describe(read_records(self.watch.watchdog.folder), self.watch.watchdog.world_size)


def own_traceback(error: BaseException) -> str:
    """Write an exception's traceback without the frames that lead every lab to its own code."""
    trace = error.__traceback__
    while trace is not None and is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
