"""Differences are put in the right words, whatever the pattern: which rank is missing, which is doubled, the factor."""

from __future__ import annotations

import inspect
import math
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distlab.course.grading import load_lesson, reference_of
from distlab.course.grading.check import examine
from distlab.course.grading.diagnosis.provenance import explain_sum
from distlab.course.grading.diagnosis.values import (
    apart,
    compare,
    describe,
    equal,
    in_python_numbers,
    seeded,
    times_of,
)
from distlab.plan import split_evenly

worlds = st.integers(2, 6)
few = settings(max_examples=30, deadline=None)


def parts_of(n: int, size: int = 40, purpose: str = "") -> list[torch.Tensor]:
    return [seeded(rank, size, purpose=purpose) for rank in range(n)]


def weighted(parts: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    return sum((w * part for w, part in zip(weights, parts, strict=True)), torch.zeros_like(parts[0]))


def test_seeded_is_the_same_every_time_and_different_for_each_rank_and_purpose() -> None:
    assert torch.equal(seeded(1, 3, 4), seeded(1, 3, 4))
    assert seeded(0, 3).dtype == torch.float64
    tensors = [seeded(rank, 5, purpose=purpose) for rank in range(4) for purpose in ("", "a", "b")]
    assert all(not torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])
    assert seeded(0).shape == ()


@few
@given(worlds, st.booleans(), st.integers(0, 99))
def test_right_sum_and_mean_are_right(n: int, mean: bool, number: int) -> None:
    parts = parts_of(n, purpose=str(number))
    expected = [1 / n if mean else 1.0] * n
    assert explain_sum(weighted(parts, expected), parts, expected=expected) is None


@few
@given(st.data(), worlds, st.booleans())
def test_missing_ranks_are_named_exactly(data: st.DataObject, n: int, mean: bool) -> None:
    missing = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))
    parts, unit = parts_of(n), 1 / n if mean else 1.0
    got = weighted(parts, [0.0 if rank in missing else unit for rank in range(n)])
    fault = explain_sum(got, parts, expected=[unit] * n)
    assert fault is not None
    if len(missing) == n - 1:
        only = (set(range(n)) - missing).pop()
        assert fault.code == "one rank only"
        assert f"is rank {only}'s tensor" in fault.message
    else:
        assert fault.code == "missing rank"
        named = {rank for rank in range(n) if f"rank {rank}'s" in fault.message}
        assert named == missing


@few
@given(st.data(), st.integers(3, 6), st.booleans())
def test_doubled_ranks_are_named_exactly(data: st.DataObject, n: int, mean: bool) -> None:
    most = (n - 1) // 2
    doubled = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=most))
    parts, unit = parts_of(n), 1 / n if mean else 1.0
    got = weighted(parts, [2 * unit if rank in doubled else unit for rank in range(n)])
    fault = explain_sum(got, parts, expected=[unit] * n)
    assert fault is not None
    assert fault.code == "counted twice"
    assert "twice" in fault.message
    assert {rank for rank in range(n) if f"rank {rank}'s" in fault.message} == doubled


@few
@given(worlds, st.sampled_from([0.5, 3.0, 10.0, -1.0]))
def test_factor_is_named(n: int, factor: float) -> None:
    parts = parts_of(n)
    fault = explain_sum(weighted(parts, [factor] * n), parts, expected=[1.0] * n)
    assert fault is not None
    if n > 1 and abs(factor * n - 1) < 1e-9:
        assert fault.code == "mean not sum"
    else:
        assert fault.code == "scale"
        words = {0.5: "2x too small", 3.0: "3x too large", 10.0: "10x too large", -1.0: "the sign is wrong"}
        assert words[factor] in fault.message


