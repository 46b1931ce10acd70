"""Owners of work: nearly the best assignment, a bound that none beats, and what is refused."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import assign_owners, least_busiest, newton_schulz_flops


def busiest(work, owners, num_ranks):
    return max(sum(one for one, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(num_ranks))


@settings(max_examples=60, deadline=None)
@given(work=st.lists(st.integers(0, 20), max_size=6), num_ranks=st.integers(1, 3))
def test_the_busiest_rank_has_at_most_four_thirds_of_the_best_and_no_one_beats_the_bound(work, num_ranks):
    given_to = assign_owners(work, num_ranks)
    best = min(busiest(work, owners, num_ranks) for owners in itertools.product(range(num_ranks), repeat=len(work)))
    assert 3 * busiest(work, given_to, num_ranks) <= 4 * best
    assert least_busiest(work, num_ranks) <= best


def test_the_longest_go_first_and_ties_to_the_first_rank():
    assert assign_owners([1, 5, 3, 3], 2) == (0, 0, 1, 1)
    assert assign_owners([2.0, 2.0, 2.0], 4) == (0, 1, 2)
    assert least_busiest([3, 3, 2, 2, 2], 2) == 6, "the three shortest of the five longest: two of them share a rank"
    assert least_busiest([9, 1, 1], 2) == 9
    assert newton_schulz_flops((3, 2), 1) == newton_schulz_flops((2, 3), 1) == 4 * 4 * 3 + 2 * 8


WRONG = [
    (lambda: assign_owners([1.0], 0), "num_ranks is 0; pass a whole number of at least 1"),
    (lambda: newton_schulz_flops((3,)), r"the shape is \[3\], and Newton-Schulz takes a matrix"),
]


def test_what_is_no_work_is_refused():
    for call, words in WRONG:
        with pytest.raises(ValueError, match=words):
            call()
