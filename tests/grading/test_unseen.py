"""A result that nothing sent can have brought about is told; so are the reference and the library's own work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from distlab import collectives
from distlab.grading import load_lesson, reference_of
from distlab.grading.check import examine
from distlab.grading.variation.sent import not_taking_part, taking_part


class Run(NamedTuple):
    """What `taking_part` needs of a run."""

    world_size: int
    records: Any


class Records:
    """Two ranks: one calls what the test says, the other an all-reduce of 8 bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.by_rank = {0: num_bytes, 1: 8}

    def calls(self, rank):
        return [SimpleNamespace(op="all_reduce", num_bytes=self.by_rank[rank])]


def test_a_rank_that_carries_no_number_is_told() -> None:
    barrier, right = taking_part(Run(2, Records(0))), taking_part(Run(2, Records(8)))
    fault = not_taking_part(barrier, right)
    assert fault is not None
    assert "rank 0 sent and received 0 bytes through torch.distributed" in fault.message
    assert not_taking_part(right, right) is None
    assert not_taking_part(right, barrier) is None


def test_the_reference_is_not_an_answer() -> None:
    exercise = load_lesson("03.flat").exercise("03.flat")
    reference = reference_of(exercise)
    report = examine(exercise, lambda module: reference(module), worlds=(1,))
    assert (report.verdict, report.fault) == ("wrong", "reference"), str(report)
    assert "write the function yourself" in report.message


def by_name(tensor, group=None):
    return through(tensor, group)


def held_in_a_list(tensor, group=None, ways=(collectives.ring_all_gather,)):
    return ways[0](tensor, group)


through = collectives.ring_all_gather


@pytest.mark.parametrize("fn", [by_name, held_in_a_list, through, partial(through)])
def test_the_librarys_own_function_is_not_an_answer(fn: Callable[..., object]) -> None:
    report = examine(load_lesson("02.ring_all_gather").exercise("02.ring_all_gather"), fn, worlds=(1,))
    assert (report.verdict, report.fault) == ("wrong", "library"), str(report)
    assert "it calls distlab.collectives.ring.ring_all_gather of the library" in report.message
