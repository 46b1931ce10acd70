"""Faults on a plan: the same for a seed, each once."""

import os
import signal
from contextlib import suppress
from queue import Empty, Queue

import pytest

from distlab.elastic import Fault, Faults, plan_faults
from distlab.elastic.faults import KINDS


def test_a_seed_makes_the_same_plan_and_every_kind_and_rank_comes():
    plan = plan_faults(3, 60, num_steps=20, world_size=4, within_s=0.5)
    assert plan == plan_faults(3, 60, num_steps=20, world_size=4, within_s=0.5)
    assert plan != plan_faults(4, 60, num_steps=20, world_size=4, within_s=0.5)
    assert {fault.kind for fault in plan} == set(KINDS)
    assert {fault.rank for fault in plan} == set(range(4))
    assert [fault.step for fault in plan] == sorted(fault.step for fault in plan)
    assert all(0 <= fault.step < 20 and 0 <= fault.seconds <= 0.5 for fault in plan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kinds": ["kill", "packets"]}, r"kinds is \['kill', 'packets'\]; pass some of kill, "),
        ({"kinds": []}, r"kinds is \[\]"),
        ({"count": -1}, "count -1"),
        ({"world_size": 0}, "world_size 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plan_faults(**({"seed": 0, "count": 1, "num_steps": 5, "world_size": 2} | arguments))
    with pytest.raises(ValueError, match="of no known kind"):
        Faults([Fault("fire", 0, 0)], "unused")


STOP = (Fault("stop", 5, 1),)


def test_a_fault_happens_once_to_its_rank_in_its_step_or_the_first_after_it(tmp_path, monkeypatch):
    sent = Queue()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.put((pid, number)))

    def begin(number, rank, world_size, plan=STOP, folder=tmp_path):
        Faults(plan, folder).before_step(number, rank, world_size)
        with suppress(Empty):
            return sent.get(timeout=0.2)

    assert [begin(number, 1, 4) for number in range(5)] == [None] * 5
    assert begin(5, 0, 4) is None
    assert begin(7, 1, 4) == (os.getpid(), signal.SIGSTOP)
    assert begin(7, 1, 4) is None
    of_two = begin(0, 1, 2, (Fault("kill", 0, 3),), tmp_path / "other")  # of two ranks, rank 3's faults are rank 1's
    assert of_two == (os.getpid(), signal.SIGKILL)
