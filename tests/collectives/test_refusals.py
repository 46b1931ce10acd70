"""Bad input: refused on every rank before a message leaves, in words that name the rank and the way out."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from refused import message

from distlab import collectives
from distlab.faces import public_names

NAMES = tuple(
    name for name in public_names("distlab.collectives") if name != "hierarchical_all_reduce" and name.islower()
)  # functions
REDUCING = tuple(name for name in NAMES if "reduce" in name and not name.startswith(("naive", "plain")))

CASES = {
    "non-contiguous": (lambda: torch.zeros(4, 6).t(), "call .contiguous()"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "pass .to_dense()"),
    "meta": (lambda: torch.zeros(3, device="meta"), "meta tensor"),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(3)), "requires grad"),
    "a list": (lambda: [1.0, 2.0], "expected a tensor, got list"),
}

WORDS = {case: words for case, (_, words) in CASES.items()} | {
    "op": "op='average' is unknown; pass one of sum, mean",
    "mean of int": "use op='sum' and divide",
    "max of complex": "sum or mean only",
    "float8": "convert to float16",
    "root": "root 2 is not in the group, whose ranks are 0 to 1",
    "negative root": "root -1 is not in the group",
    "piece_bytes": "expected at least 1",
}


def all_refusals():
    """Give (function, case, tensor, options) of each."""
    three = torch.zeros(3)
    for name in NAMES:
        for case, (make, _) in CASES.items():
            yield name, case, make(), {}
    for name in REDUCING:
        yield name, "op", three, {"op": "average"}
        yield name, "mean of int", three.long(), {"op": "mean"}
        yield name, "max of complex", three.to(torch.complex64), {"op": "max"}
        yield name, "float8", three.to(torch.float8_e4m3fn), {}
    for name in ("ring_broadcast", "tree_broadcast", "tree_reduce"):
        yield name, "root", three, {"root": 2}
        yield name, "negative root", three, {"root": -1}
    for name in ("ring_all_reduce", "ring_broadcast", "double_tree_all_reduce"):
        yield name, "piece_bytes", three, {"piece_bytes": 0}


@pytest.mark.on_ranks(2)
def test_every_bad_tensor_is_refused_on_every_rank():
    for name, case, tensor, options in all_refusals():
        text = message(partial(getattr(collectives, name), tensor, **options))
        assert text.startswith(f"ValueError: rank {dist.get_rank()}: {name}"), (name, case, text)
        assert WORDS[case] in text, (name, case, text)
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
