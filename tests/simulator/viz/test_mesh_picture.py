"""Pictures of a mesh, of degrees and of placement have every group, the step's figures, and say which leave a node."""

from dataclasses import replace
from itertools import permutations

import pytest
from pen_facts import clashes, shapes, words
from picture_facts import with_gid

from distlab.plan import AXES, Mesh, Plan, mesh_of
from simulator import cluster, gpt_workload, simulate
from simulator.units import format_s
from simulator.viz import (
    degrees_figure,
    describe_degrees,
    describe_mesh,
    describe_placement,
    mesh_figure,
    placement_figure,
    to_png,
)
from simulator.viz.mesh.degrees import parts_of

CUBE = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
LARGE = Mesh({"pipeline": 2, "data": 2, "context": 2, "tensor": 8})
MESHES = [
    (CUBE, 4),
    (CUBE, None),
    (LARGE, 8),
    (Mesh({"data": 3, "expert": 4, "tensor": 1}), 4),
    (Mesh({"pipeline": 3, "data": 5}), None),
    (Mesh({"data": 1}), None),
    (Mesh({"pipeline": 6, "data": 2, "tensor": 8}), 8),
    (Mesh({"own name": 2, "data": 2, "expert": 2, "context": 2, "tensor": 2}), 16),
]


@pytest.mark.parametrize(("mesh", "node"), MESHES)
def test_every_group_has_a_line_and_every_rank_a_box_on_each_axis(mesh, node):
    figure = mesh_figure(mesh, devices_per_node=node)
    axes = [name for name, size in mesh.axes if size > 1] or ["data"]
    lines = sum(len(group) - 1 for axis in axes for group in mesh.groups(axis))
    assert shapes(figure, "lines") == lines
    assert shapes(figure, "boxes") == len(axes) * (mesh.size + 1)  # and a box with the axis' letter
    assert all(words(figure).count(str(mesh.size - 1)) >= 1 for _ in axes)
    assert clashes(figure) == []


def test_an_axis_leaves_the_node_when_a_group_has_ranks_in_two():
    assert [CUBE.crosses_nodes(axis, 4) for axis in CUBE.names] == [True, False, False]
    assert [CUBE.crosses_nodes(axis, 2) for axis in CUBE.names] == [True, True, False]
    assert not any(CUBE.crosses_nodes(axis, 8) for axis in CUBE.names)
    assert Mesh({"data": 2, "tensor": 3}).crosses_nodes("tensor", 4)  # ranks 3, 4 and 5: the second node begins at 4


def test_the_text_tells_groups_and_wires():
    text = describe_mesh(CUBE, devices_per_node=4)
    assert text.startswith(
        "8 ranks = pipeline (2) x data (2) x tensor (2): data and tensor stay inside a node, pipeline"
    )
    assert "data: 4 groups of 2, inside a node: (0 2), (1 3), (4 6), (5 7)." in text
    assert "pipeline: 4 groups of 2, between nodes: (0 4), (1 5), (2 6), (3 7)." in text
    assert "node" not in describe_mesh(CUBE).splitlines()[1]
    assert "every axis leaves the node" in describe_mesh(CUBE, devices_per_node=1)


def test_one_rank_has_its_own_groups_coloured_alone():
    figure = mesh_figure(CUBE, devices_per_node=4, rank=5)
    assert shapes(figure, "lines") == 3
    text = describe_mesh(CUBE, rank=5)
    assert "Rank 5 stands at pipeline 1, data 0, tensor 1." in text
    assert [line.split(": ")[-1] for line in text.splitlines()[2:]] == ["(4 5).", "(5 7).", "(1 5)."]
    assert to_png(figure).startswith(b"\x89PNG")


WORKLOAD = gpt_workload(hidden_size=1024, num_layers=8, num_heads=16, sequence_length=1024, vocab_size=8192)
CLUSTER = cluster("dgx-h100", 32)
PLANS = [
    Plan(data=4),
    Plan(data=2, tensor=8, sequence_parallel=True),
    Plan(data=2, pipeline=4, tensor=4, num_microbatches=8),
    Plan(context=4, tensor=2),
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_parts_sum_to_the_step_and_are_the_steps_own(plan):
    step = simulate(WORKLOAD, CLUSTER, plan)
    parts = {part.name: part.seconds for part in parts_of(step)}
    assert sum(parts.values()) == pytest.approx(step.duration_s)
    assert all(seconds >= 0 for seconds in parts.values())
    assert {axis: parts[axis] for axis in AXES} == step.exposed_by_axis
    assert (parts["bubble"] > 0) == (plan.pipeline > 1)
    assert all((parts[axis] > 0) <= (getattr(plan, axis) > 1 or axis == "data") for axis in AXES)


@pytest.mark.parametrize("plan", PLANS)
def test_the_picture_has_a_box_a_part_and_the_devices_memory(plan):
    step = simulate(WORKLOAD, CLUSTER, plan)
    figure = degrees_figure(step, num_devices=32)
    shown = words(figure)
    assert f"time of a step: {format_s(step.duration_s)}" in shown
    assert f"=  {plan.world_size} ranks" in shown
    assert all(f"{part.words} {format_s(part.seconds)}" in shown for part in parts_of(step) if part.seconds > 0)
    assert shown.count("inside a node") + shown.count("between nodes") == sum(getattr(plan, axis) > 1 for axis in AXES)
    assert clashes(figure) == []
    assert shapes(figure, "boxes") > len(AXES)


def test_the_text_has_the_whole_equation_memory_and_idle_devices():
    step = simulate(WORKLOAD, CLUSTER, PLANS[2])
    text = describe_degrees(step, num_devices=64)
    assert "pipeline (4) x data (2) x expert (1) x context (1) x tensor (4) = 32 ranks." in text
    assert "32 of 64 GPUs are idle." in text
    assert "of 80 GB: " in text
    assert "Sent per rank: pipeline" in text
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=1e8))
    assert describe_degrees(simulate(WORKLOAD, small, PLANS[0])).startswith("Does not fit: ")


PLACED = Plan(data=2, pipeline=2, tensor=8, num_microbatches=4)


def orders_of(plan, axes):
    rest = tuple(axis for axis in AXES if axis not in axes)
    return [(rest + order, simulate(WORKLOAD, CLUSTER, plan, order=rest + order)) for order in permutations(axes)]


def test_the_fastest_order_comes_first_and_what_leaves_the_node_is_hollow():
    orders = orders_of(PLACED, ("pipeline", "data", "tensor"))
    figure, text = placement_figure(orders), describe_placement(orders)
    lines = text.splitlines()[1:]
    assert len(lines) == 6
    best = min(step.duration_s for _, step in orders)
    assert f": {format_s(best)};" in lines[0]
    for order, step in orders:
        mesh = mesh_of(step.plan, order=order)
        inside = [axis for axis in order[2:] if not mesh.crosses_nodes(axis, 8)]
        (line,) = [line for line in lines if line.startswith(", ".join(order[2:]))]
        assert f"(inside a node: {', '.join(inside) or 'none'}): {format_s(step.duration_s)}" in line
    assert clashes(figure) == []
    (boxes,) = with_gid(figure, "boxes")
    hollow = sum(fill == (1, 1, 1, 1) for fill in map(tuple, boxes.get_facecolors().tolist()))
    outside = [axis for order, _ in orders for axis in order[2:] if mesh_of(PLACED, order=order).crosses_nodes(axis, 8)]
    assert hollow == len(outside)
    both = describe_placement(orders + [(("context", "expert", *order[2:]), step) for order, step in orders])
    assert both.splitlines()[1:] == lines  # axes of one rank make no other order
