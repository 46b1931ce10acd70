"""A reference with one place of its text changed: what is generated, in which words, and that a search finds it."""

from __future__ import annotations

import ast
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.grading import load_lesson, reference_of
from distlab.grading.causes.changes import changed, slips_of
from distlab.grading.check import examine
from distlab.grading.sealed import seal, unseal
from distlab.grading.slips.generate import Slip, slips

ROOT = Path(__file__).resolve().parents[2]


def shares(sizes: list[int], num_ranks: int, rank: int) -> tuple[list[int], int]:
    """Serve as a small reference."""
    length = -(-sum(sizes) // num_ranks)
    kept = []
    for size in sizes:
        if size > 0 and size < 9:
            kept.append(size - rank)
    length = max(length, 1)
    return kept, length


def made() -> dict[str, Slip]:
    return {slip.words: slip for slip in slips(shares, more=True)}


@pytest.mark.parametrize(
    "words",
    [
        "with `sum(sizes) // num_ranks` in the place of `-(-sum(sizes) // num_ranks)`",
        "with `size < 0 and size < 9` in the place of `size > 0 and size < 9`",
        "with `size < 9` in the place of `size > 0 and size < 9`",
        "with `kept.append(rank - size)` in the place of `kept.append(size - rank)`",
        "with `kept.append(size - 2 * rank)` in the place of `kept.append(size - rank)`",
        "with `-(-sum(sizes) // rank)` in the place of `-(-sum(sizes) // num_ranks)`",
        "with `kept.append(size - rank)` done twice",
        "without `kept.append(size - rank)`",
        "without `length = max(length, 1)`",
        "as if `size > 0 and size < 9` were always true",
        "going through `sizes` from back to front",
        "going through `sizes` leaving out the last",
        "with the two results in each other's places",
        "with `kept = []` before `length = -(-sum(sizes) // num_ranks)`",
    ],
)
def test_a_slip_has_words(words: str) -> None:
    assert words in made()


def test_each_slip_is_python_of_another_text() -> None:
    found = list(slips(shares, more=True))
    assert len({slip.body for slip in found}) == len(found) > 50
    for slip in found:
        ast.parse(f"def shares():\n    {slip.body.replace(chr(10), chr(10) + '    ')}")
    usual = list(slips(shares))
    assert found[: len(usual)] == usual


def test_lines_that_send_come_last_and_messages_never_where_ranks_may_miss_each_other() -> None:
    reference = reference_of(load_lesson("11.ring").exercise("11.ring"))
    risks = {slip.risk for slip in slips(reference, more=True)}
    assert risks == {0, 2}
    tried = [change.value for change in slips_of(reference, 2)]
    assert len(tried) == sum(slip.risk < 2 for slip in slips(reference, more=True))
    assert all("dist.isend(held, (rank + 1) % n)" in text for text in tried)
    assert len(list(slips_of(reference, 1))) == len(list(slips(reference, more=True)))


def test_a_slip_runs_as_it_says() -> None:
    change = next(one for one in slips_of(shares, 1) if "going through `sizes` from back" in one.words)
    assert changed(shares, change, [0])([1, 2, 12], 2, 0) == ([2, 1], 8)
    assert shares([1, 2, 12], 2, 0) == ([1, 2], 8)


def test_a_sealed_reference_is_not_quoted() -> None:
    module = types.ModuleType("sealed_shares")
    text = "def shares(sizes, num_ranks):\n    return -(-sum(sizes) // num_ranks)\n"
    lines: dict[str, Any] = {"unseal": lambda _, what, packed: unseal(vars(module), what, packed), "globals": dict}
    exec(seal(text, "solutions of lesson 91").partition("import unseal")[2], lines)
    words = {slip.words for slip in slips(module.shares, more=True)}
    assert words == {"with one change in line 1 of its body"}


def told(name: str, fn: Callable[..., Any]) -> str:
    report = examine(load_lesson(name).exercise(name), fn, worlds=(1,), seed=3)
    assert report.verdict == "wrong"
    return report.message


def share_rounded_up(uptimes_s, interval_s, save_s, restart_s):
    rounds = [math.ceil(max(each - restart_s, 0) / (interval_s + save_s)) for each in uptimes_s]
    return sum(rounds) * interval_s / sum(uptimes_s)


def test_what_a_wrong_answer_does_is_found_in_an_answer_of_another_form() -> None:
    words = told("12.share", share_rounded_up)
    assert "drawn calls what it returns is that of the reference with `-(-trains_s // (interval_s + save_s))" in words
    assert "Seen:" in words


def stop_at_the_threshold(loss, threshold):
    return bool(loss.item() <= threshold)


def test_few_wrong_results_are_told_where_one_change_of_all_explains_them() -> None:
    assert "is that of the reference with `total.item() / dist.get_world_size() <= thr" in told(
        "01.repair", stop_at_the_threshold
    )


def merge_by_chance(mean, log_sum, new, new_log_sum):
    total = torch.logaddexp(log_sum, new_log_sum)
    return mean + new * torch.rand(()), total


def test_an_answer_of_no_known_slip_is_only_told_what_was_seen() -> None:
    assert "reference" not in told("11.merge", merge_by_chance)
