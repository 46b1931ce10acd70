"""Reference solutions of lesson 12: a run that can be killed at any moment and goes on as if nothing had happened.

The library's versions, made fit for any model and any plan, are in `distlab.checkpoint` and `distlab.elastic`; how
often to save is in `simulator.runs`.
"""

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distlab.checkpoint.files import flush_directory
from distlab.elastic import Arrival, Quorum


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Save a state, tensors and numbers, as the checkpoint of a step: a kill or a power cut at any moment does no harm.

    Whoever loads takes the file `step-N.pt` with the highest N, and looks at no file of a different name. This file
    must be whole at every moment; the checkpoints that are there stay. What a killed save left behind is in nobody's
    way. When this function returns, the new checkpoint is on the disk, its name as well.
    """
    path = folder / f"step-{step}.pt"
    partial = folder / f".{path.name}"
    with open(partial, "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    os.replace(partial, path)
    flush_directory(folder)


def save_shards(folder: Path, step: int, shard: dict[str, Tensor]) -> None:
    """Save every rank's shard as one checkpoint of a step, so that a kill at any moment does no harm.

    All ranks call it. Whoever loads takes the folder `step-N` with the highest N, and from it `rank-0.pt`, `rank-1.pt`
    and so on, one for each rank; it looks at no folder of a different name. When this function returns on any rank, the
    checkpoint is there, with these files and no other. A save that was killed may have left a folder behind.
    """
    rank = dist.get_rank()
    partial = folder / f".step-{step}"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    dist.barrier()
    torch.save(shard, partial / f"rank-{rank}.pt")
    dist.barrier()
    if rank == 0:
        partial.rename(folder / f"step-{step}")
    dist.barrier()


def resumable(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, generator: torch.Generator
) -> tuple[Callable[[int], dict[str, Any]], Callable[[dict[str, Any]], int]]:
    """Return two functions, with which a run that ended goes on bit for bit as if it had not.

    `capture(position)` returns all that the rest of the run depends on, as plain values and tensors. `position` says
    how many samples were used. The state is written to disk later, while training goes on.
    `restore(state)` takes such a state up into a model, an optimizer, a schedule and a generator that were built anew,
    and returns the position.

    The model has dropout, which draws from torch's own generator; `generator` draws noise for the data.
    """
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}

    def capture(position: int) -> dict[str, Any]:
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"generator": generator.get_state(), "torch": torch.get_rng_state(), "position": position}
        return copy.deepcopy(state)

    def restore(state: dict[str, Any]) -> int:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        return state["position"]

    return capture, restore


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is as it was written (None where there is none), and what is damaged.

    A checkpoint is a folder `step-N`; other names are none. Its `manifest.json` says
    `{"step": N, "files": {"rank-0.pt": "its SHA-256, in hex", ...}}`, and was written last. Where it cannot be read, or
    is of a different step, `step-N/manifest.json` is damaged; else each file that is missing or has a different
    SHA-256, such as `step-40/rank-1.pt`. The list has what is damaged in newer checkpoints than the one returned,
    newest first.
    """
    damaged = []
    names = [found for path in folder.iterdir() if (found := re.fullmatch(r"step-(\d+)", path.name))]
    for name in sorted(names, key=lambda found: int(found[1]), reverse=True):
        path = folder / name[0]
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
        except (OSError, ValueError):
            manifest = {"step": None}
        if manifest["step"] != int(name[1]):
            damaged.append(f"{path.name}/manifest.json")
            continue
        wrong = []
        for file, digest in manifest["files"].items():
            there = (path / file).is_file()
            if not there or hashlib.sha256((path / file).read_bytes()).hexdigest() != digest:
                wrong.append(f"{path.name}/{file}")
        if not wrong:
            return path, damaged
        damaged += wrong
    return None, damaged


def load_shard(shard: Tensor, size: int, num_saved: int, rank: int, read: Callable[[int, int, int], Tensor]) -> None:
    """Fill this rank's new shard from shards that a different number of ranks saved.

    A row of `size` elements was cut into `num_saved` shards of ceil(size / num_saved) elements; what the last ones have
    beyond the row's end is filling. Now it is cut anew, into shards as long as this one: rank 0's comes first. Elements
    of the new shard beyond the row's end are 0.

    `read(saved, start, stop)` reads elements start to stop of the shard that rank `saved` wrote. It is slow: read no
    element that is not needed, and none twice.
    """
    length, old = len(shard), -(-size // num_saved)
    low, high = rank * length, min((rank + 1) * length, size)
    shard.zero_()
    for saved in range(num_saved):
        start, stop = max(low, saved * old), min(high, (saved + 1) * old)
        if start < stop:
            shard[start - low : stop - low] = read(saved, start - saved * old, stop - saved * old)


def useful_share(uptimes_s: list[float], interval_s: float, save_s: float, restart_s: float) -> float:
    """Return which share of a run's time is training that counts, given the times between its failures.

    After each failure the run restarts for restart_s, from the last checkpoint that is whole. Then it trains interval_s
    and saves save_s, again and again, until the next failure. What has not been saved completely by then is lost. A
    failure may come before the restart is over.
    """
    kept_s = 0.0
    for uptime_s in uptimes_s:
        trains_s = max(uptime_s - restart_s, 0.0)
        kept_s += trains_s // (interval_s + save_s) * interval_s
    return kept_s / sum(uptimes_s)


def who_goes_on(
    arrived: dict[int, Arrival], alive: set[int], last: Quorum, min_replicas: int
) -> tuple[list[int], list[int], int] | None:
    """Return (members, takers, step): who makes the next steps together, who of them takes a state, and the step.

    `arrived` holds, by number, what each replica said that asks to go on: the epoch its state comes from (`line`; an
    epoch is a group's number, one more for each new group; -1: a new process), how many updates it has made (`step`),
    and whether it is inside a step, at work on the next update (`deal` is not empty). `alive` has the numbers of those
    that live; one may have died after it had asked. `last` is the quorum before: its `epoch` and its `members`.

    - The *holders* live, have asked, and come from `last.epoch`: they have the newest state.
    - Return None until there is a holder, all living members of `last` have asked, and `min_replicas` can go on.
    - All go on from the step of the holder that is ahead: holders that are behind make that update themselves.
    - If a holder is inside that step, the holders finish it among themselves, where they are at least `min_replicas`.
      Else all that live and have asked go on, and those that are no holders take a holder's state.

    Numbers are sorted: the place of one is its rank.
    """
    living = sorted(number for number in arrived if number in alive)
    holders = [number for number in living if arrived[number].line == last.epoch]
    if not holders or any(number in alive and number not in arrived for number in last.members):
        return None
    step = max(arrived[number].step for number in holders)
    in_step = any(arrived[number].deal and arrived[number].step == step for number in holders)
    members = holders if in_step and len(holders) >= min_replicas else living
    if len(members) < min_replicas:
        return None
    return members, [number for number in members if number not in holders], step
