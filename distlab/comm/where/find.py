"""Find the ranks of jobs among this user's processes (Linux): what `distlab where` looks at.

A rank of `run`, of `Ranks` or of a notebook holds the file of its stacks open, in the folder of its job. Any other rank
has RANK and WORLD_SIZE in its environment, as torchrun, Slurm's scripts and people set them. One that a process which
stands by has forked has that one's environment; memory that it holds open for its stacks is named after its rank.
Ranks hold their records open too: /proc leads to them, also where the files have no names any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_HELD = re.compile(r"^(?:/memfd:distlab-|(/.*)/)rank(\d+)\.(stack|rec|names)(?: \(deleted\))?$")
_ELASTIC = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")


class JobRank(NamedTuple):
    """A process that is a rank.

    Attributes:
        rank: its rank.
        pid: its process number.
        is_stopped: whether a signal has stopped it.
        stack: where it writes its stacks when it is asked (`stacks`), or None.
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
