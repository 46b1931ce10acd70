"""The profile on one screen: four parts that sum to the step, and the same as the whole profile where both can say."""

import pytest
from hypothesis import given, strategies as st

from distlab.profile import Profile, plain_profile
from distlab.trace import Span, Trace


def span(rank, lane, start, end):
    return Span(rank, lane, lane, "B" if lane == "compute" else "all_reduce", start, end, 8)


def test_a_late_rank_makes_the_other_wait_and_what_is_under_computing_costs_nothing():
    spans = [
        span(0, "compute", 0, 40),
        span(0, "communication", 40, 90),  # rank 1 comes at 70
        span(1, "compute", 0, 80),
        span(1, "communication", 70, 90),  # 10 of it under computing
        span(0, "compute", 95, 100),
    ]
    assert plain_profile(spans) == [
        {"computing": 45, "waiting": 30, "exposed": 20, "idle": 5},
        {"computing": 80, "waiting": 0, "exposed": 10, "idle": 10},
    ]


def test_ranks_that_make_other_numbers_of_calls_are_refused():
    with pytest.raises(ValueError, match="zip"):
        plain_profile([span(0, "communication", 0, 1), span(1, "compute", 0, 1)])


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=1, max_size=5))
def test_the_parts_sum_to_the_step_and_agree_with_the_whole_profile(rounds):
    now, spans, end = [0, 0], [], 0
    for first, second, sent, between in rounds:
        for rank, length in enumerate((first, second)):
            spans.append(span(rank, "compute", now[rank], now[rank] + length))
            now[rank] += length
        end = max(now) + sent
        spans += [span(rank, "communication", now[rank], end) for rank in (0, 1)]
        spans += [span(rank, "compute", end, end + between) for rank in (0, 1)]
        now = [end + between] * 2
    profile = plain_profile(spans)
    assert all(sum(parts.values()) == now[0] for parts in profile)
    for rank, seconds in Profile.of(Trace.from_spans(spans)).mean_s().items():
        parts = profile[rank]
        mine = parts["computing"], parts["exposed"], parts["waiting"] + parts["idle"]
        assert mine == tuple(round(1e9 * seconds[name]) for name in ("backward", "sync", "idle"))
