"""Ranks that stay alive between calls, so that models, groups and data stay where they are."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from distlab.comm.checks import check_backend, check_timeout, check_world_size
from distlab.comm.launch import failures
from distlab.comm.launch.failures import Failure, RankError, error_of, noting_interrupt, standing, timeout_of
from distlab.comm.launch.messages import pack_call
from distlab.comm.launch.pool import Pool
from distlab.comm.plain import unpack
from distlab.comm.record.read import Records, read_records
from distlab.comm.watch.waits import describe, is_settled
from distlab.comm.watch.watchdog import Watchdog
from distlab.nodes import Nodes

POLL_S = 0.2
GRACE_S = 0.3  # how long the others may still report after a rank failed with a cause of its own
NOISE_GRACE_S = 2.0  # how long to look for the cause when ranks report only that another one has gone


class Ranks:
    """A number of real processes joined in one process group; a context manager.

    `run` calls a function on every rank at once. After a failure every process is gone and the next `run` starts fresh
    ones; `execute` keeps them where each rank ended by itself and nothing between them was left half said. Nothing
    outlives the program that made them.

    Args:
        world_size: number of ranks.
        timeout_s: how long one call may take.
        backend: "shared", "gloo", "nccl", "cpu", or None to choose; see `run`.
        nodes: how many nodes the ranks make, or `Nodes(2, between="40MB/s,200us")`; see `run`.
        record: whether calls of torch.distributed are recorded, for `records()` and to explain a hang.
        echo: whether what ranks print is shown, each line after `[rank r]`.
        plain: whether results of `run` come back as `distlab.comm.plain` data, for functions that are not trusted.

    Raises:
        ValueError: the world size, the timeout or the backend cannot be.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = 60.0,
        backend: str | None = None,
        nodes: Nodes | int = 1,
        record: bool = True,
        echo: bool = True,
        plain: bool = False,
    ) -> None:
        self.world_size, self.timeout_s = check_world_size(world_size), check_timeout(timeout_s)
        self.nodes = Nodes.for_ranks(nodes, self.world_size)
        self.backend = check_backend(backend, self.world_size, self.nodes.count)
        self.record, self.echo, self.plain = record, echo, plain
        self._pool: Pool | None = None
        self._failed_records: Records | None = None
        self._num_sources = 0
        self._interrupted, self._lock = threading.Event(), threading.Lock()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call fn(*args) on every rank and return the results in the order of ranks.

        Raises:
            ValueError: fn is not callable, or it or an argument cannot be sent to the ranks.
            RankError: a rank raised, exited or was killed; the root cause comes first.
            RankTimeout: the call took longer than timeout_s; the text says where each rank stands.
        """
        if not callable(fn):
            raise ValueError(f"fn is {fn!r}; pass a function that each rank calls, such as run(train, 4), not train()")
        results = self._do("call", pack_call(fn, args), range(self.world_size))
        return [self._read(rank, result) for rank, result in enumerate(results)]

    def _read(self, rank: int, result: bytes) -> Any:
        """Return a result of a rank."""
        try:
            return unpack(result) if self.plain else pickle.loads(result)
        except Exception as error:  # whatever unpickling an object of the rank's raises
            what = f"{type(error).__name__}: {failures.text_of(error)}; return plain values or tensors"
            raise RankError(f"rank {rank} of {self.world_size} returned what cannot be read: {what}", rank) from error

    def execute(self, source: str, ranks: Sequence[int] | None = None, *, name: str | None = None) -> list[str | None]:
        """Execute source text in each rank's namespace, which keeps its variables from call to call.

        The namespace begins with rank, world_size, torch and dist. Returns the repr of a final expression on each rank,
        or None where there is none. `name` stands for a file's name in tracebacks.

        Raises:
            ValueError: a rank does not exist.
            RankError: as `run`.
        """
        chosen = list(range(self.world_size)) if ranks is None else list(ranks)
        if wrong := [rank for rank in chosen if rank not in range(self.world_size)]:
            raise ValueError(f"there is no rank {wrong[0]}: ranks are 0 to {self.world_size - 1}")
        self._num_sources += 1
        body = pickle.dumps((source, name or f"<ranks {self._num_sources}>"))
        return [pickle.loads(result) for result in self._do("source", body, chosen)]

    def records(self) -> Records:
        """Return what the ranks' calls of torch.distributed were in the last run, also after a failure.

        Raises:
            RuntimeError: nothing has been run, or record is False.
        """
        if self._pool is not None and self.record:
            return read_records(self._pool.folder)
        if self._failed_records is not None:
            return self._failed_records
        raise RuntimeError("no records: run something first, with record=True, before these ranks are closed")

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers of the ranks that run now."""
        return () if self._pool is None else tuple(p.pid for p in self._pool.ranks if p.pid is not None)

    @property
    def output_bytes(self) -> tuple[int, ...]:
        """Bytes that each of the ranks that run now has printed."""
        pool = self._pool
        return () if pool is None else tuple(process.output.num_bytes for process in pool.ranks)

    def interrupt(self) -> None:
        """Stop the call that is running (from another thread); it raises RankError and the processes are gone."""
        self._interrupted.set()

    def close(self) -> None:
        """End the ranks and wait until they are gone."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
            self._pool = None

    def kill(self) -> None:
        """End the ranks at once, whatever they do, and wait until they are gone."""
        with self._lock:
            if self._pool is not None:
                self._pool.kill()
            self._pool = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._pool is not None:
            self._pool.kill()
        self.close()

    def _do(self, kind: str, data: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Hand one job to the ranks and wait for every reply; on a failure kill them all, unless they can go on."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("these ranks are busy with another call; make a second Ranks to run two at once")
        try:
            self._interrupted.clear()
            self._failed_records = None
            deadline = time.monotonic() + self.timeout_s
            if self._pool is None:
                settings = (2 * self.timeout_s + 30, self.record, self.echo, self.plain, self.nodes)
                self._pool = Pool(self.world_size, self.backend, *settings)
            this_round = _Round(self._pool, ranks, deadline, self)
            try:
                with noting_interrupt(this_round.standing):
                    self._pool.send(kind, data, ranks)
                    return this_round.results()
            except BaseException:
                if self.record:
                    with contextlib.suppress(Exception):  # a failure is being reported already
                        self._failed_records = read_records(self._pool.folder)
                if kind != "source" or not this_round.can_go_on(self._failed_records):
                    self._pool.kill()
                    self._pool = None
                raise
        finally:
            self._lock.release()


class _Round:
    """One job on its way: what has come back, what failed, and when to give up."""

    def __init__(self, pool: Pool, ranks: Sequence[int], deadline: float, owner: Ranks) -> None:
        self.pool, self.ranks, self.deadline, self.owner = pool, ranks, deadline, owner
        self.waiting = set(ranks)
        self.replies: dict[int, bytes] = {}
        self.failures: list[Failure] = []
        self.gone = False  # whether a process has ended
        self.left: set[int] = set()  # ranks that destroyed the process group
        self.has_calls = False  # whether a rank that is back has made a call
        self.watchdog = Watchdog(pool.folder, pool.world_size, since_ns=time.monotonic_ns()) if owner.record else None

    def results(self) -> list[bytes]:
        """Wait for every reply; return the results, or raise the error that explains what happened."""
        next_check = time.monotonic() + POLL_S
        while self.waiting:
            now, limit, num_waiting = time.monotonic(), self._give_up_at(), len(self.waiting)
            self._take(max(0.0, min(limit, next_check) - now))
            if now >= limit and len(self.waiting) == num_waiting:  # nothing lay here, as after a stop of this process
                break
            if time.monotonic() >= next_check:
                next_check += POLL_S
                self._check()
        stacks = self._stacks()
        if self.waiting:
            self._take(0.0, hung=stacks.keys())  # what came meanwhile; the signal for a stack may end what hung
            stacks = {rank: stack for rank, stack in stacks.items() if rank in self.waiting}
        if self.failures:
            self._blame_who_left()
            explanation = self._explanation()
            raise error_of(self.failures, stacks, sorted(self.replies), self.pool.world_size, explanation)
        if self.waiting:
            raise timeout_of(stacks, self.owner.timeout_s, self.pool.world_size, self._words())
        if (dog := self.watchdog) is not None and self.has_calls:
            is_over = len(self.ranks) == self.pool.world_size  # after a job of some ranks others may yet make a group
            if wrong := dog.mismatch() or dog.groups(is_over=is_over):
                raise RankError(wrong)  # every rank returned, with numbers that are wrong
        return [self.replies[rank] for rank in self.ranks]

    def _blame_who_left(self) -> None:
        """Put a rank that left a group first, where the others saw only that it had gone."""
        if all(failure.is_noise for failure in self.failures):
            destroyed = {} if self.watchdog is None else self.watchdog.left()
            self.failures += failures.who_left(self.left, destroyed, min(failure.time_ns for failure in self.failures))

    def can_go_on(self, records: Records | None) -> bool:
        """Tell whether every rank is back, by its own doing, and nothing between them is half said."""
        if self.waiting or self.gone or records is None or not self.failures:
            return False
        if any(failure.is_noise or "has not been initialized" in failure.summary for failure in self.failures):
            return False
        return is_settled(records, self.ranks)

    def _give_up_at(self) -> float:
        """When to stop waiting: at the deadline, or a short grace after the first failure with a cause of its own."""
        if not self.failures:
            return self.deadline
        causes = [failure.time_ns for failure in self.failures if self.left or not failure.is_noise]
        if causes:
            return min(causes) / 1e9 + GRACE_S
        return min(failure.time_ns for failure in self.failures) / 1e9 + NOISE_GRACE_S

    def _take(self, timeout_s: float, hung: Collection[int] = ()) -> None:
        for rank, reply in self.pool.poll(timeout_s):
            if reply is not None:
                self.has_calls |= reply.made_calls
                self.left |= {rank} if reply.left_group else set()
            if reply is None:
                if rank in self.waiting or not any(failure.rank == rank for failure in self.failures):
                    self.failures.append(self.pool.failure_of_exit(rank))
                self.waiting.discard(rank)
                self.gone = True
            elif reply.failure is not None:
                self.failures.append(reply.failure)
                self.waiting.discard(rank)
            elif rank in self.waiting and rank not in hung and reply.result is not None:
                self.replies[rank] = reply.result.read()
                self.waiting.discard(rank)

    def _check(self) -> None:
        """Ask whether the call was interrupted, and whether the recorded calls can never end."""
        if self.owner._interrupted.is_set():
            raise RankError("\n".join(["the call was interrupted", *self.standing()]))
        if self.watchdog is None or self.failures:
            return
        idle = set(range(self.pool.world_size)) - set(self.ranks)  # no job, so no other rank may wait for them
        if (message := self.watchdog.check(idle | set(self.replies))) is not None:
            heads = [f"rank {rank} of {self.pool.world_size} {failures.LEFT}\n" for rank in sorted(self.left)]
            blamed = min(self.left, default=None)
            raise RankError("\n".join([*heads, message, *standing(self._stacks(), ())]), blamed)

    def _explanation(self) -> str:
        """What the recorded calls add to a failure: a mismatch often shows first as an error in C++."""
        try:
            if self.watchdog is None:
                return ""
            return self.watchdog.mismatch() or self.watchdog.check(self.replies) or ""
        except Exception as error:  # the failure itself matters more
            return f"(the recorded calls could not be read: {error})"

    def standing(self) -> list[str]:
        """Lines that say where each unfinished rank stands."""
        return standing(self._stacks(), self._words())

    def _words(self) -> list[str]:
        """Who waits for whom, from the recorded calls."""
        if self.watchdog is None:
            return []
        try:
            return describe(read_records(self.pool.folder), self.pool.world_size)
        except Exception as error:
            return [f"(the recorded calls could not be read: {error})"]

    def _stacks(self) -> dict[int, str]:
        return self.pool.stacks(sorted(self.waiting)) if self.waiting else {}
