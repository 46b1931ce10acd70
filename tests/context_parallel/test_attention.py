"""Ring and all-to-all attention equal attention over the whole sequence, both passes, and cost what they say.

Bad input is one clear error on every rank, before anything is sent that others would wait for.
"""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equal import same_everywhere
from refused import message
from torch import nn

from distlab import context_parallel as cp
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.context_parallel.placement import natural_order, rank_order
from distlab.context_parallel.ring import part_of
from distlab.rng import generator, seed_rank

B, A, S, D = 2, 12, 24, 5  # 12 heads and 24 positions: for 1, 2, 3 and 4 ranks
CASES = {
    "ring": (cp.ring_attention, A, {}),
    "ring, every key": (cp.ring_attention, A, {"causal": False}),
    "ring, shared key heads, own scale": (cp.ring_attention, A // 3, {"scale": 0.7}),
    "all to all": (cp.all_to_all_attention, A, {}),
    "all to all, every key": (cp.all_to_all_attention, A, {"causal": False}),
    "all to all, shared key heads, own scale": (cp.all_to_all_attention, A, {"scale": 0.7}),
    "plain": (lambda q, k, v: cp.plain_ring_attention(q, k, v), A, {}),
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


def parts():
    """This rank's part of query, key and value."""
    return [cp.scatter_sequence(tensor, dim=2).detach().requires_grad_() for tensor in whole_inputs(A)[0]]


def check(name):
    """Find what attention over the whole sequence finds, at the documented cost; return it."""
    function, num_key_heads, options = CASES[name]
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, weight = whole_inputs(num_key_heads)
    mine = [cp.scatter_sequence(tensor, dim=2).detach().requires_grad_() for tensor in whole]
    with recorded() as seen:
        out = function(*mine, **options)
    forward = seen.records
    with recorded() as seen:
        found = torch.autograd.grad((out * cp.scatter_sequence(weight, dim=2)).sum(), mine)
    backward = seen.records
    values = [cp.gather_sequence(tensor, dim=2).detach() for tensor in (out, *found)]
    assert difference(values, oracle(num_key_heads, options)) <= 1e-12, name
    part = B * S // n * D * 8
    if name.startswith("all"):
        for records in (forward, backward):
            assert records.ring_equivalent_bytes(rank) == (n - 1) * (2 * A + 2 * num_key_heads) * part // n, name
            assert records.num_calls() == 2 * (n > 1), name
    else:
        for records, times in ((forward, 1), (backward, 1 if name == "plain" else 2)):
            assert records.sent_bytes(rank) == times * (n - 1) * 2 * num_key_heads * part, name
            assert records.num_calls("send") == times * (n - 1), name
    return values


def check_through_autograd(function, alone):
    """The whole in and the whole out on every rank: gradients arrive whole through scatter and gather."""
    whole, weight = whole_inputs(A)
    out = cp.gather_sequence(function(*(cp.scatter_sequence(tensor, dim=-2) for tensor in whole)), dim=2)
    found = [out.detach(), *torch.autograd.grad((out * weight).sum(), whole)]
    assert difference(found, alone) <= 1e-12


def check_dropout(function):
    """Backward is the difference quotient under one set of dropped weights, which ranks draw apart."""
    mine = parts()
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
    assert both[0].item() == pytest.approx(both[1].item(), rel=1e-6)
    assert sums.mean().item() == pytest.approx(1.0, abs=0.1)
    assert sums.std() > 0.1, "nothing was dropped"
    assert dist.get_world_size() == 1 or not same_everywhere(sums), "ranks drop the same weights"


def check_odd_gradients():
    """An expanded gradient of stride 0, and none asked of keys and values: no hang, the same numbers."""
    query, key, value = (tensor.detach() for tensor in parts())
    one, other = (query.clone().requires_grad_() for _ in range(2))
    cp.ring_attention(one, key, value).sum().backward()
    out = cp.ring_attention(other, key.clone().requires_grad_(), value.clone().requires_grad_())
    out.backward(torch.ones_like(out))
    assert torch.equal(one.grad, other.grad)


def check_half_precision():
    """Near float64; gradients travel as float32."""
    n, mine = dist.get_world_size(), parts()
    half = [x.detach().to(torch.bfloat16).requires_grad_() for x in mine]
    out = cp.ring_attention(*half)
    with recorded() as seen:
        found = torch.autograd.grad(out.sum(), half)
    assert all(one.dtype == torch.bfloat16 for one in (out, *found))
    assert (out.double() - cp.ring_attention(*mine)).abs().max().item() < 0.05
    assert seen.records.sent_bytes(dist.get_rank()) == (n - 1) * 2 * B * A * S // n * D * (2 + 4)


def check_pieces():
    """Three positions a rank, one after the other: without a mask any order and any length will do."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = [torch.randn(1, 2, 3 * num_ranks, D, dtype=torch.float64, generator=generator(1, 0, n)) for n in "qkv"]
    mine = [tensor[:, :, 3 * rank : 3 * rank + 3] for tensor in whole]
    wanted = F.scaled_dot_product_attention(*whole)[:, :, 3 * rank : 3 * rank + 3]
    assert (cp.ring_attention(*mine, causal=False) - wanted).abs().max() <= 1e-12


def check_groups(alone):
    """Two groups side by side, each with the whole sequence."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    for function in (cp.ring_attention, cp.all_to_all_attention):
        mine = [cp.scatter_sequence(tensor, group, dim=2) for tensor in whole_inputs(A)[0]]
        assert (cp.gather_sequence(function(*mine, group=group), group, dim=2) - alone).abs().max() <= 1e-12


def difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.soak_where(world_size=(1, 2, 3))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_equal_to_the_whole_sequence_at_the_documented_cost(world_size):
    n, alone = world_size, oracle(A, {})
    for name in CASES:
        first, again = check(name), check(name)
        assert difference(first, again) == 0.0, f"{name}: repeats bit for bit"
        assert all(map(same_everywhere, first)), f"{name}: ranks differ"
    for function in (cp.ring_attention, cp.all_to_all_attention):
        check_through_autograd(function, alone)
    check_dropout(cp.ring_attention)
    check_odd_gradients()
    check_half_precision()
    check_pieces()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        cp.ring_attention(*parts())
    assert sum(kept) == (4 * D + 1) * B * A * S // n
    if n == 4:
        check_groups(alone[0])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_visible_pair_is_computed_once_and_work_is_even(num_ranks):
    length, work = 4 * num_ranks, []
    seen, whole = torch.zeros(length, length, dtype=torch.int64), torch.arange(length * 2).view(length, 2)
    ordered = rank_order(whole, num_ranks)
    assert all(torch.equal(p, whole[cp.zigzag_positions(length, num_ranks, rank)]) for rank, p in enumerate(ordered))
    assert torch.equal(natural_order(ordered), whole)
    for rank in range(num_ranks):
        rows = cp.zigzag_positions(length, num_ranks, rank)
        pairs = 0
        for step in range(num_ranks):
            part = part_of(step, rank, len(rows), causal=True)
            columns = cp.zigzag_positions(length, num_ranks, (rank - step) % num_ranks)[part.columns]
            block = torch.ones(len(rows[part.rows]), len(columns), dtype=torch.int64)
            block = block.tril() if part.masked else block
            seen[rows[part.rows][:, None], columns] += block
            pairs += int(block.sum())
        work.append(pairs)
    assert torch.equal(seen, torch.ones_like(seen).tril())
    assert len(set(work)) == 1


CONFIG = GPTConfig(vocab_size=7, context=12, num_layers=1, num_heads=2, hidden_size=4)


def heads(num_heads=2, length=4, dtype=torch.float32, size=4):
    return torch.ones(1, num_heads, length, size, dtype=dtype)


def same(function, *shapes, **options):
    made = [heads(**(shape if isinstance(shape, dict) else {})) for shape in shapes]
    return lambda: function(*made, **options)


def run_model(length, also=0, **options):
    """Run a model on so many tokens; rank 1 on some more."""

    def run():
        tokens = torch.zeros(1, length + also * (dist.get_rank() == 1), dtype=torch.int64)
        cp.context_parallel(GPT(CONFIG), **options)(tokens)

    return run


def sparse():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    cp.average_gradients_(layer)


def no_grad_on_one():
    model = cp.context_parallel(GPT(CONFIG))
    with torch.set_grad_enabled(dist.get_rank() == 0):
        model(torch.zeros(1, 2, dtype=torch.int64))


BAD = {
    "sequence": (lambda: cp.scatter_sequence(torch.ones(1, 10)), "10 cannot be cut.*multiple of 6, such as 6 or 12"),
    "no such dim": (lambda: cp.scatter_sequence(torch.ones(3), dim=1), "dim 1 of a tensor of shape"),
    "odd parts": (lambda: cp.gather_sequence(torch.ones(1, 3)), "sequence of 9"),
    "parts differ": (lambda: cp.gather_sequence(torch.ones(1, 2 + 2 * dist.get_rank())), "ranks disagree on part"),
    "no such rank": (lambda: cp.zigzag_positions(6, 3, 3), "rank 3 of 3"),
    "odd length, ring": (same(cp.ring_attention, *[{"length": 3}] * 3), "sequence of 9"),
    "heads": (same(cp.all_to_all_attention, {}, {}, {}), "2 heads cannot be dealt out to 3 ranks"),
    "key heads": (same(cp.all_to_all_attention, {"num_heads": 6}, {}, {}), "key: 2 heads"),
    "shared heads": (same(cp.ring_attention, {"num_heads": 3}, {}, {}), "2 key heads cannot be shared by 3"),
    "key and value": (same(cp.ring_attention, {}, {}, {"length": 2}), "key and value alike"),
    "head size": (same(cp.ring_attention, {}, {"size": 2}, {"size": 2}), "in their number of heads alone"),
    "dtypes": (same(cp.ring_attention, {}, {"dtype": torch.float64}, {}), "one kind"),
    "integers": (same(cp.ring_attention, *[{"dtype": torch.int64}] * 3), "floating-point"),
    "dimensions": (lambda: cp.ring_attention(torch.ones(4), torch.ones(4), torch.ones(4)), "expected .batch"),
    "dropout": (same(cp.ring_attention, {}, {}, {}, dropout=1.5), "dropout is 1.5"),
    "kind": (lambda: cp.context_parallel(GPT(CONFIG), kind="star"), "kind is 'star'; choose one of ring, all_to_all"),
    "kinds differ": (lambda: cp.context_parallel(GPT(CONFIG), kind=["ring", "star"][dist.get_rank() % 2]), "disagree"),
    "no GPT": (lambda: cp.context_parallel(nn.Linear(2, 2)), "expected a distlab.models.GPT, got Linear"),
    "twice": (lambda: cp.context_parallel(cp.context_parallel(GPT(CONFIG))), "ContextParallelAttention already"),
    "models differ": (lambda: cp.context_parallel(GPT(GPTConfig(7, 12, 1, 2, 4 + 2 * dist.get_rank()))), "disagree on"),
    "model heads": (run_model(2, kind="all_to_all"), "2 heads cannot be dealt out to 3"),
    "too long": (run_model(6), "sequence of 18, which does not fit a context of 12"),
    "token counts": (run_model(2, also=2), "ranks disagree on batch"),
    "grad on one": (no_grad_on_one, "ranks disagree on batch"),
    "sparse": (sparse, "sparse gradient"),
}


@pytest.mark.on_ranks(3)
def test_bad_input_is_refused_on_every_rank():
    for name, (function, words) in BAD.items():
        text = message(function)
        assert text.startswith("ValueError: "), f"{name}: {text}"
        assert re.search(words, text), f"{name}: {text}"
