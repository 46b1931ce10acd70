"""Generated wrong answers are what they should be, and the checks reject them."""

from __future__ import annotations

import json

import pytest
from generate import slips
from mutation_run import SUMMARY, equivalents, exercises, run, said, sample_of, summary

from distlab.course.grading import Exercise, reference_of

EXERCISES = [pytest.param(exercise, id=exercise.name) for exercise in exercises()]


def reference(rank: int, n: int) -> list[int]:
    """Serve as a small reference."""
    kept = []
    for step in range(n - 1):
        if step != rank:
            kept.append(min(step, 2))
    return kept


def test_each_mutation_changes_one_place() -> None:
    made = {one.name: one.body for one in slips(reference)}
    assert "2: range(n - 1) -> range(n - 1 - 1)" in made
    assert "3: step != rank -> step == rank" in made
    assert "4: without kept.append(min(step, 2))" in made
    assert "4: min -> max" in made
    assert not any("min(2, step)" in body for body in made.values())  # the same number: no wrong answer
    assert len(set(made.values())) == len(made) >= 12
    whole = "kept = []\nfor step in range(n - 1):\n    if step != rank:\n        kept.append(min(step, 2))\nreturn kept"
    for name, body in made.items():
        changed = sum(a != b for a, b in zip(whole.splitlines(), body.splitlines(), strict=False))
        assert changed == 1, name


def test_what_is_said_of_mutations_is_said_of_those_that_are_made_and_95_percent_were_rejected() -> None:
    rows = json.loads(SUMMARY.read_text(encoding="utf-8"))
    for exercise in exercises():
        made, row = {one.name for one in slips(reference_of(exercise))}, rows[exercise.name]
        assert equivalents().get(exercise.name, set()) <= made, exercise.name
        assert row["generated"] == row["checked"] == len(made), f"{exercise.name}: run python -m mutation_run"
        assert set(row["survived"]) <= made, exercise.name
    wrong = sum(row["checked"] - row["equivalent"] for row in rows.values())
    assert sum(len(row["survived"]) for row in rows.values()) <= 0.05 * wrong


@pytest.mark.parametrize("name", ["01.fit", "04.rate", "09.bubble"])
def test_a_sample_is_rejected(name: str) -> None:
    exercise = next(one for one in exercises() if one.name == name)
    for mutation in sample_of(exercise, 3):
        words = said(exercise, mutation)
        known = mutation.name in equivalents().get(name, set())
        assert not words.startswith("checker:"), words
        assert known or words != "survived", f"{mutation.name}:\n{mutation.body}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exercise", EXERCISES)
def test_wrong_answers_are_rejected(exercise: Exercise, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mutation_run.RESULTS", tmp_path / "mutation.json")
    found = {name: words for _, name, words in run([exercise], None)}
    assert not [words for words in found.values() if words.startswith("checker:")]
    left = summary({exercise.name: found})[exercise.name]["survived"]
    known = json.loads(SUMMARY.read_text(encoding="utf-8"))[exercise.name]["survived"]
    assert set(left) <= set(known), f"{exercise.name}: these wrong answers pass now: {sorted(set(left) - set(known))}"
