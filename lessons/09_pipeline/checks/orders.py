"""Orders of a rank in GPipe, 1F1B and a zero-bubble schedule: whether they run, how long, and how much is held."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import describe
from distlab.course.grading.exercise import Refused
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant
from distlab.plan import Action, parse_action

PIPELINES = ((4, 8), (2, 3), (3, 7), (4, 2), (1, 3))  # ranks, micro-batches; the widest first: it names faults best
WHOLE = {"F": 1, "B": 2}  # how long each kind takes, in units of a forward pass
SPLIT = {"F": 1, "I": 1, "W": 1}
LENGTH = "length of the step in forward passes"


def _needs(action: Action, num_ranks: int) -> list[Action]:
    """Return the actions that must have ended before this one."""
    stage, kind, i = action
    if kind == "F":
        return [Action(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [Action(stage, "I", i)]
    return [Action(stage, "F", i)] + ([Action(stage + 1, kind, i)] if stage < num_ranks - 1 else [])


def _run(orders: list[list[Action]], takes: dict[str, int]) -> tuple[int, str]:
    """Run each action as soon as what it needs has ended; return when the last ends, and what cannot go on."""
    end: dict[Action, int] = {}
    waiting, free, moved = [list(order) for order in orders], [0] * len(orders), True
    while moved:
        moved = False
        for rank, order in enumerate(waiting):
            while order and all(need in end for need in _needs(order[0], len(orders))):
                action, moved = order.pop(0), True
                start = max([free[rank], *(end[need] for need in _needs(action, len(orders)))])
                free[rank] = end[action] = start + takes.get(action.kind, 0)
    stuck = ", ".join(str(order[0]) for order in waiting if order)
    return max(free), f"wait for each other: {stuck}" if stuck else ""


def _misfit(orders: list[list[Action]], count: int, kinds: str) -> str:
    """Say which rank has actions that are not its own, or too many or too few."""
    for rank, order in enumerate(orders):
        own = [Action(rank, kind, i) for kind in kinds for i in range(count)]
        odd = {
            "has": [action for action in order if action not in own],
            "lacks": [action for action in own if action not in order],
            "runs again": [action for action in own if order.count(action) > 1],
        }
        if words := [f"{verb} {_few(actions)}" for verb, actions in odd.items() if actions]:
            return f"rank {rank} {', '.join(words)}"
    return ""


def _few(actions: list[Action]) -> str:
    more = f" and {len(actions) - 2} more" if len(actions) > 2 else ""
    return ", ".join(map(str, actions[:2])) + more


def _parsed(order: Any, rank: int) -> list[Action]:
    if not isinstance(order, list | tuple) or not all(isinstance(text, str) for text in order):
        text = f"rank {rank}: expected a list of texts such as '2F0', got {describe(order)}"
        raise Refused("returned", text)
    try:
        return [parse_action(text) for text in order]
    except ValueError as error:
        raise Refused("returned", f"rank {rank}: {error}") from None


def _held(order: list[Action]) -> int:
    """Return the most micro-batches that a rank holds: from F to B, or to W."""
    steps = [(action.kind == "F") - (action.kind in "BW") for action in order]
    return max((sum(steps[: end + 1]) for end in range(len(steps))), default=0)


def _use(schedule: str, fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> dict[str, Any]:
    """Say of all ranks' orders what holds for every right one: several are."""
    p, m, takes = num_ranks, num_microbatches, SPLIT if schedule == "ZB-H1" else WHOLE
    asked = (m,) if schedule == "GPipe" else (p, m)
    orders = [_parsed(fn(rank, *asked), rank) for rank in range(p)]
    length, stuck = _run(orders, takes)
    least = 3 * m + p - 1 if schedule == "ZB-H1" and m >= p else 3 * (m + p - 1)
    seen: dict[str, Any] = {"orders of all ranks": _misfit(orders, m, "".join(takes)) or stuck or "can run"}
    for rank, order in enumerate(orders):
        if schedule == "GPipe":
            first = next((place for place, action in enumerate(order) if action.kind != "F"), len(order))
            seen[f"forward passes before the first backward pass on rank {rank}"] = first
        else:
            needs = min(p if schedule == "ZB-H1" else p - rank, m)
            seen[f"most micro-batches in flight on rank {rank}"] = max(_held(order), needs)
    return seen | {LENGTH: max(length, least)}


