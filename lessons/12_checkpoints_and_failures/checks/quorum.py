"""Who goes on after a death: decided from what replicas say of themselves, without a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.course.grading.cases import Cases
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.elastic import Arrival, Quorum
from distlab.grading import Evidence, Mutant

ALL, LAST = (0, 1, 2), Quorum(3, (0, 1, 2), 40, (), (0, 1, 2))
BORDER, INSIDE, AHEAD = Arrival(3, 41), Arrival(3, 41, ALL), Arrival(3, 42)
NEW, OLD = Arrival(-1, 0), Arrival(2, 44)
SITUATIONS = {
    "2 was killed, 0 and 1 are in step 41": ({0: INSIDE, 1: INSIDE}, {0, 1}, LAST, 1),
    "2 lives and has not asked": ({0: INSIDE, 1: INSIDE}, {0, 1, 2}, LAST, 1),
    "1 asked and was killed": ({0: BORDER, 1: BORDER, 2: BORDER}, {0, 2}, LAST, 1),
    "a new 2 asks while 0 and 1 are in step 41": ({0: INSIDE, 1: INSIDE, 2: NEW}, {0, 1, 2}, LAST, 1),
    "a new 2 asks, 0 and 1 are between two steps": ({0: BORDER, 1: BORDER, 2: NEW}, {0, 1, 2}, LAST, 1),
    "a new 0 asks, 1 is between two steps": ({1: BORDER, 0: NEW}, {0, 1}, LAST, 1),
    "2 was taken for dead and comes back": ({0: BORDER, 1: BORDER, 2: OLD}, {0, 1, 2}, LAST, 1),
    "0 has made update 42, 1 has not yet": ({0: AHEAD, 1: INSIDE}, {0, 1}, LAST, 1),
    "0 has made update 42, 1 not yet, a new 2 asks": ({0: AHEAD, 1: INSIDE, 2: NEW}, {0, 1, 2}, LAST, 1),
    "0 is in step 42, 1 has not made it yet": ({0: Arrival(3, 42, ALL), 1: INSIDE}, {0, 1}, LAST, 1),
    "0 alone is left, and two are asked for": ({0: INSIDE}, {0}, LAST, 2),
    "0 is in step 41, a new 1 asks, and two are asked for": ({0: INSIDE, 1: NEW}, {0, 1}, LAST, 2),
    "0 alone is left, and one is enough": ({0: INSIDE}, {0}, LAST, 1),
    "0, 1 and 2 were killed, a new 1 asks": ({1: NEW}, {1}, LAST, 1),
    "5 lives, was in no quorum, and has not asked": ({0: BORDER, 1: BORDER}, {0, 1, 5}, LAST, 1),
}


def _use(fn: Callable[..., Any], arrived: Any, alive: set[int], last: Quorum, min_replicas: int) -> Any:
    found = fn(arrived, alive, last, min_replicas)
    if not isinstance(found, tuple | list) or len(found) != 3:
        return found
    members, takers, step = found
    return {"members": [*members], "those that take a state": [*takers], "step": step}


drive_quorum = Cases(SITUATIONS, _use)


def budget_quorum(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{len(SITUATIONS)} situations after a death or an arrival"]


def _draw_quorum(draw: Draw) -> tuple[Any, ...]:
    num, epoch = draw.integer(2, 6), draw.integer(0, 9)
    last = Quorum(epoch, tuple(range(num)), step := draw.integer(1, 99))
    ahead, arrived = draw.integer(0, num - 1), {}
    for number in range(num + draw.integer(0, 2)):
        deal = last.members if draw.one_of(True, False) else ()
        holder = Arrival(epoch, step + draw.integer(0, 1), deal)
        kinds = [holder, Arrival(-1, 0), Arrival(epoch - 1, step + 3), None]
        if (one := holder if number == ahead else draw.one_of(*kinds)) is not None:
            arrived[number] = one
    alive = {number for number in range(num + 2) if number == ahead or draw.one_of(True, True, False)}
    return arrived, alive, last, draw.integer(1, 3)


vary_quorum = Vary(_draw_quorum, use=_use, num_calls=24, left_out={"empty": "at least one holder has asked"})

_WAITS, _LEAST = (
    "if not holders or any(number in alive and number not in arrived for number in last.members):",
    "if len(members) < min_replicas:",
)
_HOLDS, _MEMBERS = (
    "if arrived[number].line == last.epoch",
    "members = holders if in_step and len(holders) >= min_replicas else living",
)
WRONG_QUORUM = (
    Mutant("the dead too", "dead is in", "one is in that died after it had asked; `alive` says who lives", 1).edit(
        "for number in arrived if number in alive", "for number in arrived"
    ),
    Mutant("does not wait", "went ahead", "it goes on without a member that lives and has not asked yet: wait", 1).edit(
        _WAITS, "if not holders:"
    ),
    Mutant("waits for the dead", "waits", "it waits for a member that is dead, which will never ask", 1).edit(
        "number in alive and number not in arrived for number", "number not in arrived for number"
    ),
    Mutant("into a step", "into a step", "a new one is let into a step that it has no gradient of: it waits", 1).edit(
        _MEMBERS, "members = living"
    ),
    Mutant("never lets in", "never let in", "between two steps all that live go on, new ones too", 1).edit(
        _MEMBERS, "members = holders"
    ),
    Mutant(
        "old state", "old state", "one that was taken for dead has an old state: only last.epoch is the newest", 1
    ).edit(_HOLDS, "if arrived[number].line >= 0"),
    Mutant(
        "the least step", "least step", "the step is that of the one behind; the update that others made counts", 1
    ).edit("step = max(", "step = min("),
    Mutant(
        "anyone's step", "anyone's step", "the step is of one whose state is not the newest; ask the holders", 1
    ).edit("for number in holders)\nin_step", "for number in living)\nin_step"),
    Mutant("behind is inside", "behind", "one that is behind makes its update now, and is inside no step then", 1).edit(
        " and arrived[number].step == step", ""
    ),
    Mutant(
        "too few inside", "too few inside", "it waits though a new one is there: too few for a step let it in", 1
    ).edit(" and len(holders) >= min_replicas", ""),
    Mutant("any number", "too few", "fewer than min_replicas go on; they wait", 1).edit(_LEAST, "if not members:"),
    Mutant("a majority", "majority", "it wants more than half of those before; min_replicas says how many", 1).edit(
        _LEAST, "if len(members) < max(min_replicas, len(last.members) // 2 + 1):"
    ),
    Mutant("as they came", "unsorted", "numbers come in the order of asking; sorted, the place is the rank", 1).edit(
        "sorted(number for number in arrived if number in alive)", "[number for number in arrived if number in alive]"
    ),
    Mutant(
        "all take", "all take", "holders take a state, too; only those take one that do not hold the newest", 1
    ).edit("[number for number in members if number not in holders]", "[*members]"),
    Mutant("behind takes", "behind takes", "one that is behind takes no state: it makes that update itself", 1).edit(
        "if number not in holders]", "if number not in holders or arrived[number].step < step]"
    ),
    Mutant("nobody has it", "no holder", "nobody that lives has the newest state: wait for one", 1)
    .edit("not holders or ", "")
    .edit(
        "max(arrived[number].step for number in holders)",
        "max((arrived[number].step for number in holders), default=0)",
    ),
    Mutant("has not asked", "not asked", "one is in that lives but has not asked", 1)
    .edit("for number in arrived if number in alive", "for number in alive")
    .edit(_HOLDS, "if number in arrived and arrived[number].line == last.epoch"),
)
