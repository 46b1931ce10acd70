"""What machines know of each other: how far their clocks are apart, and in which facts they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Fault, Mutant

Round = tuple[float, float, float]
AHEAD_S = 2.5  # by how much the other clock is ahead
_WAYS_S = ((0.004, 0.009), (0.001, 0.002), (0.013, 0.001), (0.0005, 0.006))  # there, back
ROUNDS: list[Round] = [
    (10.0 + i, 10.0 + i + go + AHEAD_S, 10.0 + i + go + back) for i, (go, back) in enumerate(_WAYS_S)
]


_BEHIND = [(sent, theirs - 2 * AHEAD_S, received) for sent, theirs, received in ROUNDS]


def _told(fn: Callable[..., Any], rounds: list[Round]) -> Any:
    """Return the offset and how far off it may be by these names, if there are two."""
    found = fn(rounds)
    if isinstance(found, list | tuple) and len(found) == 2:
        return dict(zip(("the offset", "how far off it may be"), found, strict=True))
    return found


drive_clocks = Cases(
    {
        "4 rounds, the other clock is ahead": (ROUNDS,),
        "1 round": (ROUNDS[:1],),
        "3 rounds, the other clock is ahead": (ROUNDS[:2] + ROUNDS[3:],),
        "4 rounds, the other clock is behind": (_BEHIND,),
    },
    _told,
)


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


vary_clocks = Vary(_draw_rounds, num_calls=24)
_BEST = "min(rounds, key=lambda one: one[2] - one[0])"
WRONG_CLOCKS = (
    Mutant(
        "other way round", "sign", "what is added to a clock that is ahead is negative: this clock minus theirs", 1
    ).edit("(sent + received) / 2 - theirs", "theirs - (sent + received) / 2"),
    Mutant(
        "mean of all", "mean", "that is the mean over all rounds; a slow round says little, so take the quickest", 1
    ).edit(_BEST, "(sum(x) / len(rounds) for x in zip(*rounds))"),
    Mutant("median of all", "median", "that is the median over all rounds; take the quickest alone", 1)
    .setup("from statistics import median")
    .edit("return (sent + received) / 2 - theirs", "return median((a + c) / 2 - b for a, b, c in rounds)"),
    Mutant("slowest", "slowest round", "that is the slowest round; take the quickest", 1).edit(
        "min(rounds", "max(rounds"
    ),
    Mutant("first", "first round", "that is the first round; take the quickest", 1).edit(_BEST, "rounds[0]"),
    Mutant(
        "smallest offset", "smallest offset", "that is the round with the smallest offset; take the quickest", 1
    ).edit("one[2] - one[0]", "(one[0] + one[2]) / 2 - one[1]"),
    Mutant("when sent", "way back forgotten", "the message took time: they answered midway, not at `sent`", 1).edit(
        "(sent + received) / 2", "sent"
    ),
    Mutant(
        "when received", "way there forgotten", "the answer took time: they answered midway, not at `received`", 1
    ).edit("(sent + received) / 2", "received"),
    Mutant("last", "last round", "that is the last round; take the quickest", 1).edit(_BEST, "rounds[-1]"),
    Mutant("whole trip", "whole trip", "it is off by half the round trip at most, where all of it was one way", 1).edit(
        "(received - sent) / 2", "received - sent"
    ),
)

FACTS = (  # by rank: two nodes of two ranks, on three ranks the second node has one
    {"host": "b", "torch": "2.13", "wire": "eth0", "device": "H100"},
    {"host": "b", "torch": "2.13", "wire": "eth0", "device": "H100"},
    {"host": "a", "torch": "2.11", "wire": "eth0", "driver": "550"},
    {"host": "c", "torch": "2.11", "wire": "eth0", "driver": "550"},
)


def use_preflight(fn: Callable[..., Any], facts: dict[str, str]) -> Any:
    """Return the facts that differ, and the values of each, in the order of their names: the reference has sets."""
    return _in_order(fn(facts))


def _in_order(found: Any) -> Any:
    return {name: _in_order(found[name]) for name in sorted(found, key=str)} if isinstance(found, dict) else found


drive_preflight = Cases(lambda rank, n: {"": (dict(FACTS[rank]),)}, use_preflight, most_bytes=0)


def failure_preflight(error: RankError, world_size: int) -> Fault | None:
    """Name a collective that only some ranks call."""
    if "all_gather" in str(error) and "raised" not in str(error).splitlines()[0]:
        return Fault("under if", f"on {world_size} ranks some wait in all_gather_object: every rank must call it")
    return None


def budget_preflight(evidence: Evidence) -> list[str]:
    """Say what it took."""
    return [f"{len(evidence.results[0]['']['result'])} differences found on {evidence.world_size} ranks"]


def _draw_facts(draw: Draw) -> tuple[Any, ...]:
    hosts = draw.one_of(1, 2, 3)
    facts = {"host": f"h{(draw.rank * 7 + draw.integer(0, 5)) % hosts}"}
    for name in ("torch", "nccl", "wire", "shm")[: draw.one_of(2, 3, 4)]:
        value = draw.own(0, draw.one_of(0, 1, 2))
        if value or draw.integer(0, 1):
            facts[name] = f"v{value}"
    return (facts,)


vary_preflight = Vary(
    _draw_facts,
    least_bytes=0.05,
    left_out={
        "bytes": "one rank may compare, or ranks may compare hashes first",
        "sub-group": "the whole job is looked at",
    },
)
_VALUES, _HOSTS = 'values = {one.get(name, "missing") for one in everyone}', '{one["host"] for one in everyone'
WRONG_PREFLIGHT = (
    Mutant("rank 0 alone knows", "rank 0 alone", "every rank needs the answer", 3).edit(
        "return found", "return found if dist.get_rank() == 0 else None"
    ),
    Mutant(
        "own names", "own names", "a fact that this rank does not have is not told: look at the facts of all ranks", 3
    ).edit('for one in everyone for name in one if name != "host"', 'for name in facts if name != "host"'),
    Mutant(
        "missing left out", "missing left out", "where a rank does not give a fact, it has the value 'missing'", 3
    ).edit(_VALUES, "values = {one[name] for one in everyone if name in one}"),
    Mutant("neighbours", "not told", "a fact that differs is not told: look at the facts of all ranks", 3)
    .edit("everyone: list[Any] =", "everyone =")
    .edit(
        "dist.all_gather_object(everyone, facts)", "dist.all_gather_object(everyone, facts)\neveryone = everyone[:2]"
    ),
    Mutant("hosts too", "host", "hosts differ, as they should: do not compare them", 3).without(' if name != "host"'),
    Mutant("all facts", "same everywhere", "a fact is the same on all ranks: tell only what differs", 3).edit(
        "> 1", "> 0"
    ),
    Mutant("ranks", "not hosts", "name the hosts that have a value, not the ranks", 3).edit(
        _HOSTS, "{rank for rank, one in enumerate(everyone)"
    ),
    Mutant("a host per rank", "hosts repeated", "a host stands once for each of its ranks: name each once", 3)
    .edit("sorted({", "sorted([")
    .edit("== value})", "== value])"),
    Mutant("backwards", "order of hosts", "hosts stand in alphabetical order", 4).edit(
        "== value})", "== value}, reverse=True)"
    ),
    Mutant("rank 0 gathers", "under if", "every rank must call it", 3, 5).edit(
        "dist.all_gather_object(everyone, facts)",
        "if dist.get_rank() > 0:\n    return {}\ndist.all_gather_object(everyone, facts)",
    ),
    Mutant("own value only", "own values", "only this rank's value is told: tell each value, with its hosts", 3).edit(
        "for value in values", 'for value in [facts.get(name, "missing")]'
    ),
    Mutant("odd alone", "odd alone", "the value that most ranks have is left out: tell each value", 3).edit(
        "for value in values",
        'for value in values - {max(values, key=[one.get(name, "missing") for one in everyone].count)}',
    ),
)
