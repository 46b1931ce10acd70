"""Faults on a plan that a seed makes: to try whether a run survives what a cluster does to it.

A fault is a signal that a rank gets some time after a step has begun, wherever it is then:

- "kill" (SIGKILL): it is gone, as when its machine lost its power.
- "stop" (SIGSTOP): it does nothing any more, so that its peers wait for it.
- "leave" (SIGTERM): it is asked to end.

Each happens once, however often the run is started: a mark in a directory remembers it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
KINDS = tuple(SIGNALS)


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        kind: one of `KINDS`.
        step: in this step, or in the first one after it that is made.
        rank: whose (modulo the number of ranks).
        seconds: how long after the step's begin.
    """

    kind: str
    step: int
    rank: int
    seconds: float = 0.0


def plan_faults(
    seed: int, count: int, *, num_steps: int, world_size: int, kinds: Sequence[str] = KINDS, within_s: float = 0.1
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
    if [kind for kind in kinds if kind not in KINDS] or not kinds:
        raise ValueError(f"kinds is {list(kinds)}; pass some of {', '.join(KINDS)}")
    if min(count, within_s) < 0 or min(num_steps, world_size) < 1:
        raise ValueError(
            f"count {count}, within_s {within_s}, num_steps {num_steps} or world_size {world_size} cannot be: pass at "
            "least 0, 0, 1 and 1"
        )
    chance = random.Random(seed)
    draw, drawn = chance.randrange, []
    for _ in range(count):
        drawn.append(Fault(chance.choice(kinds), draw(num_steps), draw(world_size), chance.uniform(0, within_s)))
    return tuple(sorted(drawn, key=lambda fault: fault.step))


class Faults:
    """Lets the faults of a plan happen to this rank, each once.

    Args:
        plan: of `plan_faults`, or written by hand; the same on all ranks.
        directory: where the marks of those that have happened are; it outlives the ranks.

    Raises:
        ValueError: the plan has a fault of no known kind.
    """

    def __init__(self, plan: Sequence[Fault], directory: str | Path) -> None:
        self.plan, self._directory = tuple(plan), Path(directory)
        for fault in self.plan:
            if fault.kind not in KINDS:
                raise ValueError(f"{fault} is of no known kind; pass one of {', '.join(KINDS)}")

    def before_step(self, number: int, rank: int, world_size: int) -> None:
        """Let happen what is due in the step that begins."""
        for index, fault in enumerate(self.plan):
            if fault.step <= number and fault.rank % world_size == rank and self._is_new(index):
                timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), SIGNALS[fault.kind]))
                timer.daemon = True
                timer.start()

    def _is_new(self, index: int) -> bool:
        """Mark a fault, and return whether it was not marked before."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._directory / f"fault-{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True
