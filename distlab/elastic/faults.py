"""Faults on a plan that a seed makes: to try whether a run survives what a cluster does to it.

- "kill": the rank is killed (SIGKILL) some time after a step has begun, wherever it is then.
- "stop": it is stopped (SIGSTOP), so that its peers wait for it.
- "slow": it sleeps in a step.
- "exception": it raises in a step.
- "flip": one bit of its weights changes.
- "disk": its next save finds no room on the disk.

Each happens once, however often the run is started: a mark in a directory remembers it. Lost packets are a fault of the
wire, not of a rank: see `packets`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distlab.checkpoint import files

KINDS = ("kill", "stop", "slow", "exception", "flip", "disk")


class InjectedFault(RuntimeError):
    """What the fault "exception" raises."""


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        kind: one of `KINDS`.
        step: in this step, or in the first one after it that is made.
        rank: whose (modulo the number of ranks).
        seconds: "kill", "stop": how long after the step's begin; "slow": how long it sleeps.
    """

    kind: str
    step: int
    rank: int
    seconds: float = 0.0


def plan_faults(
    seed: int,
    count: int,
    *,
    num_steps: int,
    world_size: int,
    kinds: Sequence[str] = KINDS,
    within_s: float = 0.1,
) -> tuple[Fault, ...]:
    """Return faults of random kinds, steps, ranks and moments, by step; the same seed gives the same ones.

    Args:
        seed: of the plan.
        count: how many.
        num_steps: of the run.
        world_size: ranks.
        kinds: to draw from.
        within_s: longest `seconds` of a fault.

    Raises:
        ValueError: a kind is unknown, or a number is out of range.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds is {list(kinds)}; pass some of {', '.join(KINDS)} (lost packets: lossy_loopback)")
    if min(count, within_s) < 0 or min(num_steps, world_size) < 1:
        raise ValueError(
            f"count {count}, within_s {within_s}, num_steps {num_steps} or world_size {world_size} cannot be: pass at "
            "least 0, 0, 1 and 1"
        )
    chance = random.Random(seed)
    drawn = (
        Fault(
            chance.choice(kinds), chance.randrange(num_steps), chance.randrange(world_size), chance.uniform(0, within_s)
        )
        for _ in range(count)
    )
    return tuple(sorted(drawn, key=lambda fault: fault.step))


class _FullDisk:
    """Stands for `os` where checkpoints are written: nothing can be."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, *_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Faults:
    """Lets the faults of a plan happen to this rank, each once.

    Args:
        plan: of `plan_faults`, or written by hand; the same on all ranks.
        directory: where the marks of those that have happened are; it outlives the ranks.
    """

    def __init__(self, plan: Sequence[Fault], directory: str | Path) -> None:
        self.plan, self._directory = tuple(plan), Path(directory)
        self._is_disk_full = False
        for fault in self.plan:
            if fault.kind not in KINDS:
                raise ValueError(f"{fault} is of no known kind; pass one of {', '.join(KINDS)}")

    @property
    def fill_disks(self) -> bool:
        """Whether the plan has a full disk, on whatever rank."""
        return any(fault.kind == "disk" for fault in self.plan)

    def before_step(self, number: int, rank: int, world_size: int, modules: Sequence[nn.Module]) -> None:
        """Let happen what is due.

        Raises:
            InjectedFault: the plan has an exception here.
        """
        for index, fault in enumerate(self.plan):
            if fault.step <= number and fault.rank % world_size == rank and self._is_new(index):
                self._happen(index, fault, rank, modules)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Let this rank's checkpoint find no room on the disk in the block, where the plan says so."""
        is_full, self._is_disk_full = self._is_disk_full, False
        try:
            if is_full:
                vars(files)["os"] = _FullDisk()
            yield
        finally:
            vars(files)["os"] = os

    def _is_new(self, index: int) -> bool:
        """Mark a fault, and return whether it was not marked before."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._directory / f"fault-{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _happen(self, index: int, fault: Fault, rank: int, modules: Sequence[nn.Module]) -> None:
        if fault.kind in ("kill", "stop"):
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
        elif fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "exception":
            raise InjectedFault(f"rank {rank}: fault {index} of the plan raises here ({fault})")
        elif fault.kind == "disk":
            self._is_disk_full = True
        else:
            flip_bit(modules, random.Random(index))


@torch.no_grad()
def flip_bit(modules: Sequence[nn.Module], chance: random.Random) -> None:
    """Flip one bit of one of the modules' parameters.

    Raises:
        ValueError: none of them has a parameter whose elements lie side by side.
    """
    rows = [one.view(-1).view(torch.uint8) for m in modules for one in m.parameters() if one.is_contiguous()]
    rows = [row for row in rows if row.numel()]
    if not rows:
        raise ValueError("there is no parameter to flip a bit of; leave 'flip' out of the plan's kinds")
    row = chance.choice(rows)
    row[chance.randrange(row.numel())] ^= 1 << chance.randrange(8)
