"""What needs no disk: the samples of a step on any number of ranks, and the share of a run's time that counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import whole
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.elastic import BatchRule
from distlab.grading import Evidence, Mutant

STAYS, LINEAR, SQRT = BatchRule(12), BatchRule(12, 4, "linear"), BatchRule(12, 4, "sqrt")
STEPS = (  # rule, position, end, world size
    (STAYS, 0, 100, 4),
    (STAYS, 24, 100, 4),
    (STAYS, 24, 100, 3),
    (STAYS, 24, 100, 5),
    (STAYS, 96, 100, 3),
    (STAYS, 96, 98, 3),
    (LINEAR, 24, 100, 4),
    (LINEAR, 24, 100, 8),
    (SQRT, 24, 100, 8),
    (LINEAR, 24, 100, 2),
    (LINEAR, 97, 100, 2),
)
LR = 0.1


def _use_samples(fn: Callable[..., Any], rule: BatchRule, lr: float, at: int, end: int, n: int) -> Any:
    """Return all ranks' samples in order, how many each has, their weights and the rates."""
    ranks = [fn(rule, lr, at, end, rank, n) for rank in range(n)]
    odd = [one for one in ranks if not isinstance(one, tuple | list) or len(one) != 3]
    if odd:
        return odd[0]
    return {
        "samples of all ranks": sorted(whole(sample) for samples, _, _ in ranks for sample in samples),
        "number of samples of each rank": [len(samples) for samples, _, _ in ranks],
        "rates, as multiples of lr": [float(rate) / lr for _, _, rate in ranks],
        "weights": [float(weight) for _, weight, _ in ranks],
    }


drive_samples = Cases(
    {f"{rule}, position {at} of {end}, {n} ranks": (rule, LR, at, end, n) for rule, at, end, n in STEPS}, _use_samples
)


def budget_samples(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{len(STEPS)} steps on 2 to 8 ranks: no sample twice, none lost"]


def _draw_samples(draw: Draw) -> tuple[Any, ...]:
    base, each = draw.integer(1, 6), draw.integer(1, 9)
    rule = draw.one_of(
        BatchRule(base * each), BatchRule(base * each, base, "linear"), BatchRule(base * each, base, "sqrt")
    )
    at = draw.integer(0, 500)
    most = 9 if rule.world_size else min(9, rule.batch)  # a batch that stays gives each rank a sample
    return rule, draw.number(0.01, 1.0), at, at + draw.integer(1, 60), draw.integer(1, most)


vary_samples = Vary(_draw_samples, use=_use_samples, num_calls=24)

_BATCH = "batch = rule.batch if rule.world_size is None else rule.batch // rule.world_size * world_size"
_RATE = '(ratio**0.5 if rule.lr == "sqrt" else ratio)'
_START, _SAMPLES = "start = position + rank * each + min(rank, more)", "range(start, start + each + (rank < more))"
_COUNTS = "the position counts the samples of all ranks, whatever their number was"
_RATIO = "lr times the ratio of the batch to rule.batch, or times its root"

WRONG_SAMPLES = (
    Mutant(
        "what does not divide is dropped", "lost", "what does not divide is lost: the first ranks take one more", 1, 45
    )
    .edit(_START, "start = position + rank * each")
    .edit(_SAMPLES, "range(start, start + each)"),
    Mutant("filled up", "twice", "samples are taken more than once; nothing fills up what does not divide", 1, 45)
    .edit("each, more = divmod(batch, world_size)", "each, more = -(-batch // world_size), 0")
    .edit(_START, "start = min(position + rank * each, position + batch - each)"),
    Mutant(
        "position in steps", "another place", f"it begins at position x batch; {_COUNTS}, and not the steps", 1, 43
    ).edit(_START, "start = position * batch + rank * each + min(rank, more)"),
    Mutant("from the beginning", "another place", f"it begins with sample 0; {_COUNTS}", 1, 43).edit(
        _START, "start = rank * each + min(rank, more)"
    ),
    Mutant(
        "first ranks not counted", "taken twice", "some samples are taken twice: the first ranks have one more each", 1
    ).edit(" + min(rank, more)", ""),
    Mutant(
        "past the end", "beyond the end", "it takes samples beyond the end; the last step ends with the data", 1
    ).edit("min(batch, end - position)", "batch"),
    Mutant("rest dropped", "rest lost", "the samples before the end are lost: the last step is a smaller one", 1)
    .edit("min(batch, end - position)", "batch if end - position >= batch else 0")
    .edit("* world_size / batch", "* world_size / max(batch, 1)"),
    Mutant(
        "batch always grows",
        "another batch",
        "with rule.world_size None the batch stays, whatever the ranks are",
        1,
        45,
    ).edit(_BATCH, "batch = rule.batch // (rule.world_size or 4) * world_size"),
    Mutant(
        "batch never grows", "same batch", "with a rule.world_size each rank's part stays: the batch grows", 1, 45
    ).edit(_BATCH, "batch = rule.batch"),
    Mutant("rate stays", "rate", f"the rate is lr though the batch grows; it is {_RATIO}", 1, 45).edit(
        f"lr * {_RATE}", "lr"
    ),
    Mutant("always linear", "root", 'the rate grows as the batch does; rule.lr "sqrt" takes the root', 1).edit(
        _RATE, "ratio"
    ),
    Mutant(
        "rate of the ranks", "rate of the ranks", f"the rate is lr times the number of ranks; it is {_RATIO}", 1
    ).edit(_RATE, "(1.0 if rule.world_size is None else world_size)"),
    Mutant(
        "rate of the rest", "rate of the rest", "the rate follows the batch by the rule, not what is left at the end", 1
    ).edit(
        "ratio = batch / rule.batch\nbatch = min(batch, end - position)",
        "batch = min(batch, end - position)\nratio = 1.0 if rule.world_size is None else batch / rule.batch",
    ),
    Mutant(
        "weight 1",
        "weight",
        "each rank's mean counts alike; its weight is len(samples) / batch times the number of ranks",
        1,
        23,
    ).edit("len(samples) * world_size / batch", "1.0"),
    Mutant(
        "share of the samples", "weight of a sum", "the ranks take a mean, not a sum: multiply by their number", 1, 9
    ).edit("len(samples) * world_size / batch", "len(samples) / batch"),
    Mutant(
        "last ranks more", "uneven", "the last ranks have one sample more; at most one more, and the first have it", 1
    )
    .edit(_START, "start = position + rank * each + max(0, rank - world_size + more)")
    .edit(_SAMPLES, "range(start, start + each + (rank >= world_size - more))"),
    Mutant("rounded up", "rounded up", "parts are rounded up, so that the last is short: the first have one more", 1)
    .edit("divmod(batch, world_size)", "-(-batch // world_size), 0")
    .edit(_SAMPLES, "range(min(start, position + batch), min(start + each, position + batch))"),
)

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
