"""Wrong results that follow from the right ones are told by what they are, and nothing is told by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distlab.grading.causes.relations import relation
from distlab.grading.diagnosis.moved import which

CASES = [  # what each of six calls was given, and the right result
    ({"num_ranks": 2, "mode": "sum", "is_last": True}, 3.5),
    ({"num_ranks": 3, "mode": "mean", "is_last": False}, -1.25),
    ({"num_ranks": 5, "mode": "sum", "is_last": False}, 0.75),
    ({"num_ranks": 7, "mode": "mean", "is_last": True}, 2.5),
    ({"num_ranks": 4, "mode": "sum", "is_last": True}, -4.5),
    ({"num_ranks": 9, "mode": "mean", "is_last": False}, 6.25),
]


def runs(result: Callable[[dict[str, Any], float], Any], cases: list[tuple[dict[str, Any], Any]] = CASES) -> Any:
    """Return what two runs of one rank left: the answer's, and the reference's."""

    def calls(fn: Callable[[dict[str, Any], float], Any]) -> list[dict[str, Any]]:
        made = [{"result": fn(given, right), "before": [*given.items()], "after": []} for given, right in cases]
        return [{"calls": made}]

    return calls(result), calls(lambda given, right: right)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda given, right: 2 * right, "in all 6 drawn calls what it returns is 2 times what is right."),
        (lambda given, right: right * given["num_ranks"], "is num_ranks times what is right."),
        (lambda given, right: right / (given["num_ranks"] - 1), "is what is right divided by (num_ranks - 1)."),
        (
            lambda given, right: right * given["num_ranks"] / (given["num_ranks"] - 1),
            "is num_ranks / (num_ranks - 1) times what is right.",
        ),
        (lambda given, right: right + 1, "is 1 more than what is right."),
        (lambda given, right: right - given["num_ranks"], "is num_ranks less than what is right."),
        (lambda given, right: abs(right) if right < 0 else right, ""),
        (lambda given, right: right**2, "is the square of what is right."),
        (lambda given, right: 0.0, ""),  # a number less its mean is zero too
        (
            lambda given, right: right if given["mode"] == "sum" else 0.123,
            "in all 6 drawn calls what it returns is wrong where mode is 'mean', and right elsewhere.",
        ),
        (
            lambda given, right: right if given["mode"] == "sum" else right / 2,
            "where it is wrong, in 3 of 6 drawn results, what it returns is 0.5 times what is right.",
        ),
        (
            lambda given, right: right if not given["is_last"] else 0.123,
            "in all 6 drawn calls what it returns is wrong where is_last is True, and right elsewhere.",
        ),
        (lambda given, right: right + 0.01 * given["num_ranks"] ** 3, ""),
        (lambda given, right: right * (1 + 1e-7), ""),
    ],
)
def test_what_holds_in_all_calls_is_told(result: Callable[[dict[str, Any], float], Any], words: str) -> None:
    found = relation(*runs(result), 1.0)
    assert found.endswith(words)
    assert bool(found) == bool(words)


def test_a_comparison_of_two_arguments_holds_wrong_calls_apart() -> None:
    steps = [({"step": step, "num_warmup": 5 + step % 2}, 0.1 + step) for step in range(1, 10)]
    found = relation(*runs(lambda given, right: right if given["step"] < given["num_warmup"] else 7.7, steps), 1.0)
    assert found == "in all 9 drawn calls what it returns is wrong where num_warmup is below step, and right elsewhere."


def test_the_first_wrong_part_is_told() -> None:
    pairs = [(given, {"loss": right, "norm": right + 3}) for given, right in CASES]
    got = runs(lambda given, right: {"loss": right["loss"], "norm": 2 * right["norm"]}, pairs)
    assert relation(*got, 1.0) == "in all 6 drawn calls the result['norm'] is 2 times what is right."


def test_tensors_have_functions_and_factors() -> None:
    pairs = [({"rows": n}, torch.arange(1.0, 2 * n + 1).view(n, 2)) for n in (2, 3, 4)]
    assert "is rows times what is right." in relation(*runs(lambda given, right: given["rows"] * right, pairs), 1.0)
    turned = runs(lambda given, right: right / right.norm(dim=-2, keepdim=True), pairs)
    assert "with each column brought to length 1." in relation(*turned, 1.0)
    square = [(given, right @ right.T) for given, right in pairs]
    assert relation(*runs(lambda given, right: right.clamp(max=3.5), square), 1.0) == ""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([0, 0, 0, 1, 1, 1, 1], ": all from element 3 of 7 on, and none before"),
        ([1, 1, 1, 0, 0, 0, 0], ": all of the first 3 of 7, and none after"),
        ([0, 1, 0, 0, 1, 0, 0, 1], ": one in every 3, from element 1 on"),
        ([0, 1, 1, 0, 0, 0, 0], ""),
        ([1, 1, 1, 1, 1, 1, 1], ""),
        ([0, 0, 0, 1, 0, 0, 0], ""),
    ],
)
def test_elements_that_are_wrong_in_an_order_are_told(wrong: list[int], words: str) -> None:
    assert which(torch.tensor(wrong, dtype=torch.bool)) == words
