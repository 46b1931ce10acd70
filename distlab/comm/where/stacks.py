"""Find the ranks of this user's jobs (Linux), and say where each stands: what `distlab where` looks at.

A rank of `run`, of `Ranks` or of a notebook holds the file of its stacks open, in the folder of its job. Any other rank
has RANK and WORLD_SIZE in its environment, as torchrun, Slurm's scripts and people set them. One that a process which
stands by has forked has that one's environment; memory that it holds open for its stacks is named after its rank.
Ranks hold their records open too: /proc leads to them, also where the files have no names any more.

Frames are read from outside by py-spy: it reads the memory of a process that goes on meanwhile, of any Python program.
Where it is missing or may not read, ranks of distlab answer a signal (faulthandler). That handler is C: it answers also
while the rank waits in C or holds the interpreter lock. The signal is one that programs do not use for themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.where.frames import Frame, threads_in

SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR1)  # macOS has no SIGRTMIN
SILENT = "it does not answer: it is starting, it is stopped by a signal, or it gets no time to run"
WAIT_S = 1.0
_WHOLE = b" in <module>\n", b"in _bootstrap\n"  # ends stacks: the main thread comes last, its outermost call too
_TRIES = 5  # a process that runs changes its frames while they are read
_HELD = re.compile(r"^(?:/memfd:distlab-|(/.*)/)rank(\d+)\.(stack|rec|names)(?: \(deleted\))?$")
_ELASTIC = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")


class JobRank(NamedTuple):
    """A process that is a rank.

    Attributes:
        rank: its rank.
        pid: its process number.
        is_stopped: whether a signal has stopped it.
        stack: where it writes its stacks when it is asked (`ask`), or None.
        record: the files of its calls and of their texts, or None.
        environment: what it was started with.
    """

    rank: int
    pid: int
    is_stopped: bool
    stack: Path | None
    record: tuple[Path, Path] | None
    environment: Mapping[str, str]


class RunningJob(NamedTuple):
    """The ranks of one job on this machine.

    Attributes:
        launcher: process number and command of what started it, in words.
        world_size: how many ranks it has, also on other machines.
        ranks: its processes here, ascending.
        processes: process numbers of all that belong to it, and of all that its ranks come from.
    """

    launcher: str
    world_size: int
    ranks: tuple[JobRank, ...]
    processes: frozenset[int]


def find_jobs(pid: int | None = None) -> list[RunningJob]:
    """Return the jobs of this user on this machine, or the one that a process belongs to or has started.

    Raises:
        ValueError: there is no such process, or it has no ranks; or this is no Linux.
    """
    if sys.platform != "linux":
        raise ValueError("where reads /proc, which Linux alone has; on this system use py-spy on each rank")
    jobs = list(_jobs())
    if pid is None:
        return jobs
    if not Path(f"/proc/{pid}").exists():
        raise ValueError(f"there is no process {pid}; pass the number of a launcher or of a rank, or none for all jobs")
    found = [job for job in jobs if pid in job.processes]
    if not found:
        raise ValueError(
            f"process {pid} is not a rank of yours and has started none: a rank has RANK and WORLD_SIZE in its "
            "environment, or comes from distlab's run; call where without a number to see all jobs"
        )
    return found


def _jobs() -> Iterator[RunningJob]:
    import psutil

    me = psutil.Process()
    others = {me.pid, *(one.pid for one in me.parents())}
    found: dict[tuple[str, ...], dict[int, list[tuple[JobRank, int, Any]]]] = {}
    for process in psutil.process_iter():
        # It has ended, or belongs to somebody else.
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if process.pid not in others and (read := _read(process)) is not None:
                name, size, rank = read
                found.setdefault(name, {}).setdefault(rank.rank, []).append((rank, size, process))
    for by_rank in found.values():
        # What a rank has started, such as a loader's workers, inherits all of this: the first of the line is the rank.
        # What asked for a rank that was forked came before it, and shows no stacks.
        ordered = [
            sorted(same, key=lambda one: (one[0].stack is None, one[2].create_time(), one[0].pid))
            for _, same in sorted(by_rank.items())
        ]
        parents: list[Any] = []
        for _, _, process in (one for same in ordered for one in same):
            with contextlib.suppress(psutil.Error):
                parents += [one for one in process.parents() if one.pid > 1]
        own = {rank.pid for same in ordered for rank, _, _ in same}
        ranks, size = tuple(same[0][0] for same in ordered), max(same[0][1] for same in ordered)
        launchers = filter(None, (_words(one) for one in parents if one.pid not in own))
        launcher = next(launchers, "a process that has ended")
        yield RunningJob(launcher, size, ranks, frozenset(own | {one.pid for one in parents}))


def _read(process: Any) -> tuple[tuple[str, ...], int, JobRank] | None:
    """Return a process's job, its number of ranks and its place in it; None where it is not a rank."""
    is_python = "python" in " ".join([*process.cmdline(), process.exe()]).lower()
    if process.uids().effective != os.geteuid() or not is_python:
        return None
    environment, state = process.environ(), process.status()
    stacks, records = _held(Path(f"/proc/{process.pid}/fd"))
    stack, folder, rank = stacks[-1] if stacks else (None, None, int(environment.get("RANK", "-1")))
    if state == "zombie" or rank < 0 or (folder is None and "WORLD_SIZE" not in environment):
        return None
    found = JobRank(rank, process.pid, "stop" in state, stack, records.get(rank), environment)
    if folder is not None:
        return (folder,), len(list(Path(folder).glob("rank*.stack"))), found
    return tuple(environment.get(part, "") for part in _ELASTIC), int(environment["WORLD_SIZE"]), found


