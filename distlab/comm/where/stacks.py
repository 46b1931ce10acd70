"""Where processes stand: their frames, read from outside by py-spy, or written by a rank that is asked.

py-spy reads the memory of a process that goes on meanwhile; it works for any Python program. Where it is missing or may
not read, ranks of distlab answer a signal (faulthandler).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.where.answer import SIGNAL, SILENT, ask
from distlab.comm.where.find import JobRank
from distlab.comm.where.frames import Frame, threads_in

WAIT_S = 1.0
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
    text = ask({0: process.stack}, lambda ranks: [os.kill(process.pid, SIGNAL) for _ in ranks], WAIT_S)[0]
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
                chosen = next((one for one in threads if one.get("os_thread_id") == pid), threads[0])
                if chosen["frames"]:
                    read = [(one["filename"], one["line"], one["name"]) for one in chosen["frames"]]
                    return RankStack(tuple(Frame(f, int(line), name.rpartition(".")[2]) for f, line, name in read))
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = " ".join(line.strip() for line in lines[:2])
        time.sleep(0.02)
    return RankStack((), f"py-spy cannot read it ({why or 'its frames change too fast'})")
