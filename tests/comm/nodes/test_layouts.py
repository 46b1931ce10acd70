"""What is built on groups runs in nodes: a mesh inside and across, hierarchical sums."""

import pytest
import torch
import torch.distributed as dist
from hybrid_gpt import assert_equal_to_one_process, train, train_alone

from distlab.collectives import hierarchical_all_reduce
from distlab.comm import mesh_groups, node_groups
from distlab.plan import Mesh, Plan, Sharding


def crossing_axes(axes):
    """Return the axes whose group leaves this rank's node."""
    groups = mesh_groups(Mesh(axes))
    return [axis for axis, group in groups.items() if group.wire is not None]


def test_the_last_axis_stays_inside(node_ranks):
    assert node_ranks(4).run(crossing_axes, {"data": 2, "tensor": 2}) == [["data"]] * 4
    assert node_ranks(4).run(crossing_axes, {"tensor": 2, "pipeline": 1, "data": 2}) == [["tensor"]] * 4


@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, tensor=2),
        Plan(data=2, context=2, sharding=Sharding(3)),
    ],
    ids=["data x tensor", "FSDP x context"],
)
def test_a_mesh_over_two_nodes_equals_one_process(node_ranks, plan):
    assert_equal_to_one_process(node_ranks(4).run(train, plan), train_alone())


def hierarchical_sums():
    groups, found = node_groups(), []
    for numel in (0, 1, 7, 30_011):
        mine = torch.arange(numel, dtype=torch.float64) * (dist.get_rank() + 1)
        flat = mine.clone()
        dist.all_reduce(flat)
        found.append(torch.equal(hierarchical_all_reduce(mine, groups["local"], groups["node"]), flat))
    return found


def test_two_levels_by_hand_sum_what_the_backend_sums(node_ranks):
    assert node_ranks(4).run(hierarchical_sums) == [[True] * 4] * 4
