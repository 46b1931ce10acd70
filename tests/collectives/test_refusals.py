"""Bad input: refused on every rank before a message leaves, in words that name the rank and the way out."""

import pytest
import torch
import torch.distributed as dist

from distlab import collectives
from distlab.faces import public_names

NAMES = tuple(
    name for name in public_names("distlab.collectives") if name != "hierarchical_all_reduce" and name.islower()
)  # functions
REDUCING = tuple(name for name in NAMES if "reduce" in name and not name.startswith(("naive", "plain")))


def refused(name, make, options):
    """Return the words of the refusal, and prove that the group still works after it."""
    try:
        getattr(collectives, name)(make(), **options)
        words = ""
    except ValueError as error:
        words = str(error)
    check = torch.ones(1)
    dist.all_reduce(check)
    return words, check.item()


CASES = {
    "non-contiguous": (lambda: torch.zeros(4, 6).t(), "call .contiguous()"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "pass .to_dense()"),
    "meta": (lambda: torch.zeros(3, device="meta"), "meta tensor"),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(3)), "requires grad"),
    "a list": (lambda: [1.0, 2.0], "expected a tensor, got list"),
}


def all_refusals():
    results = {}
    for name in NAMES:
        for case, (make, _) in CASES.items():
            results[name, case] = refused(name, make, {})
    for name in REDUCING:
        results[name, "op"] = refused(name, lambda: torch.zeros(3), {"op": "average"})
        results[name, "mean of int"] = refused(name, lambda: torch.zeros(3, dtype=torch.int64), {"op": "mean"})
        results[name, "max of complex"] = refused(name, lambda: torch.zeros(3, dtype=torch.complex64), {"op": "max"})
        results[name, "float8"] = refused(name, lambda: torch.zeros(3).to(torch.float8_e4m3fn), {})
    for name in ("ring_broadcast", "tree_broadcast", "tree_reduce"):
        results[name, "root"] = refused(name, lambda: torch.zeros(3), {"root": 2})
        results[name, "negative root"] = refused(name, lambda: torch.zeros(3), {"root": -1})
    for name in ("ring_all_reduce", "ring_broadcast", "double_tree_all_reduce"):
        results[name, "piece_bytes"] = refused(name, lambda: torch.zeros(3), {"piece_bytes": 0})
    return results


def test_every_bad_tensor_is_refused_on_every_rank(ranks):
    words_of = {case: words for case, (_, words) in CASES.items()}
    words_of |= {
        "op": "op='average' is unknown; pass one of sum, mean",
        "mean of int": "use op='sum' and divide",
        "max of complex": "sum or mean only",
        "float8": "convert to float16",
        "root": "root 2 is not in the group, whose ranks are 0 to 1",
        "negative root": "root -1 is not in the group",
        "piece_bytes": "expected at least 1",
    }
    for rank, results in enumerate(ranks(2).run(all_refusals)):
        for (name, case), (words, after) in results.items():
            assert words_of[case] in words, f"{name}, {case}: {words!r}"
            assert words.startswith(f"rank {rank}: {name}"), words
            assert after == 2.0


def parameter_without_grad_mode():
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        collectives.ring_all_reduce(parameter)
    return parameter.tolist()


def test_a_parameter_may_be_reduced_without_grad_mode(ranks):
    assert ranks(2).run(parameter_without_grad_mode) == [[2.0] * 3] * 2


def same_group_twice():
    words = ""
    try:
        collectives.hierarchical_all_reduce(torch.ones(3), None, None)
    except ValueError as error:
        words = str(error)
    group = dist.new_group([1])
    try:
        collectives.ring_all_reduce(torch.ones(3), group)
    except ValueError as error:
        return words, str(error)
    return words, ""


def test_groups_that_make_no_mesh_or_leave_this_rank_out(ranks):
    for rank, (mesh, left_out) in enumerate(ranks(2).run(same_group_twice)):
        assert f"rank {rank}: local group [0, 1] and cross group [0, 1] share ranks [0, 1]" in mesh
        assert ("rank 0 is not in the group" in left_out) == (rank == 0)


def test_outside_a_job():
    with pytest.raises(ValueError, match="torch.distributed is not initialised"):
        collectives.ring_all_reduce(torch.ones(3))
