"""Check an answer: the function itself, then on 1, 2, 3 and 4 real ranks; the first fault ends it.

    flat = check("03.flat", flat).function

Every number of ranks gets processes of its own, which are killed afterwards, so an answer may hang, exit or crash.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distlab.course.grading.exercise import SEEN, Exercise, Fault
from distlab.course.grading.lesson import load_lesson, reference_of
from distlab.course.grading.progress import keep
from distlab.course.grading.report import Report

if TYPE_CHECKING:
    from distlab.comm import Ranks

LONGER_S = 5.0  # for a further number of ranks, once there is a fault to tell
_stand_ins: dict[str, Callable[..., Any]] = {}  # the reference that each exercise's last failed check handed out


def check(name: str, fn: Any, *, worlds: Sequence[int] | None = None, seed: int | None = None) -> Report:
    """Check fn as an answer to an exercise, show the report in a notebook, keep the progress, and return the report.

    Args:
        name: the exercise, such as "03.flat".
        fn: the function that you wrote.
        worlds: numbers of ranks to run it on; by default those of the exercise.
        seed: of the drawn arguments; by default a different one each time. A failure says which it was.

    Raises:
        ValueError: there is no such exercise, or a number of ranks is not a positive number.
    """
    exercise = load_lesson(name).exercise(name)
    stand_in = _stand_ins.get(exercise.name)
    if stand_in is not None and fn is stand_in:  # no answer: nothing is run or kept
        text = f"{exercise.name}: since the last check {fn.__name__} is the reference, so that the lesson goes on"
        text = f"{text}. Run the cell with your function first, then the check again"
        report = Report(exercise, "not attempted", "not attempted", text, (), (), 0.0, None, stand_in)
    else:
        report = examine(exercise, fn, worlds=worlds, seed=seed)
    if not report.passed:
        _stand_ins[exercise.name] = report.function
    report = replace(report, progress=keep(report))
    report.show()
    return report


def examine(exercise: Exercise, fn: Any, *, worlds: Sequence[int] | None = None, seed: int | None = None) -> Report:
    """Check fn without showing or keeping anything; a seed draws the same arguments again.

    Raises:
        ValueError: there are no numbers of ranks, or one is not a positive number.
    """
    from distlab.course.grading.answer.signature import first_fault
    from distlab.course.grading.diagnosis.blame import in_plain_names
    from distlab.course.grading.run import Unavailable

    chosen = tuple(exercise.worlds if worlds is None else worlds)
    if not chosen or any(type(n) is not int or not 1 <= n <= 64 for n in chosen):
        raise ValueError(f"worlds is {worlds!r}; pass numbers of ranks from 1 to 64, such as worlds=(1, 2)")
    reference, start = reference_of(exercise), time.perf_counter()
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    fault = first_fault(exercise, fn, reference)
    right: list[int] = []
    budget: tuple[str, ...] = ()
    blocked = ""
    if fault is None:
        try:
            fault, right, budget = _run_worlds(exercise, fn, chosen, seed)
        except Unavailable as error:
            blocked = str(error)
    ended = "passed" if fault is None else "not attempted" if fault.code == "not attempted" else "wrong"
    return Report(
        exercise=exercise,
        verdict="blocked" if blocked else ended,
        fault=None if fault is None else fault.code,
        message=blocked if fault is None else in_plain_names(fault.message, fn),
        budget=budget,
        worlds=tuple(right),
        seconds=time.perf_counter() - start,
        answer=fn if callable(fn) else None,
        reference=reference,
    )


def _run_worlds(
    exercise: Exercise, fn: Callable[..., Any], worlds: Sequence[int], seed: int
) -> tuple[Fault | None, list[int], tuple[str, ...]]:
    """Run one number of ranks after the other; return the first fault, where it was right, and the budget's lines.

    After a fault that drawn arguments show, the exercise's own cases are run on the other numbers of ranks: what they
    show there is told if it weighs as much.
    """
    from distlab.course.grading.run import fresh_ranks

    right: list[int] = []
    budget: tuple[str, ...] = ()
    drawn: Fault | None = None
    with fresh_ranks(worlds, exercise.timeout_s) as sets:
        for ranks in sets:
            if drawn is not None:
                ranks.timeout_s = min(ranks.timeout_s, LONGER_S)
            fault, is_drawn, budget = _fault_on(exercise, fn, ranks, seed, drawn)
            if fault is not None and is_drawn:
                drawn = _at_world(fault, right, ranks.world_size)._replace(cause=fault.cause)
            elif fault is not None and drawn is None:
                return _at_world(fault, right, ranks.world_size), right, ()
            elif fault is not None:
                return Fault(fault.code, f"on {ranks.world_size} ranks: {fault.words}"), right, ()
            elif drawn is None:
                right.append(ranks.world_size)
    return drawn, right, () if drawn is not None else budget


def _fault_on(
    exercise: Exercise, fn: Callable[..., Any], ranks: Ranks, seed: int, earlier: Fault | None
) -> tuple[Fault | None, bool, tuple[str, ...]]:
    """Return the fault on one number of ranks, whether drawn arguments show it, and the budget's lines.

    The exercise's own cases come first. Drawn calls follow where these are right; or where what is wrong has no name,
    since drawn calls may show the cause.

    After `earlier`, which drawn arguments have shown on fewer ranks, only what weighs as much is told.
    """
    from distlab.course.grading.run import judge, run_world
    from distlab.course.grading.variation.verdict import drawn_fault

    assert exercise.drive is not None, f"{exercise.name}: load_lesson finds how it is driven"
    outcome, reference = run_world(exercise, exercise.drive, fn, ranks), reference_of(exercise)
    own, budget = (outcome, ()) if isinstance(outcome, Fault) else judge(exercise, outcome, fn, ranks)
    if own is None:
        looks = exercise.vary is not None and earlier is None
        drawn = drawn_fault(exercise, fn, reference, ranks, seed) if looks else None
        return drawn, True, budget
    if earlier is not None and not 0 < own.weight >= earlier.weight:
        return None, False, ()
    if own.code in SEEN | {"raised"} and not own.cause and exercise.vary is not None:
        drawn = drawn_fault(exercise, fn, reference, ranks, seed, is_wrong=True)
        if drawn is not None and drawn.cause:
            own = own._replace(cause=drawn.cause)
        elif drawn is not None and own.code != "returned" and drawn.code in SEEN:
            smallest = f"the smallest drawn arguments for which it is wrong: {drawn.message}"
            own = own._replace(message=f"{own.message}\n  {smallest}")
    return own, False, ()


def _at_world(fault: Fault, right: Sequence[int], wrong: int) -> Fault:
    if not right or fault.code == "not attempted":
        return Fault(fault.code, fault.words)
    listed = " and ".join(filter(None, [", ".join(map(str, right[:-1])), str(right[-1])]))
    text = f"right on {listed} rank{'' if list(right) == [1] else 's'}, wrong on {wrong}: {fault.words}"
    return Fault(fault.code, text)
