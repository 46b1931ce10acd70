"""The pictures of degrees and of placement show the step's own figures, and say in words why a plan cannot run."""

from dataclasses import replace
from itertools import permutations

import pytest
from pen_facts import clashes, drawn, words

from distlab.plan import AXES, Plan, mesh_of
from simulator import cluster, gpt_workload, simulate
from simulator.units import format_s
from simulator.viz import (
    degrees_figure,
    describe_degrees,
    describe_placement,
    placement_figure,
    to_png,
)
from simulator.viz.mesh.degrees import parts_of

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
    (boxes,) = drawn(figure, "boxes")
    assert len(boxes.get_paths()) > len(AXES)
    assert to_png(figure).startswith(b"\x89PNG")


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
    (boxes,) = drawn(figure, "boxes")
    hollow = sum(fill == (1, 1, 1, 1) for fill in map(tuple, boxes.get_facecolors().tolist()))
    outside = [axis for order, _ in orders for axis in order[2:] if mesh_of(PLACED, order=order).crosses_nodes(axis, 8)]
    assert hollow == len(outside)
    both = describe_placement(orders + [(("context", "expert", *order[2:]), step) for order, step in orders])
    assert both.splitlines()[1:] == lines  # axes of one rank make no other order


def test_no_order_is_refused():
    with pytest.raises(ValueError, match="there is no order"):
        placement_figure([])


def test_the_panel_follows_every_control_and_says_why_a_plan_cannot_run():
    pytest.importorskip("ipywidgets")
    from simulator.viz import degrees_panel

    panel = degrees_panel(
        WORKLOAD, {"a": CLUSTER, "b": replace(CLUSTER, name="half", num_devices=16)}, plan=Plan(data=2)
    )
    texts = [panel.text]
    for name, value in (
        ("tensor", 8),
        ("sequence_parallel", True),
        ("num_microbatches", 4),
        ("recompute", "full"),
        ("stage", 1),
        ("pipeline", 2),
        ("on", "b"),
        ("data", 1),
    ):
        panel.controls[name].value = value
        assert panel.error is None
        assert panel.png
        texts.append(panel.text)
    assert len(set(texts)) == len(texts)
    assert texts[7].startswith(
        "This plan cannot run: pipeline (2) x data (2) x expert (1) x context (1) x tensor (8) = 32"
    )
    assert "the product is 32, and half has 16 GPUs: lower a degree until it is at most 16" in texts[7]
    assert texts[8].startswith("Fits")
    panel.controls["context"].value = 32
    assert "This plan cannot run" in panel.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": {}}, "there is no cluster"),
        ({"plan": Plan(data=3)}, "the plan has data = 3; choose one of 1, 2, 4"),
    ],
)
def test_a_panel_that_cannot_begin_is_refused(options, message):
    pytest.importorskip("ipywidgets")
    from simulator.viz import degrees_panel

    with pytest.raises(ValueError, match=message):
        degrees_panel(WORKLOAD, **options)
