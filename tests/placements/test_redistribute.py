"""Routes send the fewest bytes; redistribution sends what they say, gives the wanted part, and its gradient comes back.

Which operation gives which placement, and the line of a program at which a sum is missing, are told before it runs.
"""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.comm import mesh_groups, recorded
from distlab.placements import (
    RULES,
    Partial,
    Replicate,
    Shard,
    call_plainly,
    check_program,
    cut,
    cut_plainly,
    gradient_layout,
    layout_of,
    local_shape,
    placement_of,
    redistribute,
    redistribute_plainly,
    route,
    shard_sizes,
    words,
)
from distlab.placements.route import moves_from
from distlab.placements.rules import legal
from distlab.plan import Mesh

MESHES = ((4,), (2, 2))
SHAPES = ((8, 4), (5, 3), (1, 4), (0, 2), (3,), ())
EVEN = SHAPES[0]


def layouts(dims, axes):
    return list(product([Replicate(), Partial(), *map(Shard, range(dims))], repeat=axes))


def groups_of(mesh):
    return list(mesh_groups(Mesh({f"axis {at}": size for at, size in enumerate(mesh)})).values())


def test_parts_are_those_of_torchs_chunk():
    for length, parts in product(range(10), range(1, 6)):
        chunks = [len(one) for one in torch.arange(length).chunk(parts)] if length else []
        assert shard_sizes(length, parts) == (*chunks, *[0] * (parts - len(chunks)))
    assert local_shape((5, 3), layout_of("S(0), S(0)"), (2, 2), 3) == (1, 3)  # 3 and 2; of 2: 1 and 1
    assert words(layout_of("S(1), R,P")) == "S(1), R, P"


def all_pairs(mesh, shape):
    """Go from every layout to every other one on this rank: values, parts, gradients, and bytes of even parts."""
    groups, rank = groups_of(mesh), dist.get_rank()
    draw = torch.Generator().manual_seed(1)
    whole, gradient = (torch.randint(-9, 10, shape, generator=draw).double() for _ in range(2))
    all_whole, every = (Replicate(),) * len(mesh), layouts(len(shape), len(mesh))
    for before, after in product(every, every):
        local = cut(whole, before, mesh, rank).requires_grad_()
        kept = local.detach().clone()
        redistribute(local, shape, before, after, groups)  # the first time ranks agree on it
        with recorded() as seen:
            made = redistribute(local, shape, before, after, groups)
        name = f"({words(before)}) to ({words(after)}) of {shape} on {mesh}"
        sent, moves = (
            seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank),
            route(shape, before, after, mesh, itemsize=8),
        )
        assert shape != EVEN or sent == sum(move.bytes_sent for move in moves), name
        assert made.shape == local_shape(shape, after, mesh, rank), name
        assert Partial() in after or torch.equal(made, cut(whole, after, mesh, rank)), name
        assert torch.equal(redistribute(made.detach(), shape, after, all_whole, groups), whole), name
        if before != after:
            made.backward(cut(gradient, gradient_layout(after), mesh, rank))
            back = redistribute(local.grad, shape, gradient_layout(before), all_whole, groups)
            assert torch.equal(back, gradient), name
        assert torch.equal(local, kept), f"{name} changed its input"


@pytest.mark.on_ranks(4)
@pytest.mark.soak_where(shape=SHAPES[3:])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_from_any_layout_to_any_other_one(mesh, shape):
    all_pairs(mesh, shape)


def cheapest(shape, before, after, mesh):
    """Return the least bytes of all routes, by trying steps from all layouts until nothing gets cheaper."""
    reached, now = {}, {before: 0}
    while now != reached:
        reached = dict(now)
        for layout, sent in reached.items():
            for move in moves_from(shape, layout, mesh, 4):
                now[move.after] = min(now.get(move.after, math.inf), sent + move.bytes_sent)
    return reached[after]


def test_no_route_sends_fewer_bytes():
    for before, after in product(layouts(2, 2), layouts(2, 2)):
        for shape in ((64, 64), (5, 3), (1, 8)):
            moves = route(shape, before, after, (2, 4))
            assert sum(move.bytes_sent for move in moves) == cheapest(shape, before, after, (2, 4))
            assert [move.before for move in moves] + [after] == [before] + [move.after for move in moves]
    steps = [(move.collective, move.axis) for move in route((64, 64), layout_of("P, P"), layout_of("R, R"), (2, 4))]
    assert steps == [("reduce_scatter", 1), ("all_reduce", 0), ("all_gather", 1)]  # not two sums of the whole
    steps = [
        (move.collective, move.axis) for move in route((64, 64), layout_of("S(0), S(0)"), layout_of("R, R"), (2, 4))
    ]
    assert steps == [("all_gather", 1), ("all_gather", 0)]  # the inner axis first: else parts lie in a wrong order


