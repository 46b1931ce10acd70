"""A right answer that does something wrong besides is rejected, whatever the exercise."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch import Tensor

from distlab.course.grading import Exercise, Mutant, lessons, load_lesson, reference_of
from distlab.course.grading.check import examine
from distlab.course.grading.mutant import build
from tests.lessons.mechanical import KINDS, Kind

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
EXERCISES = [one for number in lessons(LESSONS) for one in load_lesson(number, LESSONS).exercises if one.vary]

# What the mistake does not change here, or changes into a different one that is told first.
OTHERWISE = {
    "changes an argument": {"02.ring_all_gather", "02.repair", "02.tree_broadcast", "02.halving_doubling"}
    | {"02.hierarchical", "05.feedback"},  # they work in place: a changed argument is a wrong result
    "seeds the world": {"03.accumulate"}  # the model draws numbers, so the reference changes it too
    | {"06.recompute"},  # dropout then drops others: a wrong result
    "keeps its result's memory": {"05.feedback"},  # its memory is part of the result: wrong from step 2 on
}


def fits(exercise: Exercise, kind: Kind) -> bool:
    """Whether the exercise's drawn calls can show the mistake: its own function takes what is drawn."""
    assert exercise.vary is not None
    vary, world = exercise.vary, exercise.worlds[0]
    if exercise.name in OTHERWISE.get(kind.name, ()):
        return False
    if vary.use is not None and kind.name != "seeds the world":
        return False
    if kind.name == "seeds the world" and "torch's random state" in vary.any_state:
        return False
    returns = inspect.signature(reference_of(exercise)).return_annotation
    if kind.name == "keeps its result's memory" and returns not in (Tensor, "Tensor"):
        return False
    given = [vary.arguments(vary.draw(0, call, 0, world)) for call in range(vary.num_calls)]
    return vary.scratch == frozenset() and any(one is not None and kind.fits(tuple(one)) for one in given)


ALL = [(one, kind) for one in EXERCISES for kind in KINDS if fits(one, kind)]
FIRST = [next(pair for pair in reversed(ALL) if pair[1] is kind) for kind in KINDS]


@pytest.mark.soak_where(exercise=[one for one in EXERCISES if one not in [pair[0] for pair in FIRST]])
@pytest.mark.parametrize(
    ("exercise", "kind"), [pytest.param(*each, id=f"{each[0].name}-{each[1].name}") for each in ALL]
)
def test_it_is_rejected(exercise: Exercise, kind: Kind) -> None:
    again = build(Mutant("the reference", "", "", 1), exercise.name, reference_of(exercise), exercise.imports).fn
    assert again is not None
    report = examine(exercise, kind.make(again), worlds=exercise.worlds[:1], seed=0)
    assert report.verdict == "wrong", str(report)
    assert report.fault in kind.codes, str(report)
    assert kind.says in report.message, str(report)