def _held(links: Path) -> tuple[list[tuple[Path, str | None, int]], dict[int, tuple[Path, Path]]]:
    """Return the files that a process holds open: of stacks, with folder (None: memory) and rank; of records, by rank.

    Where it has several records of one rank, the first that it opened counts.
    """
    stacks, parts = [], dict[tuple[str, int], dict[str, Path]]()
    for link in sorted(links.iterdir(), key=lambda link: int(link.name)):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found = _HELD.match(os.readlink(link))
            if found is None:
                continue
            folder, rank, kind = found[1], int(found[2]), found[3]
            if kind == "stack":
                stacks.append((link, folder, rank))
            else:
                parts.setdefault((folder, rank), {})[kind] = link
    whole = [(rank, (two["rec"], two["names"])) for (_, rank), two in parts.items() if len(two) == 2]
    return stacks, dict(reversed(whole))


def _words(process: Any) -> str:
    """Return a launcher's command and process number; "" for a process of `run`, or one that has ended."""
    try:
        text = " ".join(" ".join(process.cmdline()).split())
    except Exception:  # whatever psutil says of a process that has just ended
        return ""
    short = text if len(text) <= 80 else text[:77] + "..."
    return "" if "distlab.comm.launch" in text else f"{short} (process {process.pid})"


@contextlib.contextmanager
def answering(rank: int) -> Iterator[None]:
    """Answer the questions of `distlab where` while the block runs, in memory that no file names.

    Nobody can ask where the program uses the signal itself, or the system has no such memory.
    """
    if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN) or not hasattr(os, "memfd_create"):
        yield
        return
    faulthandler.register(SIGNAL, 2)  # who sees the file may send the signal, which must not end the rank
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
        while time.monotonic() < deadline and not all(said[rank].endswith(_WHOLE) for rank in opened):
            time.sleep(0.01)
            for rank, file in opened.items():
                said[rank] += file.read()
    return {rank: text.decode(errors="replace") for rank, text in said.items()}


class RankStack(NamedTuple):
    """Where a process stands: the frames of its main thread, innermost first; or, in words, why they are not known."""

    frames: tuple[Frame, ...]
    why: str = ""


def stacks_of(processes: Sequence[JobRank]) -> dict[int, RankStack]:
    """Return where each process stands, by rank; takes a second or so, whatever the ranks do."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(_stack_of, processes)
    return {process.rank: stack for process, stack in zip(processes, found, strict=True)}


def _stack_of(process: JobRank) -> RankStack:
    stack = _spied(process.pid)
    if stack.frames or process.stack is None:
        return stack
    text = ""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        text = ask({0: process.stack}, lambda ranks: os.kill(process.pid, SIGNAL) if ranks else None, WAIT_S)[0]
    frames = tuple(threads_in(text)[-1][1])
    return RankStack(frames, "" if frames else SILENT)


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _spied(pid: int) -> RankStack:
    if (spy := find_py_spy()) is None:
        return RankStack((), "py-spy is not installed: pip install 'distlab[labs]'")
    command = [spy, "dump", "--pid", str(pid), "--nonblocking", "--json"]
    why = ""
    for _ in range(_TRIES):
        try:
            done = subprocess.run(command, capture_output=True, timeout=10 * WAIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return RankStack((), f"py-spy: {error}")
        if done.returncode == 0:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                threads: list[dict[str, Any]] = json.loads(done.stdout)
                own = [one for one in threads if one.get("os_thread_id") == pid] or threads[:1]
                read = [(one["filename"], one["line"], one["name"]) for thread in own for one in thread["frames"]]
                if read:
                    return RankStack(tuple(Frame(f, int(line), name.rpartition(".")[2]) for f, line, name in read))
                why = "no thread of it runs Python: it starts, or it ends"
        else:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            why = f"py-spy cannot read it ({' '.join(line.strip() for line in lines[:2])})"
        time.sleep(0.02)
    return RankStack((), why or "py-spy cannot read it (its frames change too fast)")
