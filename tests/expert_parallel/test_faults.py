"""What does not fit is refused on every rank, and nobody is left waiting."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.expert_parallel import (
    ExpertParallel,
    MixtureOfExperts,
    Router,
    clip_gradients_,
    expert_parallel,
    reduce_gradients,
)


def full(hidden_size=4, num_experts=3, **options):
    return MixtureOfExperts(
        Router(hidden_size, num_experts, **options), [nn.Linear(hidden_size, hidden_size) for _ in range(num_experts)]
    )


def wider():
    layer = full()
    layer.experts[2] = nn.Linear(4, 5)
    return layer


def lonely():
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    reduce_gradients(ExpertParallel.from_full(full(), groups[dist.get_rank()]))


SETTINGS = "the settings of ExpertParallel"
BAD = [
    (lambda: ExpertParallel.from_full(full(num_experts=3 + dist.get_rank())), "layers given to ExpertParallel"),
    (lambda: ExpertParallel.from_full(full(top_k=1 + dist.get_rank())), SETTINGS),
    (lambda: ExpertParallel.from_full(full(capacity_factor=None if dist.get_rank() else 1.5)), SETTINGS),
    (lambda: ExpertParallel(Router(4, 2), {5 * dist.get_rank(): nn.Linear(4, 4)}), "holds experts [5], expected [1]"),
    (lambda: ExpertParallel.from_full(full(), balance_over="everybody"), "balance_over is 'everybody'"),
    (lambda: expert_parallel(nn.Linear(2, 2)), "no MixtureOfExperts"),
    (lonely, "and the group given has [0, 1]"),
    (lambda: ExpertParallel.from_full(wider()), "expert 2 turns [0, 4] into [0, 5]"),
    (lambda: ExpertParallel.from_full(full()).total_load(), "no batch has passed"),
    (lambda: clip_gradients_(ExpertParallel.from_full(full()), 0.0), "max_norm is 0.0"),
]


@pytest.mark.on_ranks(2)
def test_every_rank_hears_of_what_does_not_fit():
    for action, words in BAD:
        assert words in message(action)
    rank, x = dist.get_rank(), torch.ones(2, 4)
    layer = ExpertParallel.from_full(full())
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
    reduce_gradients(layer)
    if rank == 1:
        next(iter(layer.experts.values())).bias.grad[0] = torch.nan
    text = message(lambda: clip_gradients_(layer, 1.0))
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
    layer = ExpertParallel.from_full(full(num_experts=1, top_k=1))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.ones(rank, 4, requires_grad=True))
    (y.sum() + layer.balance_loss).backward()
    assert layer.load.kept == (rank,)
    assert layer.total_load() == (tokens, (tokens,), (tokens,), 0)
    assert (list(y.shape), y.dtype) == ([rank, 4], torch.float32)
