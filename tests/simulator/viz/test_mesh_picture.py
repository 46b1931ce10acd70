"""Pictures of a mesh, of degrees and of placement have every group, the step's figures, and say which leave a node."""

import pytest

from distlab.plan import AXES, Mesh, Plan
from simulator import cluster, gpt_workload, simulate
from simulator.viz.mesh.degrees import parts_of

CUBE = Mesh({"pipeline": 2, "data": 2, "tensor": 2})


def test_an_axis_leaves_the_node_when_a_group_has_ranks_in_two():
    assert [CUBE.crosses_nodes(axis, 4) for axis in CUBE.names] == [True, False, False]
    assert [CUBE.crosses_nodes(axis, 2) for axis in CUBE.names] == [True, True, False]
    assert not any(CUBE.crosses_nodes(axis, 8) for axis in CUBE.names)
    assert Mesh({"data": 2, "tensor": 3}).crosses_nodes("tensor", 4)  # ranks 3, 4 and 5: the second node begins at 4


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
