"""Differences are put in the right words, whatever the pattern: which rank is missing, which is doubled, the factor."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distlab.course.grading.diagnosis import values
from distlab.course.grading.diagnosis.provenance import explain_sum
from distlab.plan import split_evenly

worlds = st.integers(2, 6)
few = settings(max_examples=20, deadline=None)


def parts_of(n, size=40, purpose=""):
    return [values.seeded(rank, size, purpose=purpose) for rank in range(n)]


def weighted(parts, weights):
    return sum((w * part for w, part in zip(weights, parts, strict=True)), torch.zeros_like(parts[0]))


def told(got, parts, unit=1.0, **options):
    """Return what is said where a sum of the ranks' parts, each times a unit, was expected."""
    return explain_sum(got, parts, expected=[unit] * len(parts), **options)


def difference(got, want, *options):
    return values.compare(got, want, *options).message


def named_in(fault):
    return {rank for rank in range(9) if f"rank {rank}'s" in fault.message}


@few
@given(st.data(), worlds, st.booleans())
def test_missing_and_doubled_ranks_are_named_exactly(data, n, mean):
    parts, unit = parts_of(n), 1 / n if mean else 1.0
    assert explain_sum(weighted(parts, [unit] * n), parts, expected=[unit] * n) is None
    missing = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))
    fault = told(weighted(parts, [0.0 if rank in missing else unit for rank in range(n)]), parts, unit)
    if len(missing) == n - 1:
        assert fault.code == "one rank only"
        assert f"is rank {(set(range(n)) - missing).pop()}'s tensor" in fault.message
    else:
        assert (fault.code, named_in(fault)) == ("missing rank", missing)
    if n > 2:
        doubled = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=(n - 1) // 2))
        fault = told(weighted(parts, [2 * unit if rank in doubled else unit for rank in range(n)]), parts, unit)
        assert (fault.code, named_in(fault)) == ("counted twice", doubled)
        assert "twice" in fault.message


SUMS = [  # each rank's weight, the one expected, the code, the words
    ([3.0] * 5, 1.0, "scale", "3x too large"),
    ([-1.0] * 2, 1.0, "scale", "the sign is wrong"),
    (
        *([1.0] * 5, 1 / 5, "sum not mean"),
        "5x too large: it is the sum over ranks, not the mean: divide by world_size (5)",
    ),
    ([1 / 5] * 5, 1.0, "mean not sum", ""),
    ([1 / 25] * 5, 1 / 5, "divided twice", ""),
    ([1.0, 2.0], 1.0, "counted twice", ""),
    ([1.0, 0.4, 1.7], 1.0, "wrong weights", ""),
    ([1.0, 1.0, 0.0, 1.0], 0.25, "missing rank", "lacks rank 2's part"),  # and it was not divided
    ([1.0, 1.0, 0.0, 1.0], 0.25, "missing rank", "divide by world_size (4)"),
]


def test_sums_are_told_by_their_weights():
    for weights, unit, code, words in SUMS:
        fault = told(weighted(parts := parts_of(len(weights)), weights), parts, unit)
        assert fault.code == code, weights
        assert words in fault.message
    parts = parts_of(4)
    fault = told(parts[1].clone(), parts, what="it", rank=1)
    assert fault.code == "not communicated"
    assert fault.message == "it is this rank's own tensor: nothing of the others reached it"
    assert told(parts[1].clone(), parts, rank=0).code == "one rank only"
    one = parts_of(4, size=1)
    assert told(weighted(one, [1, 1, 0, 1]), one).message == "the result lacks rank 2's part"
    fault = told(2 * torch.ones(8), [torch.ones(8) for _ in range(3)])  # nobody can be told apart, nobody is blamed
    assert fault.code == "scale"
    assert "rank" not in fault.message
    fault = told(values.seeded(9, 40, purpose="garbage"), parts)
    assert fault.code == "values"
    assert "40 of 40 elements differ" in fault.message


@few
@given(st.data(), st.integers(2, 4), st.integers(4, 40))
def test_fault_in_one_chunk_is_found_there(data, n, size):
    bounds = split_evenly(size, n)
    chunk = data.draw(st.sampled_from([index for index, (start, stop) in enumerate(bounds) if stop > start]))
    rank, parts = data.draw(st.integers(0, n - 1)), parts_of(n, size)
    got, (start, stop) = weighted(parts, [1.0] * n), bounds[chunk]
    got[start:stop] -= parts[rank][start:stop]
    fault = told(got, parts, what="the sum")
    assert f"chunk {chunk} of the sum (elements {start} to {stop - 1})" in fault.message
    assert fault.code == ("missing rank" if n > 2 else "one rank only")
    assert n == 2 or f"lacks rank {rank}'s part" in fault.message


@pytest.mark.parametrize("op", ["MAX", "MIN", "PRODUCT", "median"])
@pytest.mark.parametrize("divided", ["before", "after", "never"])
def test_a_different_reduction_is_told(op, divided):
    parts = parts_of(3, 20, "provenance")
    stack = torch.stack(parts) / (3 if divided == "before" else 1)
    reduced = {"MAX": stack.amax(0), "MIN": stack.amin(0), "PRODUCT": stack.prod(0), "median": stack.median(0).values}
    fault = told(reduced[op] / (3 if divided == "after" else 1), parts, 1 / 3)
    assert fault.code == "not a sum"
    assert ("the median of the ranks' values" if op == "median" else f"(ReduceOp.{op})") in fault.message
    assert ("divided by 3" in fault.message) == (divided != "never")


