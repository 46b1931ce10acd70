"""What a call returns, and the thread of a group on which calls run that nobody waits for, in their order."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.futures import Future

Tensors = list[torch.Tensor]


class SharedWork(dist.Work):
    """A call that is over, or under way on another thread."""

    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, results: Tensors, *, is_over: bool = False) -> None:
        super().__init__()
        self.is_over = is_over
        self.error: BaseException | None = None
        self.source = -1
        self._results = results
        self._future: Future[Tensors] | None = None
        self._latch: threading.Lock | None = None
        if not is_over:
            self._latch = threading.Lock()
            self._latch.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Say that the call is over, and how."""
        with self._guard:
            self.error, self.is_over = error, True
            future = self._future
        if self._latch is not None:
            self._latch.release()
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over; raise what it raised.

        Raises:
            RuntimeError: it is not over in time.
        """
        if not self.is_over:
            limit_s = 0.0 if timeout is None else timeout.total_seconds()
            if not self._stand(limit_s):
                raise RuntimeError(f"timed out waiting {limit_s * 1000:.0f} ms for a call of backend 'shared'")
        if self.error is not None:
            raise self.error
        return True

    def _stand(self, limit_s: float) -> bool:
        """Stand still until the call is over, or for a limit above 0; return whether it is over."""
        assert self._latch is not None, "a call under way has a latch"
        if self._latch.acquire(timeout=limit_s if limit_s > 0 else -1):
            self._latch.release()  # for whoever else waits
            return True
        return False

    def is_completed(self) -> bool:
        """Whether the call is over."""
        return self.is_over

    def is_success(self) -> bool:
        """Whether the call is over and raised nothing."""
        return self.is_over and self.error is None

    def exception(self) -> BaseException | None:
        """What the call raised."""
        return self.error

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
        with self._guard:
            if self._future is not None:
                return self._future
            future: Future[Tensors] = Future()
            self._future = future
            is_over = self.is_over
        if is_over:
            self._settle(future)
        return future

    def _settle(self, future: Future[Tensors]) -> None:
        if self.error is None:
            future.set_result(self._results)
        else:
            error = self.error if isinstance(self.error, Exception) else RuntimeError(repr(self.error))
            future.set_exception(error)  # type: ignore[arg-type]


class CallQueue:
    """The calls of one group, one at a time and in order.

    A call that the caller waits for runs on the caller's own thread where none is under way; others run on a thread of
    their own, so that the caller can compute meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._turn = threading.Lock()
        self._count = threading.Lock()
        self._pending = 0
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], SharedWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

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
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()
            self._calls.put((call, work))
        if not is_async:
            work.wait()
        return work

    def close(self) -> None:
        """Let the thread end after the calls that it has."""
        self._calls.put(None)

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        while (item := self._calls.get()) is not None:
            call, work = item
            error: BaseException | None = None
            with self._turn:
                try:
                    call()
                except BaseException as raised:
                    error = raised
                with self._count:
                    self._pending -= 1
            del call, item  # they hold the caller's tensors
            with contextlib.suppress(Exception):  # a future's callbacks are the caller's business
                work.finish(error)
            del work
