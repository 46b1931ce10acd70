"""The grammar: parse and print are exact inverses, and a mistake is told with its place."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distlab.plan import KINDS, Action, Schedule, gpipe, one_f_one_b, parse_action, parse_schedule

NUMBERS = st.integers(0, 2**31 - 1)
ACTIONS = st.builds(Action, NUMBERS, st.sampled_from(KINDS), NUMBERS)
RANKS = st.lists(st.lists(ACTIONS, max_size=8), min_size=1, max_size=5)


@given(ACTIONS)
def test_an_action_prints_and_parses_back(action):
    assert parse_action(str(action)) == action


@given(RANKS)
def test_a_schedule_prints_and_parses_back(ranks):
    schedule = Schedule.from_actions(ranks)
    assert parse_schedule(str(schedule)) == schedule
    assert str(parse_schedule(str(schedule))) == str(schedule)
    assert [schedule.actions(rank) for rank in range(schedule.num_ranks)] == ranks


@given(st.text(alphabet="0123456789FBIWSENDRCV_ ;(-٣", max_size=9))
def test_a_text_parses_only_to_what_prints_as_itself(text):
    try:
        action = parse_action(text)
    except ValueError:
        return
    assert str(action) == text


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds(kind):
    assert parse_action(f"3{kind}12") == Action(3, kind, 12)
    assert str(Action(3, kind, 12)) == f"3{kind}12"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "02F0", "2F00", "-1F0", " 2F0", "2F0 ", "2 F 0", "²F0"])
def test_what_is_no_action(text):
    with pytest.raises(ValueError, match=r"is not an action; write STAGE KIND MICROBATCH .*F B I W SEND_F"):
        parse_action(text)


def test_lower_case_is_told_from_nonsense():
    with pytest.raises(ValueError, match=r"line 2, column 5: '1b0' is not an action; .*; did you mean 1B0\?"):
        parse_schedule("0F0,0B0\n1F0,1b0,")
    with pytest.raises(ValueError, match="is not an action") as caught:
        parse_action("1x0")
    assert "did you mean" not in str(caught.value)


def test_numbers_have_a_limit():
    with pytest.raises(ValueError, match=r"below 2\*\*31"):
        parse_action("0F2147483648")


def test_commas_blanks_and_blank_lines():
    assert parse_schedule("0F0, 0B0\n\n 1F0\t1B0 \n") == parse_schedule("0F0,0B0\n1F0,1B0")
    assert parse_schedule("\n0F0,0B0,\n\n,1F0,,1B0,,\n\n") == parse_schedule("0F0,0B0\n1F0,1B0")


def test_a_rank_with_nothing_to_do():
    schedule = Schedule.from_actions([[Action(0, "F", 0)], [], [Action(1, "F", 0)], []])
    assert str(schedule) == "0F0\n,\n1F0\n,"
    assert schedule.num_ranks == 4
    assert schedule.actions(3) == []


def test_torch_extras_are_read():
    text = ",0F0,,(0F1;1B0)OVERLAP_F_B,0UNSHARD,0REDUCE_GRAD\r\n,,2F0,2RESHARD0"
    assert str(parse_schedule(text)) == "0F0,0F1,1B0\n2F0"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0F0 0X1", "line 1, column 5: '0X1'"),
        ("0F0\n\n1F0,,1F", "line 3, column 6: '1F'"),
        ("0F0;0F1", "line 1, column 1"),
        ("(0F0;0Q1)OVERLAP_F_B", "line 1, column 1: '0Q1'"),
        ("# comment", "line 1, column 1: '#'"),
    ],
)
def test_a_mistake_is_told_with_its_place(text, place):
    with pytest.raises(ValueError, match="is not an action") as caught:
        parse_schedule(text)
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_no_schedule(text):
    with pytest.raises(ValueError, match="holds no schedule; write one line per rank"):
        parse_schedule(text)


def test_columns():
    schedule = parse_schedule("0F0 0F1 0B0\n1F0")
    assert schedule.num_ranks == 2
    assert schedule.num_stages == 2
    assert schedule.num_microbatches == 2
    assert len(schedule) == 4
    assert schedule.rank.tolist() == [0, 0, 0, 1]
    assert schedule.step.tolist() == [0, 1, 2, 0]
    assert [KINDS[code] for code in schedule.kind] == ["F", "F", "B", "F"]
    assert schedule.action(2) == Action(0, "B", 0)
    assert not schedule.has_communication
    assert parse_schedule("0SEND_F0").has_communication
    assert repr(schedule) == "Schedule(2 ranks, 2 stages, 2 micro-batches, 4 actions)"


def test_equality_sees_order_and_ranks():
    assert gpipe(2, 2) == gpipe(2, 2)
    assert hash(gpipe(2, 2)) == hash(gpipe(2, 2))
    assert gpipe(2, 3) != one_f_one_b(2, 3)
    assert parse_schedule("0F0 1F0") != parse_schedule("0F0\n1F0")
    assert gpipe(1, 1) != "0F0,0B0"


def test_a_rank_outside():
    with pytest.raises(ValueError, match=r"rank 2 is outside the schedule; it has ranks 0..1"):
        gpipe(2, 2).actions(2)


def test_building_checks_what_it_is_given():
    with pytest.raises(ValueError, match="rank 1, step 0: .*is not an action"):
        Schedule.from_actions([[], [Action(0, "X", 0)]])
    with pytest.raises(ValueError, match="is not an action"):
        Schedule.from_actions([[Action(-1, "F", 0)]])
    with pytest.raises(ValueError, match="at least one rank"):
        Schedule.from_actions([])
    with pytest.raises(ValueError, match="lengths add up to 3"):
        Schedule.from_columns(stage=[0], kind=[0], microbatch=[0], lengths=[3])
    with pytest.raises(ValueError, match="code outside"):
        Schedule.from_columns(stage=[0], kind=[99], microbatch=[0], lengths=np.array([1]))
    with pytest.raises(ValueError, match="microbatch holds -1"):
        Schedule.from_columns(stage=[0], kind=[0], microbatch=[-1], lengths=[1])
