"""Axes: one mesh for all five, and what a plan counts along them."""

import pytest

from distlab.plan import AXES, Plan, Sharding, mesh_of


def test_a_mesh_has_all_axes_also_those_of_size_one():
    mesh = mesh_of(Plan(data=2, pipeline=3, tensor=2))
    assert mesh.names == AXES
    assert str(mesh) == "pipeline (3) x data (2) x expert (1) x context (1) x tensor (2) = 12"
    assert mesh.group_of(5, "tensor") == (4, 5)
    assert mesh.group_of(5, "expert") == (5,)


def test_the_order_decides_who_are_neighbours():
    mesh = mesh_of(Plan(data=2, tensor=2), order=("pipeline", "tensor", "expert", "context", "data"))
    assert mesh.group_of(0, "data") == (0, 1)
    assert mesh.group_of(0, "tensor") == (0, 2)


def test_degrees_that_do_not_fill_the_ranks_show_the_whole_equation():
    product = r"pipeline \(1\) x data \(2\) x expert \(3\) x context \(1\) x tensor \(2\) = 12"
    with pytest.raises(ValueError, match=f"{product} does not fill 8 ranks"):
        mesh_of(Plan(data=2, expert=3, tensor=2), world_size=8)


@pytest.mark.parametrize("order", [("data",), (*AXES, "data"), ("a", *AXES[1:]), "pipeline"])
def test_an_order_names_each_axis_once(order):
    with pytest.raises(ValueError, match="name each of pipeline, data, expert, context, tensor once"):
        mesh_of(Plan(), order=order)


def test_copies_and_replicas_of_a_plan():
    plan = Plan(data=2, expert=3, context=5, tensor=7, pipeline=11)
    assert (plan.world_size, plan.copies, plan.num_replicas) == (2310, 30, 6)


def test_a_plan_refuses_what_it_has_no_name_for():
    with pytest.raises(ValueError, match="context_kind is 'tree'; choose one of ring, all_to_all"):
        Plan(context_kind="tree")
    with pytest.raises(ValueError, match="expert"):
        Plan(expert=0)
    with pytest.raises(ValueError, match="4 replicas do not divide 6 ranks"):
        Plan(data=2, context=3, sharding=Sharding(stage=1, replicas=4))
