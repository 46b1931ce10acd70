"""What a call returns; and the thread of a group that runs, in their order, the calls that no rank waits for."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.futures import Future

Tensors = list[torch.Tensor]
END_S = 5.0  # how long a group that is left waits for its threads


class End:
    """Whether and how a call has ended: what the thread that does it keeps of the caller's work.

    It does not hold the work's tensors, so that their memory is the caller's alone to free once the call is over.
    """

    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, is_over: bool = False) -> None:
        self.is_over = is_over
        self.error: BaseException | None = None
        self._then: Callable[[], None] | None = None
        self._latch: threading.Lock | None = None
        if not is_over:
            self._latch = threading.Lock()
            self._latch.acquire()

    def come(self, error: BaseException | None = None) -> None:
        """Mark the call as over, with its error if it failed; of two reports the first counts."""
        with self._guard:
            if self.is_over:
                return
            self.error, self.is_over = error, True
            then, self._then = self._then, None
        if self._latch is not None:
            self._latch.release()
        if then is not None:
            then()

    def then(self, do: Callable[[], None]) -> None:
        """Do something at the end, or at once if that has come."""
        with self._guard:
            if not self.is_over:
                self._then = do
                return
        do()

    @property
    def has_sequel(self) -> bool:
        """Whether something is to be done at the end."""
        return self._then is not None

    def stand(self, limit_s: float) -> bool:
        """Stand still until the call is over, or for a limit above 0; return whether it is over."""
        assert self._latch is not None, "a call under way has a latch"
        if self._latch.acquire(timeout=limit_s if limit_s > 0 else -1):
            self._latch.release()  # for whoever else waits
            return True
        return False


class SharedWork(dist.Work):
    """A call that is over, or under way on another thread."""

    def __init__(self, results: Tensors, *, is_over: bool = False) -> None:
        super().__init__()
        self.end = End(is_over=is_over)
        self.source = -1
        self.under_way: Any = None  # of a message to another node: what is waited for
        self._results = results
        self._future: Future[Tensors] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the call has ended."""
        return self.end.is_over

    def finish(self, error: BaseException | None = None) -> None:
        """Say that the call is over, and how."""
        self.end.come(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over; raise what it raised.

        Raises:
            RuntimeError: it is not over in time.
        """
        if not self.end.is_over:
            limit_s = 0.0 if timeout is None else timeout.total_seconds()
            if not self._stand(limit_s):
                raise RuntimeError(f"timed out waiting {limit_s * 1000:.0f} ms for a call of backend 'shared'")
        if self.end.error is not None:
            raise self.end.error
        return True

    def _stand(self, limit_s: float) -> bool:
        return self.end.stand(limit_s)

    def is_completed(self) -> bool:
        """Whether the call is over."""
        return self.end.is_over

    def is_success(self) -> bool:
        """Whether the call is over and raised nothing."""
        return self.end.is_over and self.end.error is None

    def exception(self) -> BaseException | None:
        """What the call raised."""
        return self.end.error

    def result(self) -> Tensors:
        """The tensors that the call writes."""
        return self._results

    def synchronize(self) -> None:
        """Wait: there is no stream on a CPU."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait: there is no stream on a CPU."""
        self.wait()

    def source_rank(self) -> int:
        """Which rank of the group a message came from."""
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> Future[Tensors]:
        """A future of the tensors that the call writes."""
        if self._future is None:
            self._future = Future()
            self.end.then(functools.partial(_settle, self._future, self.end, self._results))
        return self._future


def _settle(future: Future[Tensors], end: End, results: Tensors) -> None:
    if end.error is None:
        future.set_result(results)
    else:
        error = end.error if isinstance(end.error, Exception) else RuntimeError(repr(end.error))
        future.set_exception(error)  # type: ignore[arg-type]


class GroupThread(threading.Thread):
    """A thread of a group, which begins with the first call that needs one: no work of the program that called."""

    def __init__(self, do: Callable[[], Any], name: str) -> None:
        super().__init__(target=do, name=name, daemon=True)


def end_threads(close: Callable[[], None], threads: Sequence[threading.Thread]) -> None:
    """Tell threads to end, and wait until they have."""
    close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(END_S)


class CallQueue:
    """The calls of one group, one at a time and in order.

    A call that the caller waits for runs on the caller's own thread where none is under way; others run on a thread of
    their own, so that the caller can compute meanwhile. What is to be done at a call's end may wait for later calls, as
    some of torch's hooks do: a second thread makes those.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._turn, self._order = threading.Lock(), threading.Lock()
        self._count = threading.Lock()
        self._pending = 0
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], End] | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def run(self, call: Callable[[], None], results: Tensors, *, is_async: bool) -> SharedWork:
        """Do a call, or have it done; whatever it raises here or in its work's `wait` is the call's own."""
        if not is_async and self._turn.acquire(blocking=False):
            try:
                if not self._pending:
                    call()
                    return SharedWork(results, is_over=True)
            finally:
                self._turn.release()
        work = SharedWork(results)
        with self._count:
            self._pending += 1
            self._have_threads(1)
            self._calls.put((call, work.end))
        if not is_async:
            work.wait()
        return work

    def close(self) -> None:
        """Let the threads end after the calls that they have."""
        self._calls.put(None)

    def _have_threads(self, number: int) -> None:
        while len(self.threads) < number:
            self.threads.append(GroupThread(self._serve, self.name))
            self.threads[-1].start()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self._order:  # so that calls keep theirs, whichever thread makes them
                item = self._calls.get()
                if item is None:
                    self._calls.put(None)  # for the other thread
                    return
                self._turn.acquire()
            call, end = item
            error: BaseException | None = None
            try:
                call()
            except BaseException as raised:
                error = raised
            with self._count:
                self._pending -= 1
                if end.has_sequel:
                    self._have_threads(2)
            self._turn.release()
            del call, item  # they hold the caller's tensors
            with contextlib.suppress(Exception):  # a future's callbacks are the caller's business
                end.come(error)
