"""Where processes stand: their frames, read from outside by py-spy, or written by a rank that is asked.

py-spy reads the memory of a process that goes on meanwhile; it works for any Python program. Where it is missing or may
not read, ranks of distlab answer a signal (faulthandler). That handler is C: it answers also while the rank waits in C
or holds the interpreter lock. The signal is one that programs do not use for themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.where.find import JobRank
from distlab.comm.where.frames import Frame, threads_in

SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR1)  # macOS has no SIGRTMIN
SILENT = "it does not answer: it is starting, it is stopped by a signal, or it gets no time to run"


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


WAIT_S = 1.0
_WHOLE = b" in <module>\n", b"in _bootstrap\n"  # ends stacks: the main thread comes last, its outermost call too
_TRIES = 5  # a process that runs changes its frames while they are read


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
    if (spy := find_py_spy()) is None:
        stack = RankStack((), "py-spy is not installed: pip install 'distlab[labs]'")
    else:
        stack = _spied(spy, process.pid)
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


def _spied(spy: str, pid: int) -> RankStack:
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
