"""Sums that hold other things than the ranks' tensors: parts of zeros, and reductions other than a sum."""

from __future__ import annotations

import pytest
import torch

from distlab.course.grading.diagnosis.provenance import explain_sum
from distlab.course.grading.diagnosis.values import seeded

N, SIZE = 3, 20
MEAN = [1 / N] * N


def parts_of(size: int = SIZE) -> list[torch.Tensor]:
    return [seeded(rank, size, purpose="provenance") for rank in range(N)]


@pytest.mark.parametrize("op", ["MAX", "MIN", "PRODUCT"])
@pytest.mark.parametrize("divided", ["before", "after", "never"])
def test_another_reduction_is_told(op: str, divided: str) -> None:
    parts = parts_of()
    stack = torch.stack(parts) / (N if divided == "before" else 1)
    reduced = {"MAX": stack.amax(0), "MIN": stack.amin(0), "PRODUCT": stack.prod(0)}[op]
    fault = explain_sum(reduced / (N if divided == "after" else 1), parts, expected=MEAN)
    assert fault is not None
    assert fault.code == "not a sum"
    assert f"(ReduceOp.{op})" in fault.message
    assert ("divided by 3" in fault.message) == (divided != "never")


def test_a_median_is_told() -> None:
    parts = parts_of()
    fault = explain_sum(torch.stack(parts).median(0).values, parts, expected=MEAN)
    assert fault is not None
    assert "the median of the ranks' values" in fault.message


@pytest.mark.parametrize("size", [SIZE, 3])
def test_a_part_of_zeros_hides_no_other_mistake(size: int) -> None:
    parts = [torch.zeros(size, dtype=torch.float64), *parts_of(size)[1:]]
    fault = explain_sum(parts[1] + parts[2], parts, expected=MEAN)
    assert fault is not None
    assert fault.code == "sum not mean"
    fault = explain_sum(parts[2] / 3, parts, expected=MEAN)
    assert fault is not None
    assert fault.code == "missing rank"
    assert "lacks rank 1's part" in fault.message
    assert explain_sum((parts[1] + parts[2]) / 3, parts, expected=MEAN) is None


def test_parts_that_are_all_zeros_blame_nobody() -> None:
    parts = [torch.zeros(SIZE, dtype=torch.float64)] * N
    fault = explain_sum(torch.ones(SIZE, dtype=torch.float64), parts, expected=MEAN)
    assert fault is not None
    assert fault.code == "values"