@few
@given(worlds)
def test_sum_where_mean_was_asked_and_the_other_way_round(n: int) -> None:
    parts = parts_of(n)
    fault = explain_sum(weighted(parts, [1.0] * n), parts, expected=[1 / n] * n)
    assert fault is not None
    assert fault.code == "sum not mean"
    assert f"{n}x too large" in fault.message
    assert f"divide by world_size ({n})" in fault.message
    fault = explain_sum(weighted(parts, [1 / n] * n), parts, expected=[1.0] * n)
    assert fault is not None
    assert fault.code == "mean not sum"
    fault = explain_sum(weighted(parts, [1 / n**2] * n), parts, expected=[1 / n] * n)
    assert fault is not None
    assert fault.code == "divided twice"


@few
@given(st.data(), worlds)
def test_own_tensor_alone_was_not_communicated(data: st.DataObject, n: int) -> None:
    rank = data.draw(st.integers(0, n - 1))
    parts = parts_of(n)
    fault = explain_sum(parts[rank].clone(), parts, expected=[1.0] * n, what="it", rank=rank)
    assert fault is not None
    assert fault.code == "not communicated"
    assert fault.message == "it is this rank's own tensor: nothing of the others reached it"
    other = (rank + 1) % n
    fault = explain_sum(parts[rank].clone(), parts, expected=[1.0] * n, what="it", rank=other)
    assert fault is not None
    assert fault.code == "one rank only"


def test_missing_rank_in_a_sum_that_was_not_divided_says_both() -> None:
    parts = parts_of(4)
    fault = explain_sum(weighted(parts, [1, 1, 0, 1]), parts, expected=[0.25] * 4)
    assert fault is not None
    assert fault.code == "missing rank"
    assert "lacks rank 2's part" in fault.message
    assert "divide by world_size (4)" in fault.message


@few
@given(st.data(), st.integers(2, 4), st.integers(4, 40))
def test_fault_in_one_chunk_is_found_there(data: st.DataObject, n: int, size: int) -> None:
    bounds = split_evenly(size, n)
    filled = [index for index, (start, stop) in enumerate(bounds) if stop > start]
    chunk = data.draw(st.sampled_from(filled))
    rank = data.draw(st.integers(0, n - 1))
    parts = parts_of(n, size)
    got = weighted(parts, [1.0] * n)
    start, stop = bounds[chunk]
    got[start:stop] -= parts[rank][start:stop]
    fault = explain_sum(got, parts, expected=[1.0] * n, what="the sum")
    assert fault is not None
    assert f"chunk {chunk} of the sum (elements {start} to {stop - 1})" in fault.message
    if n > 2:
        assert fault.code == "missing rank"
        assert f"lacks rank {rank}'s part" in fault.message
    else:
        assert fault.code == "one rank only"


def test_small_tensors_are_explained_too() -> None:
    parts = parts_of(4, size=1)
    fault = explain_sum(weighted(parts, [1, 1, 0, 1]), parts, expected=[1.0] * 4)
    assert fault is not None
    assert fault.message == "the result lacks rank 2's part"


def test_constant_tensors_cannot_be_told_apart_and_nobody_is_blamed() -> None:
    parts = [torch.ones(8, dtype=torch.float64) for _ in range(3)]
    fault = explain_sum(2 * parts[0], parts, expected=[1.0] * 3)
    assert fault is not None
    assert "rank" not in fault.message
    assert fault.code == "scale"


def test_garbage_is_not_explained_away() -> None:
    parts = parts_of(3)
    fault = explain_sum(seeded(9, 40, purpose="garbage"), parts, expected=[1.0] * 3)
    assert fault is not None
    assert fault.code == "values"
    assert "40 of 40 elements differ" in fault.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_other_dtypes_have_their_own_tolerance(dtype: torch.dtype) -> None:
    parts = [(10 * seeded(rank, 50)).to(dtype) for rank in range(3)]
    assert explain_sum(parts[0] + parts[1] + parts[2], parts, expected=[1.0] * 3) is None
    fault = explain_sum(parts[0] + parts[1], parts, expected=[1.0] * 3)
    assert fault is not None
    if dtype in (torch.float32, torch.int64):
        assert fault.message == "the result lacks rank 2's part"


