"""What the checks of lesson 13 share: known wrong versions run on the cases; one that agrees names the fault.

So a wrong version is written once, as an edit of the reference; its `says` is what a learner with that fault is told.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.exercise import Drive, Judge
from distlab.grading.mutant import build

Cases = Mapping[str, tuple[Any, ...]]  # what is asked, in words, and the arguments


def drive_cases(cases: Cases) -> Drive:
    """Return what calls a function with the arguments of every case."""

    def drive(fn: Callable[..., Any]) -> list[Any]:
        return [fn(*copy.deepcopy(arguments)) for arguments in cases.values()]

    return drive


def judge_cases(function: str, cases: Cases, wrong: Sequence[Mutant], imports: tuple[str, ...] = ()) -> Judge:
    """Return what compares a function's results with the reference's, and names the fault of a known wrong version."""

    def judge(evidence: Evidence) -> Iterator[Fault]:
        reference = getattr(importlib.import_module("distlab_lesson_13.solutions"), function)
        got, want = evidence.results[0], drive_cases(cases)(reference)
        first = next((at for at, pair in enumerate(zip(got, want, strict=True)) if not agree(*pair)), None)
        if first is None:
            return
        text = f"{list(cases)[first]}: expected {short(want[first])}, got {short(got[first])}"
        made = [(mutant, build(mutant, function, reference, imports).fn) for mutant in wrong]
        others = [(mutant, [_result(fn, arguments) for arguments in cases.values()]) for mutant, fn in made]
        for mutant, results in others:
            if agree(got, results):
                yield Fault(mutant.fault, f"{text}: {mutant.says}")
        wrong_at = [at for at, pair in enumerate(zip(got, want, strict=True)) if not agree(*pair)]
        for mutant, results in others:  # more than one mistake: the one that most of the wrong cases show
            alike = [at for at in wrong_at if agree(got[at], results[at])]
            if first in alike and 2 * len(alike) > len(wrong_at):
                yield Fault(mutant.fault, f"{text}: {mutant.says}")
        yield Fault("values", text)

    return judge


def _result(fn: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> Any:
    assert fn is not None, "it was built"
    try:
        return fn(*copy.deepcopy(arguments))
    except Exception as error:  # a wrong version may fail on a case: then it agrees with nothing
        return error


def agree(one: Any, other: Any) -> bool:
    """Tell whether two results are equal; numbers to nine digits."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(agree, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-9 * max(1.0, abs(other))
    return bool(one == other)


def short(value: Any) -> str:
    """Write a result on one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        words = ", ".join(map(short, value))
        return f"[{words}]" if isinstance(value, list) else f"({words})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
