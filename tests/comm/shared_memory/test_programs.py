"""Random programs of collectives and messages compute on shared memory what they compute on gloo."""

import pytest
from random_programs import hold


def test_random_programs_equal_gloo(shared_ranks, request):
    hold(shared_ranks, 8, request.config.getoption("--hypothesis-seed"))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_random_programs_equal_gloo(shared_ranks, request):
    hold(shared_ranks, 200, request.config.getoption("--hypothesis-seed"))