@pytest.mark.parametrize("size", [20, 3])
def test_a_part_of_zeros_hides_no_other_mistake(size):
    parts = [torch.zeros(size, dtype=torch.float64), *parts_of(3, size, "provenance")[1:]]
    assert told(parts[1] + parts[2], parts, 1 / 3).code == "sum not mean"
    fault = told(parts[2] / 3, parts, 1 / 3)
    assert fault.code == "missing rank"
    assert "lacks rank 1's part" in fault.message
    assert explain_sum((parts[1] + parts[2]) / 3, parts, expected=[1 / 3] * 3) is None
    assert told(torch.ones(size, dtype=torch.float64), [parts[0]] * 3, 1 / 3).code == "values"


def test_other_dtypes_have_their_own_tolerance():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        parts = [(10 * values.seeded(rank, 50)).to(dtype) for rank in range(3)]
        assert explain_sum(parts[0] + parts[1] + parts[2], parts, expected=[1.0] * 3) is None
        assert dtype.itemsize == 2 or told(parts[0] + parts[1], parts).message == "the result lacks rank 2's part"


WRONG = [
    (None, torch.ones(2), "returned", "expected a float32 tensor of shape [2], got None (is a return missing?)"),
    (
        *(torch.ones(2, 1), torch.ones(2), "shape"),
        "shape [2], got [2, 1]: these are the right values, in a different shape",
    ),
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
    (torch.tensor([True, True]), torch.tensor([True, False]), "values", "[1]: expected False, got True"),
    (torch.tensor(math.inf), torch.tensor(1.0), "values", "expected 1, got inf"),
    ([1, 2], [1, 2, 3], "returned", "expected [1, 2, 3], got [1, 2]"),
    ([1, 4], [1, 2], "values", "the result[1]: expected 2, got 4"),
    ([1], [1, 2, 3], "returned", "expected [1, 2, 3], got [1]: 2 missing at its end"),
    ([2, 1], (1, 2), "values", "the result[0]: expected 1, got 2; the result has the right values in a diff"),
    ({"a": 1}, {"b": 1}, "returned", "the result: it lacks ['b']; it must not have ['a']"),
    ({"a": 1.5}, {"a": 1.0}, "values", "the result['a']: expected 1, got 1.5"),
    (
        *({"p": [8.0]}, {"p": [8]}, "not a whole number"),
        "['p'][0]: expected the whole number 8, got the float 8.0; divide",
    ),
    (True, 1, "values", "expected 1, got True"),
    ("x", "y", "values", "expected 'y', got 'x'"),
    (torch.ones(3), 1.0, "returned", "expected a number"),
]


def test_difference_in_words():
    for got, want, code, says in WRONG:
        fault = values.compare(got, want, world_size=4)
        assert fault.code == code
        assert says in fault.message


RIGHT = [torch.ones(3), torch.tensor([math.inf, math.nan]), torch.empty(0), torch.tensor([True, False])]
RIGHT += ["text", None, 0.0, {"a": (1, 2), "b": None}, [1, 2.5, torch.ones(2)]]


def test_equal_values_are_equal():
    pairs = [*zip(RIGHT, RIGHT, strict=True), ([1, 2], (1, 2)), (2, 2.0), (torch.tensor(2.0), 2.0)]
    assert [pair for pair in pairs if values.compare(*pair) is not None] == []


@few
@given(st.floats(1e-15, 1e15))
def test_tolerance_is_relative(scale):
    want = values.seeded(0, 20) * scale
    size = float(want.abs().max())
    assert values.equal(want + 1e-12 * size, want)
    assert not values.equal(want + 1e-8 * size, want)


def test_long_values_are_described_shortly():
    assert values.describe(list(range(1000))) == "a list of 1000"
    assert values.describe(torch.ones(2, 3)) == "a float32 tensor of shape [2, 3]"
    assert len(values.describe("x" * 10_000)) < 100


def test_lost_precision_is_named():
    float64 = torch.float64
    for kind, coarser in ((float64, torch.float32), (float64, torch.bfloat16), (torch.float32, torch.float16)):
        want = values.seeded(0, 50).to(kind)
        name, own = (str(dtype).removeprefix("torch.") for dtype in (coarser, kind))
        assert f"{name} somewhere in a {own} run" in difference(want.to(coarser).to(kind), want)
        assert "expected" in difference((want.to(coarser) * 3).to(kind) / 3, want)  # lost in a step before the last
        for got in (want + 1e-3, want * torch.linspace(1, 1.1, 50, dtype=kind)):
            assert " somewhere in a " not in difference(got, want)


@few
@given(st.floats(-1e3, 1e3, allow_subnormal=False), st.floats(1e-12, 1.0))
def test_two_numbers_that_differ_are_never_shown_as_equal(one, gap):
    if one != one + gap:
        first, second = values.apart(one, one + gap)
        assert first != second


def test_numbers_at_the_ends_of_their_range_and_near_one():
    for got in (5e-324, 1.7e308, math.inf, math.nan):
        fault = values.compare(torch.tensor([got], dtype=torch.float64), torch.tensor([1.5], dtype=torch.float64))
        assert fault.code in ("values", "nan", "scale")
        assert values.compare(got, 1.5) is not None
    assert (values.times_of(1.00002), values.times_of(0.25)) == ("1.00002x too large", "4x too small")
    assert "expected 1, got 1;" not in difference(1.0 + 1e-7, 1.0, "the mean")


def test_whole_numbers_of_numpy_are_whole_numbers():
    kept = [1, (2, [3.0])]
    assert values.in_python_numbers(kept) is kept
    got = values.in_python_numbers({np.int64(1): (np.int32(2), [np.float32(0.5), np.bool_(True)])})
    assert got == {1: (2, [0.5, True])}
    assert [type(each) for each in (*got, got[1][0], *got[1][1])] == [int, int, float, bool]
