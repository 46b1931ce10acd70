"""Groups inside nodes, across them and in unequal parts compute what gloo computes."""

import torch
import torch.distributed as dist
from random_programs import hold


def test_random_programs_equal_gloo(node_ranks, request):
    hold(node_ranks, 5, request.config.getoption("--hypothesis-seed"), sizes=(2, 4))


def sums_of_groups(sets):
    """Return what each set of ranks adds up to, by a sum, a gather and a scatter, on this rank."""
    me, found = dist.get_rank(), {}
    for members in sets:
        group = dist.new_group(members)
        if me in members:
            x, parts = torch.tensor([float(me)]), [torch.empty(1) for _ in members]
            dist.all_gather(parts, x, group=group)
            dist.all_reduce(x, group=group)
            part = torch.empty(1)
            dist.reduce_scatter_tensor(part, torch.arange(float(len(members))), group=group)
            found[tuple(members)] = (x.item(), [int(p) for p in parts], part.item())
    return found


def test_groups_inside_across_and_uneven(node_ranks):
    sets = [[0, 1], [0, 2], [1, 3], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3]]
    for rank, found in enumerate(node_ranks(4).run(sums_of_groups, sets)):
        mine = [members for members in sets if rank in members]
        assert found == {tuple(m): (float(sum(m)), m, float(len(m) * m.index(rank))) for m in mine}
