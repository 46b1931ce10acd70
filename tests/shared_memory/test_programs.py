"""Random programs of collectives and messages compute on shared memory what they compute on gloo."""

import pytest
from collective_programs import FIXED, PROGRAMS, differences
from hypothesis import given, settings


def check(shared_ranks, world_size, program):
    assert shared_ranks(world_size).run(differences, program) == [[]] * world_size


@settings(max_examples=20, **FIXED)
@given(PROGRAMS)
def test_random_programs_equal_gloo(shared_ranks, program):
    check(shared_ranks, *program)


@pytest.mark.soak
@pytest.mark.timeout(900)
@settings(max_examples=200, **FIXED)
@given(PROGRAMS)
def test_two_hundred_random_programs_equal_gloo(shared_ranks, program):
    check(shared_ranks, *program)
