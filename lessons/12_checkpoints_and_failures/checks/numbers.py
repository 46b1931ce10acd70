"""What needs no disk: the samples of a step on any number of ranks, and the share of a run's time that counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from distlab.elastic import BatchRule
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import close, describe, numbers_differ
from distlab.grading.variation.draw import Draw, Vary

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


def drive_steps(fn: Callable[..., Any]) -> list[list[Any]]:
    """Ask for each rank's part of each step."""
    return [[fn(rule, LR, at, end, rank, n) for rank in range(n)] for rule, at, end, n in STEPS]


def judge_steps(evidence: Evidence) -> Iterator[Fault]:
    """Every sample once, the mean over samples, and the rate of the rule."""
    for (rule, at, end, n), ranks in zip(STEPS, evidence.results[0], strict=True):
        whole = 12 if rule.world_size is None else 3 * n
        batch, what = min(whole, end - at), f"{rule}, position {at} of {end}, {n} ranks"
        for rank, one in enumerate(ranks):
            if not isinstance(one, tuple | list) or len(one) != 3 or isinstance(one[0], int):
                yield Fault("returned", f"{what}: expected (samples, weight, rate), got {describe(one)} on rank {rank}")
        parts = [[int(sample) for sample in samples] for samples, _, _ in ranks]
        yield from _samples_fault(parts, range(at, at + batch), end, what)
        for rank, (_, weight, lr) in enumerate(ranks):
            yield from _numbers_fault(
                rule, len(parts[rank]) * n / batch, float(weight), whole / 12, float(lr) / LR, f"{what}, rank {rank}"
            )


def _samples_fault(parts: list[list[int]], wanted: range, end: int, what: str) -> Iterator[Fault]:
    taken = sorted(sample for part in parts for sample in part)
    counts, sizes = Counter(taken), [len(part) for part in parts]
    twice, lost = [one for one in counts if counts[one] > 1], sorted(set(wanted) - set(taken))
    if taken and taken[0] != wanted[0]:
        text = (
            f"{what}: begins with sample {taken[0]}, expected {wanted[0]}: the position counts the samples of all ranks"
        )
        yield Fault("another place", f"{text}, whatever their number was")
    if taken and taken[-1] >= end:
        yield Fault("beyond the end", f"{what}: takes sample {taken[-1]}; the last step ends with the data")
    if twice:
        yield Fault("twice", f"{what}: samples {twice} are taken more than once; nothing fills up what does not divide")
    if len(taken) != len(wanted) and len(taken) in (12, 3 * len(parts)):
        yield Fault("another batch", f"{what}: {len(taken)} samples are taken, expected {len(wanted)} by the rule")
    if lost:
        yield Fault("lost", f"{what}: samples {lost} are taken by no rank; the first ranks take one more each")
    if taken != [*wanted]:
        yield Fault("another batch", f"{what}: {len(taken)} samples are taken, expected {len(wanted)}")
    if max(sizes) - min(sizes) > 1 or sizes != sorted(sizes, reverse=True):
        yield Fault("uneven", f"{what}: the ranks have {sizes} samples; at most one more, and the first ranks have it")


def _numbers_fault(rule: BatchRule, weight: float, got: float, ratio: float, rate: float, what: str) -> Iterator[Fault]:
    wanted = {"same": 1.0, "linear": ratio, "sqrt": ratio**0.5}[rule.lr]
    if not close(rate, wanted):
        text = f"{what}: the rate is {rate:.4g} times lr, expected {wanted:.4g}"
        advice = (
            "the batch stays, so the rate does" if rule.lr == "same" else f"the batch is {ratio:.4g} times rule.batch"
        )
        yield Fault("rate", f"{text}: {advice}{', and this rule takes the root' * (rule.lr == 'sqrt')}")
    if abs(got - weight) > 1e-9:
        text = (
            f"{what}: weight {numbers_differ(got, weight)}. The mean over ranks is the mean over samples where a rank"
        )
        yield Fault("weight", f"{text}'s mean counts len(samples) / batch, times the number of ranks")


