"""What machines know of each other: how far their clocks are apart, and in which facts they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, median
from typing import Any

import torch.distributed as dist

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import close, compare, describe
from distlab.grading.variation.draw import Draw, Vary

Round = tuple[float, float, float]
AHEAD_S = 2.5  # by how much the other clock is ahead
_WAYS_S = ((0.004, 0.009), (0.001, 0.002), (0.013, 0.001), (0.0005, 0.006))  # there, back
ROUNDS: list[Round] = [
    (10.0 + i, 10.0 + i + go + AHEAD_S, 10.0 + i + go + back) for i, (go, back) in enumerate(_WAYS_S)
]


def drive_clocks(fn: Callable[..., Any]) -> list[Any]:
    """Ask for the offset of a clock that is ahead, of one round of it, and of the other machine's."""
    turned = [(sent, theirs - 2 * AHEAD_S, received) for sent, theirs, received in ROUNDS]
    return [fn(list(rounds)) for rounds in (ROUNDS, ROUNDS[:1], turned)]


def judge_clocks(evidence: Evidence) -> Iterator[Fault]:
    """The middle of the quickest round, and half its time."""
    first = evidence.results[0][0]
    for got in evidence.results[0]:
        if not isinstance(got, list | tuple) or len(got) != 2 or not all(isinstance(x, int | float) for x in got):
            yield Fault("returned", f"expected the offset and how far off it may be, got {describe(got)}")
    middles = [(sent + received) / 2 - theirs for sent, theirs, received in ROUNDS]
    trips = [received - sent for sent, _, received in ROUNDS]
    best, half = middles[1], trips[1] / 2
    words = f"expected {best:.4f} +- {half:.4f} s from round 2, the quickest; got {first[0]:.4f} +- {first[1]:.4f} s"
    known = (
        ("sign", -best, "the other clock is ahead, so what is added to it is negative"),
        ("mean", mean(middles), "that is the mean over all rounds; a slow round says little, take the quickest"),
        ("mean", median(middles), "that is the median over all rounds; take the quickest alone"),
        ("slowest round", middles[2], "that is round 3, the slowest"),
        ("first round", middles[0], "that is round 1; take the quickest"),
        (
            "way back forgotten",
            ROUNDS[1][0] - ROUNDS[1][1],
            "the message took time: they answered midway, not at `sent`",
        ),
        ("way there forgotten", ROUNDS[1][2] - ROUNDS[1][1], "the answer took time: they answered midway"),
    )
    for code, value, why in known:
        if close(first[0], value):
            yield Fault(code, f"{words}: {why}")
    for got, rounds in zip(evidence.results[0], (1, 0, 1), strict=True):
        if close(got[1], 2 * trips[rounds] / 2) and not close(got[1], trips[rounds] / 2):
            yield Fault("whole trip", f"{words}: it is off by half the round trip at most, where all of it was one way")
    for number, (got, want) in enumerate(zip(evidence.results[0], right_offsets(), strict=True)):
        if not close(got[0], want[0]) or not close(got[1], want[1]):
            yield Fault("values", f"case {number + 1}: expected {want}, got {tuple(got)}")


def right_offsets() -> list[tuple[float, float]]:
    """Return what is expected of each case."""
    middle = [(sent + received) / 2 - theirs for sent, theirs, received in ROUNDS]
    half = [(received - sent) / 2 for sent, _, received in ROUNDS]
    return [(middle[1], half[1]), (middle[0], half[0]), (middle[1] + 2 * AHEAD_S, half[1])]


