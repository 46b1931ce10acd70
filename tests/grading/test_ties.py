"""Ties are drawn: an answer that takes any other of two equal ones is told by drawn arguments alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distlab.grading import load_lesson
from distlab.grading.check import examine


def takes(tie: Callable[[Any], Any]) -> Callable[..., Any]:
    def cheapest(offers, days):
        there = [offer for offer in offers if offer[2] <= days]
        if not there:
            return None
        return min(there, key=lambda offer: (24 * offer[1] * offer[2] * offer[3], tie(offer)))[0]

    return cheapest


WRONG = {
    "by name": takes(lambda offer: offer[0]),
    "by name, backwards": takes(lambda offer: -ord(offer[0][0])),
    "the first": takes(lambda offer: 0),
    "the fewest GPUs": takes(lambda offer: offer[1]),
}


def of_draws(fn: Callable[..., Any], seed: int) -> Any:
    exercise = load_lesson("15.cheapest").exercise("15.cheapest")
    alone = replace(exercise, drive=lambda fn: None, judge=lambda evidence: (), budget=None)
    return examine(alone, fn, seed=seed)


@pytest.mark.parametrize("name", WRONG)
def test_a_tie_is_drawn(name: str) -> None:
    report = of_draws(WRONG[name], 1)
    assert report.verdict == "wrong", str(report)
    assert "cheapest(offers=" in report.message


@pytest.mark.parametrize("seed", range(3))
def test_the_shorter_run_is_right(seed: int) -> None:
    assert of_draws(takes(lambda offer: offer[2]), seed).passed
