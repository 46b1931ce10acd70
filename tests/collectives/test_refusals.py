"""Bad input: refused on every rank before a message leaves, in words that name the rank and the way out."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from refused import message

from distlab import collectives
from distlab.faces import public_names

NAMES = [name for name in public_names("distlab.collectives") if name.islower() and not name.startswith("hierarch")]
REDUCING = [name for name in NAMES if "reduce" in name and not name.startswith(("naive", "plain"))]
ROOTED, CUT = ("ring_broadcast", "tree_broadcast", "tree_reduce"), ("ring_all_reduce", "ring_broadcast")


def refused():
    """Return which functions, what they are given, and words of the error."""
    three = torch.zeros(3)
    return [
        (NAMES, torch.zeros(4, 6).t(), {}, "call .contiguous()"),
        (NAMES, torch.eye(3).to_sparse(), {}, "pass .to_dense()"),
        (NAMES, torch.zeros(3, device="meta"), {}, "meta tensor"),
        (NAMES, torch.nn.Parameter(torch.zeros(3)), {}, "requires grad"),
        (NAMES, [1.0, 2.0], {}, "expected a tensor, got list"),
        (REDUCING, three, {"op": "average"}, "op='average' is unknown; pass one of sum, mean"),
        (REDUCING, three.long(), {"op": "mean"}, "use op='sum' and divide"),
        (REDUCING, three.to(torch.complex64), {"op": "max"}, "sum or mean only"),
        (REDUCING, three.to(torch.float8_e4m3fn), {}, "convert to float16"),
        (ROOTED, three, {"root": 2}, "root 2 is not in the group, whose ranks are 0 to 1"),
        (ROOTED, three, {"root": -1}, "root -1 is not in the group"),
        ((*CUT, "double_tree_all_reduce"), three, {"piece_bytes": 0}, "expected at least 1"),
    ]


@pytest.mark.on_ranks(2)
def test_every_bad_tensor_is_refused_on_every_rank():
    for names, tensor, options, words in refused():
        for name in names:
            text = message(partial(getattr(collectives, name), tensor, **options))
            assert text.startswith(f"ValueError: rank {dist.get_rank()}: {name}"), (name, text)
            assert words in text, (name, text)
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        collectives.ring_all_reduce(parameter)  # the group still works; it takes a parameter
    assert parameter.tolist() == [2.0] * 3


@pytest.mark.on_ranks(2)
def test_groups_that_make_no_mesh_or_leave_this_rank_out():
    rank, group = dist.get_rank(), dist.new_group([1])
    mesh = message(lambda: collectives.hierarchical_all_reduce(torch.ones(3), None, None))
    assert f"rank {rank}: local group [0, 1] and cross group [0, 1] share ranks [0, 1]" in mesh
    left_out = message(lambda: collectives.ring_all_reduce(torch.ones(3), group))
    assert ("rank 0 is not in the group" in left_out) == (rank == 0)


def test_outside_a_job():
    with pytest.raises(ValueError, match="torch.distributed is not initialised"):
        collectives.ring_all_reduce(torch.ones(3))
