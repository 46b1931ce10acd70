"""A right answer that does something wrong besides is rejected in every exercise: no lesson writes such versions."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distlab.course.grading import Mutant, lessons, load_lesson, reference_of
from distlab.course.grading.check import examine
from distlab.course.grading.mutant import build

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
EXERCISES = [one for number in lessons(LESSONS) for one in load_lesson(number, LESSONS).exercises if one.vary]


def is_float(value):
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def change_arguments(result, arguments, kept):
    with torch.no_grad():
        for one in filter(is_float, arguments):
            one.add_(1.0)
    return result


def same_memory(result, arguments, kept):
    if not isinstance(result, Tensor) or result.requires_grad:
        return result
    return kept.setdefault((result.shape, result.dtype), torch.empty_like(result)).copy_(result)


def no_grad(result, *_):
    torch.set_grad_enabled(False)
    return result


class Kind(NamedTuple):
    """What is done before the right answer and with its result; the faults that a check may name, and its words.

    `otherwise` names the exercises in which the mistake changes nothing, or something that is told first.
    """

    before: Callable[[], Any]
    after: Callable[..., Any]
    codes: set[str]
    says: str
    otherwise: set[str]


IN_PLACE = {"02.ring_all_gather", "02.repair", "02.tree_broadcast", "02.halving_doubling", "02.hierarchical"}
KINDS = {
    # The models of 03.accumulate draw numbers, so the reference changes it too; in 06.recompute dropout drops others.
    "seeds the world": Kind(
        *(lambda: torch.manual_seed(0), lambda result, *_: result, {"state left behind"}),
        *("torch's random state", {"03.accumulate", "06.recompute"}),
    ),
    "no grad for all": Kind(lambda: None, no_grad, {"state left behind", "values"}, "grad", set()),
    "changes an argument": Kind(
        *(lambda: None, change_arguments, {"argument changed", "changed argument"}, "", IN_PLACE | {"05.feedback"})
    ),
    "keeps its result's memory": Kind(lambda: None, same_memory, {"kept"}, "same memory", {"05.feedback"}),
}


def fits(exercise, name):
    """Whether the exercise's drawn calls can show the mistake: its own function takes what is drawn."""
    vary = exercise.vary
    is_seed = name == "seeds the world"
    if exercise.name in KINDS[name].otherwise or (vary.use is not None and not is_seed) or vary.scratch:
        return False
    if is_seed and "torch's random state" in vary.any_state:
        return False
    returns = inspect.signature(reference_of(exercise)).return_annotation
    if name == "keeps its result's memory" and returns not in (Tensor, "Tensor"):
        return False
    drawn = [vary.arguments(vary.draw(0, call, 0, exercise.worlds[0])) for call in range(vary.num_calls)]
    given = [one for one in drawn if one is not None]
    return any(any(map(is_float, one)) for one in given) if "'s" in name or "argument" in name else bool(given)


ALL = [pytest.param(one, name, id=f"{one.name}-{name}") for one in EXERCISES for name in KINDS if fits(one, name)]
FIRST = [next(case.values[0] for case in ALL if case.values[1] == name) for name in KINDS]


@pytest.mark.soak_where(exercise=[one for one in EXERCISES if one not in FIRST])
@pytest.mark.parametrize(("exercise", "name"), ALL)
def test_it_is_rejected(exercise, name):
    reference, kind = reference_of(exercise), KINDS[name]
    right = build(Mutant("the reference", "", "", 1), exercise.name, reference, exercise.imports).fn
    kept = {}

    def wrong(*arguments, **named):
        kind.before()
        return kind.after(right(*arguments, **named), arguments, kept)

    wrong.__name__ = wrong.__qualname__ = reference.__name__  # as if it were written anew
    wrong.__signature__ = inspect.signature(reference)
    report = examine(exercise, wrong, worlds=exercise.worlds[:1], seed=0)
    assert report.verdict == "wrong", str(report)
    assert report.fault in kind.codes, str(report)
    assert kind.says in report.message, str(report)
