"""Groups that cross nodes compute what gloo computes, and equal bits on all ranks."""

import pytest
import torch
import torch.distributed as dist
from collective_programs import (
    backwards,
    bits,
    moved_wrongly,
    reduced_differently,
    scattered_in_memory,
)
from random_programs import hold

LAYOUTS = [(2, 2), (4, 2), (3, 3), (4, 4)]


@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize(("world_size", "nodes"), LAYOUTS[:2])
def test_every_reduction_of_every_type_is_gloos(node_ranks, world_size, nodes):
    assert node_ranks(world_size, nodes).run(reduced_differently) == [[]] * world_size


# What is large goes in pieces of 4 MiB inside a node, here three; two nodes of two ranks and four of one show it.
SIZES = [(*layout, numel) for numel in (0, 1, 13) for layout in LAYOUTS] + [(4, 2, 1_100_001), (4, 4, 1_100_001)]


@pytest.mark.soak_where(numel=(0, 1), nodes=(3, 4))
@pytest.mark.soak_where(numel=(0, 1), world_size=(2,))
@pytest.mark.soak_where(numel=(1_100_001,), nodes=(4,))
@pytest.mark.parametrize(("world_size", "nodes", "numel"), SIZES)
def test_data_goes_where_it_should(node_ranks, world_size, nodes, numel):
    assert node_ranks(world_size, nodes).run(moved_wrongly, numel) == [[]] * world_size


@pytest.mark.soak_where(world_size=(3,))  # three nodes of one rank have no room that is shared
@pytest.mark.parametrize(("world_size", "nodes"), LAYOUTS[1:3])
def test_tensors_that_lie_scattered_in_memory(node_ranks, world_size, nodes):
    assert node_ranks(world_size, nodes).run(scattered_in_memory) == [[]] * world_size


def test_bits_repeat_and_are_equal_on_all_ranks(node_ranks):
    of_ranks = node_ranks(4).run(bits, 3)
    for first, again in zip(of_ranks[0][::2], of_ranks[0][1::2], strict=True):
        assert torch.equal(first, again)
    for other in of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_ranks[0], other, strict=True))


def test_random_programs_equal_gloo(node_ranks, request):
    hold(node_ranks, 8, request.config.getoption("--hypothesis-seed"), sizes=(2, 4))


@pytest.mark.parametrize("nodes", [2, 1])
def test_any_number_of_messages_may_be_received_in_another_order(node_ranks, nodes):
    for count, numel in ((200, 3), (200, 100_000)):
        assert node_ranks(2, nodes).run(backwards, count, numel) == [True] * 2


def sums_of_groups(sets):
    """Return what each set of ranks adds up to, by a sum, a mean and a gather, on this rank."""
    me, found = dist.get_rank(), []
    for members in sets:
        group = dist.new_group(members)
        if me in members:
            x, parts = torch.tensor([float(me)]), [torch.empty(1) for _ in members]
            dist.all_gather(parts, x, group=group)
            mean = x.clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
            dist.all_reduce(x, group=group)
            part = torch.empty(1)
            dist.reduce_scatter_tensor(part, torch.arange(float(len(members))), group=group)
            found.append((x.item(), mean.item(), [p.item() for p in parts], part.item()))
    return found


def test_groups_inside_across_and_uneven(node_ranks):
    sets = [[0, 1], [0, 2], [1, 3], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3]]
    for rank, found in enumerate(node_ranks(4).run(sums_of_groups, sets)):
        expected = [
            (
                float(sum(members)),
                sum(members) / len(members),
                [float(m) for m in members],
                float(len(members) * sorted(members).index(rank)),
            )
            for members in sets
            if rank in members
        ]
        assert found == expected
