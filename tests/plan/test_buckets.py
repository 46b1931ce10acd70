"""Buckets: every parameter once, in reverse, closed when full, as torch does it."""

import pytest
from hypothesis import given, strategies as st

from distlab.plan import Bucket, assign_buckets

SIZES = st.lists(st.integers(0, 100), max_size=40)


def test_walks_in_reverse_and_closes_when_full():
    assert assign_buckets([10, 20, 30, 40], 50) == (Bucket(0, (3, 2), 70), Bucket(1, (1, 0), 30))


def test_the_first_bucket_may_be_small():
    assert [bucket.parameters for bucket in assign_buckets([10] * 5, 20, 10)] == [(4,), (3, 2), (1, 0)]


def test_a_large_tensor_has_a_bucket_of_its_own():
    assert [bucket.parameters for bucket in assign_buckets([5, 100, 5, 5], 20)] == [(3, 2), (1,), (0,)]


def test_nothing_to_assign():
    assert assign_buckets([], 10) == ()


@given(SIZES, st.integers(1, 150), st.integers(1, 150))
def test_every_parameter_once_in_reverse(sizes, capacity, first):
    buckets = assign_buckets(sizes, capacity, first)
    assert [p for bucket in buckets for p in bucket.parameters] == list(reversed(range(len(sizes))))
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert bucket.num_bytes == sum(sizes[p] for p in bucket.parameters)
        limit = capacity if bucket.index else max(first, capacity)
        before_the_last = bucket.num_bytes - sizes[bucket.parameters[-1]]
        assert len(bucket.parameters) == 1 or before_the_last < limit


@given(SIZES, st.integers(100, 300), st.integers(1, 300))
def test_the_same_as_torch(sizes, capacity, first):
    torch = pytest.importorskip("torch")
    tensors = [torch.empty(size, dtype=torch.uint8) for size in reversed(sizes)]
    if not tensors:
        return
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [first, capacity])
    theirs = [tuple(len(sizes) - 1 - index for index in bucket) for bucket in indices]
    assert [bucket.parameters for bucket in assign_buckets(sizes, capacity, first)] == theirs


@pytest.mark.parametrize("arguments", [([1], 0), ([1], -5), ([1], 10, 0)])
def test_capacity_must_be_positive(arguments):
    with pytest.raises(ValueError, match="at least one byte"):
        assign_buckets(*arguments)


def test_sizes_must_not_be_negative():
    with pytest.raises(ValueError, match="parameter 1 has a size of -3"):
        assign_buckets([1, -3], 10)
