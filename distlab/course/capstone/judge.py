"""Run an entry with one kill on the way, and in turns with it the first plan without a kill; then say what was kept."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from distlab.course.capstone.task import (
    MOST_BYTES,
    MOST_LOSS,
    MOST_REPEATED,
    MOST_TIME,
    NODES,
    NUM_RANKS,
    UPDATES,
    BoardEntry,
    first_entry,
)
from distlab.course.capstone.train import Update, read_log, train, train_alone
from distlab.elastic import Fault, run_elastic

PLAIN_UPDATES = 4  # of the first plan, before and after the entry's run


class CapstoneVerdict(NamedTuple):
    """What became of an entry.

    Attributes:
        plan: in a few words.
        seed: of the kill.
        time: from the first update's start to the last one's end, the kill and what followed it included, over the time
            of the first plan's updates without a kill.
        predicted: the same ratio for one update, by the simulator.
        sent_bytes: from one rank to the other node in an update; of the rank that sent most.
        repeated: updates that were made twice.
        loss: of the last update, and its relative difference to one process's.
        loss_error: that difference.
    """

    plan: str
    seed: int
    time: float
    predicted: float
    sent_bytes: int
    repeated: int
    loss: float
    loss_error: float

    def lines(self) -> list[tuple[str, bool]]:
        """Return a sentence per bar, and whether it is kept."""
        return [
            (f"time {self.time:.2f} of the first plan's, at most {MOST_TIME:g}", self.time <= MOST_TIME),
            (
                f"{self.sent_bytes / 1e3:.0f} kB per rank and update to the other node, at most {MOST_BYTES / 1e3:.0f}",
                self.sent_bytes <= MOST_BYTES,
            ),
            (
                f"{self.repeated} updates made twice because of the kill, at most {MOST_REPEATED}",
                self.repeated <= MOST_REPEATED,
            ),
            (
                f"last loss {self.loss:.4f}, {self.loss_error:.0e} from one process's, at most {MOST_LOSS:g}",
                self.loss_error <= MOST_LOSS,
            ),
        ]

    @property
    def is_kept(self) -> bool:
        """Whether all bars are kept."""
        return all(kept for _, kept in self.lines())


def attempt(entry: BoardEntry, seed: int) -> CapstoneVerdict:
    """Train by the entry's plan through one kill, drawn from the seed; and by the first plan before and after it.

    It takes about a minute on two cores.

    Raises:
        RankError: the entry's run failed, and not because of the kill; the text begins with the root cause.
    """
    chance = random.Random(seed)
    kill = Fault("kill", chance.randrange(UPDATES // 3, UPDATES - 2), chance.randrange(NUM_RANKS), chance.random() / 10)
    first, plain = first_entry(), list[Update]()
    with tempfile.TemporaryDirectory(prefix="capstone-") as name:
        folder = Path(name)
        plain += _run(first, folder / "before", PLAIN_UPDATES)[0]
        made, sent = _run(entry, folder / "own", UPDATES, [kill])
        plain += _run(first, folder / "after", PLAIN_UPDATES)[0]
    alone = train_alone(UPDATES)[-1]
    usual_s = median(update.end_s - update.start_s for update in plain if update.number)  # the first one warms up
    predicted = [one.file.simulate().duration_s for one in (entry, first)]
    return CapstoneVerdict(
        plan=entry.text,
        seed=seed,
        time=(made[-1].end_s - made[0].start_s) / (UPDATES * usual_s),
        predicted=predicted[0] / predicted[1],
        sent_bytes=max(sent),
        repeated=len(made) - UPDATES,
        loss=made[-1].loss,
        loss_error=abs(made[-1].loss / alone - 1),
    )


def _run(entry: BoardEntry, folder: Path, updates: int, faults: Sequence[Fault] = ()) -> tuple[list[Update], list[int]]:
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ranks are started anew is the task
        sent = run_elastic(
            train, NUM_RANKS, args=(entry, folder, updates, faults), max_restarts=len(faults), nodes=NODES
        )
    return read_log(folder), sent
