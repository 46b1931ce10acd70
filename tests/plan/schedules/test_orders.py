"""The orders: by hand and step by step, what they hold, the time that ranks are idle, and the messages they imply."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from distlab import plan
from distlab.plan import ActionTimes, add_communication, gpipe, make_schedule, one_f_one_b, parse_schedule, validate
from simulator import simulate_schedule

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 20))


@given(SIZES)
def test_the_length_of_the_first_orders_and_what_they_hold(sizes):
    num_stages, num_microbatches = sizes
    few = tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))
    for make, expected in ((gpipe, (num_microbatches,) * num_stages), (one_f_one_b, few)):
        report = validate(make(*sizes))
        assert report.longest_chain == 2 * (num_microbatches + num_stages - 1)
        assert report.peak_in_flight == expected


def test_where_messages_stand():
    """Receives follow the order of the sends, and stages on one rank send nothing."""
    for text, full in (
        (
            str(gpipe(2, 2)),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
        ),
        (  # rank 1 needs the second message first
            "0F0 0F1 0B1 0B0\n1F1 1F0 1B1 1B0",
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n1RECV_F0,1RECV_F1,1F1,1F0,1B1,1SEND_B1,1B0,1SEND_B0",
        ),
        ("0F0 1F0 1B0 0B0", "0F0,1F0,1B0,0B0"),
        ("0F0\n1F0", "0F0,0SEND_F0\n1RECV_F0,1F0"),
    ):
        assert str(add_communication(parse_schedule(text))) == full
    with pytest.raises(plan.ScheduleError, match="1F0"):
        add_communication(parse_schedule("0F0 0B0\n1B0"))
    with pytest.raises(ValueError, match="already has sends"):
        add_communication(add_communication(gpipe(2, 2)))


def peaks(name, num_ranks, num_microbatches, **options):
    return validate(make_schedule(name, num_ranks, num_microbatches, **options)).peak_in_flight


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("factor", [1, 3])
def test_peaks_in_flight(p, factor):
    m = p * factor
    assert peaks("naive", p, m) == (1,) * p
    assert peaks("looped_bfs", p, m) == (2 * m,) * p
    assert peaks("zb_h1", p, m) == (min(m, p),) * p
    assert peaks("zb_h2", p, m) == (min(m, 2 * p - 1),) * p
    for v in (1, 2, 4):
        held = Fraction(peaks("interleaved", p, m, stages_per_rank=v)[0], v)  # in micro-batches of a rank's whole model
        assert held == (p * (1 + Fraction(p - 1, p * v)) if factor > 1 else p)
    if factor > 1:  # in half-stages
        assert peaks("zb_v", p, m) == (2 * p,) * p
        assert p <= max(peaks("v_half", p, m)) <= p + 3
        assert 2 * p / 3 <= max(peaks("v_min", p, m)) <= 2 * p / 3 + 8 / 3
        assert max(peaks("dualpipe_v", p, m)) == 2 * p + 1


def idle(schedule, *times):
    """Return how long ranks are idle: in the whole step, and in the span of the rank that runs longest."""
    run = simulate_schedule(schedule, ActionTimes(*times), unit_s=1e-9)
    return round((run.duration_s - run.ideal_s) * 1e9), round((run.steady_s - run.ideal_s) * 1e9)


@pytest.mark.parametrize("p", [1, 4, 7])
def test_bubbles_have_their_closed_forms(p):
    f, i, w = 100, 90, 70
    for m in (2 * p, 5 * p):
        make = {name: make_schedule(name, p, m) for name in ("naive", "gpipe", "one_f_one_b", "zb_h1", "zb_h2")}
        bubble = {name: idle(schedule, f, i, w) for name, schedule in make.items()}
        assert bubble["naive"][0] == m * (p - 1) * (f + i + w)
        assert bubble["gpipe"][0] == bubble["one_f_one_b"][0] == (p - 1) * (f + i + w)
        assert bubble["zb_h1"][0] == (p - 1) * (f + i - w)
        assert bubble["zb_h2"][1] == (p - 1) * (f + i - 2 * w)
        for name in ("interleaved", "looped_bfs"):  # f, i and w are times of one of a rank's stages
            assert idle(make_schedule(name, p, m, stages_per_rank=3), f, i, w)[0] == (p - 1) * (f + i + w)


@pytest.mark.parametrize("p", [2, 8])
def test_equal_times_leave_no_bubble_in_zb_h2_and_zb_v(p):
    m = 4 * p
    assert idle(make_schedule("zb_h2", p, m), 1, 1, 1)[1] == 0
    assert idle(make_schedule("zb_v", p, m), 1, 1, 1)[1] == 0
    one_f_one_b = 6 * (p - 1)  # in slots of a half-stage
    assert idle(make_schedule("dualpipe_v", p, m), 1, 1, 1)[0] == p - 1
    assert abs(idle(make_schedule("v_half", p, m), 1, 1, 1)[0] - one_f_one_b / 2) <= 5
    assert abs(idle(make_schedule("v_min", p, m), 1, 1, 1)[0] - one_f_one_b * 2 / 3) <= 3
    if p >= 4:
        assert idle(make_schedule("v_half", 4 * p, 4 * m), 1, 1, 1)[0] == 3.25 * 4 * p - 2
        assert idle(make_schedule("v_min", 4 * p, 4 * m), 1, 1, 1)[0] == 4 * 4 * p - 5
