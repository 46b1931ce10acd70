"""What experts on other ranks cost: calls and bytes of each exchange, of gradients, norms and of building a layer."""

import pytest
import torch
import torch.distributed as dist
from equal import calls_of
from torch import nn

from distlab.expert_parallel import (
    ExpertParallel,
    MixtureOfExperts,
    Router,
    clip_gradients_,
    reduce_gradients,
)
from distlab.expert_parallel.exchange import Condition, exchange_rows, sum_over_ranks, trade_counts
from distlab.rng import generator

EXPERTS, HIDDEN = 3, 4


def heard(function):
    """Return what a function returns, and this rank's calls."""
    made = []
    calls = calls_of(lambda: made.append(function()))
    return made[0], calls


def mixture():
    torch.manual_seed(dist.get_rank())
    return MixtureOfExperts(Router(HIDDEN, EXPERTS), [nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])


@pytest.mark.on_ranks(2)
def test_each_exchange_sends_what_it_says():
    rank, full = dist.get_rank(), mixture()
    layer, calls = heard(lambda: ExpertParallel.from_full(full))
    broadcast = sorted(size for op, size in calls if op == "broadcast")
    assert broadcast == sorted(4 * tensor.numel() for tensor in full.state_dict().values())
    x = torch.randn(6, HIDDEN, generator=generator(0, rank, "x"))
    layer(x).sum().backward()
    assert calls_of(layer.total_load) == [("all_reduce", 8 * (2 * EXPERTS + 2))]
    condition, place = Condition("", torch.float32, True, True), {"device": torch.device("cpu"), "group": None}
    counts, calls = heard(lambda: trade_counts([rank + 1, 1, 2], [2, 3], condition, **place))
    assert [len(row) for row in counts] == [2 - rank, 2 - rank]
    assert calls == [("all_to_all", 8 * (EXPERTS + 4 * 2))]
    rows = torch.randn(4, HIDDEN, requires_grad=True)  # one stays on rank 0, three go to rank 1
    arrived, calls = heard(lambda: exchange_rows(rows, [1, 3], [1, 1] if rank == 0 else [3, 3]))
    assert calls == [("all_to_all", 4 * 4 * HIDDEN)]
    assert calls_of(arrived.sum().backward) == [("all_to_all", 4 * arrived.numel())]
    everyone = [None, None]
    dist.all_gather_object(everyone, rows.detach())
    assert torch.equal(arrived, torch.cat([one[:1] if rank == 0 else one[1:] for one in everyone]))
    numbers = torch.ones(5, requires_grad=True)
    total, calls = heard(lambda: sum_over_ranks(numbers))
    assert calls == calls_of(total.sum().backward) == [("all_reduce", 4 * 5)]
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer, nn.Linear(HIDDEN, 2))
    (model(x).sum() * (rank + 1)).backward()
    model[2].bias.grad = None
    model[2].weight.grad = torch.ones(2, HIDDEN) if rank == 0 else None
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    summed = 4 * (sum(p.numel() for p in dense) + len(dense))
    assert calls_of(lambda: reduce_gradients(model)) == [("all_reduce", summed)]
    assert calls_of(lambda: clip_gradients_(model, 1e6)) == [("all_reduce", 8)]
    assert model[2].bias.grad is None
    assert torch.equal(model[2].weight.grad, torch.full((2, HIDDEN), 0.5))


@pytest.mark.on_ranks(2)
def test_with_replicas_experts_are_summed_over_those():
    rank = dist.get_rank()
    own, others = ([dist.new_group(members) for members in sets] for sets in ([[0], [1]], [[0, 1]]))
    layer = ExpertParallel.from_full(mixture(), own[rank], balance_over="rank")
    layer(torch.ones(2, HIDDEN)).sum().backward()
    calls = calls_of(lambda: reduce_gradients(layer, own[rank], replicas=others[0]))
    experts = list(layer.experts.parameters())
    experts = 4 * (sum(p.numel() for p in experts) + len(experts))
    assert calls[-1] == ("all_reduce", experts)
    assert len(calls) == 2  # the router's before
