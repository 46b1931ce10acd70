"""Partitions: contiguous, complete, and the best there is."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from distlab.plan import balance, split_evenly
from distlab.plan.partition import Cuts, even_blocks


@given(st.integers(0, 100), st.integers(1, 20))
def test_an_even_split_covers_everything_once(total, parts):
    ranges = split_evenly(total, parts)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    sizes = [stop - start for start, stop in ranges]
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_an_even_split():
    assert split_evenly(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert split_evenly(1, 3) == ((0, 1), (1, 1), (1, 1))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balance_is_the_best_cut(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    cuts = balance(costs, stages)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(costs)
    assert len(cuts) == stages
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    assert all(start < stop for start, stop in cuts)
    bounds = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(bound)) for bound in bounds)
    assert max(sum(costs[start:stop]) for start, stop in cuts) == best


def test_balance_of_a_model_with_a_heavy_head():
    assert balance([1, 1, 1, 1, 1, 1, 3], 3) == ((0, 3), (3, 6), (6, 7))


@given(st.lists(st.integers(0, 9), min_size=3, max_size=9))
def test_one_program_cuts_into_any_number_of_stages(costs):
    cuts = Cuts(costs)
    for stages in (len(costs), 1, 3, 2):
        assert cuts.into(stages) == balance(costs, stages)


def test_even_blocks_count_the_ends_where_that_makes_them_divide():
    """An embedding in front, a head behind: 22 blocks on 8 stages as in zero bubble's Table 3."""
    assert even_blocks(1, 13, 14, 3) == ((0, 5), (5, 9), (9, 14))
    assert [stop - start for start, stop in even_blocks(1, 23, 24, 8)] == [3] * 8
    assert even_blocks(0, 4, 4, 2) == ((0, 2), (2, 4))
    assert even_blocks(1, 5, 6, 1) == ((0, 6),)
    with pytest.raises(ValueError, match="23 blocks do not divide into 8 equal stages.*cut='time'"):
        even_blocks(1, 24, 25, 8)


@pytest.mark.parametrize("arguments", [(-1, 2), (4, 0)])
def test_a_split_needs_a_part(arguments):
    with pytest.raises(ValueError, match="cannot split"):
        split_evenly(*arguments)


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        ([1, 2], 3, "2 layers cannot fill 3 stages; use at least 1 and at most 2"),
        ([1, 2], 0, "cannot fill 0 stages"),
        ([1, -2], 1, "layer 1 costs -2"),
        ([float("nan")], 1, "layer 0 costs nan"),
    ],
)
def test_balance_says_what_is_wrong(costs, stages, message):
    with pytest.raises(ValueError, match=message):
        balance(costs, stages)
