"""Ring and all-to-all attention equal attention over the whole sequence, both passes, and cost what they say."""

from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import distlab.context_parallel.ring as ring_module
from distlab.comm import recorded
from distlab.context_parallel import (
    all_to_all_attention,
    gather_sequence,
    plain_ring_attention,
    ring_attention,
    scatter_sequence,
    zigzag_positions,
)
from distlab.context_parallel.block import Rule, _kept
from distlab.context_parallel.placement import natural_order, rank_order
from distlab.context_parallel.ring import part_of
from distlab.rng import generator, seed_rank

B, A, S, D = 2, 12, 24, 5  # 12 heads and 24 positions: for 1, 2, 3 and 4 ranks
CASES = {
    "ring": (ring_attention, A, {}),
    "ring, every key": (ring_attention, A, {"causal": False}),
    "ring, shared key heads, own scale": (ring_attention, A // 3, {"scale": 0.7}),
    "all to all": (all_to_all_attention, A, {}),
    "all to all, every key": (all_to_all_attention, A, {"causal": False}),
    "all to all, shared key heads, own scale": (all_to_all_attention, A, {"scale": 0.7}),
    "plain": (lambda q, k, v: plain_ring_attention(q, k, v), A, {}),
}


def whole_inputs(num_key_heads):
    """Query, key and value of the whole sequence, as a projection's slices lie in memory, and a weight of the loss."""
    tensors = []
    for name, heads in (("q", A), ("k", num_key_heads), ("v", num_key_heads), ("loss", A)):
        drawn = torch.randn(B, S, heads, D, dtype=torch.float64, generator=generator(0, 0, name))
        tensors.append(drawn.transpose(1, 2))
    return [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3]


def oracle(num_key_heads, options):
    (query, key, value), weight = whole_inputs(num_key_heads)
    shared = A // num_key_heads
    out = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(shared, 1),
        value.repeat_interleave(shared, 1),
        is_causal=options.get("causal", True),
        scale=options.get("scale"),
    )
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (query, key, value))]


@cache
def oracles(pool):
    """Attend alone, on a rank: it has one thread, as the ranks have that attend together."""
    return pool.run(lambda: {name: oracle(heads, options) for name, (_, heads, options) in CASES.items()})[0]


def in_parts(name):
    """What the ranks find together, and what this rank sent: forward alone, then backward too."""
    function, num_key_heads, options = CASES[name]
    whole, weight = whole_inputs(num_key_heads)
    rank, sent = dist.get_rank(), []
    mine = [scatter_sequence(tensor, dim=2).detach().requires_grad_() for tensor in whole]
    with recorded() as seen:
        out = function(*mine, **options)
    sent.append(seen.records)
    with recorded() as seen:
        found = torch.autograd.grad((out * scatter_sequence(weight, dim=2)).sum(), mine)
    sent.append(seen.records)
    counts = [(r.sent_bytes(rank), r.num_calls("send"), r.ring_equivalent_bytes(rank), r.num_calls()) for r in sent]
    return [gather_sequence(tensor, dim=2).detach() for tensor in (out, *found)], counts


def through_autograd(function):
    """The whole in and the whole out on every rank: gradients arrive whole through scatter and gather."""
    whole, weight = whole_inputs(A)
    out = gather_sequence(function(*(scatter_sequence(tensor, dim=-2) for tensor in whole)), dim=2)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), whole)]


