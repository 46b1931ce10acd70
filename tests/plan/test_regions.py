"""Regions: parts of a layer's work, and what its parameters say of the ranks that divide them."""

import pytest

from distlab.plan import Experts, Layer, Work

WORK = Work(100.0, 40.0, 6)


def test_a_part_and_the_rest_make_the_whole():
    part = Work(30.0, 40.0, 2)
    assert WORK.without(part) + part == WORK
    assert WORK.times(0.5) == Work(50.0, 20.0, 6)
    with pytest.raises(ValueError, match="is not a part of"):
        part.without(WORK)


def layer(**options):
    return Layer("l", (6, 4), Work(), Work(), Work(), **options)


def test_axes_of_parameters_are_counted():
    assert layer(parameter_axes=("tensor", "expert"), tensor_parameters=6).expert_parameters == 4
    assert layer().expert_parameters == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"parameter_axes": ("tensor",), "tensor_parameters": 6}, "1 parameter_axes for 2 parameters"),
        ({"parameter_axes": ("tensor", "")}, "6 elements for tensor ranks and tensor_parameters says 0"),
        ({"parameter_axes": ("data", "")}, r"parameter_axes has \['data'\]"),
    ],
)
def test_axes_that_do_not_fit_the_parameters_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        layer(**options)


def test_the_first_ranks_hold_one_expert_more():
    experts = Experts(5, 1, 10, WORK, WORK, WORK, kernels_each=1)
    assert [experts.most_on_a_rank(ranks) for ranks in (1, 2, 3, 5, 8)] == [5, 3, 2, 1, 1]
    with pytest.raises(ValueError, match="5 experts of 2 kernels"):
        Experts(5, 1, 10, WORK, WORK, WORK, kernels_each=2)
