"""Who is in the quorum, from what replicas said of themselves: as data, without a process."""

import pytest

from distlab.elastic import Arrival, Quorum, quorum

ALL = (0, 1, 2)
BEGIN, THIRD = Quorum(-1, ALL), Quorum(3, ALL, 40, (), ALL)
NEW, OLD = Arrival(-1, 0), Arrival(2, 40)
AT_BORDER, IN_STEP, AHEAD = Arrival(3, 41), Arrival(3, 41, ALL), Arrival(3, 42)


@pytest.mark.parametrize(
    ("arrived", "alive", "last", "expected"),
    [
        ({0: NEW, 1: NEW}, ALL, BEGIN, None),  # the third is on its way
        ({0: NEW, 1: NEW, 2: NEW}, ALL, BEGIN, Quorum(0, ALL, 0, (), ALL)),
        ({1: NEW, 2: NEW}, (1, 2), BEGIN, Quorum(0, (1, 2), 0, (), (1, 2))),  # the first died before
        ({0: NEW, 1: NEW._replace(facts="x")}, (0, 1), BEGIN, Quorum(0, (0,), 0, (), (0,), (1,))),
        ({0: IN_STEP}, (0, 2), THIRD, None),  # 2 lives and has not come
        ({0: IN_STEP, 2: IN_STEP}, (0, 2), THIRD, Quorum(4, (0, 2), 41, (), ALL)),
        ({0: IN_STEP, 2: AHEAD}, (0, 2), THIRD, Quorum(4, (0, 2), 42, (), (0, 2))),  # 0 has to make update 42 yet
        ({0: IN_STEP, 2: Arrival(3, 42, ALL)}, (0, 2), THIRD, Quorum(4, (0, 2), 42, (), ALL)),
        ({0: IN_STEP, 1: NEW, 2: IN_STEP}, ALL, THIRD, Quorum(4, (0, 2), 41, (), ALL)),  # 1 waits for the border
        ({0: AT_BORDER, 1: NEW, 2: AT_BORDER}, ALL, THIRD, Quorum(4, ALL, 41, (1,), ALL)),
        ({0: NEW, 1: AT_BORDER}, (0, 1), THIRD, Quorum(4, (0, 1), 41, (0,), (0, 1))),  # the first number does not give
        ({0: OLD, 1: AT_BORDER}, (0, 1), THIRD, Quorum(4, (0, 1), 41, (0,), (0, 1))),  # was taken for dead
        ({0: AT_BORDER, 7: NEW}, (0, 7), THIRD, Quorum(4, (0, 7), 41, (7,), (0, 7))),
        ({0: AT_BORDER, 1: AT_BORDER}, (0,), THIRD, Quorum(4, (0,), 41, (), (0,))),  # 1 died after it had come
        ({0: AT_BORDER, 1: NEW._replace(facts="x")}, (0, 1), THIRD, Quorum(4, (0,), 41, (), (0,), (1,))),
    ],
)
def test_who_is_in(arrived, alive, last, expected):
    assert quorum(arrived, alive, last) == expected


def test_the_giver_holds_the_newest_state():
    assert Quorum(4, ALL, 41, (0,), ALL).giver == 1


def test_a_lost_state_is_told():
    with pytest.raises(RuntimeError, match=r"all replicas that held step 40 and later are gone \(0, 1, 2\); start the"):
        quorum({1: NEW, 2: OLD}, (1, 2), THIRD)