def with_dropout(function):
    """Return how far backward is from the difference quotient under one set of dropped weights, and rows' sums."""
    mine = [scatter_sequence(tensor, dim=2).detach().requires_grad_() for tensor in whole_inputs(A)[0]]
    ways = [
        torch.randn(x.shape, dtype=x.dtype, generator=generator(7, dist.get_rank(), str(i))) for i, x in enumerate(mine)
    ]

    def total(step):
        seed_rank(3, dist.get_rank())
        out = function(*(x + step * way for x, way in zip(mine, ways, strict=True)), dropout=0.4)
        return (out.square()).sum()

    found = torch.autograd.grad(total(0.0), mine)
    slope = sum((way * one).sum() for way, one in zip(ways, found, strict=True))
    with torch.no_grad():
        quotient = (total(1e-5) - total(-1e-5)) / 2e-5
        both = torch.stack([slope, quotient])
        dist.all_reduce(both)
        seed_rank(3, dist.get_rank())
        sums = function(mine[0], mine[1], torch.ones_like(mine[2]), dropout=0.4)
    return both.tolist(), sums


def order_of_work():
    """What a rank does in forward, in its order: "start" a message, "attend", "arrive"."""
    done = []

    def noting(name, function):
        def call(*args, **options):
            done.append(name)
            return function(*args, **options)

        return call

    mine = [torch.randn(1, 2, 4, D) for _ in range(3)]
    with (
        mock.patch.object(ring_module, "start", noting("start", ring_module.start)),
        mock.patch.object(ring_module, "attend", noting("attend", ring_module.attend)),
        mock.patch.object(ring_module._Ring, "arrive", noting("arrive", ring_module._Ring.arrive)),
    ):
        ring_attention(*mine)
    return done


def odd_gradients():
    """An expanded gradient, and none asked of keys and values: no hang, the same numbers."""
    mine = [scatter_sequence(tensor, dim=2).detach() for tensor in whole_inputs(A)[0]]
    query = mine[0].clone().requires_grad_()
    ring_attention(query, *mine[1:]).sum().backward()  # an expanded gradient of stride 0
    other = mine[0].clone().requires_grad_()
    out = ring_attention(other, *(x.clone().requires_grad_() for x in mine[1:]))
    out.backward(torch.ones_like(out))
    return torch.equal(query.grad, other.grad)


def in_half_precision():
    """How far the output is from float64, and what backward sends: gradients travel as float32."""
    mine = [scatter_sequence(tensor, dim=2).detach() for tensor in whole_inputs(A)[0]]
    half = [x.to(torch.bfloat16).requires_grad_() for x in mine]
    out = ring_attention(*half)
    with recorded() as seen:
        found = torch.autograd.grad(out.sum(), half)
    assert all(one.dtype == torch.bfloat16 for one in (out, *found))
    return (out.double() - ring_attention(*mine)).abs().max().item(), seen.records.sent_bytes(dist.get_rank())


def kept_elements():
    """How many elements ring attention keeps for backward."""
    mine = [scatter_sequence(tensor, dim=2).detach().requires_grad_() for tensor in whole_inputs(A)[0]]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        ring_attention(*mine)
    return sum(kept)


def in_pieces():
    """Three positions a rank, one after the other: without a mask any order and any length will do."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = [torch.randn(1, 2, 3 * num_ranks, D, dtype=torch.float64, generator=generator(1, 0, n)) for n in "qkv"]
    mine = [tensor[:, :, 3 * rank : 3 * rank + 3] for tensor in whole]
    wanted = F.scaled_dot_product_attention(*whole)[:, :, 3 * rank : 3 * rank + 3]
    return (ring_attention(*mine, causal=False) - wanted).abs().max().item()


def in_groups(alone):
    """Two groups side by side, each with the whole sequence."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    found = []
    for function in (ring_attention, all_to_all_attention):
        parts = [scatter_sequence(tensor, group, dim=2) for tensor in whole_inputs(A)[0]]
        found.append((gather_sequence(function(*parts, group=group), group, dim=2) - alone).abs().max().item())
    return found


def everything(alone):
    found = {name: in_parts(name) for name in CASES}
    found["again"] = in_parts("ring"), in_parts("all to all")
    found["autograd"] = [through_autograd(function) for function in (ring_attention, all_to_all_attention)]
    found["dropout"] = [with_dropout(ring_attention)]
    found["order"] = order_of_work()
    found["odd"], found["half"], found["kept"] = odd_gradients(), in_half_precision(), kept_elements()
    found["pieces"] = in_pieces()
    found["groups"] = in_groups(alone) if dist.get_world_size() == 4 else []
    return found


def difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.soak_where(world_size=(1, 2, 3))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_the_whole_sequence_at_the_documented_cost(ranks, world_size):
    n = world_size
    alone = oracles(ranks(1))
    results = ranks(n).run(everything, alone["ring"][0])
    for name, (_, num_key_heads, _) in CASES.items():
        wanted = alone[name]
        for result in results:
            values, (forward, backward) = result[name]
            assert difference(values, wanted) <= 1e-12, name
            part = B * S // n * D * 8
            if name.startswith("all"):
                moved = (n - 1) * (2 * A + 2 * num_key_heads) * part // n
                assert forward[2] == backward[2] == moved, name
                assert forward[3] == backward[3] == 2 * (n > 1), name
            else:
                moved = (n - 1) * 2 * num_key_heads * part
                twice = 1 if name == "plain" else 2
                assert forward[:2] == (moved, n - 1), name
                assert backward[:2] == (twice * moved, twice * (n - 1)), name
    for result in results:
        for name, again in zip(("ring", "all to all"), result["again"], strict=True):
            assert difference(result[name][0], again[0]) == 0.0, f"{name}: repeats bit for bit"
            assert difference(result[name][0], results[0][name][0]) == 0.0, f"{name}: ranks differ"
        for values in result["autograd"]:
            assert difference(values, alone["ring"]) <= 1e-12
        assert result["odd"]
        apart, sent = result["half"]
        assert apart < 0.05
        assert sent == (n - 1) * 2 * B * A * S // n * D * (2 + 4)
        assert result["kept"] == (4 * D + 1) * B * A * S // n
        assert max([result["pieces"], *result["groups"]]) <= 1e-12
        assert result["order"] == ["start", "attend", "arrive"] * (n - 1) + ["attend", "arrive"]
        for (slope, quotient), sums in result["dropout"]:
            assert slope == pytest.approx(quotient, rel=1e-6)
            assert sums.mean().item() == pytest.approx(1.0, abs=0.1)
            assert sums.std() > 0.1, "nothing was dropped"
    for one, other in zip(results, results[1:], strict=False):
        assert not torch.equal(one["dropout"][0][1], other["dropout"][0][1]), "ranks drop the same weights"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_visible_pair_is_computed_once_and_work_is_even(num_ranks):
    length = 4 * num_ranks
    seen = torch.zeros(length, length, dtype=torch.int64)
    work = []
    for rank in range(num_ranks):
        rows = zigzag_positions(length, num_ranks, rank)
        pairs = 0
        for step in range(num_ranks):
            part = part_of(step, rank, len(rows), causal=True)
            columns = zigzag_positions(length, num_ranks, (rank - step) % num_ranks)[part.columns]
            block = torch.ones(len(rows[part.rows]), len(columns), dtype=torch.int64)
            block = block.tril() if part.masked else block
            seen[rows[part.rows][:, None], columns] += block
            pairs += int(block.sum())
        work.append(pairs)
    assert torch.equal(seen, torch.ones_like(seen).tril())
    assert len(set(work)) == 1


def test_blocks_of_a_rank_drop_different_weights():
    weights, rule = torch.ones(1, 1, 8, 8), Rule(causal=False, scale=1.0, dropout=0.5, seed=1)
    kept = [_kept(weights, rule, part_of(step, 0, 8, causal=False)) for step in (0, 1, 1)]
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], kept[2]), "backward draws the same again"
    assert set(kept[0].unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_orders_are_inverse(num_ranks):
    whole = torch.arange(12 * 2).view(12, 2)
    parts = rank_order(whole, num_ranks)
    assert all(torch.equal(part, whole[zigzag_positions(12, num_ranks, r)]) for r, part in enumerate(parts))
    assert torch.equal(natural_order(parts), whole)
