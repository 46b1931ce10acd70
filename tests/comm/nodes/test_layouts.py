"""What is built on groups runs in nodes: a mesh inside and across, hierarchical sums, torch's own products."""

import pytest
import torch
import torch.distributed as dist
from hybrid_gpt import assert_equal_to_one_process, train, train_alone
from torch import nn

from distlab.collectives import hierarchical_all_reduce
from distlab.comm import Nodes, Ranks, mesh_groups, node_groups
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
        Plan(tensor=2, pipeline=2, num_microbatches=2),
        Plan(data=2, context=2, sharding=Sharding(3)),
        Plan(data=2, expert=2),
    ],
    ids=["data x tensor", "tensor x pipeline", "FSDP x context", "data x expert"],
)
def test_a_mesh_over_two_nodes_equals_one_process(node_ranks, plan):
    options = {"experts": 3} if plan.expert > 1 else {}
    expected = train_alone(**options)
    results = node_ranks(4).run(train_in_nodes, plan, options)
    assert_equal_to_one_process(results, expected)


def train_in_nodes(plan, options):
    return train(plan, **options)


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


def ddp_weights():
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Linear(90, 7)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(5, 40, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_torch_ddp_trains_over_a_wire_as_on_gloo():
    with Ranks(4, nodes=Nodes(2, between="40MB/s,200us")) as in_nodes, Ranks(4, backend="gloo") as on_gloo:
        for mine, theirs in zip(in_nodes.run(ddp_weights), on_gloo.run(ddp_weights), strict=True):
            assert max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True)) < 1e-12
