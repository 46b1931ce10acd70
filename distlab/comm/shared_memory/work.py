"""What a call returns; and the thread of a group that runs, in their order, the calls that no rank waits for."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame
from torch.futures import Future

Tensors = list[torch.Tensor]
KEPT_BYTES = 64  # of results may outlive the work, as the one number of which DDP asks its join
_Function = TypeVar("_Function", bound=Callable[..., Any])


class End:
    """Whether and how a call has ended. It holds none of the call's tensors, whose memory is the caller's to free.

    Attributes:
        event: ends an event of torch's profiler with the call (`forms.event_of`).
    """

    event: Future[None] | None = None

    def __init__(self) -> None:
        self.is_over, self.error = False, cast("BaseException | None", None)
        self._latch = threading.Lock()
        self._latch.acquire()

    def come(self, error: BaseException | None = None) -> None:
        """Say that the call is over, with its error if it failed."""
        self.error, self.is_over = error, True
        if self.event is not None:
            self.event.set_result(None)
        self._latch.release()

    def stand(self, limit_s: float) -> bool:
        """Stand still until the call is over, or for a limit above 0; return whether it is over."""
        if self._latch.acquire(timeout=limit_s if limit_s > 0 else -1):
            self._latch.release()  # for whoever else waits
        return self.is_over


class SharedWork(dist.Work):
    """A call that is over, or under way on a different thread.

    Attributes:
        end: whether and how the call has ended.
        source: which rank of the group a message came from.
        until_s: the moment, on the monotonic clock, before which the call is not over; 0: there is none.
    """

    source, until_s = -1, 0.0

    def __init__(self, results: Tensors) -> None:
        super().__init__()
        self.end = End()
        self._results = results
        self._future: Future[Tensors] | None = None

    def __del__(self) -> None:
        """Live on for a while: torch's C++ may hold its half alone, wait for it and ask for its tensors."""
        end, until_s, results = self.end, self.until_s, self._results
        if sum(tensor.nbytes for tensor in results) > KEPT_BYTES:
            results = []
        vars(self).clear()
        self.end, self.until_s, self._results, self._future = end, until_s, results, None
        _LET_GO.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over; raise what it raised.

        Raises:
            RuntimeError: it is not over in time.
        """
        error = self._outcome(0.0 if timeout is None else timeout.total_seconds())
        if error is not None:
            raise error
        return True

    def _outcome(self, limit_s: float = 0.0) -> BaseException | None:
        """Wait until the call is over, or for a limit above 0; return what it raised."""
        if not (self.end.is_over or self._stand(limit_s)):
            return RuntimeError(f"Timed out waiting {limit_s * 1000:.0f} ms for a call of backend 'shared'")
        if self.until_s and (left_s := self.until_s - time.monotonic()) > 0:
            time.sleep(left_s)
        return self.end.error

    def _stand(self, limit_s: float) -> bool:
        return self.end.stand(limit_s)

    def is_completed(self) -> bool:
        """Whether the call is over."""
        return self.end.is_over and time.monotonic() >= self.until_s

    def is_success(self) -> bool:
        """Whether the call is over and raised nothing."""
        return self.is_completed() and self.end.error is None

    def exception(self) -> BaseException | None:
        """What the call raised."""
        return self.end.error

    def result(self) -> Tensors:
        """The tensors that the call writes."""
        return self._results

    def synchronize(self) -> None:
        """Wait: there is no stream on a CPU."""
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> Future[Tensors]:
        """A future of the tensors that the call writes.

        A thread of its own settles it, so what is done then may wait for later calls, as some of torch's hooks do.
        """
        if self._future is None:
            self._future = Future()
            if self.is_completed():
                self._settle(self._future)
            else:
                start_thread(functools.partial(self._settle, self._future), "shared-future")
        return self._future

    def _settle(self, future: Future[Tensors]) -> None:
        error = self._outcome()
        if error is None:
            future.set_result(self._results)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]


def start_thread(do: Callable[[], Any], name: str) -> threading.Thread:
    """Let a thread of a group do something: no work of the program that called, so nothing is to be differentiated."""
    thread = threading.Thread(target=torch.no_grad()(do), name=name, daemon=True)
    thread.start()
    return thread


class CallQueue:
    """The calls of one group, one at a time and in order.

    A call that the caller waits for runs on the caller's own thread where none is under way; others run on a thread of
    the group, so that the caller can compute meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._turn, self._count = threading.Lock(), threading.Lock()
        self._pending = 0
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], End] | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def run(self, call: Callable[[], None], results: Tensors, *, is_async: bool) -> SharedWork | None:
        """Do a call, or have it done; whatever it raises here or in its work's `wait` is the call's own.

        Nobody needs a work of a call that is over when this returns: there is none, as torch has it.
        """
        if not is_async and self._turn.acquire(blocking=False):
            try:
                if not self._pending:
                    call()
                    return None
            finally:
                self._turn.release()
        work = SharedWork(results)
        with self._count:
            self._pending += 1
            if not self.threads:
                self.threads.append(start_thread(self._serve, self.name))
            self._calls.put((call, work.end))
        if is_async:
            return work
        work.wait()
        return None

    def close(self) -> None:
        """Let the thread end after the calls that it has."""
        self._calls.put(None)

    def _serve(self) -> None:
        """Make the calls until the queue is closed. Nothing here holds a tensor after a call's end."""
        while (item := self._calls.get()) is not None:
            (call, end), error = item, cast("BaseException | None", None)
            with self._turn:
                try:
                    call()
                except BaseException as raised:
                    error = raised
            with self._count:
                self._pending -= 1
            del call, item
            end.come(error)
            del end, error


# The last works that nobody in Python holds any more. DDP's join drops one for which its reducer waits in C++ later.
_LET_GO: deque[SharedWork] = deque(maxlen=1024)


def keep_untraced(*kinds: type) -> None:
    """Keep torch.compile out of all methods of classes, and of what they call; it costs nothing at a call.

    A graph of a model ends at a call of torch.distributed that it cannot hold. The call then runs as it is. But what
    runs is Python here, C++ in gloo: torch.compile would try to make a graph of that, too, and fail.
    """
    for kind in kinds:
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                untraced(method)


def untraced(function: _Function) -> _Function:
    """Mark a function: torch.compile follows neither it nor what it calls."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
