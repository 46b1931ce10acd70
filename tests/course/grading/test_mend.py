"""Where an answer is wrong is found in its own text: what is tried, in which words, and what is never said."""

import ast
import functools
import inspect
import json
import textwrap

import torch

from distlab.course.grading import load_lesson, reference_of
from distlab.course.grading.answer.submission import isolated_submission
from distlab.course.grading.causes.mend import in_order, text_of_answer
from distlab.course.grading.causes.places import versions
from distlab.course.grading.check import examine

SUMS = """
def means(rows, num_ranks: int, rank: int):
    total = 0
    kept = []
    for row in rows:
        total = row[0]
        kept.append(total)
        if total > rank:
            dist.all_reduce(total)
    kept.reverse()
    return total, kept
"""
WORDS = {
    "with `total += row[0]` in the place of `total = row[0]`": 6,
    "with `row[-1]` in the place of `row[0]`": 6,
    "with `row[rank]` in the place of `row[0]`": 6,
    "with `kept.append(rank)` in the place of `kept.append(total)`": 7,
    "with `total < rank` in the place of `total > rank`": 8,
    "with `total > rank - 1` in the place of `total > rank`": 8,
    "with `total /= num_ranks` after `dist.all_reduce(total)`": 9,
    "with `if not total > rank:` in the place of `if total > rank:`": 8,
    "with `return (total / num_ranks, kept)` in the place of `return (total, kept)`": 11,
    "with `total = row[0]` before `for row in rows:`": 5,
    "without `kept.reverse()`": 10,
    "with `kept.reverse()` moved before `kept = []`": 10,
    "with `float('-inf')` in the place of `0`": 3,
}


def test_mends_have_words_and_lines_and_are_python_of_different_texts():
    function = ast.parse(textwrap.dedent(SUMS)).body[0]
    made = {version.words: version for version in versions(function)}
    assert {words: made[words].line for words in WORDS} == WORDS
    assert len({version.body for version in made.values()}) > 100
    for version in made.values():
        ast.parse("def means():\n" + textwrap.indent(version.body, "    "))


def told(name, fn, world=1):
    report = examine(load_lesson(name).exercise(name), fn, worlds=(world,), seed=3)
    assert report.verdict == "wrong"
    return report.message


def cost_of_lateness(arrivals):
    costs = [0.0] * len(arrivals)
    for call in range(len(arrivals[0])):
        times = [own[call] for own in arrivals]
        ordered = sorted(times)
        for rank in range(len(arrivals)):
            if times[rank] > ordered[0]:
                costs[rank] += times[rank] - ordered[-2]
    return costs


def far_from_right(arrivals):
    return [sum(max(own) - min(own) for own in arrivals) / 7.0 for _ in arrivals]


def line_of(fn, text):
    lines, first = inspect.getsourcelines(fn)
    return next(first + number for number, line in enumerate(lines) if text in line)


def test_an_answer_of_a_different_form_is_told_its_line_and_what_would_make_it_right(monkeypatch):
    words, line = told("13.late", cost_of_lateness), line_of(cost_of_lateness, "ordered[0]")
    assert f"test_mend.py, line {line}: with `times[rank] > ordered[-2]` in the place of" in words
    assert "all results are right in 48 drawn calls. Seen: " in words
    assert "all results are right" not in told("13.late", far_from_right)
    monkeypatch.setattr("distlab.course.grading.causes.mend.is_sealed", lambda fn: True)
    words = told("13.late", cost_of_lateness)
    assert f"line {line}: with one change there, all results are right in 48 drawn calls." in words
    assert "ordered[-2]" not in words


def rows_of_heads(weight, num_heads, num_shared, num_ranks, rank):
    if num_heads % num_ranks or num_shared % num_ranks:
        raise ValueError("heads do not divide")
    depth = weight.shape[0] // (num_heads + 2 * num_shared)
    query = weight[: num_heads * depth]
    key = weight[num_heads * depth : (num_heads + num_shared) * depth]
    value = weight[num_heads * depth : num_heads * depth + num_shared * depth]  # both ends are wrong
    return torch.cat([part.chunk(num_ranks)[rank] for part in (query, key, value)])


def test_where_no_cause_is_found_the_smallest_drawn_call_is_told():
    first, smallest, again = told("08.heads", rows_of_heads).splitlines()
    assert "rank 0 of 2: the result[" in first
    assert smallest.startswith("  the smallest drawn arguments for which it is wrong: call ")
    assert ": the result[" in smallest
    assert again.endswith("seed=3)")


def test_a_mend_never_writes_down_the_number_of_ranks():
    function = ast.parse("def f(x, y):\n    return x * 1 + y\n").body[0]
    assert any("x * 2 + y" in version.body for version in in_order(function, 1))
    assert not any("x * 2 + y" in version.body for version in in_order(function, 2))


def test_a_cell_of_a_notebook_is_named_with_its_own_line(tmp_path):
    text = textwrap.dedent(inspect.getsource(cost_of_lateness))
    cells = [{"cell_type": "code", "source": one} for one in ("import torch\n", f"x = 1\n\n{text}")]
    notebook = tmp_path / "lesson.ipynb"
    notebook.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    functions, _ = isolated_submission(str(notebook), load_lesson("13"))
    assert "code cell 2, line 9: with `times[rank] > ordered[-2]`" in told("13.late", functions["13.late"])


def test_what_has_no_text_of_its_own_is_left_alone():
    kept = []

    def closes_over(arrivals):
        kept.append(1)
        return arrivals

    class Answer:
        def __call__(self, arrivals):
            return arrivals

    for fn in (closes_over, Answer(), functools.partial(cost_of_lateness), lambda arrivals: arrivals):
        assert text_of_answer(fn) is None
    text = text_of_answer(reference_of(load_lesson("13").exercise("13.late")))
    assert "Return for each rank how many seconds" not in ast.unparse(text.function)


def axes_to_sum(kind, axes, sequence_parallel):
    summed = ["data", "context", *["expert"] * (kind != "expert")]
    summed += ["tensor"] * (kind == "norm" and sequence_parallel) + ["pipeline"] * (kind == "tied")
    num_means = axes["data"] * axes["expert"] ** axes["context"]
    is_met = [False] * 217  # a drawn mesh has 6 x 6 x 6 of them at most
    is_met[num_means] = True
    return summed, num_means


def test_an_answer_that_does_not_come_to_the_end_of_its_drawn_calls_is_mended_too():
    words = told("10.gradient_axes", axes_to_sum)
    assert f"line {line_of(axes_to_sum, '**')}: " in words
    assert "in 72 drawn calls. Seen: matrix without sequence_parallel" in words  # of nine seeds
