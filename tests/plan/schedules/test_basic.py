"""GPipe and 1F1B: the orders, their length, what they hold, and the messages they imply."""

import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distlab.plan import (
    Schedule,
    ScheduleError,
    add_communication,
    gpipe,
    one_f_one_b,
    parse_schedule,
    validate,
)

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 20))


def one_f_one_b_step_by_step(num_stages, num_microbatches):
    """1F1B written as a loop: forward while few are in flight, else backward."""
    lines = []
    for stage in range(num_stages):
        forward = backward = 0
        actions = []
        while backward < num_microbatches:
            if forward < num_microbatches and forward - backward < num_stages - stage:
                actions.append(f"{stage}F{forward}")
                forward += 1
            else:
                actions.append(f"{stage}B{backward}")
                backward += 1
        lines.append(" ".join(actions))
    return parse_schedule("\n".join(lines))


def test_gpipe_order():
    assert gpipe(2, 3) == parse_schedule("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2")


def test_one_f_one_b_order():
    assert one_f_one_b(2, 3) == parse_schedule("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")


@given(SIZES)
def test_closed_form_is_the_loop(sizes):
    assert one_f_one_b(*sizes) == one_f_one_b_step_by_step(*sizes)


@given(SIZES)
def test_length_and_memory(sizes):
    num_stages, num_microbatches = sizes
    gpipe_report, one_f_one_b_report = validate(gpipe(*sizes)), validate(one_f_one_b(*sizes))
    shortest = 2 * (num_microbatches + num_stages - 1)
    assert gpipe_report.longest_chain == one_f_one_b_report.longest_chain == shortest
    assert gpipe_report.peak_in_flight == (num_microbatches,) * num_stages
    expected = tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))
    assert one_f_one_b_report.peak_in_flight == expected


@given(SIZES, st.sampled_from([gpipe, one_f_one_b]))
def test_communication_is_valid_and_leaves_the_computations(sizes, make):
    schedule = make(*sizes)
    full = add_communication(schedule)
    assert validate(full).peak_in_flight == validate(schedule).peak_in_flight
    compute = np.isin(full.kind, (0, 1))
    assert np.array_equal(full.stage[compute], schedule.stage)
    assert np.array_equal(full.kind[compute], schedule.kind)
    assert np.array_equal(full.microbatch[compute], schedule.microbatch)
    assert len(full) - len(schedule) == 4 * (sizes[0] - 1) * sizes[1]


def test_communication_order():
    assert str(add_communication(gpipe(2, 2))).splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
    ]


def test_receives_follow_the_order_of_the_sends():
    swapped = parse_schedule("0F0 0F1 0B1 0B0\n1F1 1F0 1B1 1B0")  # rank 1 needs the second message first
    assert str(add_communication(swapped)).splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0",
        "1RECV_F0,1RECV_F1,1F1,1F0,1B1,1SEND_B1,1B0,1SEND_B0",
    ]
    validate(add_communication(swapped))


def test_stages_on_one_rank_send_nothing():
    both = parse_schedule("0F0 1F0 1B0 0B0")
    assert add_communication(both) == both


def test_communication_of_forward_passes_alone():
    assert str(add_communication(parse_schedule("0F0\n1F0"))) == "0F0,0SEND_F0\n1RECV_F0,1F0"


def test_communication_refuses_what_is_not_valid():
    with pytest.raises(ScheduleError, match="1F0"):
        add_communication(parse_schedule("0F0 0B0\n1B0"))
    with pytest.raises(ValueError, match="already has sends"):
        add_communication(add_communication(gpipe(2, 2)))


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("sizes", "name"), [((0, 4), "num_ranks"), ((4, 0), "num_microbatches"), ((-1, 2), "-1")])
def test_counts_must_be_positive(make, sizes, name):
    with pytest.raises(ValueError, match=name):
        make(*sizes)


def test_counts_must_be_whole():
    with pytest.raises(ValueError, match=r"num_microbatches is 2.5; pass a whole number"):
        gpipe(2, 2.5)


@pytest.mark.soak
def test_a_big_schedule_is_planned_at_once():
    start = time.process_time()  # other programs do not count
    schedule = one_f_one_b(64, 1024)
    assert time.process_time() - start < 0.3
    assert isinstance(schedule, Schedule)
    assert len(schedule) == 131_072
