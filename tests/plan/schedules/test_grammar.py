"""The grammar: parse and print are exact inverses, and a mistake is told with its place."""

import pytest
from hypothesis import given, strategies as st

from distlab.plan import KINDS, Action, Schedule, gpipe, one_f_one_b, parse_action, parse_schedule

NUMBERS = st.integers(0, 2**31 - 1)
ACTIONS = st.builds(Action, NUMBERS, st.sampled_from(KINDS), NUMBERS)
RANKS = st.lists(st.lists(ACTIONS, max_size=8), min_size=1, max_size=5)


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


def test_commas_blanks_ranks_with_nothing_to_do_and_extras_of_torch():
    assert parse_schedule("0F0, 0B0\n\n 1F0\t1B0 \n") == parse_schedule("0F0,0B0\n1F0,1B0")
    assert parse_schedule("\n0F0,0B0,\n\n,1F0,,1B0,,\n\n") == parse_schedule("0F0,0B0\n1F0,1B0")
    idle = Schedule.from_actions([[Action(0, "F", 0)], [], [Action(1, "F", 0)], []])
    assert (str(idle), idle.num_ranks, idle.actions(3)) == ("0F0\n,\n1F0\n,", 4, [])
    text = ",0F0,,(0F1;1B0)OVERLAP_F_B,0UNSHARD,0REDUCE_GRAD\r\n,,2F0,2RESHARD0"
    assert str(parse_schedule(text)) == "0F0,0F1,1B0\n2F0"


def test_columns_and_equality():
    schedule = parse_schedule("0F0 0F1 0B0\n1F0")
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, len(schedule)) == (2, 2, 2, 4)
    assert (schedule.rank.tolist(), schedule.step.tolist()) == ([0, 0, 0, 1], [0, 1, 2, 0])
    assert [KINDS[code] for code in schedule.kind] == ["F", "F", "B", "F"]
    assert schedule.action(2) == Action(0, "B", 0)
    assert (schedule.has_communication, parse_schedule("0SEND_F0").has_communication) == (False, True)
    assert repr(schedule) == "Schedule(2 ranks, 2 stages, 2 micro-batches, 4 actions)"
    assert gpipe(2, 2) == gpipe(2, 2)
    assert hash(gpipe(2, 2)) == hash(gpipe(2, 2))
    assert gpipe(2, 3) != one_f_one_b(2, 3)
    assert parse_schedule("0F0 1F0") != parse_schedule("0F0\n1F0")
    assert gpipe(1, 1) != "0F0,0B0"


NO_ACTION = r"is not an action; write STAGE KIND MICROBATCH .*F B I W SEND_F"
REFUSED = [
    *((lambda text=text: parse_action(text), NO_ACTION) for text in ("", "F0", "2F", "2X0", "02F0", "2F00", "-1F0")),
    *((lambda text=text: parse_action(text), NO_ACTION) for text in (" 2F0", "2F0 ", "2 F 0", "²F0")),
    (lambda: parse_action("1x0"), r"is not an action(?!.*did you mean)"),
    (lambda: parse_action("0F2147483648"), r"below 2\*\*31"),
    (lambda: parse_schedule("0F0,0B0\n1F0,1b0,"), r"line 2, column 5: '1b0' is not .*; did you mean 1B0\?"),
    (lambda: parse_schedule("0F0\n\n1F0,,1F"), "^line 3, column 6: '1F' is not an action"),
    (lambda: parse_schedule("0F0;0F1"), "^line 1, column 1: .* is not an action"),
    (lambda: parse_schedule("(0F0;0Q1)OVERLAP_F_B"), "^line 1, column 1: '0Q1' is not an action"),
    (lambda: parse_schedule(" \n\n"), "holds no schedule; write one line per rank"),
    (lambda: gpipe(2, 2).actions(2), r"rank 2 is outside the schedule; it has ranks 0..1"),
    (lambda: Schedule.from_actions([[], [Action(0, "X", 0)]]), "rank 1, step 0: .*is not an action"),
    (lambda: Schedule.from_actions([[Action(-1, "F", 0)]]), "is not an action"),
    (lambda: Schedule.from_actions([]), "at least one rank"),
    (lambda: Schedule.from_columns(stage=[0], kind=[0], microbatch=[0], lengths=[3]), "lengths add up to 3"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_a_mistake_is_told_with_its_place(make, words):
    with pytest.raises(ValueError, match=words):
        make()