WRONG: list[tuple[Any, Any, str, str]] = [
    (None, torch.ones(2), "returned", "expected a float32 tensor of shape [2], got None (is a return missing?)"),
    ([1.0], torch.ones(1), "returned", "got [1.0]"),
    (torch.ones(2, 1), torch.ones(2), "shape", "expected shape [2], got [2, 1]"),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype", "expected dtype float64, got float32"),
    (torch.ones(2, device="meta"), torch.ones(2), "device", "expected it on cpu, got it on meta"),
    (torch.ones(2).to_sparse(), torch.ones(2), "layout", "sparse"),
    (torch.tensor([1.0, math.nan]), torch.ones(2), "nan", "has 1 NaN of 2"),
    (torch.zeros(3), torch.ones(3), "zeros", "is all zeros"),
    (torch.arange(6.0).reshape(2, 3) * 4, torch.arange(6.0).reshape(2, 3), "sum not mean", "divide by world_size (4)"),
    (torch.arange(6.0) / 4, torch.arange(6.0), "divided twice", "once too often"),
    (torch.arange(6.0) * 7, torch.arange(6.0), "scale", "7x too large"),
    (torch.arange(4.0).reshape(2, 2).T, torch.arange(4.0).reshape(2, 2), "order", "it is transposed"),
    (torch.arange(5.0).roll(1), torch.arange(5.0), "order", "rolled by 1 along dimension 0"),
    (torch.arange(5.0).roll(-1), torch.arange(5.0), "order", "rolled by -1 along dimension 0"),
    (torch.arange(5.0).flip(0), torch.arange(5.0), "order", "reversed along dimension 0"),
    (torch.tensor([3.0, 1.0, 9.0, 2.0]), torch.tensor([1.0, 9.0, 3.0, 2.0]), "order", "sorted, they agree"),
    (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), "values", "the result[1]: expected 2, got 2.5; 1 of 2"),
    (torch.tensor([1, 3]), torch.tensor([1, 2]), "values", "the result[1]: expected 2, got 3"),
    (torch.tensor(math.inf), torch.tensor(1.0), "values", "expected 1, got inf"),
    ([1, 2], [1, 2, 3], "returned", "expected [1, 2, 3], got [1, 2]"),
    ([1, 4], [1, 2], "values", "the result[1]: expected 2, got 4"),
    ({"a": 1}, {"b": 1}, "returned", "expected the names ['b'], got the names ['a']"),
    ({"a": 1.5}, {"a": 1.0}, "values", "the result['a']: expected 1, got 1.5"),
    (True, 1, "values", "expected 1, got True"),
    ("x", "y", "values", "expected 'y', got 'x'"),
    (None, 3, "values", "got None"),
    (torch.ones(3), 1.0, "returned", "expected a number"),
]


@pytest.mark.parametrize(("got", "want", "code", "says"), WRONG)
def test_difference_in_words(got: Any, want: Any, code: str, says: str) -> None:
    fault = compare(got, want, world_size=4)
    assert fault is not None
    assert fault.code == code
    assert says in fault.message


RIGHT: list[Any] = [
    torch.ones(3),
    torch.tensor(2.0),
    torch.empty(0),
    torch.tensor([math.inf, -math.inf, math.nan]),
    torch.tensor([True, False]),
    [1, 2.5, torch.ones(2)],
    {"a": (1, 2), "b": None},
    "text",
    None,
    0.0,
]


@pytest.mark.parametrize("value", RIGHT)
def test_equal_values_are_equal(value: Any) -> None:
    assert compare(value, value) is None


def test_lists_and_tuples_and_whole_numbers_count_as_equal() -> None:
    assert compare([1, 2], (1, 2)) is None
    assert compare(2, 2.0) is None
    assert compare(torch.tensor(2.0), 2.0) is None


@few
@given(st.floats(1e-15, 1e15))
def test_tolerance_is_relative(scale: float) -> None:
    want = seeded(0, 20) * scale
    size = float(want.abs().max())
    assert equal(want + 1e-12 * size, want)
    assert not equal(want + 1e-8 * size, want)


