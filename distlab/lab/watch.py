"""End a lab that takes too long, with the line where each rank stands.

A thread in each rank looks four times a second. Learner code is tried out inside of `Lab.watched`: there the ranks see
a deadlock from their records within seconds (`distlab.comm.watch`). In timed code nothing is recorded, and the time
limit ends it. A rank that holds the interpreter lock forever is ended by faulthandler, a little later and with its
stack alone.
"""

from __future__ import annotations

import faulthandler
import threading
import time
import traceback
from types import TracebackType

from distlab.comm import RankTimeout
from distlab.comm.watch.watch import LOOK_S, end, stack_of
from distlab.comm.where.frames import is_machinery

LOCK_GRACE_S = 10.0


class Guard:
    """Watches over one rank of a lab from its start to its end."""

    def __init__(self, what: str, limit_s: float) -> None:
        self.what, self.limit_s = what, limit_s
        self.deadline = time.monotonic() + limit_s
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

    def _look(self) -> None:
        while not self._done.wait(LOOK_S):
            if time.monotonic() > self.deadline:
                words = f"{self.what} did not finish in {self.limit_s:g} s (--limit-s)"
                end(RankTimeout(words), stack_of(self._main), aloud=False)


def own_traceback(error: BaseException) -> str:
    """Write an exception's traceback without the frames that lead every lab to its own code."""
    trace = error.__traceback__
    while trace is not None and is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
