"""One checkpoint that all ranks write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_12.checks.disk import a_folder, a_state, loaded

from distlab.checkpoint.crashes import Crash, crash_points
from distlab.comm import RankError
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Fault, Mutant

FIRST = 40
NAMED, UNNAMED = "when the folder had its name", "when the folder had no name"


def drive_shards(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Save on all ranks, each in turn being slow, over what a save of more ranks left when it was killed."""
    rank, n = dist.get_rank(), dist.get_world_size()
    with a_folder() as name:
        folder, results = _shared(name), []
        for slow in range(n):
            step = FIRST + slow
            if rank == 0:
                (folder / f".step-{step}").mkdir()
                (folder / f".step-{step}" / f"rank-{n}.pt").write_bytes(b"of another save")
            dist.barrier()
            pause_s = 0.05 if rank == slow else 0.0
            shard = a_state(step, rank)
            path = folder / f"step-{step}"
            try:
                crashes = crash_points(lambda: fn(folder, step, shard), folder, alone=False, pause_s=pause_s)  # noqa: B023
            except (OSError, RuntimeError) as error:
                raise RuntimeError(f"{NAMED if path.exists() else UNNAMED}: {error}") from error
            row: dict[str, Any] = {"slow": slow, "is there": path.is_dir()}
            row["torn"] = next(filter(None, (torn(crash, step, n) for crash in crashes)), "")
            dist.all_reduce(torch.zeros(1))  # no barrier: one that the answer makes on some ranks alone is told by it
            row["files"] = sorted(one.name for one in path.glob("*"))
            results.append(row)
            dist.barrier()
        return results


def _shared(name: str) -> Path:
    names = [name]
    dist.broadcast_object_list(names)
    return Path(names[0])


def torn(crash: Crash, step: int, n: int) -> str:
    """Say what is wrong with a checkpoint that is there, or return ""."""
    for name in [f"rank-{rank}.pt" for rank in range(n)] if f"step-{step}" in crash.files else []:
        if f"step-{step}/{name}" not in crash.files:
            return f"step-{step} was there without {name}"
        if loaded(crash.files[f"step-{step}/{name}"]) is None:
            return f"step-{step} was there with a part of {name}"
    return ""


def judge_shards(evidence: Evidence) -> Iterator[Fault]:
    """There all at once, with every rank's shard, before any rank goes on."""
    names = [f"rank-{rank}.pt" for rank in range(evidence.world_size)]

    def look(rank: int, rows: list[dict[str, Any]]) -> Iterator[Fault]:
        for step, row in enumerate(rows, start=FIRST):
            when = f"while rank {row['slow']} was slow, rank {rank}"
            lost = [name for name in names if row["is there"] and name not in row["files"]]
            if lost:
                text = f"step-{step} never gets {', '.join(lost)}: each rank writes a file of its own"
                yield Fault("missing", f"{text}, after rank 0 has made the folder")
            if row["torn"]:
                text = f"{when} saw that {row['torn']}: a kill at this moment leaves a checkpoint that does not load"
                yield Fault("published too soon", f"{text}. Rank 0 gives it its name after every rank has written")
            if not row["is there"]:
                text = f"{when} returned before step-{step} was there: it may end, or remove the one before"
                yield Fault("returned too soon", f"{text}; all ranks wait until rank 0 has given it its name")
            more = sorted(set(row["files"]) - set(names))
            if more:
                text = f"step-{step} has {', '.join(more)} too, which a killed save left in the folder"
                yield Fault("stale", f"{text}; rank 0 removes what is left of it, and makes the folder anew")

    for rank, rows in enumerate(evidence.results):
        yield from look(rank, rows)


