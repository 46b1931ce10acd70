"""What needs no disk: the samples of a step on any number of ranks, and the share of a run's time that counts."""

from __future__ import annotations

import random
from typing import Any

from distlab.course.grading.cases import Cases
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant

HOUR = 3600.0
RUNS = (  # times between failures, interval, save, restart
    ([10_000.0], 900.0, 100.0, 0.0),
    ([2_950.0, 3_950.0, 2_950.0], 900.0, 100.0, 0.0),
    ([2_500.0, 3_999.0], 900.0, 100.0, 600.0),
    ([500.0, 5_000.0, 300.0], 900.0, 100.0, 600.0),
    ([500.0, 800.0], 900.0, 100.0, 600.0),
)
drive_share = Cases({f"uptimes {run[0]} s, interval 900, save 100, restart {run[3]:.0f}": run for run in RUNS})


def budget_share(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{len(RUNS)} runs, one of which is never up long enough to save"]


def _draw_share(draw: Draw) -> tuple[Any, ...]:
    chance = random.Random(draw.integer(0, 10**9))
    uptimes = [chance.expovariate(1 / HOUR) for _ in range(draw.one_of(20, 1, 200))]
    return uptimes, draw.number(10, 2 * HOUR), draw.number(0.1, 300), draw.one_of(0.0, 60.0, 600.0)


vary_share = Vary(_draw_share, num_calls=12, left_out={"empty": "a run has a failure"})

_ROUNDS, _UP = "kept_s += trains_s // (interval_s + save_s) * interval_s", "max(uptime_s - restart_s, 0.0)"
WRONG_SHARE = (
    Mutant(
        "all at once", "all at once", "each failure loses the work since its own last save: do not add first", 1
    ).edit("in uptimes_s:", "in [sum(uptimes_s) - (len(uptimes_s) - 1) * restart_s]:"),
    Mutant(
        "lost work counted", "lost work counted", "work is counted that is lost; only whole rounds count, with //", 1
    ).edit(" // ", " / "),
    Mutant(
        "saving counted", "saving counted", "the time of saving is counted; a save is no training, interval_s counts", 1
    ).edit("* interval_s", "* (interval_s + save_s)"),
    Mutant("saving is free", "saving is free", "training waits for a save: a round takes interval_s + save_s", 1).edit(
        "(interval_s + save_s)", "interval_s"
    ),
    Mutant("no restart", "no restart", "the restarts are left out; restart_s passes before training begins", 1).edit(
        _UP, "uptime_s"
    ),
    Mutant(
        "below zero", "below zero", "a failure before the restart is over leaves 0 s, not less: max(..., 0)", 1
    ).edit(_UP, "uptime_s - restart_s"),
    Mutant(
        "saved when begun", "saved when begun", "work counts as soon as its save begins; it counts when it is over", 1
    ).edit("trains_s // ", "(trains_s + save_s) // "),
    Mutant("seconds", "not a share", "it returns seconds; a share is of the whole time, sum(uptimes_s)", 1).without(
        " / sum(uptimes_s)"
    ),
    Mutant("mean of shares", "mean of shares", "short and long uptimes do not count alike: divide the sums", 1, 22)
    .edit(_ROUNDS, f"{_ROUNDS} / uptime_s")
    .edit("sum(uptimes_s)", "len(uptimes_s)"),
    Mutant("checkpoints", "checkpoints", "checkpoints are counted; each stands for interval_s of training", 1).without(
        " * interval_s"
    ),
    Mutant("two restarts", "two restarts", "restart_s is taken off twice; there is one restart per failure", 1).edit(
        "- restart_s", "- 2 * restart_s"
    ),
    Mutant("left time counts", "since the last save", "it counts the time since the last save, which is lost", 1).edit(
        "trains_s // (interval_s + save_s) * interval_s", "trains_s - trains_s // (interval_s + save_s) * save_s"
    ),
    Mutant(
        "one restart more", "one restart more", "the uptimes hold the restarts already: divide by their sum", 1
    ).edit("kept_s / sum(uptimes_s)", "kept_s / (sum(uptimes_s) + restart_s)"),
)
