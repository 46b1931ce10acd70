"""Top-k takes the largest, random indices take all alike."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from distlab.compression import random_indices, scatter, top_k


def normal(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-5, 5), min_size=1, max_size=40), data=st.data())
def test_nothing_left_out_is_larger_than_anything_kept(values, data):
    vector = torch.tensor(values, dtype=torch.float32)
    k = data.draw(st.integers(1, len(values)))
    indices, kept = top_k(vector, k)
    assert indices.tolist() == sorted(set(indices.tolist()))
    assert len(indices) == k
    assert torch.equal(vector[indices], kept)
    rest = scatter(indices, torch.zeros_like(kept), len(values)) + vector
    rest[indices] = 0
    assert rest.abs().max() <= kept.abs().min()
    assert torch.equal(scatter(indices, kept, len(values)) + rest, vector)


def test_a_long_vector_is_searched_as_exactly_as_a_short_one():
    """Also equal elements, a period that the sample of the search sees alone, and what is not finite."""
    periodic = torch.zeros(64 * 2000)
    periodic[::64], periodic[5] = 1.0, 2.0
    for vector in (normal(100_000), normal(100_000).pow(9), torch.ones(100_000), periodic):
        for k in (1, 10, 1000, 99_999):
            _, kept = top_k(vector, k)
            assert torch.equal(kept.abs().sort().values, vector.abs().sort().values[-k:])
    for value, place in product((float("nan"), float("inf")), (0, 64, 70, 99_999)):
        vector = normal(100_000)
        vector[place] = value
        assert place in top_k(vector, 100)[0].tolist()


def test_random_indices_are_different_sorted_repeat_and_all_are_as_likely():
    for size, k in [(1, 1), (10, 10), (10, 3), (100_000, 1000), (1000, 240)]:
        first, second = (random_indices(size, k, torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(first, second)
        assert first.tolist() == sorted(set(first.tolist()))
        assert (len(first), first[0] >= 0, first[-1] < size) == (k, True, True)
    for size, k in [(50, 5), (8, 4)]:  # both ways of drawing
        generator, counts, draws = torch.Generator().manual_seed(0), torch.zeros(size), 2000
        for _ in range(draws):
            counts[random_indices(size, k, generator)] += 1
        share = k / size
        assert (counts - draws * share).abs().max() < 4.5 * (draws * share * (1 - share)) ** 0.5


def test_bad_numbers_of_elements_are_refused():
    for k in (0, 5, 2.0, True):
        with pytest.raises(ValueError, match=f"k is {k}; pass how many of 4"):
            top_k(torch.ones(4), k)
        with pytest.raises(ValueError, match=f"k is {k}"):
            random_indices(4, k, torch.Generator())
    with pytest.raises(ValueError, match=r"the vector has shape \[2, 2\]"):
        top_k(torch.ones(2, 2), 1)