def wrong_calls():
    """Return what one wrong rank of four makes all of them say."""
    groups, rank = groups_of((2, 2)), dist.get_rank()
    s0, r = layout_of("S(0), R"), layout_of("R, R")
    local = torch.zeros(3 if rank == 2 else 4, 2)
    first = message(redistribute, local, (8, 2), s0, r, groups)
    second = message(redistribute, torch.zeros(4, 2), (8, 2), s0, layout_of("S(1), R") if rank == 1 else r, groups)
    third = message(redistribute, torch.zeros(4, 2), (8, 2), s0, layout_of("S(2), R"), groups)
    return first, second, third


def test_one_wrong_rank_is_told_on_every_rank_and_nothing_hangs(ranks):
    for first, second, third in ranks(4).run(wrong_calls):
        assert first.startswith("ValueError: rank 2: the local tensor is (3, 2) in place of (4, 2), which is (S(0), R)")
        assert second.startswith("ValueError: ranks redistribute different things: ")
        assert third == "ValueError: S(2) of a tensor of 2 dims, (8, 2); pass a dim in 0..1"


REFUSED = {
    "as many": (route, (4,), layout_of("R, R"), layout_of("R"), (2,)),
    "S(0) of a tensor without dims": (route, (), layout_of("S(0)"), layout_of("R"), (2,)),
    "'Q' is no placement": (layout_of, "S(0), Q"),
    "rank 4 is outside the mesh (2, 2)": (local_shape, (4,), layout_of("R, R"), (2, 2), 4),
    "no rule for 'sort'": (placement_of, "sort", layout_of("R")),
    "it takes 2": (placement_of, "add", layout_of("R")),
    "relu of P on axis 0: a Partial is not the sum yet; redistribute argument 0 from P to R": (
        *(placement_of, "relu", layout_of("P")),
    ),
    "redistribute argument 1 from P to R": (placement_of, "multiply", layout_of("P"), layout_of("P")),
    "on axis 1: the local parts do not belong together; redistribute argument 1 from S(1) to S(0)": (
        *(placement_of, "matmul", layout_of("R, S(1)"), layout_of("R, S(1)")),
    ),
    "x is (P, P); give one placement for each of its mesh axes": (
        *(check_program, ["y = redistribute(x, R)"], {"x": layout_of("P, P")}, {}),
    ),
    "add_bias of P, R": (placement_of, "add_bias", layout_of("P"), layout_of("R")),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals(said):
    action, *given = REFUSED[said]
    assert said.replace("as many", "2 placements and the mesh (2,) 1 axes") in message(action, *given)


EXAMPLES = {
    "matmul": (torch.matmul, ((4, 6), (6, 8))),
    "batched_matmul": (torch.bmm, ((4, 2, 6), (4, 6, 8))),
    "linear": (torch.matmul, ((2, 4, 6), (6, 8))),
    "add": (torch.add, ((4, 6), (4, 6))),
    "add_bias": (torch.add, ((4, 6), (6,))),
    "multiply": (torch.mul, ((4, 6), (4, 6))),
    "scale": (lambda x: 3 * x, ((4, 6),)),
    "relu": (torch.relu, ((4, 6),)),
    "gelu": (nn.functional.gelu, ((4, 6),)),
    "transpose": (lambda x: x.T, ((4, 6),)),
    "sum_rows": (lambda x: x.sum(0), ((4, 6),)),
    "sum_columns": (lambda x: x.sum(1), ((4, 6),)),
    "sum": (torch.sum, ((4, 6),)),
}
PLACES = (Replicate(), Partial(), Shard(0), Shard(1), Shard(2))


def assembled(parts, placement):
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    return sum(parts) if isinstance(placement, Partial) else parts[0]


def torn(whole, placement):
    """Return what two ranks hold; of a sum both have a part of each number."""
    if isinstance(placement, Partial):
        return [whole - 2, torch.full_like(whole, 2.0)]
    return [cut(whole, (placement,), (2,), rank) for rank in range(2)]


def test_rules_say_yes_where_the_parts_make_the_whole_and_no_elsewhere():
    assert {*EXAMPLES, "embedding"} == {*RULES}
    for name, (operation, shapes) in EXAMPLES.items():
        given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        wanted = operation(*given)
        for layout in product(PLACES, repeat=len(shapes)):
            if any(isinstance(p, Shard) and p.dim >= len(s) for p, s in zip(layout, shapes, strict=True)):
                continue
            case = dict(legal(RULES[name])).get(layout)
            try:
                made = [operation(*one) for one in zip(*map(torn, given, layout), strict=True)]
            except RuntimeError:  # parts that do not fit
                made = []
            ways = [Replicate(), Partial(), *map(Shard, range(wanted.ndim))]
            right = [way for way in ways if made and _same(made, way, wanted)]
            assert case in right if case else not right, f"{name} of {words(layout)}: {case}, {right}"
    table, indices = torch.randn(6, 3), torch.tensor([[0, 5, 3]])
    parts = [torch.where(((indices // 3) == rank)[..., None], table[rank * 3 :][:3][indices % 3], 0) for rank in (0, 1)]
    assert torch.equal(sum(parts), table[indices])
    assert placement_of("embedding", (Replicate(),), (Shard(0),)) == (Partial(),)


def _same(parts, placement, wanted):
    if isinstance(placement, Replicate) and not torch.equal(*parts):
        return False
    made = assembled(parts, placement)
    return made.shape == wanted.shape and torch.allclose(made, wanted)


MEGATRON = ["h = matmul(x, w1)", "a = gelu(h)", "y = matmul(a, w2)"]
INPUTS = {"x": layout_of("R"), "w1": layout_of("S(1)"), "w2": layout_of("S(0)"), "bias": layout_of("R")}


def test_the_missing_sum_is_found_before_anything_runs():
    assert check_program(MEGATRON, INPUTS, {})["y"] == layout_of("P")
    fixed = [*MEGATRON, "y = redistribute(y, R)", "z = add_bias(y, bias)"]
    assert check_program(fixed, INPUTS, {"z": layout_of("R")})["z"] == layout_of("R")
    wrong = {
        "line 4, 'z = add_bias(y, bias)': add_bias of P, R on axis 0: a Partial is not the sum yet": [
            *MEGATRON,
            fixed[4],
        ],
        "line 3, 'y = matmul(a, w2)': y is (P) and (R) is wanted; redistribute it": MEGATRON,
        "line 4, 'z = relu(v)': nothing is named 'v' yet": [*MEGATRON, "z = relu(v)"],
        "line 1, 'x + y', is no call": ["x + y"],
        "line 1, 'y = redistribute(x, T)': 'T' is no placement": ["y = redistribute(x, T)"],
        "'y' is wanted and no line makes it": MEGATRON[:1],
    }
    for said, lines in wrong.items():
        assert said in message(check_program, lines, INPUTS, {"y": layout_of("R")})


@pytest.mark.on_ranks(3)
def test_the_plainest_changes_cost_what_they_say_and_a_model_cut_plainly_has_the_mean_gradients():
    rank, whole = dist.get_rank(), torch.arange(24.0).view(6, 4)
    costs = {"SR": 2, "PS": 2, "PR": 4}  # of a third of 96 bytes
    for before, after in product("SRP", "SRP"):
        local = cut(whole, layout_of(before.replace("S", "S(0)")), (3,), rank)
        with recorded() as seen:
            made = redistribute_plainly(local, before, after)
        assert seen.records.ring_equivalent_bytes(rank) == 32 * costs.get(before + after, 0)
        if before + after != "SP":  # summands in which the own part counts
            assert torch.equal(made, cut(whole, layout_of(after.replace("S", "S(0)")), (3,), rank)), before + after
        assert torch.equal(redistribute_plainly(made, after, "R"), whole), before + after
    assert "rows that the ranks divide" in message(redistribute_plainly, whole[:4], "R", "S")
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    x = torch.randn(3, 5, dtype=torch.float64)
    other(x).square().mean().backward()
    model[0].bias.requires_grad_(False)
    parts = cut_plainly(model)
    with recorded() as seen:
        call_plainly(model, parts, x[rank], group=None).square().mean().backward()
    assert [seen.records.num_calls(op) for op in ("all_gather", "reduce_scatter")] == [4, 3]  # one bias is frozen
    for name, wanted in other.named_parameters():
        rows = cut(wanted.grad, layout_of("S(0)"), (3,), rank)
        trains = name != "0.bias"
        assert (parts[name].grad is not None) == trains, name
        assert not trains or torch.allclose(parts[name].grad, rows, rtol=0, atol=1e-12), name
