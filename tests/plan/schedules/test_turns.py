import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import Action, Schedule
from distlab.plan.schedules.turns import depth_first, rounds_of, take_turns


def by_the_definition(passes, warm_up, delay):
    """One rank's order, action after action, as the docstring of `take_turns` tells it."""
    forward, backward = ([*zip(each.turn.tolist(), each.microbatch.tolist(), strict=True)] for each in passes)
    order = [("F", each) for each in forward[:warm_up]]
    for done, each in enumerate(backward):
        order += [("F", one) for one in forward[warm_up + done : warm_up + done + 1]]
        order.append(("B" if delay is None else "I", each))
        if delay is not None and done >= delay:
            order.append(("W", backward[done - delay]))
    if delay is not None:
        order += [("W", each) for each in backward[max(len(backward) - delay, 0) :]]
    return order


@pytest.mark.parametrize("splits", [False, True])
@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(1, 6), microbatches=st.integers(1, 30), stages=st.integers(1, 3), seed=st.integers(0, 2**32 - 1)
)
def test_slices_lay_out_what_the_definition_says(splits, ranks, microbatches, stages, seed):
    passes = depth_first(rounds_of(ranks, microbatches), stages)
    draw = np.random.default_rng(seed)
    warm_up, delay = draw.integers(0, 2 * microbatches * stages, (2, ranks))
    rows = [
        [Action(turn * ranks + rank, kind, one) for kind, (turn, one) in by_the_definition(passes, warm, late)]
        for rank, (warm, late) in enumerate(
            zip(warm_up.tolist(), delay.tolist() if splits else [None] * ranks, strict=True)
        )
    ]
    planned = take_turns(*passes, warm_up=warm_up, weight_delay=delay if splits else None)
    assert planned == Schedule.from_actions(rows)
