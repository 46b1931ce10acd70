"""Changes of the library are made, found again and made in one place; generated wrong answers are rejected."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from generate import Mutation, changed_source, changes, find, functions, pieces, slips
from library import BASELINE, EACH, Near
from mutation_run import SUMMARY, equivalents, exercises, run, said, sample_of, summary

from distlab.course.grading import Exercise, reference_of

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("source.txt").read_text()


def test_each_usual_change_is_made_and_no_words_are_touched() -> None:
    made = {
        name: {new for piece in pieces(node.body) for new in changes(piece)}
        for name, node in functions(ast.parse(SOURCE))
    }
    assert made["outer"] >= {
        *("total = 1", "sizes[2:]", "size <= rank and wide", "size < rank or wide", "not (size < rank and wide)"),
        *("total += send(rank, size, tag=3)", "total += send(size, rank)", "total += send(size, rank, tag=4)", "pass"),
        *("total is not None", "not (total is None)", "return total + 1", "return total - 2", "return None"),
    }
    assert not any("raise" in new for new in made["outer"])
    assert made["Holder.keep"] == {"pass"}


@pytest.mark.parametrize("home", ["distlab/course/one.py", "simulator/two.py"])
def test_a_change_is_found_where_its_function_moved_and_leaves_other_lines_alone(tmp_path: Path, home: str) -> None:
    mutation = Mutation("distlab/one.py", "outer", "size < rank and wide", 0, "size < rank or wide")
    (tmp_path / home).parent.mkdir(parents=True)
    (tmp_path / home).write_text("# moved\n" + SOURCE)
    found = find(tmp_path, mutation)
    assert found is not None
    path, place = found
    assert path == tmp_path / home
    before, after = path.read_text(), changed_source(path.read_text(), place, mutation.new)
    assert ast.unparse(ast.parse(after)) == ast.unparse(ast.parse(before)).replace("rank and wide", "rank or wide")
    kept = [line for line in after.splitlines() if line in before.splitlines()]
    assert len(after.splitlines()) == len(before.splitlines()) == len(kept) + 2
    assert after.splitlines()[-8:] == before.splitlines()[-8:]
    assert find(tmp_path, Mutation("distlab/one.py", "outer", "size <= rank and wide", 0, "x")) is None  # it is gone
    assert find(tmp_path, Mutation("distlab/one.py", "outer", "return total - 1", 1, "x")) is None


def test_the_nearest_tests_import_the_function_and_an_earlier_killer_is_found_by_its_name() -> None:
    near = Near(ROOT)
    files = near.files(ROOT / "distlab" / "collectives" / "ring.py", "ring_all_reduce")
    assert {path.parent.name for path in files[:3]} == {"collectives"}
    assert near.with_test("moved/since.py::test_the_baseline_is_whole[3]") == []  # tests of tests notice nothing
    first = next(line[4:].split("(")[0] for line in files[0].read_text().splitlines() if line.startswith("def test_"))
    assert near.with_test(f"tests/old.py::{first}[2]") == files[:1]


def test_the_baseline_is_whole() -> None:
    packages = json.loads(BASELINE.read_text(encoding="utf-8"))["packages"]
    assert [len(rows) for rows in packages.values()] == [EACH] * 16
    assert all(isinstance(row["by"], str) for rows in packages.values() for row in rows)


EXERCISES = [pytest.param(exercise, id=exercise.name) for exercise in exercises()]


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
