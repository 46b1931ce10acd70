"""What experts on other ranks cost: calls and bytes of each exchange, of gradients, norms and of building a layer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import recorded
from distlab.expert_parallel import (
    ExpertParallel,
    MixtureOfExperts,
    Router,
    assign,
    clip_gradients_,
    reduce_gradients,
    switch_loss,
)
from distlab.expert_parallel.assign import combine
from distlab.expert_parallel.exchange import Condition, exchange_rows, sum_over_ranks, trade_counts
from distlab.expert_parallel.router import load_sums
from distlab.rng import generator

EXPERTS, HIDDEN = 3, 4


def calls_of(function):
    """Return what a function returns, and this rank's calls: (operation, bytes)."""
    with recorded() as seen:
        value = function()
    return value, [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]


def mixture():
    torch.manual_seed(dist.get_rank())
    return MixtureOfExperts(Router(HIDDEN, EXPERTS), [nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])


@pytest.mark.on_ranks(2)
def test_each_exchange_sends_what_it_says():
    rank, full = dist.get_rank(), mixture()
    layer, calls = calls_of(lambda: ExpertParallel.from_full(full))
    broadcast = sorted(size for op, size in calls if op == "broadcast")
    assert broadcast == sorted(4 * tensor.numel() for tensor in full.state_dict().values())
    x = torch.randn(6, HIDDEN, generator=generator(0, rank, "x"))
    layer(x).sum().backward()
    assert calls_of(layer.total_load)[1] == [("all_reduce", 8 * (2 * EXPERTS + 2))]
    traded = {"device": torch.device("cpu"), "group": None}
    heard, calls = calls_of(
        lambda: trade_counts([rank + 1, 1, 2], [2, 3], Condition("", torch.float32, True, True), **traded)
    )
    assert [len(row) for row in heard] == [2 - rank, 2 - rank]
    assert calls == [("all_to_all", 8 * (EXPERTS + 4 * 2))]
    rows = torch.randn(4, HIDDEN, requires_grad=True)  # one stays on rank 0, three go to rank 1
    arrived, calls = calls_of(lambda: exchange_rows(rows, [1, 3], [1, 1] if rank == 0 else [3, 3]))
    assert calls == [("all_to_all", 4 * 4 * HIDDEN)]
    assert calls_of(arrived.sum().backward)[1] == [("all_to_all", 4 * arrived.numel())]
    everyone = [None, None]
    dist.all_gather_object(everyone, rows.detach())
    assert torch.equal(arrived, torch.cat([one[:1] if rank == 0 else one[1:] for one in everyone]))
    numbers = torch.ones(5, requires_grad=True)
    total, calls = calls_of(lambda: sum_over_ranks(numbers))
    assert calls == calls_of(total.sum().backward)[1] == [("all_reduce", 4 * 5)]
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer, nn.Linear(HIDDEN, 2))
    (model(x).sum() * (rank + 1)).backward()
    model[2].bias.grad = None
    model[2].weight.grad = torch.ones(2, HIDDEN) if rank == 0 else None
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    _, calls = calls_of(lambda: reduce_gradients(model))
    assert calls == [("all_reduce", 4 * (sum(p.numel() for p in dense) + len(dense)))]
    assert calls_of(lambda: clip_gradients_(model, 1e6))[1] == [("all_reduce", 8)]
    assert model[2].bias.grad is None
    assert torch.equal(model[2].weight.grad, torch.full((2, HIDDEN), 0.5))


@pytest.mark.on_ranks(2)
def test_with_replicas_experts_are_summed_over_those():
    rank = dist.get_rank()
    own, others = ([dist.new_group(members) for members in sets] for sets in ([[0], [1]], [[0, 1]]))
    layer = ExpertParallel.from_full(mixture(), own[rank], balance_over="rank")
    layer(torch.ones(2, HIDDEN)).sum().backward()
    _, calls = calls_of(lambda: reduce_gradients(layer, own[rank], replicas=others[0]))
    experts = list(layer.experts.parameters())
    experts = 4 * (sum(p.numel() for p in experts) + len(experts))
    assert calls[-1] == ("all_reduce", experts)
    assert len(calls) == 2  # the router's before


def test_outputs_of_a_token_are_added_in_the_order_of_its_experts():
    torch.manual_seed(0)
    router = Router(HIDDEN, EXPERTS, top_k=3)
    routing = router(torch.randn(5, HIDDEN))
    chosen = assign(routing, None)
    rows = 10.0 ** torch.randint(-6, 6, (15, HIDDEN)) * torch.randn(15, HIDDEN)  # additions in a different order differ
    found = combine(rows, chosen, routing)
    position = {}
    for row, token in enumerate(chosen.tokens.tolist()):
        position.setdefault(token, []).append(row)
    for token, mine in position.items():
        weights = dict(zip(routing.experts[token].tolist(), routing.weights[token], strict=True))
        total = torch.zeros(HIDDEN)
        for expert, row in enumerate(mine):  # rows are sorted by expert
            total = total + rows[row] * weights[expert]
        assert torch.equal(found[token], total)


def test_the_mean_of_own_balance_losses_is_another_number():
    torch.manual_seed(0)
    router = Router(HIDDEN, EXPERTS, top_k=1)
    sums = [load_sums(router(torch.randn(8, HIDDEN) + shift)) for shift in (-1, 1)]
    mean = (switch_loss(sums[0]) + switch_loss(sums[1])) / 2
    assert switch_loss(sums[0] + sums[1]).item() != pytest.approx(mean.item(), rel=1e-3)