def budget_steps(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{len(STEPS)} steps on 2 to 8 ranks: no sample twice, none lost"]


def _draw_steps(draw: Draw) -> tuple[Any, ...]:
    base, each = draw.integer(1, 6), draw.integer(1, 9)
    rule = draw.one_of(
        BatchRule(base * each), BatchRule(base * each, base, "linear"), BatchRule(base * each, base, "sqrt")
    )
    at = draw.integer(0, 500)
    most = 9 if rule.world_size else min(9, rule.batch)  # a batch that stays gives each rank a sample
    return rule, draw.number(0.01, 1.0), at, at + draw.integer(1, 60), draw.integer(1, most)


def _use_steps(fn: Callable[..., Any], rule: BatchRule, lr: float, at: int, end: int, n: int) -> dict[str, Any]:
    """Return all ranks' samples in order, how many each has, their weights and the rates."""
    ranks = [fn(rule, lr, at, end, rank, n) for rank in range(n)]
    return {
        "samples": sorted(int(sample) for samples, _, _ in ranks for sample in samples),
        "of each rank": [len(samples) for samples, _, _ in ranks],
        "weights": [float(weight) for _, weight, _ in ranks],
        "rates": [float(rate) for _, _, rate in ranks],
    }


STEP = Vary(_draw_steps, use=_use_steps, num_calls=24)

_BATCH = "batch = rule.batch if rule.world_size is None else rule.batch // rule.world_size * world_size"
_RATE = '(ratio**0.5 if rule.lr == "sqrt" else ratio)'
_START, _SAMPLES = "start = position + rank * each + min(rank, more)", "range(start, start + each + (rank < more))"

WRONG_STEPS = (
    Mutant("what does not divide is dropped", "lost", "the first ranks take one more", 1, 45)
    .edit(_START, "start = position + rank * each")
    .edit(_SAMPLES, "range(start, start + each)"),
    Mutant("filled up", "twice", "nothing fills up", 1, 45)
    .edit("each, more = divmod(batch, world_size)", "each, more = -(-batch // world_size), 0")
    .edit(_START, "start = min(position + rank * each, position + batch - each)"),
    Mutant("position in steps", "another place", "counts the samples of all", 1, 43).edit(
        _START, "start = position * batch + rank * each + min(rank, more)"
    ),
    Mutant("from the beginning", "another place", "counts the samples of all", 1, 43).edit(
        _START, "start = rank * each + min(rank, more)"
    ),
    Mutant("first ranks not counted", "twice", "more than once", 1).edit(" + min(rank, more)", ""),
    Mutant("past the end", "beyond the end", "the last step ends with the data", 1).edit(
        "min(batch, end - position)", "batch"
    ),
    Mutant("rest dropped", "lost", "taken by no rank", 1)
    .edit("min(batch, end - position)", "batch if end - position >= batch else 0")
    .edit("* world_size / batch", "* world_size / max(batch, 1)"),
    Mutant("batch always grows", "another batch", "expected 12", 1, 45).edit(
        _BATCH, "batch = rule.batch // (rule.world_size or 4) * world_size"
    ),
    Mutant("batch never grows", "another batch", "by the rule", 1, 45).edit(_BATCH, "batch = rule.batch"),
    Mutant("rate stays", "rate", "2 times rule.batch", 1, 45).edit(f"lr * {_RATE}", "lr"),
    Mutant("always linear", "rate", "takes the root", 1).edit(_RATE, "ratio"),
    Mutant("rate of the ranks", "rate", "times rule.batch", 1).edit(
        _RATE, "(1.0 if rule.world_size is None else world_size)"
    ),
    Mutant("rate of the rest", "rate", "expected 0.5", 1).edit(
        "ratio = batch / rule.batch\nbatch = min(batch, end - position)",
        "batch = min(batch, end - position)\nratio = 1.0 if rule.world_size is None else batch / rule.batch",
    ),
    Mutant("weight 1", "weight", "len(samples) / batch", 1, 23).edit("len(samples) * world_size / batch", "1.0"),
    Mutant("share of the samples", "weight", "times the number of ranks", 1, 9).edit(
        "len(samples) * world_size / batch", "len(samples) / batch"
    ),
)

HOUR = 3600.0
RUNS = (  # times between failures, interval, save, restart
    ([10_000.0], 900.0, 100.0, 0.0),
    ([2_950.0, 3_650.0], 900.0, 100.0, 0.0),
    ([2_500.0, 3_999.0], 900.0, 100.0, 600.0),
    ([500.0, 5_000.0, 300.0], 900.0, 100.0, 600.0),
    ([500.0, 800.0], 900.0, 100.0, 600.0),
)
Count = Callable[[float, float, float, float], float]  # uptime, interval, save, restart: training that counts
MISTAKES: tuple[tuple[str, Count, str], ...] = (
    (
        "lost work counted",
        lambda u, i, s, r: max(u - r, 0) * i / (i + s),
        "what is not saved is lost: whole rounds, //",
    ),
    (
        "saving counted",
        lambda u, i, s, r: max(u - r, 0) // (i + s) * (i + s),
        "a save is no training: interval_s counts",
    ),
    ("saving is free", lambda u, i, s, r: max(u - r, 0) // i * i, "training waits: a round takes interval_s + save_s"),
    ("no restart", lambda u, i, s, r: u // (i + s) * i, "restart_s passes before training begins"),
    (
        "below zero",
        lambda u, i, s, r: (u - r) // (i + s) * i,
        "a failure in the restart leaves 0, not less: max(..., 0)",
    ),
    ("saved when begun", lambda u, i, s, r: (max(u - r, 0) + s) // (i + s) * i, "it counts when its save is over"),
    ("two restarts", lambda u, i, s, r: max(u - 2 * r, 0) // (i + s) * i, "there is one restart per failure"),
    ("checkpoints", lambda u, i, s, r: max(u - r, 0) // (i + s), "each checkpoint stands for interval_s of training"),
)


def drive_share(fn: Callable[..., Any]) -> list[Any]:
    """Ask for the share of each run."""
    return [fn(list(uptimes), *times) for uptimes, *times in RUNS]


def shares(count: Count = lambda u, i, s, r: max(u - r, 0) // (i + s) * i, *, whole: bool = True) -> list[float]:
    """Return what is found for each run, or the mean of its parts' shares, where this counts for a part."""
    sums = [[count(uptime, *times) / (1 if whole else uptime) for uptime in uptimes] for uptimes, *times in RUNS]
    return [sum(one) / (sum(run[0]) if whole else len(one)) for one, run in zip(sums, RUNS, strict=True)]


def judge_share(evidence: Evidence) -> Iterator[Fault]:
    """Whole rounds of training over the whole time; a mistake is named that gives all of these numbers."""
    results = evidence.results[0]
    for got in results:
        if isinstance(got, bool) or not isinstance(got, int | float):
            yield Fault("returned", f"expected a number, got {describe(got)}")

    def gives(those: list[float]) -> bool:
        return all(abs(one - other) <= 1e-9 for one, other in zip(results, those, strict=True))

    for run, got, want in zip(RUNS, results, shares(), strict=True):
        if abs(got - want) <= 1e-9:
            continue
        text = f"uptimes {run[0]} s, interval 900, save 100, restart {run[3]:.0f}: {numbers_differ(float(got), want)}"
        for code, count, words in MISTAKES:
            if gives(shares(count)):
                yield Fault(code, f"{text}: {words}")
        if gives(shares(whole=False)):
            yield Fault("mean of shares", f"{text}: short and long uptimes do not count alike; divide the sums")
        more = "; a share is of the whole time, sum(uptimes_s)" if got > 1 else ""
        yield Fault("not a share" if more else "values", text + more)


def budget_share(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{len(RUNS)} runs, one of which is never up long enough to save"]


def _draw_share(draw: Draw) -> tuple[Any, ...]:
    chance = random.Random(draw.integer(0, 10**9))
    uptimes = [chance.expovariate(1 / HOUR) for _ in range(draw.one_of(20, 1, 200))]
    return uptimes, draw.number(10, 2 * HOUR), draw.number(0.1, 300), draw.one_of(0.0, 60.0, 600.0)


SHARE = Vary(_draw_share, num_calls=12, left_out={"empty": "a run has a failure"})

_ROUNDS, _UP = "kept_s += trains_s // (interval_s + save_s) * interval_s", "max(uptime_s - restart_s, 0.0)"
WRONG_SHARES = (
    Mutant("lost work counted", "lost work counted", "whole rounds", 1).edit(" // ", " / "),
    Mutant("saving counted", "saving counted", "is no training", 1).edit("* interval_s", "* (interval_s + save_s)"),
    Mutant("saving is free", "saving is free", "training waits", 1).edit("(interval_s + save_s)", "interval_s"),
    Mutant("no restart", "no restart", "before training begins", 1).edit(_UP, "uptime_s"),
    Mutant("below zero", "below zero", "leaves 0, not less", 1).edit(_UP, "uptime_s - restart_s"),
    Mutant("saved when begun", "saved when begun", "save is over", 1).edit("trains_s // ", "(trains_s + save_s) // "),
    Mutant("seconds", "not a share", "of the whole time", 1).without(" / sum(uptimes_s)"),
    Mutant("mean of shares", "mean of shares", "divide the sums", 1, 22)
    .edit(_ROUNDS, f"{_ROUNDS} / uptime_s")
    .edit("sum(uptimes_s)", "len(uptimes_s)"),
    Mutant("checkpoints", "checkpoints", "stands for interval_s", 1).without(" * interval_s"),
    Mutant("two restarts", "two restarts", "one restart per failure", 1).edit("- restart_s", "- 2 * restart_s"),
)
