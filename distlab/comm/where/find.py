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
from typing import NamedTuple

from distlab.comm.where.answer import SIGNAL

PROC = Path("/proc")
_HELD = re.compile(r"^(?:/memfd:distlab-|(/.*)/)rank(\d+)\.(stack|rec|names)(?: \(deleted\))?$")
_ELASTIC = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")


class JobRank(NamedTuple):
    """A process that is a rank.

    Attributes:
        rank: its rank.
        pid: its process number.
        started: when, in the kernel's ticks: a number that is given away again has a later one.
        state: the kernel's letter: R runs, S and D wait, T is stopped, Z has ended.
        stack: where it writes its stacks when it is asked (`answer`), or None.
        record: the files of its calls and of their texts, or None.
        environment: what it was started with.
    """

    rank: int
    pid: int
    started: int
    state: str
    stack: Path | None
    record: tuple[Path, Path] | None
    environment: Mapping[str, str]


class RunningJob(NamedTuple):
    """The ranks of one job on this machine.

    Attributes:
        name: what its ranks have in common.
        launcher: process number and command of what started it, in words.
        world_size: how many ranks it has, also on other machines.
        ranks: its processes here, ascending.
        parents: process numbers of all that its ranks come from.
    """

    name: tuple[str, ...]
    launcher: str
    world_size: int
    ranks: tuple[JobRank, ...]
    parents: frozenset[int]


def find_jobs(pid: int | None = None) -> list[RunningJob]:
    """Return the jobs of this user on this machine, or the one that a process belongs to or has started.

    Raises:
        ValueError: there is no such process, or it has no ranks; or this is no Linux.
    """
    if sys.platform != "linux":
        raise ValueError("where reads /proc, which Linux alone has; on this system use py-spy on each rank")
    jobs = sorted(_jobs(), key=lambda job: job.ranks[0].started)
    if pid is None:
        return jobs
    if not (PROC / str(pid)).exists():
        raise ValueError(f"there is no process {pid}; pass the number of a launcher or of a rank, or none for all jobs")
    found = [job for job in jobs if pid in job.parents or any(rank.pid == pid for rank in job.ranks)]
    if not found:
        raise ValueError(
            f"process {pid} is not a rank of yours and has started none: a rank has RANK and WORLD_SIZE in its "
            "environment, or comes from distlab's run; call where without a number to see all jobs"
        )
    return found


def _jobs() -> Iterator[RunningJob]:
    me = {os.getpid(), *ancestors(os.getpid())}
    found: dict[tuple[str, ...], dict[int, list[tuple[JobRank, int]]]] = {}
    for path in PROC.iterdir():
        if path.name.isdigit() and int(path.name) not in me:
            try:
                read = _read(path)
            except (OSError, ValueError, IndexError):  # it has ended, or belongs to somebody else
                continue
            if read is not None:
                name, size, process = read
                found.setdefault(name, {}).setdefault(process.rank, []).append((process, size))
    for name, by_rank in found.items():
        # What a rank has started, such as a loader's workers, inherits all of this: the first of the line is the rank.
        # What asked for a rank that was forked came before it, and shows no stacks.
        ordered = [
            sorted(same, key=lambda one: (one[0].stack is None, one[0].started, one[0].pid))
            for _, same in sorted(by_rank.items())
        ]
        firsts = [same[0] for same in ordered]
        everyone = [process.pid for same in ordered for process, _ in same]
        lines = [ancestors(pid) for pid in everyone]
        ranks = tuple(process for process, _ in firsts)
        launcher = next(filter(None, (_launcher(line, everyone) for line in lines)), "a process that has ended")
        yield RunningJob(name, launcher, max(size for _, size in firsts), ranks, frozenset().union(*lines))


def _read(path: Path) -> tuple[tuple[str, ...], int, JobRank] | None:
    """Return a process's job, its number of ranks and its place in it; None where it is not a rank."""
    if path.stat().st_uid != os.geteuid():
        return None
    command = (path / "cmdline").read_bytes()
    if b"python" not in command.lower() and "python" not in os.readlink(path / "exe").lower():
        return None
    entries = (path / "environ").read_bytes().decode(errors="replace").split("\0")
    environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    stacks, records = _held(path)
    stack, folder, rank = stacks[-1] if stacks else (None, None, int(environment.get("RANK", "-1")))
    state, _, started = status(int(path.name))
    if state == "Z" or rank < 0 or (folder is None and "WORLD_SIZE" not in environment):
        return None
    process = JobRank(rank, int(path.name), started, state, stack, records.get(rank), environment)
    if folder is not None:
        return (folder,), len(list(Path(folder).glob("rank*.stack"))), process
    return tuple(environment.get(part, "") for part in _ELASTIC), int(environment["WORLD_SIZE"]), process


def _held(path: Path) -> tuple[list[tuple[Path, str | None, int]], dict[int, tuple[Path, Path]]]:
    """Return the files that a process holds open: of stacks, with folder (None: memory) and rank; of records, by rank.

    Where it has several records of one rank, the first that it opened counts.
    """
    stacks, parts = [], dict[tuple[str, int], dict[str, Path]]()
    for link in sorted((path / "fd").iterdir(), key=lambda link: int(link.name)):
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


def status(pid: int) -> tuple[str, int, int]:
    """Return a process's state (one letter), its parent, and when it started.

    Raises:
        OSError: it has ended.
    """
    words = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return words[0], int(words[1]), int(words[19])


def ancestors(pid: int) -> list[int]:
    """Return the process numbers of parent, grandparent and so on; process 1 (init) is left out."""
    line: list[int] = []
    while pid > 1:
        try:
            pid = status(pid)[1]
        except OSError:
            break
        if pid > 1:
            line.append(pid)
    return line


def _launcher(line: list[int], own: list[int]) -> str:
    """Return the command of the first ancestor that is not a process of the job or of `run`; "" where none is left."""
    for pid in line:
        if pid in own:
            continue
        try:
            words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue
        if not any("distlab.comm.launch" in word for word in words):
            text = " ".join(" ".join(words).split())
            return f"{text if len(text) <= 80 else text[:77] + '...'} (process {pid})"
    return ""


def answers(process: JobRank) -> bool:
    """Tell whether the signal makes the process write its stacks: it catches it; else the signal would end it."""
    if process.stack is None:
        return False
    try:
        lines = (PROC / str(process.pid) / "status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        same = status(process.pid)[2] == process.started
    except (OSError, StopIteration):
        return False
    return same and bool(caught >> (SIGNAL - 1) & 1)