def failure_shards(error: RankError, world_size: int) -> Fault | None:
    """Name what ranks raise that do not wait for each other."""
    text = str(error)
    words = "not all ranks call as many barriers: one under `if rank == 0` is a barrier that the others never reach"
    not_every_rank = Fault("not every rank", words)
    if "barrier" in text and "all_reduce" in text:
        return not_every_rank
    if NAMED in text:
        words = f"on {world_size} ranks one still used the folder when it had its name: it gets its name once, after"
        return Fault("published too soon", f"{words} every rank has written; dist.barrier() makes a rank wait for all")
    if "FileExistsError" in text or "File exists" in text:
        words = "the folder is there already: a killed save left it, or a different rank made it"
        return Fault("folder", f"{words}. Rank 0 alone removes what is left, and makes it anew")
    if UNNAMED in text:
        return Fault("no folder", "a rank writes into the folder before it is there: all wait until rank 0 has made it")
    if "waits in barrier" in text:
        return not_every_rank
    return None


def budget_shards(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{evidence.world_size} files, one rename; each rank was slow once, and no rank saw a part"]


def _draw_shards(draw: Draw) -> tuple[Any, ...]:
    count, own = draw.one_of(2, 1, 0), draw.own(1, 4)
    return draw.one_of(7, 0, 123), {f"w{i}": draw.tensor(own, *draw.shape(), dtype=draw.dtype()) for i in range(count)}


def _use_shards(fn: Callable[..., Any], step: int, shard: dict[str, Any]) -> dict[str, Any]:
    """Save twice, and return what was saved under each name."""
    with a_folder() as name:
        folder = _shared(name)
        returned = [fn(folder, step + more, shard) for more in (0, 1)]
        dist.barrier()
        files = {str(p.relative_to(folder)): loaded(p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
        dist.barrier()
    return {"files": files, "returned": returned}


vary_shards = Vary(
    _draw_shards,
    use=_use_shards,
    num_calls=4,
    left_out={"layout": "what torch.save writes of a view is 12.save's", "sub-group": "takes no group"},
)

_WRITE = 'torch.save(shard, partial / f"rank-{rank}.pt")'
_NAME = 'partial.rename(folder / f"step-{step}")'
_PUBLISH = f"if rank == 0:\n    {_NAME}"
_CLEAN = "shutil.rmtree(partial, ignore_errors=True)"

WRONG_SHARDS = (
    Mutant("rank 0 is done", "published too soon", "after every rank has written", 2, 69, races=True).edit(
        f"{_WRITE}\ndist.barrier()", _WRITE
    ),
    Mutant("in its place", "published too soon", "does not load", 1, 44)
    .edit('f".step-{step}"', 'f"step-{step}"')
    .edit(_PUBLISH, "pass"),
    Mutant("returns at once", "returned too soon", "all ranks wait until", 2, 69).edit(
        f"{_PUBLISH}\ndist.barrier()", _PUBLISH
    ),
    Mutant("folder not awaited", "missing", "after rank 0 has made the folder", 2)
    .edit(f"dist.barrier()\n{_WRITE}", _WRITE)
    .edit(_CLEAN, f"time.sleep(0.5)\n{_CLEAN}")
    .setup("import time"),
    Mutant("what is left stays", "stale", "makes the folder anew", 1, 44)
    .without(_CLEAN)
    .edit("mkdir()", "mkdir(exist_ok=True)"),
    Mutant("must be new", "folder", "is there already", 1, 44).without(_CLEAN),
    Mutant("all rename it", "published too soon", "it gets its name once", 3).edit(_PUBLISH, _NAME),
    Mutant("one file", "missing", "never gets rank-1.pt", 2).edit('f"rank-{rank}.pt"', '"rank-0.pt"'),
    Mutant("only rank 0 saves", "missing", "a file of its own", 2, 41).edit(_WRITE, f"if rank == 0:\n    {_WRITE}"),
    Mutant("barrier of rank 0", "not every rank", "that the others never reach", 2, 5).edit(
        f"{_PUBLISH}\ndist.barrier()", f"{_PUBLISH}\n    dist.barrier()"
    ),
)