def _draw(draw: Draw) -> tuple[int, int]:
    num_ranks = draw.one_of(1, 2, draw.integer(3, 4), draw.integer(5, 8))
    return num_ranks, draw.one_of(1, draw.integer(2, 4), num_ranks, draw.integer(9, 14), draw.integer(2, 20))


def _named(*pipelines: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {f"{p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}": (p, m) for p, m in pipelines}


def budget_gpipe(evidence: Evidence) -> list[str]:
    """Say how long the widest case takes and what it holds."""
    name, made = next(iter(evidence.results[0].items()))
    *held, length = (value for value in made["result"].values() if isinstance(value, int))
    idle = 1 - 3 * PIPELINES[0][1] / length
    return [f"{name}: {length} units, bubble {idle:.1%}; in flight {', '.join(map(str, held))}"]


budget_one_f_one_b = budget_zero_bubble = budget_gpipe
_gpipe, _one_f_one_b, _zero_bubble = (partial(_use, schedule) for schedule in ("GPipe", "1F1B", "ZB-H1"))
drive_gpipe, vary_gpipe = Cases(_named(*PIPELINES), _gpipe), Vary(_draw, use=_gpipe)
drive_one_f_one_b, vary_one_f_one_b = Cases(_named(*PIPELINES), _one_f_one_b), Vary(_draw, use=_one_f_one_b)
drive_zero_bubble = Cases(_named(*PIPELINES[:3], (4, 4), *PIPELINES[3:]), _zero_bubble)
vary_zero_bubble = Vary(_draw, use=_zero_bubble)

_ALL = "forward + backward"
WRONG_GPIPE = (
    Mutant(
        "one by one",
        "stages never overlap",
        "each micro-batch goes forward and back before the next one starts, so that stages never work at the same "
        "time; run all forward passes first",
        1,
        58,
    ).edit(_ALL, "[text for pair in zip(forward, backward) for text in pair]"),
    Mutant("stage 0 everywhere", "wrong stage", "every rank gets the actions of stage 0; rank r holds stage r", 1).edit(
        "{rank}", "0", times=2
    ),
    Mutant("from 1", "past the end", "micro-batches are counted from 1; the first one is 0", 1).edit(
        "{i}", "{i + 1}", times=2
    ),
    Mutant("one backward", "missing action", "one micro-batch alone goes back; every one has a backward pass", 1).edit(
        "+ backward", "+ backward[:1]"
    ),
    Mutant(
        "orders differ", "two orders", "odd ranks go back from the last micro-batch on; all take one order", 1, 27
    ).edit("+ backward", "+ (backward[::-1] if rank % 2 else backward)"),
    Mutant(
        "one too early", "not GPipe", "a backward pass comes too early; GPipe runs all forward passes first", 1
    ).edit(_ALL, "forward[:-1] + backward[:1] + forward[-1:] + backward[1:]"),
    Mutant("tuples", "returned", "expected a list of texts", 1).edit('f"{rank}F{i}"', '(rank, "F", i)'),
    Mutant("halves of backward", "wrong kind", "backward passes are split into I and W; GPipe's are whole: B", 1).edit(
        '[f"{rank}B{i}" for i', '[f"{rank}{kind}{i}" for kind in "IW" for i'
    ),
    Mutant("eight at most", "values", "rank 0 lacks 0F8", 1, "one size").edit(
        "range(num_microbatches)", "range(min(num_microbatches, 8))", times=2
    ),
)

_WARM_UP = "num_ranks - 1 - rank"
_ASKED = "rank r runs p - 1 - r forward passes before its first pair"
WRONG_ONE_F_ONE_B = (
    Mutant("GPipe", "GPipe", "it is GPipe, and holds all micro-batches; go back as soon as a pass can run", 1).edit(
        f"min({_WARM_UP}, num_microbatches)", "num_microbatches"
    ),
    Mutant("same warm-up", "same warm-up", f"all ranks warm up as long as rank 0; {_ASKED}", 1).edit(
        _WARM_UP, "num_ranks - 1"
    ),
    Mutant(
        "no warm-up",
        "stages never overlap",
        f"no rank warms up, so that stages never work at the same time; {_ASKED}",
        1,
        25,
    ).edit(_WARM_UP, "0"),
    Mutant("turned", "turned", f"the last rank warms up longest; {_ASKED}", 1).edit(_WARM_UP, "rank"),
    Mutant("short warm-up", "short warm-up", f"the warm-up is one forward pass too short; {_ASKED}", 1).edit(
        _WARM_UP, "max(num_ranks - 2 - rank, 0)"
    ),
    Mutant(
        "last rank turned",
        "last rank turned",
        "the last rank goes back from its last micro-batch on, and the others from their first: they wait for each "
        "other",
        1,
        27,
    ).edit("return order", "return order if rank < num_ranks - 1 else [*order[::2], *order[::-2]]"),
    Mutant(
        "runs past the end",
        "past the end",
        "each pair has a forward pass, also when none is left; B stands alone then",
        1,
    )
    .edit(f"min({_WARM_UP}, num_microbatches)", _WARM_UP)
    .edit("if warm_up + i < num_microbatches:", "if True:"),
    Mutant("newest first", "newest first", "the newest micro-batch goes back first; the oldest must", 1, 27).edit(
        "B{i}", "B{warm_up + i if warm_up + i < num_microbatches else num_microbatches - 1 - i}"
    ),
    Mutant("no minimum", "past the end", "the warm-up has more forward passes than there are micro-batches", 1).edit(
        "range(warm_up)", f"range({_WARM_UP})"
    ),
    Mutant(
        "no end", "missing action", "it ends with the last forward pass; what is in flight still has to go back", 1
    ).edit("range(num_microbatches)", "range(num_microbatches - warm_up)"),
    Mutant("four ranks", "values", LENGTH, 1, "one size").edit(_WARM_UP, f"min({_WARM_UP}, 3)"),
)


def _lagging(mutant: Mutant, lag: str) -> Mutant:
    """Let each W stand so many I's later."""
    later = mutant.edit("i >= rank", f"i >= {lag}").edit("i - rank", f"i - ({lag})")
    return later.edit("num_microbatches - rank", f"num_microbatches - ({lag})")


WRONG_ZERO_BUBBLE = (
    _lagging(
        Mutant("W at once", "W at once", "every W stands right behind its I; on rank r let r more I's go first", 1),
        "0",
    ),
    _lagging(
        Mutant("W last", "W last", "all W's come at the end, and everything is held until then; run them earlier", 1),
        "num_microbatches",
    ),
    _lagging(
        Mutant("turned", "turned", "W's lag most on rank 0; it is the other way round: on rank r they lag r I's", 1),
        _WARM_UP,
    ),
    Mutant(
        "not split", "not split", "backward passes are whole; write I and W, so that W can go where a rank idles", 1
    ).edit("{rank}I{i}", "{rank}B{i}"),
    Mutant("W first", "too early", "a W stands before its I, which makes what it needs", 1)
    .without('order.append(f"{rank}I{i}")')
    .edit('order.append(f"{rank}W{i - rank}")', 'order.append(f"{rank}W{i - rank}")\norder.append(f"{rank}I{i}")')
    .edit("if i >= rank:", 'if i < rank:\n    order.append(f"{rank}I{i}")\nelse:'),
    Mutant("W lost", "missing action", "the last W's are missing; append at the end those that are left", 1).without(
        'f"{rank}W{i}" for i in range(max(num_microbatches - rank, 0), num_microbatches)'
    ),
    Mutant(
        "one warm-up more",
        "one too many",
        "rank 0 holds a micro-batch too many: rank r warms up with p - 1 - r, and its W's lag r I's, no more",
        1,
    ).edit(_WARM_UP, "num_ranks - rank"),
    _lagging(Mutant("four ranks", "values", LENGTH, 1, "one size"), "min(rank, 3)"),
)