def test_long_values_are_described_shortly() -> None:
    assert describe(list(range(1000))) == "a list of 1000"
    assert describe(torch.ones(2, 3)) == "a float32 tensor of shape [2, 3]"
    assert len(describe("x" * 10_000)) < 100


@pytest.mark.parametrize(
    ("kind", "coarser"),
    [(torch.float64, torch.float32), (torch.float64, torch.bfloat16), (torch.float32, torch.float16)],
)
def test_lost_precision_is_named(kind: torch.dtype, coarser: torch.dtype) -> None:
    want = seeded(0, 50).to(kind)
    fault = compare(want.to(coarser).to(kind), want)
    assert fault is not None
    name, own = (str(dtype).removeprefix("torch.") for dtype in (coarser, kind))
    assert f"{name} somewhere in a {own} run" in fault.message, fault.message
    inside = compare((want.to(coarser) * 3).to(kind) / 3, want)  # lost on the way, in a step before the last
    assert inside is not None
    assert "expected" in inside.message


def test_another_difference_is_not_called_lost_precision() -> None:
    want = seeded(0, 50)
    for got in (want + 1e-3, want * torch.linspace(1, 1.1, 50), want + 1e-4 * seeded(1, 50)):
        fault = compare(got, want)
        assert fault is not None
        assert "float32" not in fault.message.replace("float64", ""), fault.message


@few
@given(st.floats(-1e3, 1e3, allow_subnormal=False), st.floats(1e-12, 1.0))
def test_two_numbers_that_differ_are_never_shown_as_equal(one: float, gap: float) -> None:
    other = one + gap
    if one != other:
        first, second = apart(one, other)
        assert first != second


@pytest.mark.parametrize("got", [5e-324, 1e-310, 1.7e308, math.inf, -math.inf, math.nan])
def test_numbers_at_the_ends_of_their_range_are_compared(got: float) -> None:
    fault = compare(torch.tensor([got], dtype=torch.float64), torch.tensor([1.5], dtype=torch.float64))
    assert fault is not None
    assert fault.code in ("values", "nan", "scale")
    assert compare(got, 1.5) is not None


def test_a_factor_near_one_is_not_shown_as_one() -> None:
    assert times_of(1.00002) == "1.00002x too large"
    assert times_of(0.25) == "4x too small"
    fault = compare(1.0 + 1e-7, 1.0, "the mean")
    assert fault is not None
    assert "expected 1, got 1;" not in fault.message


def test_whole_numbers_of_numpy_are_whole_numbers():
    kept = [1, (2, [3.0])]
    assert in_python_numbers(kept) is kept
    got = in_python_numbers({np.int64(1): (np.int32(2), [np.float32(0.5), np.bool_(True)])})
    assert got == {1: (2, [0.5, True])}
    assert [type(each) for each in (*got, got[1][0], *got[1][1])] == [int, int, float, bool]


@pytest.mark.parametrize("name", ["03.buckets", "15.choose"])
def test_an_answer_in_numpys_numbers_is_right(name):
    exercise = load_lesson(name).exercise(name)
    reference = reference_of(exercise)

    def numpys(value):
        if isinstance(value, int):
            return np.int64(value)
        return type(value)(map(numpys, value)) if isinstance(value, list | tuple) else value

    def answer(*arguments, **named):
        return numpys(called(*arguments, **named))

    called = FunctionType(
        reference.__code__.replace(co_name="mine"),  # not the reference's own code
        reference.__globals__,
        "mine",
        reference.__defaults__,
        reference.__closure__,
    )
    called.__kwdefaults__ = reference.__kwdefaults__
    answer.__signature__ = inspect.signature(reference)
    report = examine(exercise, answer, worlds=exercise.worlds[:1], seed=0)
    assert report.passed, str(report)


def test_a_float_where_a_whole_number_is_expected_is_named() -> None:
    fault = compare({"parameters": [8.0]}, {"parameters": [8]})
    assert fault is not None
    assert fault.code == "not a whole number"
    assert "['parameters'][0]: expected the whole number 8, got the float 8.0; divide with //" in fault.message
    assert compare(8, 8.0) is None
