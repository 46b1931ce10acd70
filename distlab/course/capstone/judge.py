"""Run an entry with one kill on the way, and the first plan before and after it; say what was kept; the class's table.

The table is one CSV file, a line per attempt, which many may write to at once.
"""

from __future__ import annotations

import csv
import random
import tempfile
import warnings
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

from distlab.course.capstone import task
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
        sent, most = self.sent_bytes / 1e3, task.MOST_BYTES / 1e3
        bars = (
            (self.time, task.MOST_TIME, f"time {self.time:.2f} of the first plan's"),
            (sent, most, f"{sent:.0f} kB per rank and update to the other node"),
            (self.repeated, task.MOST_REPEATED, f"{self.repeated} updates made twice because of the kill"),
            (self.loss_error, task.MOST_LOSS, f"last loss {self.loss:.4f}, {self.loss_error:.0e} from one process's"),
        )
        return [(f"{text}, at most {most:g}", value <= most) for value, most, text in bars]

    @property
    def is_kept(self) -> bool:
        """Whether all bars are kept."""
        return all(kept for _, kept in self.lines())


def attempt(entry: task.BoardEntry, seed: int) -> CapstoneVerdict:
    """Train by the entry's plan through one kill, drawn from the seed; and by the first plan before and after it.

    It takes about a minute on two cores.

    Raises:
        RankError: the entry's run failed, and not because of the kill; the text begins with the root cause.
    """
    chance = random.Random(seed)
    kill = Fault(
        "kill",
        chance.randrange(task.UPDATES // 3, task.UPDATES - 2),
        chance.randrange(task.NUM_RANKS),
        chance.random() / 10,
    )
    first = task.first_entry()
    with tempfile.TemporaryDirectory(prefix="capstone-") as name:
        before, _ = _run(first, Path(name, "before"), PLAIN_UPDATES)
        made, sent = _run(entry, Path(name, "own"), task.UPDATES, [kill])
        after, _ = _run(first, Path(name, "after"), PLAIN_UPDATES)
    usual_s = median(one.end_s - one.start_s for one in (*before, *after) if one.number)  # the first one warms up
    predicted_s, first_s = (one.file.simulate().duration_s for one in (entry, first))
    return CapstoneVerdict(
        plan=entry.text,
        seed=seed,
        time=(made[-1].end_s - made[0].start_s) / (task.UPDATES * usual_s),
        predicted=predicted_s / first_s,
        sent_bytes=max(sent),
        repeated=len(made) - task.UPDATES,
        loss=made[-1].loss,
        loss_error=abs(made[-1].loss / task.train_alone(task.UPDATES)[-1] - 1),
    )


def _run(
    entry: task.BoardEntry, folder: Path, updates: int, faults: Sequence[Fault] = ()
) -> tuple[list[task.Update], list[int]]:
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ranks are started anew is the task
        given = (entry, folder, updates, faults)
        sent = run_elastic(task.train, task.NUM_RANKS, args=given, max_restarts=len(faults), nodes=task.NODES)
    return task.read_log(folder), sent


class BoardRow(NamedTuple):
    """An attempt on the board."""

    name: str
    day: str
    kept: bool
    time: float
    sent_bytes: int
    repeated: int
    seed: int
    plan: str


def add_row(path: Path, name: str, verdict: CapstoneVerdict) -> None:
    """Add an attempt, in one write at the end: lines of others who add theirs at the same time stay whole.

    Raises:
        OSError: the file cannot be written.
    """
    safe = f"'{name}" if name[:1] in ("=", "+", "-", "@") else name  # no formula in a spreadsheet
    own = (verdict.is_kept, round(verdict.time, 3), verdict.sent_bytes, verdict.repeated, verdict.seed, verdict.plan)
    with path.open("a", newline="", encoding="utf-8") as file:
        head = () if file.tell() else (BoardRow._fields,)
        written = csv.writer(file, lineterminator="\n")
        written.writerows((*head, (" ".join(safe.split()), date.today().isoformat(), *own)))


def read_board(path: Path) -> list[BoardRow]:
    """Return the attempts, the best one of each name: budgets kept before others, then the shortest time.

    Raises:
        ValueError: it is not a board.
        OSError: it cannot be read.
    """
    best: dict[str, BoardRow] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.reader(file), start=1):
            if tuple(line) == BoardRow._fields:
                continue
            try:
                name, day, kept, time, sent, repeated, seed, plan = line
                row = BoardRow(name, day, kept == "True", float(time), int(sent), int(repeated), int(seed), plan)
            except ValueError:
                wrong = f"{path}, line {number}: {','.join(line)[:60]!r} is not an attempt"
                raise ValueError(f"{wrong}; pass a file that --board made") from None
            if name not in best or _order(row) < _order(best[name]):
                best[name] = row
    return sorted(best.values(), key=_order)


def _order(row: BoardRow) -> tuple[bool, float]:
    return not row.kept, row.time


def table(rows: Sequence[BoardRow]) -> str:
    """Return the board as text."""
    lines = [f"{'':3} {'name':20} {'time':>5} {'kB out':>7} {'twice':>5}  plan"]
    for place, row in enumerate(rows, start=1):
        sign = f"{place}." if row.kept else "-"
        lines.append(
            f"{sign:3} {row.name:20.20} {row.time:5.2f} {row.sent_bytes / 1e3:7.0f} {row.repeated:5}  {row.plan}"
        )
    return "\n".join(lines)
