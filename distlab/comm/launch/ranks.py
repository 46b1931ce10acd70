"""Run functions on several ranks: real processes on this machine, each with its part of one process group.

    def hello():
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    run(hello, 4)  # [4.0, 4.0, 4.0, 4.0]

It works the same from a script, a test, `python -c` and a notebook's cell. The function travels by value
(cloudpickle), so ranks never import the caller's script, and no `if __name__ == "__main__"` is needed. `Ranks` stay
alive between calls, so that models, groups and data stay where they are.

The way of a call: `run` -> `Ranks` (deadlines, root cause) -> `Pool` (the processes) -> `forkserver` (starts and guards
them) -> `worker` (inside a rank).
"""

from __future__ import annotations

import contextlib
import pickle
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from distlab.comm.checks import check_backend, check_timeout, check_world_size
from distlab.comm.launch import worker
from distlab.comm.launch.failures import Failure, RankError, RankTimeout, error_of, standing, timeout_of
from distlab.comm.launch.fork_client import fork_server
from distlab.comm.launch.messages import Settings, pack_call, rank_file
from distlab.comm.launch.pool import Echo, Pool, show
from distlab.comm.nodes import Nodes
from distlab.comm.plain import unpack
from distlab.comm.record.read import Records, read_records
from distlab.comm.watch.watchdog import Watchdog, describe, is_settled

POLL_S = 0.2
GRACE_S = 0.3  # how long the others may still report after a rank failed with a cause of its own
NOISE_GRACE_S = 2.0  # how long to look for the cause when ranks report only that a different one has gone
SAID = 3  # exit status of a rank that has said all there is to say: a wrong result, told in its own words
_HUNG = "raised RankTimeout: "


class ScriptRefused(ValueError):
    """What a script was asked for cannot be: one line is enough."""


class Watching(TypedDict, total=False):
    """Whether `run` records what ranks call, and shows what they print; see there."""

    record: bool
    echo: bool


def run(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 60.0,
    backend: str | None = None,
    nodes: Nodes | int = 1,
    **watching: Unpack[Watching],
) -> list[Any]:
    """Call fn(*args) on world_size new ranks and return their results in the order of ranks.

    torch.distributed is initialised when fn starts. What ranks print is shown as it comes, each line after `[rank r]`.

    Args:
        fn: the function; it may come from a notebook's cell or be a lambda.
        world_size: number of ranks.
        args: its arguments, the same on every rank.
        timeout_s: how long the call may take.
        backend: "shared" (ranks meet in shared memory: one Linux host, CPU tensors), "gloo", "nccl", or "cpu": shared
            where that works, else gloo. None: nccl when each rank has its own GPU; gloo when ranks share one; else
            "cpu".
        nodes: how many nodes the ranks make, or `Nodes(2, between="40MB/s,200us")`. What leaves a node
            takes the time of a wire of that speed, else of 1 GB/s and 50 us.
        watching: `record` (True): whether calls of torch.distributed are recorded, so that a hang is explained in words
            and ended early; `echo` (True): whether what ranks print is shown.

    Raises:
        ValueError: an argument cannot be, or something cannot be sent to the ranks; nothing was started.
        RankError: a rank raised, exited or was killed; the root cause comes first.
        RankTimeout: the call took longer than timeout_s; the text says where each rank stands.
    """
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ValueError(f"args is {args!r}; pass a tuple, such as args=(1, 2)")
    with Ranks(world_size, timeout_s=timeout_s, backend=backend, nodes=nodes, **watching) as ranks:
        return ranks.run(fn, *args)


