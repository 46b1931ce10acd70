"""What the judges of this lesson share: an answer is compared with the right one, and with those of known slips."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distlab.grading import Evidence, Fault
from distlab.grading.diagnosis.values import describe

Answer = Callable[[Any, str], Any]


def close(one: Any, other: Any) -> bool:
    """Tell whether two answers are the same: texts and None, numbers to 1e-9, and tuples or dicts of them."""
    if isinstance(other, dict):
        return isinstance(one, dict) and one.keys() == other.keys() and all(close(one[k], other[k]) for k in other)
    if isinstance(other, tuple):
        is_row = isinstance(one, tuple | list) and len(one) == len(other)
        return is_row and all(close(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(other, float):
        is_number = isinstance(one, int | float) and not isinstance(one, bool)
        return is_number and math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-15)
    return bool(one == other)


def judge_slips(evidence: Evidence, cases: Sequence[Any], answer: Answer, slips: Mapping[str, str]) -> Iterator[Fault]:
    """Yield the slip that gives these very answers, or else how the first wrong one differs.

    Args:
        evidence: of a run that answered every case.
        cases: each with `words` that say what is asked.
        answer: returns the right answer of a case, or the one of a slip.
        slips: what to say of each.
    """
    pairs = list(zip(cases, evidence.results[0], strict=True))
    wrong = [(case, got) for case, got in pairs if not close(got, answer(case, ""))]
    if not wrong:
        return
    case, got = wrong[0]
    want = answer(case, "")
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        name = next(key for key in want if not close(got[key], want[key]))
        text = f"{case.words}: {name!r} expected {_said(want[name])}, got {_said(got[name])}"
    else:
        text = f"{case.words}: expected {_said(want)}, got {_said(got)}"
    for alike in (pairs, wrong[:1]):  # all answers are explained, or the first wrong one
        for slip, advice in slips.items():
            if not close(want, answer(case, slip)) and all(close(one, answer(each, slip)) for each, one in alike):
                yield Fault(slip, f"{text}. {advice}")
    yield Fault("values" if type(got) is type(want) else "returned", text)


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_said, value))})"
    return f"{value:.5g}" if isinstance(value, float) else describe(value)
