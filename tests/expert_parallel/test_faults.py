"""What does not fit is refused on every rank, and nobody is left waiting; what each exchange costs."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, heard
from refused import message
from torch import nn

from distlab import expert_parallel as ep
from distlab.expert_parallel.exchange import Condition, exchange_rows, sum_over_ranks, trade_counts
from distlab.rng import generator


def full(hidden_size=4, num_experts=3, **options):
    return ep.MixtureOfExperts(
        ep.Router(hidden_size, num_experts, **options),
        [nn.Linear(hidden_size, hidden_size) for _ in range(num_experts)],
    )


def wider():
    layer = full()
    layer.experts[2] = nn.Linear(4, 5)
    return layer


def lonely():
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    ep.reduce_gradients(ep.ExpertParallel.from_full(full(), groups[dist.get_rank()]))


SETTINGS = "the settings of ExpertParallel"
BAD = [
    (lambda: ep.ExpertParallel.from_full(full(num_experts=3 + dist.get_rank())), "layers given to ExpertParallel"),
    (lambda: ep.ExpertParallel.from_full(full(top_k=1 + dist.get_rank())), SETTINGS),
    (lambda: ep.ExpertParallel.from_full(full(capacity_factor=None if dist.get_rank() else 1.5)), SETTINGS),
    (
        lambda: ep.ExpertParallel(ep.Router(4, 2), {5 * dist.get_rank(): nn.Linear(4, 4)}),
        "holds experts [5], expected [1]",
    ),
    (lambda: ep.ExpertParallel.from_full(full(), balance_over="everybody"), "balance_over is 'everybody'"),
    (lambda: ep.expert_parallel(nn.Linear(2, 2)), "no MixtureOfExperts"),
    (lonely, "and the group given has [0, 1]"),
    (lambda: ep.ExpertParallel.from_full(wider()), "expert 2 turns [0, 4] into [0, 5]"),
    (lambda: ep.ExpertParallel.from_full(full()).total_load(), "no batch has passed"),
    (lambda: ep.clip_gradients_(ep.ExpertParallel.from_full(full()), 0.0), "max_norm is 0.0"),
]


@pytest.mark.on_ranks(2)
def test_every_rank_hears_of_what_does_not_fit():
    for action, words in BAD:
        assert words in message(action)
    rank, x = dist.get_rank(), torch.ones(2, 4)
    layer = ep.ExpertParallel.from_full(full())
    for bad, words in [
        (x[:, :3], "got [2, 3]"),
        (torch.tensor(1.0), "got []"),
        (x.long(), "got torch.int64"),
        (x.double(), "the layer is torch.float32"),
        ("text", "got str"),
    ]:
        text = message(lambda bad=bad: layer(bad if rank == 1 else x))
        assert ("rank 1: ExpertParallel: " if rank else "rank 1 gave") in text
        assert rank == 0 or words in text
    with torch.no_grad() if rank == 0 else nullcontext():
        text = message(lambda: layer(x))
    assert "ranks disagree on whether gradients are on: rank 0 False, rank 1 True" in text
    text = message(lambda: layer.train(rank == 0)(x))
    assert "ranks disagree on the mode (train or eval): rank 0 True, rank 1 False" in text
    layer.train()
    layer(x).sum().backward()  # and it goes on
    ep.reduce_gradients(layer)
    if rank == 1:
        next(iter(layer.experts.values())).bias.grad[0] = torch.nan
    text = message(lambda: ep.clip_gradients_(layer, 1.0))
    assert text.startswith("NotFiniteError")
    assert "experts.2.bias (rank 1)" in text
    if rank:
        layer.double()
    text = message(lambda: layer(torch.ones(2, 4, dtype=layer.router.scores.weight.dtype)))
    assert "ranks disagree on the rows' dtype: rank 0 torch.float32, rank 1 torch.float64" in text


@pytest.mark.on_ranks(3)
def test_fewer_experts_than_ranks():
    """One expert among all ranks, one of which has no tokens."""
    rank, tokens = dist.get_rank(), 0 + 1 + 2
    layer = ep.ExpertParallel.from_full(full(num_experts=1, top_k=1))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.ones(rank, 4, requires_grad=True))
    (y.sum() + layer.balance_loss).backward()
    assert layer.load.kept == (rank,)
    assert layer.total_load() == (tokens, (tokens,), (tokens,), 0)
    assert (list(y.shape), y.dtype) == ([rank, 4], torch.float32)


EXPERTS, HIDDEN = 3, 4


@pytest.mark.on_ranks(2)
def test_each_exchange_sends_what_it_says():
    rank, whole = dist.get_rank(), full()
    layer, calls = heard(lambda: ep.ExpertParallel.from_full(whole))
    broadcast = sorted(size for op, size in calls if op == "broadcast")
    assert broadcast == sorted(4 * tensor.numel() for tensor in whole.state_dict().values())
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
    assert calls_of(lambda: ep.reduce_gradients(model)) == [("all_reduce", summed)]
    assert calls_of(lambda: ep.clip_gradients_(model, 1e6)) == [("all_reduce", 8)]
    assert model[2].bias.grad is None
    assert torch.equal(model[2].weight.grad, torch.full((2, HIDDEN), 0.5))


@pytest.mark.on_ranks(2)
def test_with_replicas_experts_are_summed_over_those():
    rank = dist.get_rank()
    own, others = ([dist.new_group(members) for members in sets] for sets in ([[0], [1]], [[0, 1]]))
    layer = ep.ExpertParallel.from_full(full(), own[rank], balance_over="rank")
    layer(torch.ones(2, HIDDEN)).sum().backward()
    calls = calls_of(lambda: ep.reduce_gradients(layer, own[rank], replicas=others[0]))
    experts = list(layer.experts.parameters())
    experts = 4 * (sum(p.numel() for p in experts) + len(experts))
    assert calls[-1] == ("all_reduce", experts)
    assert len(calls) == 2  # the router's before