def warm() -> None:
    """Start loading torch for the ranks in the background, so that the first call need not wait for it."""
    fork_server()


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
        echo: whether what ranks print is shown, each line after `[rank r]`; or what to call with (rank, line).
        plain: whether results of `run` come back as `distlab.comm.plain` data, for functions that are not trusted.
        joined: whether the ranks are in a process group; else a script that they run makes its own.

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
        echo: bool | Echo = True,
        plain: bool = False,
        joined: bool = True,
    ) -> None:
        self.world_size, self.timeout_s = check_world_size(world_size), check_timeout(timeout_s)
        self.nodes = Nodes.for_ranks(nodes, self.world_size)
        self.backend = check_backend(backend, self.world_size, self.nodes.count)
        self.record, self.plain, self.joined = record, plain, joined
        self._echo = echo if callable(echo) else show if echo else None
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
        return self._do(fn, args, range(self.world_size))

    def _read(self, rank: int, result: bytes) -> Any:
        try:
            return unpack(result) if self.plain else pickle.loads(result)
        except Exception as error:  # whatever unpickling an object of the rank's raises
            what = f"{type(error).__name__}: {error}; return plain values or tensors"
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
        call = (source, name or f"<ranks {self._num_sources}>")
        return self._do(worker.execute, call, chosen, keeps=True)

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
        return () if self._pool is None else tuple(process.output.num_bytes for process in self._pool.ranks)

    def interrupt(self) -> None:
        """Stop the call that is running (from a different thread); it raises RankError and the processes are gone."""
        self._interrupted.set()

    def close(self) -> None:
        """End the ranks, whatever they do, and wait until they are gone."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, fn: Callable[..., Any], args: Sequence[Any], ranks: Sequence[int], keeps: bool = False) -> list[Any]:
        """Let some ranks make a call and wait for every reply; on a failure end them all, unless they can go on."""
        call = pack_call(fn, args)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("these ranks are busy with a different call; make a second Ranks to run two at once")
        try:
            self._interrupted.clear()
            self._failed_records = None
            deadline = time.monotonic() + self.timeout_s
            if self._pool is None:
                wait_s = 2 * self.timeout_s + 30
                settings = (self.world_size, self.backend, wait_s, self.record, self.plain, self.nodes, self.joined)
                self._pool = Pool(Settings(*settings), self._echo)
            this_round = _Round(self._pool, ranks, deadline, self)
            try:
                self._pool.send(call, ranks)
                results = this_round.results()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    error.add_note("\n".join(this_round.standing()).lstrip("\n"))
                if self.record:
                    with contextlib.suppress(Exception):  # a failure is being reported already
                        self._failed_records = read_records(self._pool.folder)
                if not keeps or not this_round.can_go_on(self._failed_records):
                    self._end()
                raise
        finally:
            self._lock.release()
        return [self._read(rank, result) for rank, result in zip(ranks, results, strict=True)]


class _Round:
    """One call on its way: what has come back, what failed, and when to give up."""

    def __init__(self, pool: Pool, ranks: Sequence[int], deadline: float, owner: Ranks) -> None:
        self.pool, self.ranks, self.deadline, self.owner = pool, ranks, deadline, owner
        self.waiting = set(ranks)
        self.replies: dict[int, bytes] = {}
        self.failures: list[Failure] = []
        self.gone = False  # whether a process has ended
        self.asked: set[int] = set()  # ranks that had not come back when they were asked where they stand
        self.watchdog = Watchdog(pool.folder, owner.world_size, since_ns=time.monotonic_ns()) if owner.record else None

    def results(self) -> list[bytes]:
        """Wait for every reply; return the results, or raise the error that explains what happened."""
        next_check = time.monotonic() + POLL_S
        while self.waiting:
            now, limit = time.monotonic(), self._give_up_at()
            self._take(max(0.0, min(limit, next_check) - now))
            if now >= limit:
                break
            if time.monotonic() >= next_check:
                next_check += POLL_S
                self._check()
        self.failures += filter(None, (self.pool.told(rank, time.monotonic_ns()) for rank in self.waiting))
        self.waiting -= {failure.rank for failure in self.failures}
        stacks = self._stacks()
        if self.failures:
            if self.watchdog is not None and all(failure.is_noise for failure in self.failures):
                before_ns = min(failure.time_ns for failure in self.failures)
                self.failures += [Failure(r, what, "", False, before_ns) for r, what in self.watchdog.left().items()]
            explanation = "\n".join(self._recorded(lambda dog: [dog.mismatch() or dog.check(self.replies) or ""]))
            raise error_of(self.failures, stacks, sorted(self.replies), self.owner.world_size, explanation)
        if self.waiting:
            raise timeout_of(stacks, self.owner.timeout_s, self.owner.world_size, self._words())
        if (dog := self.watchdog) is not None:
            is_over = len(self.ranks) == self.owner.world_size  # after a job of some ranks others may yet make a group
            if wrong := dog.mismatch() or dog.groups(is_over=is_over):
                raise RankError(wrong)  # every rank returned, with numbers that are wrong
        return [self.replies[rank] for rank in self.ranks]

    def can_go_on(self, records: Records | None) -> bool:
        """Tell whether every rank is back, by its own doing, and nothing between them is half said."""
        if self.waiting or self.gone or records is None or not self.failures:
            return False
        if any(failure.is_noise or "has not been initialized" in failure.summary for failure in self.failures):
            return False
        return is_settled(records, self.ranks)

    def _give_up_at(self) -> float:
        """When to stop waiting: at the deadline, or a grace after a failure, short where it has a cause of its own."""
        if not self.failures:
            return self.deadline
        return min(one.time_ns / 1e9 + (NOISE_GRACE_S if one.is_noise else GRACE_S) for one in self.failures)

    def _take(self, timeout_s: float) -> None:
        for rank, failure, is_gone in self.pool.poll(timeout_s):
            self.gone |= is_gone
            if failure is None and rank in self.asked:
                continue
            if failure is None:
                self.replies[rank] = rank_file(self.pool.folder, rank, "result").read_bytes()
            elif rank in self.waiting or all(one.rank != rank for one in self.failures):
                self.failures.append(self.pool.told(rank, failure.time_ns) or failure)
            self.waiting.discard(rank)

    def _check(self) -> None:
        """Ask whether the call was interrupted, and whether the recorded calls can never end."""
        if self.owner._interrupted.is_set():
            raise RankError("\n".join(["the call was interrupted", *self.standing()]))
        if self.watchdog is None or self.failures:
            return
        idle = set(range(self.owner.world_size)) - set(self.ranks)  # no job, so no other rank may wait for them
        if (message := self.watchdog.check(idle | set(self.replies))) is not None:
            left = self.watchdog.left()
            heads = [f"rank {rank} of {self.owner.world_size} {what}\n" for rank, what in left.items()]
            raise RankError("\n".join([*heads, message, *standing(self._stacks(), ())]), next(iter(left), None))

    def standing(self) -> list[str]:
        """Lines that say where each unfinished rank stands."""
        return standing(self._stacks(), self._words())

    def _words(self) -> list[str]:
        return self._recorded(lambda _: describe(read_records(self.pool.folder), self.owner.world_size))

    def _recorded(self, words: Callable[[Watchdog], list[str]]) -> list[str]:
        """What the recorded calls add to a failure: a mismatch often shows first as an error in C++."""
        try:
            return [] if self.watchdog is None else words(self.watchdog)
        except Exception as error:  # the failure that is being told must not be lost
            return [f"(the recorded calls could not be read: {error})"]

    def _stacks(self) -> dict[int, str]:
        """Return where each rank stands from which nothing has come; what it returns from now on does not count."""
        if not self.waiting:
            return {}
        self._take(0.0)
        self.asked = set(self.waiting)  # the signal for a stack may end what hung
        stacks = self.pool.stacks(sorted(self.asked))
        self._take(0.0)  # failures that came meanwhile
        return {rank: stack for rank, stack in stacks.items() if rank in self.waiting}


def run_script(
    script: str | Path,
    num_ranks: int,
    arguments: Sequence[str] = (),
    *,
    echo: Callable[[int, str], None],
    limit_s: float = 600.0,
) -> int:
    """Run a script on ranks of this machine and return 0, or 1 when its ranks said themselves what is wrong.

    It is what torchrun does, on ranks that are forked with torch loaded: each finds the variables that torchrun would
    set, makes its own process group, and tells its launcher what went wrong as it would tell torchrun.

    Args:
        script: the Python file.
        num_ranks: how many processes run it.
        arguments: its own arguments.
        echo: called with (rank, line) for each line of output, in this thread.
        limit_s: after this everything is killed.

    Raises:
        RankError: a rank failed; the text begins with the root cause.
        RankTimeout: the script did not end in time.
        ValueError: the script does not exist, or an argument cannot be; or the ranks refused theirs.
    """
    if not Path(script).is_file():
        raise ValueError(f"there is no script {script}; pass the path of a Python file")
    try:
        with Ranks(num_ranks, timeout_s=limit_s, record=False, echo=echo, joined=False) as ranks:
            return int(SAID in ranks.run(_run_here, str(script), [*arguments]))
    except RankError as error:
        refused = f"raised {ScriptRefused.__name__}: "
        if error.failures and error.failures[0].summary.startswith(refused):
            raise ValueError(error.failures[0].summary.removeprefix(refused)) from None
        hung = {one.rank: one for one in error.failures if one.summary.startswith(_HUNG)}
        if not hung or any(one.rank not in hung and not one.is_noise for one in error.failures):
            raise
        words = next(iter(hung.values())).summary.removeprefix(_HUNG).strip() or "the ranks hang"
        stacks = {rank: one.traceback for rank, one in hung.items()}
        raise RankTimeout("\n".join([words, *standing(stacks, [])]), None, error.failures) from None


def _run_here(script: str, arguments: list[str]) -> int:
    """Run the script in this rank; return its exit status where it said all there is to say."""
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0, SAID):
            raise
        return int(left.code or 0)
    return 0