def budget_clocks(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    return [f"{len(ROUNDS)} rounds; a clock that is {AHEAD_S} s ahead, and one that is as far behind"]


def _draw_rounds(draw: Draw) -> tuple[Any, ...]:
    ahead = draw.one_of(-1.0, 1.0, 0.0) * draw.number(0.1, 100.0)
    rounds, at = [], draw.number(0.0, 50.0)
    for _ in range(draw.one_of(2, 1, draw.integer(3, 6))):
        go, back = draw.number(1e-4, 1e-2), draw.number(1e-4, 1e-2)
        rounds.append((at, at + go + ahead, at + go + back))
        at += 0.1
    return (rounds,)


CLOCKS_VARY = Vary(_draw_rounds)
_BEST = "min(rounds, key=lambda one: one[2] - one[0])"
WRONG_CLOCKS = (
    Mutant("other way round", "sign", "is negative", 1).edit(
        "(sent + received) / 2 - theirs", "theirs - (sent + received) / 2"
    ),
    Mutant("mean of all", "mean", "mean over all rounds", 1).edit(
        _BEST, "(sum(x) / len(rounds) for x in zip(*rounds))"
    ),
    Mutant("median of all", "mean", "median over all", 1)
    .setup("from statistics import median")
    .edit("return (sent + received) / 2 - theirs", "return median((a + c) / 2 - b for a, b, c in rounds)"),
    Mutant("slowest", "slowest round", "round 3", 1).edit("min(rounds", "max(rounds"),
    Mutant("first", "first round", "round 1", 1).edit(_BEST, "rounds[0]"),
    Mutant("smallest offset", "slowest round", "the slowest", 1).edit(
        "one[2] - one[0]", "(one[0] + one[2]) / 2 - one[1]"
    ),
    Mutant("when sent", "way back forgotten", "not at `sent`", 1).edit("(sent + received) / 2", "sent"),
    Mutant("when received", "way there forgotten", "the answer took time", 1).edit("(sent + received) / 2", "received"),
    Mutant("whole trip", "whole trip", "half the round trip", 1).edit("(received - sent) / 2", "received - sent"),
)

FACTS = (  # by rank: two nodes of two ranks, on three ranks the second node has one
    {"host": "b", "torch": "2.13", "wire": "eth0", "device": "H100"},
    {"host": "b", "torch": "2.13", "wire": "eth0", "device": "H100"},
    {"host": "a", "torch": "2.11", "wire": "eth0", "driver": "550"},
    {"host": "c", "torch": "2.11", "wire": "eth0", "driver": "550"},
)


def drive_preflight(fn: Callable[..., Any]) -> Any:
    """Compare facts of which two differ, one is missing on some ranks, and one is the same."""
    return fn(dict(FACTS[dist.get_rank()]))


def right_differences(world_size: int) -> dict[str, dict[str, list[str]]]:
    """Return what is expected of so many ranks."""
    if world_size < 3:
        return {}
    rest = ["a", "c"][: world_size - 2]
    old = {"torch": {"2.13": ["b"], "2.11": rest}, "device": {"H100": ["b"], "missing": rest}}
    return old | {"driver": {"missing": ["b"], "550": rest}}


def judge_preflight(evidence: Evidence) -> Iterator[Fault]:
    """The same on every rank: each fact that differs, with values and hosts."""
    want = right_differences(evidence.world_size)
    for rank, got in enumerate(evidence.results):
        what = f"rank {rank}"
        if not isinstance(got, dict) or not all(isinstance(value, dict) for value in got.values()):
            say = "every rank needs the answer" if got is None and rank else "a dict of facts, of values, of hosts"
            yield Fault("returned", f"{what}: expected {say}, got {describe(got)}")
        if "host" in got and "host" not in want:
            yield Fault("host", f"{what}: hosts differ, as they should: do not compare them")
        for name in want:
            if name not in got:
                lacks = [] if name in FACTS[rank] else [f"; rank {rank} has no {name!r} of its own"]
                say = "".join([f"{what}: {name} differs ({want[name]}) and is not told", *lacks])
                yield Fault("not told", f"{say}: look at the facts of all ranks")
            if set(got[name]) != set(want[name]):
                yield Fault("values", f"{what}: values of {name}: expected {list(want[name])}, got {list(got[name])}")
            for value, hosts in want[name].items():
                yield from _judge_hosts(f"{what}: hosts with {name} {value}", got[name][value], hosts)
        for name in got:
            if name not in want:
                yield Fault("same everywhere", f"{what}: {name} is the same on all ranks: tell only what differs")


def _judge_hosts(what: str, got: Any, want: list[str]) -> Iterator[Fault]:
    if not isinstance(got, list | tuple) or any(isinstance(host, int) for host in got):
        yield Fault("not hosts", f"{what}: expected {want}, got {describe(got)}: name hosts, in a list")
    if list(got) != want and sorted(set(got)) == want:
        text = "each once" if len(got) > len(want) else "in alphabetical order"
        yield Fault(
            "hosts repeated" if len(got) > len(want) else "order", f"{what}: expected {want}, got {got}: {text}"
        )
    fault = compare(got, want, what)
    if fault is not None:
        yield Fault("hosts", fault.message)


def preflight_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a collective that only some ranks call."""
    if "all_gather" in str(error) and "raised" not in str(error).splitlines()[0]:
        return Fault("under if", f"on {world_size} ranks some wait in all_gather_object: every rank must call it")
    return None


def budget_preflight(evidence: Evidence) -> list[str]:
    """Say what it took."""
    return [f"{len(right_differences(evidence.world_size))} differences found on {evidence.world_size} ranks"]


def _draw_facts(draw: Draw) -> tuple[Any, ...]:
    hosts = draw.one_of(1, 2, 3)
    facts = {"host": f"h{(draw.rank * 7 + draw.integer(0, 5)) % hosts}"}
    for name in ("torch", "nccl", "wire", "shm")[: draw.one_of(2, 3, 4)]:
        value = draw.own(0, draw.one_of(0, 1, 2))
        if value or draw.integer(0, 1):
            facts[name] = f"v{value}"
    return (facts,)


FACTS_VARY = Vary(
    _draw_facts,
    least_bytes=0.05,
    left_out={
        "bytes": "one rank may compare, or ranks may compare hashes first",
        "sub-group": "the whole job is looked at",
    },
)
_VALUES, _HOSTS = 'values = {one.get(name, "missing") for one in everyone}', '{one["host"] for one in everyone'
WRONG_PREFLIGHTS = (
    Mutant("rank 0 alone knows", "returned", "every rank needs the answer", 3).edit(
        "return found", "return found if dist.get_rank() == 0 else None"
    ),
    Mutant("own names", "not told", "of its own: look at", 3).edit(
        'for one in everyone for name in one if name != "host"', 'for name in facts if name != "host"'
    ),
    Mutant("missing left out", "not told", "device differs", 3).edit(
        _VALUES, "values = {one[name] for one in everyone if name in one}"
    ),
    Mutant("neighbours", "not told", "torch differs", 3)
    .edit("everyone: list[Any] =", "everyone =")
    .edit(
        "dist.all_gather_object(everyone, facts)", "dist.all_gather_object(everyone, facts)\neveryone = everyone[:2]"
    ),
    Mutant("hosts too", "host", "do not compare them", 3).without(' if name != "host"'),
    Mutant("all facts", "same everywhere", "only what differs", 3).edit("> 1", "> 0"),
    Mutant("ranks", "not hosts", "name hosts", 3).edit(_HOSTS, "{rank for rank, one in enumerate(everyone)"),
    Mutant("a host per rank", "hosts repeated", "each once", 3)
    .edit("sorted({", "sorted([")
    .edit("== value})", "== value])"),
    Mutant("backwards", "order", "alphabetical", 4).edit("== value})", "== value}, reverse=True)"),
    Mutant("rank 0 gathers", "under if", "every rank must call it", 3, 5).edit(
        "dist.all_gather_object(everyone, facts)",
        "if dist.get_rank() > 0:\n    return {}\ndist.all_gather_object(everyone, facts)",
    ),
    Mutant("own value only", "values", "values of", 3).edit(
        "for value in values", 'for value in [facts.get(name, "missing")]'
    ),
)
