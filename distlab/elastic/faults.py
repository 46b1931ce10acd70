"""Faults on a plan that a seed makes: to try whether a run survives what a cluster does to it.

- "kill": the rank is killed (SIGKILL) some time after a step has begun, wherever it is then.
- "stop": it is stopped (SIGSTOP), so that its peers wait for it.
- "slow": it sleeps in a step.
- "exception": it raises in a step.
- "flip", "flip gradient", "flip moment": one bit changes, of its weights, of a gradient just before the optimizer reads
  it (so after replicas have averaged it), or of the optimizer's state just after an update.
- "disk": its next save finds no room on the disk.

Each happens once, however often the run is started: a mark in a directory remembers it. The mark of a flip says which
bit it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.checkpoint import files
from distlab.checkpoint.parts import Parts, moments_of

KINDS = ("kill", "stop", "slow", "exception", "flip", "flip gradient", "flip moment", "disk")


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
        raise ValueError(f"kinds is {list(kinds)}; pass some of {', '.join(KINDS)}")
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

    def before_step(self, number: int, rank: int, world_size: int, parts: Parts) -> None:
        """Let happen what is due; bits flip in the modules and optimizers among the parts.

        Raises:
            InjectedFault: the plan has an exception here.
            ValueError: the plan flips a bit of what the parts have not.
        """
        for index, fault in enumerate(self.plan):
            if fault.step <= number and fault.rank % world_size == rank and self._is_new(index):
                self._happen(index, fault, rank, parts)

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

    def _happen(self, index: int, fault: Fault, rank: int, parts: Parts) -> None:
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
        elif fault.kind == "flip":
            self._flip(index, _weights_of(parts))
        else:
            self._flip_in_update(index, fault.kind == "flip gradient", parts)

    def _flip(self, index: int, found: Mapping[str, Tensor]) -> None:
        said = flip_bit(found, random.Random(f"{index} {self.plan[index]}"))
        (self._directory / f"fault-{index}").write_text(said)

    def _flip_in_update(self, index: int, is_gradient: bool, parts: Parts) -> None:
        """Flip a bit in the next update that has what to flip: of a gradient before it, of a moment after it."""
        waiting = [True]  # no hook can remove itself while torch goes through them

        def hook(optimizer: Optimizer, *_: object) -> None:
            found = _gradients_of(parts, optimizer) if is_gradient else moments_of({"optimizer": optimizer})
            if waiting and (found or not is_gradient):
                waiting.clear()
                self._flip(index, found)

        optimizers = [part for part in parts.values() if isinstance(part, Optimizer)]
        if not optimizers:
            self._flip(index, {})
        for optimizer in optimizers:
            (optimizer.register_step_pre_hook if is_gradient else optimizer.register_step_post_hook)(hook)


def _weights_of(parts: Parts) -> dict[str, Tensor]:
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    return {name: parameter for module in modules for name, parameter in module.named_parameters()}


def _gradients_of(parts: Parts, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the gradients that an optimizer is about to read, named as votes name them."""
    read = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: one for name, one in _weights_of(parts).items() if one in read and one.grad is not None}
    return {f"the gradient of {name}": one.grad for name, one in named.items() if one.grad is not None}


@torch.no_grad()
def flip_bit(found: Mapping[str, Tensor], chance: random.Random) -> str:
    """Flip one bit of one of these tensors, and say which one; sparse ones are left alone.

    Raises:
        ValueError: none of them has an element.
    """
    names = [name for name, tensor in found.items() if tensor.numel() and tensor.layout == torch.strided]
    if not names:
        raise ValueError(
            "there is no weight, gradient or moment to flip a bit of among the run's parts; leave that kind of flip "
            "out of the plan, or pass the model and its optimizer as parts of their own"
        )
    name = chance.choice(names)
    tensor = found[name]
    place = tuple(chance.randrange(size) for size in tensor.shape)
    element, byte, bit = tensor[place].reshape(1).clone(), chance.randrange(tensor.element_size()), chance.randrange(8)
    element.view(torch.uint8)[byte] ^= 1 << bit
    tensor[place] = element[0]
    return f"bit {8 * byte + bit} of element {list(place)} of {name}"
